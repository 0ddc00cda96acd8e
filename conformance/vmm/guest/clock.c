/* Reads CLOCK_MONOTONIC in one thread for each CPU, and counts the readings that are before one that another thread had:
 *
 *     clock SECONDS
 *
 * The threads move from CPU to CPU, so that CPUs which come back are used, too.
 */
#define _GNU_SOURCE
#include <inttypes.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

enum { MOST_CPUS = 16, READINGS = 200 };

static atomic_uint_fast64_t latest, readings, back, worst;
static uint64_t end;
static int cpus;

static uint64_t now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * UINT64_C(1000000000) + time.tv_nsec;
}

static void raise_to(atomic_uint_fast64_t *highest, uint64_t value)
{
    uint_fast64_t old = atomic_load(highest);
    while (old < value && !atomic_compare_exchange_weak(highest, &old, value))
        ;
}

static void *run(void *first)
{
    uint64_t time = 0;
    for (int cpu = (int)(intptr_t)first; time < end; cpu = (cpu + 1) % cpus) {
        cpu_set_t set;
        CPU_ZERO(&set);
        CPU_SET(cpu, &set);
        /* Fails while the CPU is offline. */
        sched_setaffinity(0, sizeof set, &set);
        for (int i = 0; i < READINGS; i++) {
            uint64_t before = atomic_load(&latest);
            time = now();
            if (time < before) {
                atomic_fetch_add(&back, 1);
                raise_to(&worst, before - time);
            }
            raise_to(&latest, time);
        }
        atomic_fetch_add(&readings, READINGS);
    }
    return NULL;
}

int main(int argc, char **argv)
{
    uint64_t seconds = argc > 1 ? strtoull(argv[1], NULL, 10) : 0;
    pthread_t threads[MOST_CPUS];

    cpus = (int)sysconf(_SC_NPROCESSORS_CONF);
    if (seconds == 0 || cpus < 1 || cpus > MOST_CPUS) {
        fprintf(stderr, "usage: clock SECONDS, on 1 to %d CPUs\n", MOST_CPUS);
        return 2;
    }
    end = now() + seconds * UINT64_C(1000000000);
    for (int i = 0; i < cpus; i++)
        if (pthread_create(&threads[i], NULL, run, (void *)(intptr_t)i) != 0)
            return 2;
    for (int i = 0; i < cpus; i++)
        pthread_join(threads[i], NULL);
    printf("clock: %" PRIuFAST64 " readings, %" PRIuFAST64 " go back, by up to %" PRIuFAST64 " ns\n", readings, back, worst);
    return back != 0;
}
