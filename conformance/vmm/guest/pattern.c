/* Rewrites a pattern over its memory until SIGUSR1 arrives, or a number of times, then verifies all of it:
 *
 *     pattern MEBIBYTES [TIMES]
 *
 * Every word tells which page, which place in it and which generation it is of. Pages are rewritten in their order, so at any
 * time those before the current one are of the newest generation and the others of the one before. A page that a migration
 * lost, kept at an older state, or mixed from two states has other words, whichever it is.
 */
#include <inttypes.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

enum { PAGE = 4096, WORDS = PAGE / 8 };

static volatile sig_atomic_t stop;

static void request_stop(int signal)
{
    (void)signal;
    stop = 1;
}

static uint64_t word(uint64_t page, uint64_t index, uint64_t generation)
{
    return (page << 40 | generation << 9 | index) * UINT64_C(0x9e3779b97f4a7c15);
}

/* Counts the words of `page` that are not of `generation`, and prints the first. */
static uint64_t wrong_words(const volatile uint64_t *memory, uint64_t page, uint64_t generation)
{
    uint64_t wrong = 0;
    for (uint64_t index = 0; index < WORDS; index++) {
        uint64_t found = memory[page * WORDS + index];
        if (found != word(page, index, generation) && wrong++ == 0)
            printf("pattern: page %" PRIu64 " word %" PRIu64 " of generation %" PRIu64 ": found %#" PRIx64 "\n", page, index,
                   generation, found);
    }
    return wrong;
}

static void rewrite(volatile uint64_t *memory, uint64_t page, uint64_t generation)
{
    for (uint64_t index = 0; index < WORDS; index++)
        memory[page * WORDS + index] = word(page, index, generation);
}

int main(int argc, char **argv)
{
    uint64_t pages = argc > 1 ? strtoull(argv[1], NULL, 10) * 256 : 0;
    uint64_t times = argc > 2 ? strtoull(argv[2], NULL, 10) : UINT64_MAX;
    uint64_t generation = 0, next = pages, wrong = 0;

    if (pages == 0) {
        fprintf(stderr, "usage: pattern MEBIBYTES [TIMES]\n");
        return 2;
    }
    volatile uint64_t *memory = mmap(NULL, pages * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) {
        perror("pattern: mmap");
        return 2;
    }
    signal(SIGUSR1, request_stop);
    for (uint64_t page = 0; page < pages; page++)
        rewrite(memory, page, generation);
    printf("pattern: written\n");
    fflush(stdout);
    while (!stop && wrong == 0 && generation < times) {
        generation++;
        for (next = 0; next < pages && !stop && wrong == 0; next++) {
            wrong += wrong_words(memory, next, generation - 1);
            rewrite(memory, next, generation);
        }
    }
    for (uint64_t page = 0; page < pages; page++)
        wrong += wrong_words(memory, page, page < next ? generation : generation - 1);
    printf("pattern: %" PRIu64 " pages, %" PRIu64 " generations, %" PRIu64 " wrong words\n", pages, generation, wrong);
    return wrong != 0;
}
