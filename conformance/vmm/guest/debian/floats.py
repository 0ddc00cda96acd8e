"""Doubles: the area below a curve, and a planet around its sun."""

import math


def area(steps):
    width = 1.0 / steps
    return sum(4.0 / (1.0 + ((i + 0.5) * width) ** 2) for i in range(steps)) * width


def orbit(steps):
    x, y, vx, vy = 1.0, 0.0, 0.0, 1.0
    step = 2.0 * math.pi / steps
    for _ in range(steps):
        pull = step / (x * x + y * y) ** 1.5
        vx -= x * pull
        vy -= y * pull
        x += vx * step
        y += vy * step
    return math.hypot(x - 1.0, y)


assert abs(area(1_000_000) - math.pi) < 1e-9
assert orbit(1_000_000) < 1e-3
