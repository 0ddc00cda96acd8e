// A KVM program for a build with a sanitizer: a guest on a thread of its own, then the same in a forked child, and in a child that
// is another program.
//
//   sanitized         all of it; prints "done"
//   sanitized once    the guest alone
//   sanitized defect  the guest, then what the sanitizer it is built with reports: see `defect`
#define _GNU_SOURCE
#include <fcntl.h>
#include <limits.h>
#include <linux/kvm.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#define PAGE 0x1000
// The guest's memory begins here, with its code.
#define GUEST PAGE
// Offset of the byte that the guest writes.
#define RESULT 0x800

static void check(int good, const char *what)
{
    if (!good) {
        perror(what);
        exit(1);
    }
}

static void *run(void *vcpu)
{
    check(ioctl(*(int *)vcpu, KVM_RUN, 0) == 0, "KVM_RUN");
    return NULL;
}

static void guest(void)
{
    // add al, bl; mov [0x1800], al; hlt
    static const uint8_t code[] = { 0x00, 0xd8, 0xa2, 0x00, 0x18, 0xf4 };
    int kvm = open("/dev/kvm", O_RDWR | O_CLOEXEC);
    check(kvm >= 0, "/dev/kvm");
    int vm = ioctl(kvm, KVM_CREATE_VM, 0);
    check(vm >= 0, "KVM_CREATE_VM");
    uint8_t *memory = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    check(memory != MAP_FAILED, "mmap");
    memcpy(memory, code, sizeof code);
    struct kvm_userspace_memory_region region = {
        .guest_phys_addr = GUEST, .memory_size = PAGE, .userspace_addr = (uintptr_t)memory,
    };
    check(ioctl(vm, KVM_SET_USER_MEMORY_REGION, &region) == 0, "KVM_SET_USER_MEMORY_REGION");

    int vcpu = ioctl(vm, KVM_CREATE_VCPU, 0);
    check(vcpu >= 0, "KVM_CREATE_VCPU");
    int size = ioctl(kvm, KVM_GET_VCPU_MMAP_SIZE, 0);
    check(size >= PAGE, "KVM_GET_VCPU_MMAP_SIZE");
    struct kvm_run *page = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, vcpu, 0);
    check(page != MAP_FAILED, "mmap of a vCPU");
    struct kvm_sregs special;
    check(ioctl(vcpu, KVM_GET_SREGS, &special) == 0, "KVM_GET_SREGS");
    special.cs.base = special.cs.selector = 0;
    check(ioctl(vcpu, KVM_SET_SREGS, &special) == 0, "KVM_SET_SREGS");
    struct kvm_regs registers = { .rip = GUEST, .rax = 2, .rbx = 3, .rflags = 2 };
    check(ioctl(vcpu, KVM_SET_REGS, &registers) == 0, "KVM_SET_REGS");

    pthread_t thread;
    check(pthread_create(&thread, NULL, run, &vcpu) == 0, "pthread_create");
    check(pthread_join(thread, NULL) == 0, "pthread_join");
    check(ioctl(vcpu, KVM_GET_REGS, &registers) == 0, "KVM_GET_REGS");
    if (page->exit_reason != KVM_EXIT_HLT || registers.rax != 5 || memory[RESULT] != 5) {
        fprintf(stderr, "exit %u, rax %llu, memory %u\n", page->exit_reason, registers.rax, memory[RESULT]);
        exit(1);
    }
    munmap(page, size);
    munmap(memory, PAGE);
    close(vcpu);
    close(vm);
    close(kvm);
}

static volatile int shared;

static void *increment(void *unused)
{
    (void)unused;
    for (int i = 0; i < 1000; i++)
        shared++;
    return NULL;
}

// What each of the sanitizers reports: a read beyond an allocation, by a call that slat replaces, too; an overflow; a data
// race; a leak.
static void defect(void)
{
    int zeroes = open("/dev/zero", O_RDONLY | O_CLOEXEC);
    check(zeroes >= 0, "/dev/zero");
    char *small = malloc(16);
    volatile size_t length = 17;
    check(read(zeroes, small, length) == 17, "read");
    volatile int most = INT_MAX;
    most = most + 1;
    free(small);
    close(zeroes);
    pthread_t one, two;
    check(pthread_create(&one, NULL, increment, NULL) == 0, "pthread_create");
    check(pthread_create(&two, NULL, increment, NULL) == 0, "pthread_create");
    pthread_join(one, NULL);
    pthread_join(two, NULL);
    void *volatile leaked = malloc(32);
    leaked = NULL;
    (void)leaked;
}

int main(int count, char **words)
{
    guest();
    if (count > 1) {
        if (strcmp(words[1], "defect") == 0)
            defect();
        return 0;
    }
    fflush(NULL);
    pid_t child = fork();
    check(child >= 0, "fork");
    if (child == 0) {
        guest();
        exit(0);
    }
    int status;
    check(waitpid(child, &status, 0) == child, "waitpid");
    if (status != 0) {
        fprintf(stderr, "the forked child ended with status %#x\n", status);
        return 1;
    }
    char command[PATH_MAX + 8];
    snprintf(command, sizeof command, "'%s' once", words[0]);
    status = system(command);
    if (status != 0) {
        fprintf(stderr, "the executed child ended with status %#x\n", status);
        return 1;
    }
    puts("done");
    return 0;
}
