// A program that does not use KVM. Each word of the command line names a part; each part makes system calls of one kind, some of
// which an ordinary program seldom makes. The parts do not depend on time or on other processes, so each run makes the same calls.
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/shm.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define CHECK(condition)                                                                                                             \
    do {                                                                                                                             \
        if (!(condition)) {                                                                                                          \
            fprintf(stderr, "bystander.c:%d: %s: %s\n", __LINE__, #condition, strerror(errno));                                     \
            exit(1);                                                                                                                 \
        }                                                                                                                            \
    } while (0)

extern char **environ;

static void deleted(void) {
    char path[] = "deletedXXXXXX";
    int fd = mkstemp(path), memory = memfd_create("memory", 0);
    struct stat status;
    struct statx extended;
    CHECK(fd >= 0 && memory >= 0 && unlink(path) == 0);
    for (int at = 0; at < 2; at++) {
        int one = at ? memory : fd;
        CHECK(fstat(one, &status) == 0 && status.st_nlink == 0);
        CHECK(fstatat(one, "", &status, AT_EMPTY_PATH) == 0 && statx(one, "", AT_EMPTY_PATH, STATX_BASIC_STATS, &extended) == 0);
        CHECK(syscall(SYS_fstat, one, &status) == 0 && syscall(SYS_newfstatat, one, "", &status, AT_EMPTY_PATH) == 0);
        CHECK(ftruncate(one, 4096) == 0 && fstat(one, &status) == 0 && status.st_size == 4096);
    }
    FILE *file = tmpfile();
    CHECK(file && fputs("text", file) > 0 && fclose(file) == 0 && close(fd) == 0);
}

static void paths(void) {
    struct stat status;
    char text[64];
    const char *bad = (const char *)16;
    int fd = open("file", O_CREAT | O_RDWR, 0600), directory = open(".", O_DIRECTORY);
    CHECK(fd >= 0 && directory >= 0 && symlink("file", "link") == 0);
    CHECK(stat("file", &status) == 0 && lstat("link", &status) == 0 && fstatat(directory, "file", &status, 0) == 0);
    CHECK(access("file", R_OK) == 0 && faccessat(directory, "file", R_OK, 0) == 0 && euidaccess("file", R_OK) == 0);
    CHECK(faccessat(directory, "file", R_OK, AT_EACCESS) == 0 && access("none", R_OK) < 0 && stat("none", &status) < 0);
    CHECK(readlink("link", text, sizeof text) == 4 && readlinkat(directory, "link", text, sizeof text) == 4);
    CHECK(creat("other", 0600) >= 0 && openat(directory, "file", O_RDONLY) >= 0 && open("none", O_RDONLY) < 0);
    CHECK(fopen("file", "r") && fopen("new", "w") && !fopen("none", "r"));
    CHECK(chmod("file", 0600) == 0 && chown("file", -1, -1) == 0 && lchown("link", -1, -1) == 0 && fchownat(directory, "file", -1, -1, 0) == 0);
    char *real = realpath("link", NULL);
    CHECK(real);
    free(real);
    // A directory of the name of the device, as there is one in Linux's sources.
    CHECK(mkdir("kvm", 0700) == 0 && stat("kvm", &status) == 0 && lstat("./kvm", &status) == 0);
    CHECK(fstatat(directory, "kvm", &status, AT_SYMLINK_NOFOLLOW) == 0 && open("kvm", O_DIRECTORY) >= 0 && rmdir("kvm") == 0);
    CHECK(syscall(SYS_open, "file", O_RDONLY) >= 0 && syscall(SYS_access, "file", R_OK) == 0 && syscall(SYS_stat, "file", &status) == 0);
    CHECK(syscall(SYS_lstat, "link", &status) == 0 && syscall(SYS_readlink, "link", text, sizeof text) == 4);
    CHECK(syscall(SYS_creat, "other", 0600) >= 0);
    // What the kernel cannot read.
    CHECK(open(bad, O_RDONLY) < 0 && errno == EFAULT && open(bad, O_RDWR | O_CREAT, 0600) < 0 && errno == EFAULT);
    CHECK(stat(bad, &status) < 0 && errno == EFAULT && access(bad, R_OK) < 0 && errno == EFAULT);
    CHECK(readlink(bad, text, sizeof text) < 0 && errno == EFAULT);
}

static void descriptors(void) {
    int fd = open("/dev/null", O_RDWR), pipes[2];
    CHECK(dup(fd) >= 0 && dup2(fd, 60) == 60 && dup3(fd, 61, O_CLOEXEC) == 61 && fcntl(fd, F_DUPFD, 70) == 70);
    CHECK(fcntl(fd, F_GETFL) >= 0 && fcntl(fd, F_GETFD) == 0 && close(60) == 0 && close_range(61, 80, 0) == 0 && lseek(fd, 0, SEEK_CUR) == 0);
    CHECK(pipe(pipes) == 0 && write(pipes[1], "x", 1) == 1);
    struct pollfd polled = {.fd = pipes[0], .events = POLLIN};
    char byte;
    CHECK(poll(&polled, 1, 1000) == 1 && read(pipes[0], &byte, 1) == 1 && fcntl(pipes[0], F_GETOWN) == 0);
    closefrom(pipes[0]);
}

static void memory(void) {
    char *at = mmap(NULL, 16384, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(at != MAP_FAILED && mprotect(at, 16384, PROT_READ) == 0 && madvise(at, 16384, MADV_DONTNEED) == 0);
    at = mremap(at, 16384, 32768, MREMAP_MAYMOVE);
    CHECK(at != MAP_FAILED && munmap(at, 32768) == 0);
    int id = shmget(IPC_PRIVATE, 4096, 0600);
    at = shmat(id, NULL, 0);
    CHECK(id >= 0 && at != (void *)-1 && shmctl(id, IPC_RMID, NULL) == 0 && shmdt(at) == 0);
    int fd = open("memory", O_CREAT | O_RDWR, 0600);
    CHECK(fallocate(fd, 0, 0, 4096) == 0 && ftruncate(fd, 100) == 0);
}

static volatile int handled;
static void handle(int signal) { handled += signal != 0; }

static void signals(void) {
    struct sigaction action = {.sa_handler = handle}, once = {.sa_handler = handle, .sa_flags = SA_RESETHAND}, found;
    sigset_t set;
    CHECK(sigaction(SIGUSR1, &action, NULL) == 0 && sigaction(SIGUSR2, &once, NULL) == 0 && signal(SIGTERM, handle) == SIG_DFL);
    CHECK(raise(SIGUSR1) == 0 && raise(SIGUSR2) == 0 && raise(SIGTERM) == 0 && handled == 3);
    CHECK(sigaction(SIGUSR2, NULL, &found) == 0 && found.sa_handler == SIG_DFL && sigaction(SIGUSR1, NULL, &found) == 0 && found.sa_handler == handle);
    CHECK(sigaction(SIGSEGV, &action, &found) == 0 && found.sa_handler == SIG_DFL);
    sigemptyset(&set);
    sigaddset(&set, SIGUSR1);
    CHECK(sigprocmask(SIG_BLOCK, &set, NULL) == 0 && pthread_sigmask(SIG_UNBLOCK, &set, NULL) == 0);
    struct itimerval timer = {.it_value = {.tv_usec = 1000}};
    CHECK(sigaction(SIGALRM, &action, NULL) == 0 && setitimer(ITIMER_REAL, &timer, NULL) == 0);
    while (handled < 4)
        usleep(20000);
}

static void *thread(void *argument) {
    struct stat status;
    CHECK(fstat(0, &status) == 0);
    return argument;
}

static void threads(void) {
    for (int at = 0; at < 3; at++) {
        pthread_t made;
        CHECK(pthread_create(&made, NULL, thread, NULL) == 0 && pthread_join(made, NULL) == 0);
    }
}

static void wait_for(pid_t child) {
    int status;
    CHECK(child > 0 && waitpid(child, &status, 0) == child && status == 0);
}

static int begin(void *argument) {
    (void)argument;
    _exit(0);
}

static void forks(void) {
    static char stack[65536];
    pid_t child = fork();
    if (child == 0) {
        child = fork();
        if (child == 0)
            exit(0);
        wait_for(child);
        _exit(0);
    }
    wait_for(child);
    child = _Fork();
    if (child == 0)
        _exit(0);
    wait_for(child);
    child = vfork();
    if (child == 0)
        _exit(0);
    wait_for(child);
    wait_for(clone(begin, stack + sizeof stack, SIGCHLD, NULL));
    child = syscall(SYS_fork);
    if (child == 0)
        _exit(0);
    wait_for(child);
}

static void filter(void) {
    struct sock_filter code[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, 0),
        BPF_JUMP(BPF_JMP | BPF_JEQ, SYS_getpid, 5, 0),
        BPF_JUMP(BPF_JMP | BPF_JEQ, SYS_gettid, 4, 0),
        BPF_JUMP(BPF_JMP | BPF_JEQ, SYS_mmap, 3, 0),
        BPF_JUMP(BPF_JMP | BPF_JEQ, SYS_readlink, 2, 0),
        BPF_JUMP(BPF_JMP | BPF_JEQ, SYS_readlinkat, 1, 0),
        BPF_STMT(BPF_RET, SECCOMP_RET_ALLOW),
        BPF_STMT(BPF_RET, SECCOMP_RET_KILL_PROCESS),
    };
    struct sock_fprog program = {sizeof code / sizeof *code, code};
    struct stat status;
    CHECK(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 && prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0);
    CHECK(syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, 0, &program) == 0 && fstat(0, &status) == 0);
}

int main(int count, char **words) {
    static const struct {
        const char *name;
        void (*part)(void);
    } parts[] = {
        {"deleted", deleted}, {"paths", paths},     {"descriptors", descriptors}, {"memory", memory}, {"signals", signals},
        {"threads", threads}, {"forks", forks},     {"filter", filter},
    };
    for (int at = 1; at < count; at++)
        for (size_t part = 0; part < sizeof parts / sizeof *parts; part++)
            if (strcmp(words[at], parts[part].name) == 0)
                parts[part].part();
    return 0;
}
