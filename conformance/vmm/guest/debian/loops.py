"""Loops over numbers, lists and dictionaries."""


def primes(most):
    is_prime = [True] * (most + 1)
    for n in range(2, most + 1):
        if is_prime[n]:
            for multiple in range(n * n, most + 1, n):
                is_prime[multiple] = False
    return [n for n in range(2, most + 1) if is_prime[n]]


def count_digits(numbers):
    counts = {}
    for number in numbers:
        for digit in str(number):
            counts[digit] = counts.get(digit, 0) + 1
    return counts


numbers = primes(1_000_000)
assert len(numbers) == 78_498
assert sum(count_digits(numbers).values()) == sum(len(str(n)) for n in numbers)
