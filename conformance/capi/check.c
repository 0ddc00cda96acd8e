/*
 * What a C program can expect of libslat: an invalidation keeps a running vCPU away from the memory, unmapped memory ends KVM_RUN with
 * EFAULT, a signal ends it with EINTR, a reader of the dirty log finds the page that the guest has written. Prints the time of an exit.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <linux/kvm.h>
#include <pthread.h>
#include <signal.h>
#include <slat.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#define CHECK(condition)                                                              \
    do {                                                                              \
        if (!(condition)) {                                                           \
            fprintf(stderr, "%d: %s: %s\n", __LINE__, #condition, strerror(errno));   \
            exit(1);                                                                  \
        }                                                                             \
    } while (0)

enum { PAGE = 0x1000, CODE = PAGE, DATA = 3 * PAGE, MEMORY = 4 * PAGE, EXITS = 20000 };

struct guest {
    int kvm, vm, vcpu, run_size;
    struct kvm_run *run;
    char *memory;
    /* What KVM_RUN has returned, and errno. */
    int result, error;
    pthread_t thread;
};

static void *map(size_t size, int flags, int fd)
{
    void *start = slat_mmap(NULL, size, PROT_READ | PROT_WRITE, flags, fd, 0);
    CHECK(start != MAP_FAILED);
    return start;
}

static struct guest begin(const char *code, size_t size)
{
    struct guest guest = { .kvm = slat_open() };
    struct kvm_sregs sregs;
    struct kvm_regs regs = { .rip = CODE, .rflags = 2, .rdx = 0x10 };

    CHECK(guest.kvm >= 0);
    guest.vm = slat_ioctl(guest.kvm, KVM_CREATE_VM, 0);
    CHECK(guest.vm >= 0);
    guest.memory = map(MEMORY, MAP_PRIVATE | MAP_ANONYMOUS, -1);
    memcpy(guest.memory + CODE, code, size);
    struct kvm_userspace_memory_region region = {
        .memory_size = MEMORY,
        .userspace_addr = (__u64)guest.memory,
    };
    CHECK(slat_ioctl(guest.vm, KVM_SET_USER_MEMORY_REGION, &region) == 0);
    guest.vcpu = slat_ioctl(guest.vm, KVM_CREATE_VCPU, 0);
    CHECK(guest.vcpu >= 0);
    guest.run_size = slat_ioctl(guest.kvm, KVM_GET_VCPU_MMAP_SIZE, 0);
    guest.run = map(guest.run_size, MAP_SHARED, guest.vcpu);
    CHECK(slat_ioctl(guest.vcpu, KVM_GET_SREGS, &sregs) == 0);
    sregs.cs.base = sregs.cs.selector = 0;
    CHECK(slat_ioctl(guest.vcpu, KVM_SET_SREGS, &sregs) == 0);
    CHECK(slat_ioctl(guest.vcpu, KVM_SET_REGS, &regs) == 0);
    return guest;
}

static void end(struct guest *guest)
{
    CHECK(slat_munmap(guest->run, guest->run_size) == 0);
    CHECK(slat_close(guest->vcpu) == 0);
    CHECK(slat_close(guest->vm) == 0);
    CHECK(slat_close(guest->kvm) == 0);
    CHECK(slat_munmap(guest->memory, MEMORY) == 0);
}

static void *run(void *context)
{
    struct guest *guest = context;
    guest->result = slat_ioctl(guest->vcpu, KVM_RUN, 0);
    guest->error = errno;
    return NULL;
}

static void time_exits(void)
{
    /* again: out dx, al; jmp again */
    static const char code[] = "\xee\xeb\xfd";
    struct guest guest = begin(code, sizeof code);
    struct timespec from, to;

    clock_gettime(CLOCK_MONOTONIC, &from);
    for (int i = 0; i < EXITS; i++) {
        CHECK(slat_ioctl(guest.vcpu, KVM_RUN, 0) == 0);
        CHECK(guest.run->exit_reason == KVM_EXIT_IO && guest.run->io.port == 0x10);
    }
    clock_gettime(CLOCK_MONOTONIC, &to);
    double ns = (to.tv_sec - from.tv_sec) * 1e9 + (to.tv_nsec - from.tv_nsec);
    printf("%d exits, %.0f ns each\n", EXITS, ns / EXITS);
    end(&guest);
}

/* Replaces the page that a guest counts in by another one with the same content. */
static int replace(void *context)
{
    volatile unsigned short *counter = context;
    unsigned short before = *counter;

    usleep(50000);
    CHECK(*counter == before);
    CHECK(mmap(context, PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == context);
    *counter = before;
    return 0;
}

static void wait_for_change(volatile unsigned short *counter)
{
    unsigned short before = *counter;
    for (int i = 0; *counter == before; i++) {
        CHECK(i < 10000);
        usleep(1000);
    }
}

static void change_memory(void)
{
    /* again: inc word [DATA]; jmp again */
    static const char code[] = "\xff\x06\x00\x30\xeb\xfa";
    struct guest guest = begin(code, sizeof code);
    char *page = guest.memory + DATA;

    CHECK(pthread_create(&guest.thread, NULL, run, &guest) == 0);
    wait_for_change((void *)page);
    CHECK(slat_around(page, PAGE, replace, page) == 0);
    wait_for_change((void *)page);
    CHECK(slat_munmap(page, PAGE) == 0);
    CHECK(pthread_join(guest.thread, NULL) == 0);
    CHECK(guest.result == -1 && guest.error == EFAULT);
    end(&guest);
}

static void arrived(int signal)
{
    (void)signal;
    slat_signal_arrived();
}

static void interrupt(void)
{
    /* again: inc word [DATA]; jmp again */
    static const char code[] = "\xff\x06\x00\x30\xeb\xfa";
    struct guest guest = begin(code, sizeof code);
    struct sigaction action = { .sa_handler = arrived };

    CHECK(sigaction(SIGUSR1, &action, NULL) == 0);
    CHECK(pthread_create(&guest.thread, NULL, run, &guest) == 0);
    wait_for_change((void *)(guest.memory + DATA));
    CHECK(pthread_kill(guest.thread, SIGUSR1) == 0);
    CHECK(pthread_join(guest.thread, NULL) == 0);
    CHECK(guest.result == -1 && guest.error == EINTR);
    end(&guest);
}

static void read_log(void)
{
    /* inc word [DATA]; out dx, al */
    static const char code[] = "\xff\x06\x00\x30\xee";
    struct guest guest = begin(code, sizeof code);
    struct kvm_create_device reader = { .type = KVM_DEV_TYPE_SLAT_LOG_READER };
    struct slat_dirty_range range[MEMORY / PAGE];
    struct slat_dirty_ranges ranges = { .count = MEMORY / PAGE, .ranges = (uintptr_t)range };
    struct kvm_device_attr epoch = { .group = KVM_DEV_SLAT_LOG_READER_EPOCH, .attr = KVM_DEV_SLAT_LOG_READER_BEGIN };
    struct kvm_device_attr pages = { .group = KVM_DEV_SLAT_LOG_READER_RANGES, .addr = (uintptr_t)&ranges };

    CHECK(slat_ioctl(guest.vm, KVM_CREATE_DEVICE, &reader) == 0);
    CHECK(slat_ioctl(guest.vcpu, KVM_RUN, 0) == 0);
    CHECK(slat_ioctl(reader.fd, KVM_SET_DEVICE_ATTR, &epoch) == 0);
    CHECK(slat_ioctl(reader.fd, KVM_GET_DEVICE_ATTR, &pages) == 0);
    /* The last one is the page of the data; the page of the code may be in the log, too. */
    CHECK(ranges.count >= 1 && ranges.count <= 2);
    struct slat_dirty_range *last = &range[ranges.count - 1];
    CHECK(last->slot == 0 && last->gfn == DATA / PAGE && last->pages == 1);
    CHECK(last->userspace_addr == (uintptr_t)guest.memory + DATA && ranges.gfn == last->gfn + 1);
    epoch.attr = KVM_DEV_SLAT_LOG_READER_COMMIT;
    CHECK(slat_ioctl(reader.fd, KVM_SET_DEVICE_ATTR, &epoch) == 0);
    CHECK(slat_ioctl(reader.fd, KVM_SET_DEVICE_ATTR, &epoch) == -1 && errno == EINVAL);
    CHECK(slat_close(reader.fd) == 0);
    end(&guest);
}

int main(void)
{
    /* A check that waits for ever ends here. */
    alarm(30);
    change_memory();
    interrupt();
    read_log();
    time_exits();
    return 0;
}
