// How a process that uses KVM ends when its threads end one by one, and what a filter that allows the program's own calls alone lets it
// do. Each case is a child process with a vCPU; its parent compares what wait(2) tells with what it tells where all threads of a process
// are the program's. (Linux since 6.15 has a thread of KVM's in each such process, which does not end with the program's last one.)
//
//   ending [CASE...]    by default all of them
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/filter.h>
#include <linux/kvm.h>
#include <linux/seccomp.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define CHECK(condition)                                                                                                             \
    do {                                                                                                                             \
        if (!(condition)) {                                                                                                          \
            fprintf(stderr, "ending.c:%d: %s: %s\n", __LINE__, #condition, strerror(errno));                                        \
            exit(1);                                                                                                                 \
        }                                                                                                                            \
    } while (0)

// What solo5-hvt (0.12) allows, and kills a thread for everything else.
static const int allowed[] = {SYS_ioctl,      SYS_read,  SYS_write,   SYS_pread64,        SYS_pwrite64,       SYS_epoll_pwait,
                              SYS_timerfd_settime, SYS_clock_gettime, SYS_exit_group, SYS_rt_sigreturn, SYS_futex, SYS_mmap,
                              SYS_mprotect,   SYS_munmap, SYS_madvise, SYS_rt_sigprocmask, SYS_exit,           SYS_close};

static void filter(unsigned action, unsigned flags) {
    struct sock_filter code[64];
    unsigned short len = 0;
    code[len++] = (struct sock_filter)BPF_STMT(BPF_LD | BPF_W | BPF_ABS, 0);
    for (size_t at = 0; at < sizeof allowed / sizeof *allowed; at++) {
        code[len++] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ, allowed[at], 0, 1);
        code[len++] = (struct sock_filter)BPF_STMT(BPF_RET, SECCOMP_RET_ALLOW);
    }
    code[len++] = (struct sock_filter)BPF_STMT(BPF_RET, action);
    struct sock_fprog program = {len, code};
    CHECK(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0);
    CHECK(syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, flags, &program) == 0);
}

static struct kvm_run *run;
static int vm, vcpu;

// Makes a vCPU that writes a byte to a port and begins again, in real mode; it touches a new page each time.
static void make(void) {
    static const unsigned char guest[] = {0x8e, 0xd8,       // mov ds, ax
                                          0xa2, 0x00, 0x10, // mov [0x1000], al
                                          0x05, 0x10, 0x00, // add ax, 0x10
                                          0x25, 0xff, 0x3f, // and ax, 0x3fff
                                          0xe6, 0x10,       // out 0x10, al
                                          0xeb, 0xf1};      // jmp to the beginning
    int kvm = open("/dev/kvm", O_RDWR | O_CLOEXEC);
    size_t size = 1 << 20;
    char *memory = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    struct kvm_userspace_memory_region region = {.memory_size = size, .userspace_addr = (unsigned long)memory};
    struct kvm_sregs sregs;
    struct kvm_regs regs = {.rip = 0x500, .rflags = 2};
    vm = ioctl(kvm, KVM_CREATE_VM, 0);
    CHECK(kvm >= 0 && vm >= 0 && memory != MAP_FAILED && ioctl(vm, KVM_SET_USER_MEMORY_REGION, &region) == 0);
    memcpy(memory + 0x500, guest, sizeof guest);
    vcpu = ioctl(vm, KVM_CREATE_VCPU, 0);
    run = mmap(NULL, ioctl(kvm, KVM_GET_VCPU_MMAP_SIZE, 0), PROT_READ | PROT_WRITE, MAP_SHARED, vcpu, 0);
    CHECK(vcpu >= 0 && run != MAP_FAILED && ioctl(vcpu, KVM_GET_SREGS, &sregs) == 0);
    sregs.cs.base = sregs.cs.selector = 0;
    CHECK(ioctl(vcpu, KVM_SET_SREGS, &sregs) == 0 && ioctl(vcpu, KVM_SET_REGS, &regs) == 0);
}

static void exits(int times) {
    while (times--) {
        if (ioctl(vcpu, KVM_RUN, 0) != 0 || run->exit_reason != KVM_EXIT_IO)
            exit(2);
    }
}

static void *run_forever(void *argument) {
    for (;;)
        exits(1);
    return argument;
}

static void *run_a_while(void *argument) {
    exits(3000);
    usleep(300000);
    return argument;
}

static void say_ended(void) {
    if (write(1, "ended\n", 6) != 6)
        _exit(3);
}

static void allowed_alone(void) {
    filter(SECCOMP_RET_KILL_THREAD, 0);
    exits(20000);
    exit(0);
}

static void allowed_for_all(void) {
    filter(SECCOMP_RET_KILL_THREAD, SECCOMP_FILTER_FLAG_TSYNC);
    exits(20000);
    exit(0);
}

static int told;

static void *heed(void *argument) {
    for (uint64_t times; read(told, &times, sizeof times) == sizeof times;)
        ;
    return argument;
}

// As solo5-hvt with a network: a thread of its own is there when the filter comes, and the guest wakes it.
static void allowed_for_two(void) {
    pthread_t other;
    told = eventfd(0, 0);
    // One write in sixteen.
    struct kvm_ioeventfd port = {
        .addr = 0x10, .len = 1, .fd = told, .datamatch = 0x20, .flags = KVM_IOEVENTFD_FLAG_PIO | KVM_IOEVENTFD_FLAG_DATAMATCH};
    CHECK(told >= 0 && ioctl(vm, KVM_IOEVENTFD, &port) == 0 && pthread_create(&other, NULL, heed, NULL) == 0);
    exits(100);
    filter(SECCOMP_RET_KILL_THREAD, SECCOMP_FILTER_FLAG_TSYNC);
    exits(20000);
    exit(0);
}

static void killed(void) {
    exits(100);
    filter(SECCOMP_RET_KILL_THREAD, 0);
    exits(100);
    syscall(SYS_getppid);
}

static void one_is_killed(void) {
    pthread_t other;
    CHECK(pthread_create(&other, NULL, run_forever, NULL) == 0);
    usleep(100000);
    filter(SECCOMP_RET_KILL_THREAD, 0);
    syscall(SYS_getppid);
}

static void first_leaves(void) {
    pthread_t other;
    atexit(say_ended);
    CHECK(pthread_create(&other, NULL, run_a_while, NULL) == 0);
    pthread_exit(NULL);
}

static void leaves_by_call(void) {
    exits(100);
    syscall(SYS_exit, 7);
}

enum { SIGNALLED = 1 << 8 };

static const struct {
    const char *name;
    void (*begin)(void);
    // Whether it gets SIGTERM after a while.
    int terminated;
    // The exit status, or SIGNALLED and the signal's number.
    int status;
} cases[] = {
    {"a filter of its own calls", allowed_alone, 0, 0},
    {"a filter of its own calls, for all threads", allowed_for_all, 0, 0},
    {"a filter of its own calls, for all, of which two are its own", allowed_for_two, 0, 0},
    {"its only thread is killed", killed, 0, SIGNALLED | SIGSYS},
    {"its first thread is killed, SIGTERM", one_is_killed, 1, SIGNALLED | SIGTERM},
    {"its first thread leaves, another one follows", first_leaves, 0, 0},
    {"its only thread leaves by a system call", leaves_by_call, 0, 7},
};

int main(int count, char **words) {
    int failed = 0;
    for (size_t at = 0; at < sizeof cases / sizeof *cases; at++) {
        int chosen = count == 1, status = 0, begun[2];
        for (int word = 1; word < count; word++)
            chosen |= strstr(cases[at].name, words[word]) != NULL;
        if (!chosen)
            continue;
        CHECK(pipe(begun) == 0);
        fflush(stdout);
        pid_t child = fork();
        if (child == 0) {
            close(begun[0]);
            make();
            close(begun[1]);
            cases[at].begin();
            _exit(9);
        }
        // It has begun when its end of the pipe is closed.
        char byte;
        close(begun[1]);
        CHECK(child > 0 && read(begun[0], &byte, 1) == 0);
        close(begun[0]);
        if (cases[at].terminated) {
            usleep(500000);
            kill(child, SIGTERM);
        }
        pid_t ended = 0;
        for (int wait = 0; wait < 1000 && ended == 0; wait++) {
            ended = waitpid(child, &status, WNOHANG);
            usleep(10000);
        }
        if (ended == 0) {
            kill(child, SIGKILL);
            waitpid(child, &status, 0);
        }
        int found = WIFSIGNALED(status) ? SIGNALLED | WTERMSIG(status) : WEXITSTATUS(status);
        const char *how = ended == 0 ? "does not end" : found == cases[at].status ? "ok" : "ends otherwise";
        printf("%s: %s (%#x)\n", cases[at].name, how, found);
        failed |= ended == 0 || found != cases[at].status;
    }
    return failed;
}
