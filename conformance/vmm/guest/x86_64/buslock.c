/* Adds to a word in two cache lines with LOCK, a number of times: each locks the bus.
 *
 *     buslock TIMES
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

static _Alignas(64) uint8_t lines[128];

int main(int argc, char **argv)
{
    unsigned times = argc > 1 ? strtoul(argv[1], NULL, 10) : 0;
    void *word = lines + 62;
    uint32_t sum;

    for (unsigned i = 0; i < times; i++)
        __asm__ volatile("lock addl $1, (%0)" : : "r"(word) : "memory", "cc");
    __builtin_memcpy(&sum, word, sizeof sum);
    printf("buslock: %u\n", sum);
    return sum != times;
}
