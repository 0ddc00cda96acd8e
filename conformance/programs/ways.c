// A client of the KVM API that is built for several C libraries, linked in several manners, and run under each: what it checks does not
// depend on how its system calls come to the kernel.
//
//	cc -DRAW    makes those that concern KVM by instructions of its own
//	ways NAME   runs one part; without, all of them
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/filter.h>
#include <linux/kvm.h>
#include <linux/seccomp.h>
#include <poll.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define CHECK(condition)                                                                           \
	do {                                                                                       \
		if (!(condition)) {                                                                \
			printf("line %d: %s: errno %d\n", __LINE__, #condition, errno);            \
			fflush(stdout);                                                            \
			_exit(1);                                                                  \
		}                                                                                  \
	} while (0)

#ifdef RAW
static long raw(long number, long a, long b, long c, long d, long e, long f)
{
	register long r10 __asm__("r10") = d;
	register long r8 __asm__("r8") = e;
	register long r9 __asm__("r9") = f;
	long answer;

	__asm__ volatile("syscall"
			 : "=a"(answer)
			 : "a"(number), "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8), "r"(r9)
			 : "rcx", "r11", "memory");
	if (answer < 0 && answer > -4096) {
		errno = -answer;
		return -1;
	}
	return answer;
}
#define OPEN(path, flags) ((int)raw(SYS_openat, AT_FDCWD, (long)(path), flags, 0, 0, 0))
#define IOCTL(fd, request, argument) ((int)raw(SYS_ioctl, fd, request, (long)(argument), 0, 0, 0))
#define MMAP(len, flags, fd) ((void *)raw(SYS_mmap, 0, len, PROT_READ | PROT_WRITE, flags, fd, 0))
#define CLOSE(fd) ((int)raw(SYS_close, fd, 0, 0, 0, 0, 0))
#define FORK() ((int)raw(SYS_fork, 0, 0, 0, 0, 0, 0))
#else
#define OPEN open
#define IOCTL ioctl
#define MMAP(len, flags, fd) mmap(NULL, len, PROT_READ | PROT_WRITE, flags, fd, 0)
#define CLOSE close
#define FORK fork
#endif

enum { MEMORY = 1 << 20, CODE = 0x1000, DEVICE = 0x20000000 };

struct vm {
	int kvm, vm, vcpu;
	char *memory;
	struct kvm_run *run;
};

static void set_memory(struct vm *vm, uint32_t flags, size_t len)
{
	struct kvm_userspace_memory_region region = {
		.flags = flags,
		.memory_size = len,
		.userspace_addr = (uintptr_t)vm->memory,
	};

	CHECK(IOCTL(vm->vm, KVM_SET_USER_MEMORY_REGION, &region) == 0);
}

// Makes a VM whose vCPU is about to run `code`, in real mode with a data segment of 4 GiB.
static struct vm make(const void *code, size_t len)
{
	struct vm vm;
	struct kvm_sregs sregs;
	struct kvm_regs regs = { .rip = CODE, .rflags = 2, .rbx = DEVICE };

	CHECK((vm.kvm = OPEN("/dev/kvm", O_RDWR | O_CLOEXEC)) >= 0);
	CHECK(IOCTL(vm.kvm, KVM_GET_API_VERSION, 0) == KVM_API_VERSION);
	CHECK((vm.vm = IOCTL(vm.kvm, KVM_CREATE_VM, 0)) >= 0);
	vm.memory = MMAP(MEMORY, MAP_SHARED | MAP_ANONYMOUS, -1);
	CHECK(vm.memory != MAP_FAILED);
	set_memory(&vm, KVM_MEM_LOG_DIRTY_PAGES, MEMORY);
	CHECK((vm.vcpu = IOCTL(vm.vm, KVM_CREATE_VCPU, 0)) >= 0);
	vm.run = MMAP(IOCTL(vm.kvm, KVM_GET_VCPU_MMAP_SIZE, 0), MAP_SHARED, vm.vcpu);
	CHECK(vm.run != MAP_FAILED);
	memcpy(vm.memory + CODE, code, len);
	CHECK(IOCTL(vm.vcpu, KVM_GET_SREGS, &sregs) == 0);
	sregs.cs.base = sregs.cs.selector = 0;
	sregs.ds.limit = 0xffffffff;
	CHECK(IOCTL(vm.vcpu, KVM_SET_SREGS, &sregs) == 0);
	CHECK(IOCTL(vm.vcpu, KVM_SET_REGS, &regs) == 0);
	return vm;
}

static void drop(struct vm *vm)
{
	CHECK(munmap(vm->run, IOCTL(vm->kvm, KVM_GET_VCPU_MMAP_SIZE, 0)) == 0);
	CHECK(munmap(vm->memory, MEMORY) == 0);
	CHECK(CLOSE(vm->vcpu) == 0 && CLOSE(vm->vm) == 0 && CLOSE(vm->kvm) == 0);
}

static void run_to(struct vm *vm, uint32_t reason)
{
	CHECK(IOCTL(vm->vcpu, KVM_RUN, 0) == 0);
	CHECK(vm->run->exit_reason == reason);
}

// mov al, [ebx]; inc al; mov [ebx], al; mov [0x3000], al; hlt; jmp to the beginning.
static const uint8_t device[] = { 0x67, 0x8a, 0x03, 0xfe, 0xc0, 0x67, 0x88, 0x03, 0xa2, 0x00, 0x30, 0xf4, 0xeb, 0xf2 };
// jmp to itself.
static const uint8_t forever[] = { 0xeb, 0xfe };

static void guest(void)
{
	struct vm vm = make(device, sizeof(device));
	uint64_t bitmap[MEMORY / 4096 / 64];
	struct kvm_dirty_log log = { .dirty_bitmap = bitmap };

	for (int round = 0; round < 3; round++) {
		run_to(&vm, KVM_EXIT_MMIO);
		CHECK(vm.run->mmio.phys_addr == DEVICE && !vm.run->mmio.is_write);
		vm.run->mmio.data[0] = 10 * round;
		run_to(&vm, KVM_EXIT_MMIO);
		CHECK(vm.run->mmio.is_write && vm.run->mmio.data[0] == 10 * round + 1);
		run_to(&vm, KVM_EXIT_HLT);
		CHECK(vm.memory[0x3000] == 10 * round + 1);
		CHECK(IOCTL(vm.vm, KVM_GET_DIRTY_LOG, &log) == 0);
		// A page that is mapped for writing at its first access counts as written, too: that of the code.
		CHECK((bitmap[0] | 1 << 1) == (1 << 3 | 1 << 1));
		// The slot is made again, and memory is given back.
		set_memory(&vm, 0, 0);
		CHECK(madvise(vm.memory + 0x8000, 0x8000, MADV_DONTNEED) == 0);
		set_memory(&vm, KVM_MEM_LOG_DIRTY_PAGES, MEMORY);
	}
	drop(&vm);
}

// Registers before and after a system call.
struct kept {
	uint8_t vectors[16][16];
	uint64_t registers[11];
};

// Makes KVM_RUN with all of `before` in registers, and the carry flag set; stores what is there afterwards. Behind the function that makes the
// call is padding, as compilers make it.
long run_keeping(int vcpu, const struct kept *before, struct kept *after);
#define VECTORS(one) one(0) one(1) one(2) one(3) one(4) one(5) one(6) one(7) \
	one(8) one(9) one(10) one(11) one(12) one(13) one(14) one(15)
#define LOAD(n) "movdqu " #n "*16(%rsi), %xmm" #n "\n"
#define STORE(n) "movdqu %xmm" #n ", " #n "*16(%r11)\n"
__asm__(".text\n.p2align 4\n.globl run_keeping\n.type run_keeping, @function\nrun_keeping:\n"
	"push %rbx\npush %rbp\npush %r12\npush %r13\npush %r14\npush %r15\npush %rdx\n"
	VECTORS(LOAD)
	"mov 256(%rsi), %rbx\nmov 264(%rsi), %rbp\nmov 272(%rsi), %r12\nmov 280(%rsi), %r13\n"
	"mov 288(%rsi), %r14\nmov 296(%rsi), %r15\nmov 304(%rsi), %r8\nmov 312(%rsi), %r9\n"
	"mov 320(%rsi), %r10\nmov $0xae80, %esi\nxor %edx, %edx\nmov $16, %eax\nstc\n"
	"call one_call\n"
	"setc %cl\npop %r11\n"
	VECTORS(STORE)
	"mov %rbx, 256(%r11)\nmov %rbp, 264(%r11)\nmov %r12, 272(%r11)\nmov %r13, 280(%r11)\n"
	"mov %r14, 288(%r11)\nmov %r15, 296(%r11)\nmov %r8, 304(%r11)\nmov %r9, 312(%r11)\n"
	"mov %r10, 320(%r11)\nmovzbl %cl, %ecx\nmov %rcx, 328(%r11)\nadd %rdi, %rsi\nmov %rsi, 336(%r11)\n"
	"pop %r15\npop %r14\npop %r13\npop %r12\npop %rbp\npop %rbx\nret\n"
	".size run_keeping, . - run_keeping\n"
	".p2align 4\none_call:\nsyscall\nret\n.p2align 4, 0x90\n");

// So many exits that slat gives their places a way of their own.
static void exits(void)
{
	struct vm vm = make(device, sizeof(device));
	struct kept before, after;

	for (int round = 0; round < 300; round++) {
		uint32_t reason[] = { KVM_EXIT_MMIO, KVM_EXIT_MMIO, KVM_EXIT_HLT };

		for (size_t i = 0; i < sizeof(before); i++)
			((uint8_t *)&before)[i] = round + 7 * i;
		before.registers[9] = 1;
		before.registers[10] = 0xae80 + vm.vcpu;
#ifdef RAW
		CHECK(run_keeping(vm.vcpu, &before, &after) == 0);
		CHECK(vm.run->exit_reason == reason[round % 3]);
		CHECK(!memcmp(&before, &after, sizeof(before)));
#else
		// Only calls of the C library reach slat for certain.
		(void)before, (void)after;
		run_to(&vm, reason[round % 3]);
#endif
	}
	// An error, and a closed descriptor.
	CHECK(IOCTL(vm.kvm, KVM_RUN, 0) == -1 && errno == EINVAL);
	CHECK(IOCTL(-1, KVM_RUN, 0) == -1 && errno == EBADF);
	drop(&vm);
}

// Prints what an exit takes.
static void measure(void)
{
	enum { EXITS = 300000 };
	struct vm vm = make(device, sizeof(device));
	struct timespec begin, end;

	for (int i = 0; i < 2; i++) {
		clock_gettime(CLOCK_MONOTONIC, &begin);
		for (int n = 0; n < EXITS; n++)
			CHECK(IOCTL(vm.vcpu, KVM_RUN, 0) == 0);
		clock_gettime(CLOCK_MONOTONIC, &end);
	}
	printf("%.0f ns\n", ((end.tv_sec - begin.tv_sec) * 1e9 + end.tv_nsec - begin.tv_nsec) / EXITS);
	drop(&vm);
}

static void eventfds(void)
{
	struct vm vm = make(device, sizeof(device));
	int event = eventfd(0, EFD_CLOEXEC), line = eventfd(0, EFD_CLOEXEC);
	struct kvm_ioeventfd io = { .addr = DEVICE, .len = 1, .fd = event };
	struct pollfd poll_event = { .fd = event, .events = POLLIN };
	uint64_t count;

	CHECK(IOCTL(vm.vm, KVM_IOEVENTFD, &io) == 0);
	run_to(&vm, KVM_EXIT_MMIO);
	CHECK(!vm.run->mmio.is_write);
	// The write signals the eventfd in place of an exit.
	run_to(&vm, KVM_EXIT_HLT);
	CHECK(poll(&poll_event, 1, 0) == 1 && read(event, &count, sizeof(count)) == 8 && count == 1);
	drop(&vm);

	CHECK((vm.kvm = OPEN("/dev/kvm", O_RDWR)) >= 0 && (vm.vm = IOCTL(vm.kvm, KVM_CREATE_VM, 0)) >= 0);
	CHECK(IOCTL(vm.vm, KVM_CREATE_IRQCHIP, 0) == 0);
	struct kvm_irqfd irqfd = { .fd = line, .gsi = 5 };
	CHECK(IOCTL(vm.vm, KVM_IRQFD, &irqfd) == 0);
	count = 1;
	CHECK(write(line, &count, sizeof(count)) == 8);
	struct kvm_irqchip chip = { .chip_id = 0 };
	for (int tries = 0; tries < 2000 && !(chip.chip.pic.irr & 1 << 5); tries++) {
		usleep(1000);
		CHECK(IOCTL(vm.vm, KVM_GET_IRQCHIP, &chip) == 0);
	}
	CHECK(chip.chip.pic.irr & 1 << 5);
	CHECK(CLOSE(vm.vm) == 0 && CLOSE(vm.kvm) == 0);
}

static void *one_guest(void *argument)
{
	for (int round = 0; round < 5; round++)
		guest();
	return argument;
}

static void threads(void)
{
	enum { COUNT = 8 };
	pthread_t thread[COUNT];

	for (long i = 0; i < COUNT; i++)
		CHECK(pthread_create(&thread[i], NULL, one_guest, (void *)i) == 0);
	for (long i = 0; i < COUNT; i++) {
		void *result;
		CHECK(pthread_join(thread[i], &result) == 0 && result == (void *)i);
	}
}

static int ended(int child)
{
	int status;

	CHECK(child > 0 && waitpid(child, &status, 0) == child);
	return WIFEXITED(status) ? WEXITSTATUS(status) : 256 + WTERMSIG(status);
}

// This program's path.
static char self[4096];

static void forks(void)
{
	struct vm vm = make(device, sizeof(device));
	int child = FORK();

	if (child == 0) {
		// A VM belongs to the process that has made it.
		CHECK(IOCTL(vm.vcpu, KVM_RUN, 0) == -1 && errno == EIO);
		guest();
		_exit(7);
	}
	CHECK(ended(child) == 7);
	// By the C library.
	child = fork();
	if (child == 0) {
		guest();
		_exit(8);
	}
	CHECK(ended(child) == 8);
	child = FORK();
	if (child == 0) {
		execl(self, self, "guest", (char *)NULL);
		_exit(127);
	}
	CHECK(ended(child) == 0);
	child = vfork();
	if (child == 0) {
		execl("/bin/sh", "sh", "-c", "exit 9", (char *)NULL);
		_exit(127);
	}
	CHECK(ended(child) == 9);
	// More words than registers have room for, and an environment.
	char *const environment[] = { "STATUS=11", NULL };
	child = vfork();
	if (child == 0) {
		execle("/bin/sh", "sh", "-c", "test $# = 6 && test $6 = f && exit $STATUS", "sh", "a", "b", "c", "d", "e", "f",
		       (char *)NULL, environment);
		_exit(127);
	}
	CHECK(ended(child) == 11);
	child = vfork();
	if (child == 0) {
		execlp("sh", "sh", "-c", "exit $#", "sh", "a", "b", "c", "d", "e", (char *)NULL);
		_exit(127);
	}
	CHECK(ended(child) == 5);
	CHECK(execl("/no/such/program", "a", "b", "c", "d", "e", "f", "g", (char *)NULL) == -1 && errno == ENOENT);
	char command[4200];
	snprintf(command, sizeof(command), "'%s' guest", self);
	CHECK(system(command) == 0);
	run_to(&vm, KVM_EXIT_MMIO);
	drop(&vm);
}

static volatile int handled;
static sigjmp_buf back;
static char alternate[64 << 10];

static void on_alarm(int number, siginfo_t *info, void *context)
{
	(void)context;
	// On the alternate stack, and with calls of its own.
	char here;
	CHECK(&here > alternate && &here < alternate + sizeof(alternate));
	CHECK(info->si_signo == number);
	for (int i = 0; i < 10; i++)
		CHECK(syscall(SYS_getppid) > 0);
	if (handled < 5)
		guest();
	handled++;
}

// On the stack of what it interrupts.
static void on_alarm_here(int number)
{
	CHECK(number == SIGALRM);
	guest();
	handled++;
}

static void on_user(int number)
{
	CHECK(number == SIGUSR1);
	guest();
	siglongjmp(back, 1);
}

static void tick(int microseconds, int again)
{
	struct itimerval timer = {
		.it_value.tv_usec = microseconds,
		.it_interval.tv_usec = again ? microseconds : 0,
	};

	CHECK(setitimer(ITIMER_REAL, &timer, NULL) == 0);
}

static void signals(void)
{
	struct vm vm = make(forever, sizeof(forever));
	stack_t stack = { .ss_sp = alternate, .ss_size = sizeof(alternate) };
	struct sigaction action = { .sa_sigaction = on_alarm, .sa_flags = SA_SIGINFO | SA_ONSTACK };
	sigset_t all, before;

	handled = 0;
	CHECK(sigaltstack(&stack, NULL) == 0);
	CHECK(sigaction(SIGALRM, &action, NULL) == 0);
	for (int round = 1; round <= 5; round++) {
		tick(20000, 0);
		CHECK(IOCTL(vm.vcpu, KVM_RUN, 0) == -1 && errno == EINTR && handled == round);
	}
	signal(SIGALRM, on_alarm_here);
	for (int round = 6; round <= 8; round++) {
		tick(20000, 0);
		CHECK(IOCTL(vm.vcpu, KVM_RUN, 0) == -1 && errno == EINTR && handled == round);
	}
	CHECK(sigaction(SIGALRM, &action, NULL) == 0);
	// Many, while calls are made and a read waits.
	int pipe_ends[2];
	char byte;
	CHECK(pipe(pipe_ends) == 0);
	handled = 5;
	tick(500, 1);
	while (handled < 205) {
		CHECK(read(pipe_ends[0], &byte, 1) == -1 && errno == EINTR);
		CHECK(IOCTL(vm.kvm, KVM_GET_API_VERSION, 0) == KVM_API_VERSION);
	}
	tick(0, 0);
	// All signals blocked: KVM_RUN goes on, calls work.
	sigfillset(&all);
	CHECK(sigprocmask(SIG_BLOCK, &all, &before) == 0);
	vm.run->immediate_exit = 1;
	CHECK(IOCTL(vm.vcpu, KVM_RUN, 0) == -1 && errno == EINTR);
	vm.run->immediate_exit = 0;
	CHECK(sigprocmask(SIG_SETMASK, &before, NULL) == 0);
	// A handler that runs a guest of its own, and jumps away.
	for (volatile int round = 0; round < 200; round++) {
		signal(SIGUSR1, on_user);
		if (sigsetjmp(back, 1) == 0) {
			raise(SIGUSR1);
			CHECK(!"the handler has not jumped");
		}
	}
	drop(&vm);
}

// A filter that forbids what slat makes no use of, and answers getppid with an error.
static void filter(void)
{
	struct sock_filter code[] = {
		BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
		BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_getppid, 0, 1),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | 77),
		BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_socket, 0, 1),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
	};
	struct sock_fprog program = { .len = sizeof(code) / sizeof(code[0]), .filter = code };
	int child = FORK();

	if (child == 0) {
		CHECK(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0);
		CHECK(prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0);
		CHECK(syscall(SYS_getppid) == -1 && errno == 77);
		guest();
		syscall(SYS_socket, 1, 1, 0);
		_exit(1);
	}
	CHECK(ended(child) == 256 + SIGSYS);
}

static const struct {
	const char *name;
	void (*run)(void);
} parts[] = {
	{ "guest", guest },	{ "eventfds", eventfds }, { "threads", threads }, { "forks", forks },
	{ "signals", signals }, { "filter", filter },	  { "exits", exits },
};

int main(int count, char **words)
{
	const char *part = count > 1 ? words[1] : "";

	CHECK(readlink("/proc/self/exe", self, sizeof(self) - 1) > 0);
	if (!strcmp(part, "measure"))
		measure();
	// Twice, the second time after many exits.
	for (int round = 0; round < (*part ? 1 : 2); round++)
		for (size_t i = 0; i < sizeof(parts) / sizeof(parts[0]); i++)
			if (!*part || !strcmp(part, parts[i].name))
				parts[i].run();
	puts("all parts passed");
	return 0;
}
