// A client of the KVM API that is built for several C libraries, linked in several manners, and run under each: what it checks does not
// depend on how its system calls come to the kernel.
//
//	cc -DRAW    makes those that concern KVM by instructions of its own
//	ways NAME   runs one part; without, all of them
//	ways states SETTING  makes calls in one state, with which a defect ends the program
#define _GNU_SOURCE
#include "vdso.h"
#include <cpuid.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/filter.h>
#include <linux/kvm.h>
#include <linux/seccomp.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <setjmp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <ucontext.h>
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

// What a client may have set when it makes a call, and finds afterwards. Assembly has the offsets of the words.
struct state {
	uint64_t flags;
	// RBX, RBP, R12 to R15.
	uint64_t kept[6];
	// RDI, RSI, RDX, R10, R8, R9, which only a system call keeps.
	uint64_t arguments[6];
	// The bytes below the stack pointer, which a system call keeps, too.
	uint64_t red_zone[16];
	uint64_t fs, gs;
	// XSAVE's image in its standard format: x87, SSE, AVX and AVX-512.
	uint8_t image[4096] __attribute__((aligned(64)));
};

enum {
	TF = 1 << 8, DF = 1 << 10, NT = 1 << 14, AC = 1 << 18, ID = 1 << 21,
	ARITHMETIC = 0x8d5,
	X87 = 1, SSE = 2, AVX = 4, AVX512 = 0xe0,
};

struct state state_before, state_after, state_own;
uint64_t state_components, state_answer, state_has_bases;
// What is called, and what it finds in RAX.
const void *state_function;
uint64_t state_number;

// Calls `state_function` in the state `state_before`; stores that after it, and what it returns.
void state_call(void);
#define AT(state, offset) "state_" #state "+" #offset "(%rip)"
#define XSTATE(instruction, state)                                                                 \
	"mov state_components(%rip), %eax\nmov state_components+4(%rip), %edx\n" #instruction " " AT(state, 256) "\n"
__asm__(".text\n.p2align 4\n.globl state_call\n.type state_call, @function\nstate_call:\n"
	"push %rbx\npush %rbp\npush %r12\npush %r13\npush %r14\npush %r15\nsub $8, %rsp\n"
	XSTATE(xsave64, own) XSTATE(xrstor64, before)
	// The return address will be above the red zone.
	"lea -136(%rsp), %rdi\nlea " AT(before, 104) ", %rsi\nmov $16, %ecx\nrep movsq\n"
	"mov " AT(before, 8) ", %rbx\nmov " AT(before, 16) ", %rbp\nmov " AT(before, 24) ", %r12\n"
	"mov " AT(before, 32) ", %r13\nmov " AT(before, 40) ", %r14\nmov " AT(before, 48) ", %r15\n"
	"mov " AT(before, 56) ", %rdi\nmov " AT(before, 64) ", %rsi\nmov " AT(before, 72) ", %rdx\n"
	"mov " AT(before, 80) ", %r10\nmov " AT(before, 88) ", %r8\nmov " AT(before, 96) ", %r9\n"
	"mov state_number(%rip), %rax\n"
	"pushq " AT(before, 0) "\npopfq\n"
	"call *state_function(%rip)\n"
	"pushfq\npopq " AT(after, 0) "\npushq $2\npopfq\n"
	"mov %rax, state_answer(%rip)\n"
	"mov %rbx, " AT(after, 8) "\nmov %rbp, " AT(after, 16) "\nmov %r12, " AT(after, 24) "\n"
	"mov %r13, " AT(after, 32) "\nmov %r14, " AT(after, 40) "\nmov %r15, " AT(after, 48) "\n"
	"mov %rdi, " AT(after, 56) "\nmov %rsi, " AT(after, 64) "\nmov %rdx, " AT(after, 72) "\n"
	"mov %r10, " AT(after, 80) "\nmov %r8, " AT(after, 88) "\nmov %r9, " AT(after, 96) "\n"
	"lea -136(%rsp), %rsi\nlea " AT(after, 104) ", %rdi\nmov $16, %ecx\nrep movsq\n"
	"cmpq $0, state_has_bases(%rip)\nje 1f\n"
	"rdfsbase %rax\nmov %rax, " AT(after, 232) "\nrdgsbase %rax\nmov %rax, " AT(after, 240) "\n1:\n"
	XSTATE(xsave64, after) XSTATE(xrstor64, own)
	"add $8, %rsp\npop %r15\npop %r14\npop %r13\npop %r12\npop %rbp\npop %rbx\nret\n"
	".size state_call, . - state_call\n");
_Static_assert(offsetof(struct state, image) == 256, "assembly has the offsets");

// Returns the bytes of a component of XSAVE's image, and where they begin.
static uint32_t component(int index, uint32_t *offset)
{
	uint32_t size, c, d;

	__cpuid_count(0xd, index, size, *offset, c, d);
	return size;
}

// A state to make a call in. The words of floating point are those of the processor: MXCSR and the x87 control word.
struct setting {
	const char *name;
	uint32_t flags, mxcsr;
	uint16_t control;
	// The x87 exceptions that have occurred, and the registers that have values.
	uint8_t raised, used;
};

static const struct setting settings[] = {
	{ "plain", 0, 0x1f80, 0x37f, 0, 0 },
	{ "arithmetic flags", ARITHMETIC, 0x1f80, 0x37f, 0, 0 },
	{ "AC", AC, 0x1f80, 0x37f, 0, 0 },
	{ "DF", DF, 0x1f80, 0x37f, 0, 0 },
	{ "NT", NT, 0x1f80, 0x37f, 0, 0 },
	{ "ID", ID, 0x1f80, 0x37f, 0, 0 },
	{ "TF", TF, 0x1f80, 0x37f, 0, 0 },
	{ "MXCSR: sticky flags", 0, 0x1fbf, 0x37f, 0, 0 },
	{ "MXCSR: rounds up", 0, 0x5f80, 0x37f, 0, 0 },
	{ "MXCSR: truncates, FTZ, DAZ", 0, 0xffc0, 0x37f, 0, 0 },
	{ "MXCSR: no exception masked", 0, 0, 0x37f, 0, 0 },
	{ "x87: rounds down, single precision", 0, 0x1f80, 0x47f, 0, 0 },
	{ "x87: no exception masked", 0, 0x1f80, 0x340, 0, 0 },
	{ "x87: sticky flags", 0, 0x1f80, 0x37f, 0x3f, 0 },
	{ "x87: all registers used", 0, 0x1f80, 0x37f, 0, 0xff },
	{ "all", AC | DF | NT | ID | ARITHMETIC, 0xe03f & ~0x3f, 0x840, 0, 0xff },
};

#ifdef RAW
// All that a system call keeps.
static const int is_system_call = 1;
void one_call(void);
#else
static const int is_system_call = 0;
#endif

static uint64_t bases(int which)
{
	uint64_t base = 0;

	if (state_has_bases && which == 0)
		__asm__ volatile("rdfsbase %0" : "=r"(base));
	else if (state_has_bases)
		__asm__ volatile("rdgsbase %0" : "=r"(base));
	return base;
}

static void prepare_state(const struct setting *setting, const long words[3])
{
	uint32_t offset, size;

	for (size_t i = 0; i < 6; i++)
		state_before.kept[i] = 0x1111111111111111 * (i + 1);
	for (size_t i = 0; i < 6; i++)
		state_before.arguments[i] = i < 3 ? (uint64_t)words[i] : 0x0123456789abcdef * i;
	for (size_t i = 0; i < 16; i++)
		state_before.red_zone[i] = ~i;
	state_before.flags = 2 | 1 << 9 | setting->flags;
	state_before.fs = bases(0);
	state_before.gs = bases(1);
	uint8_t *image = state_before.image;
	memset(image, 0, sizeof(state_before.image));
	for (int index = 2; index < 8; index++)
		if (state_components & 1 << index && (size = component(index, &offset)) != 0)
			for (size_t i = 0; i < size; i++)
				image[offset + i] = i * 5 + index;
	for (size_t i = 160; i < 416; i++)
		image[i] = i * 3;
	// Eight numbers between 1 and 2.
	for (size_t i = 0; i < 8; i++) {
		uint64_t number[2] = { (uint64_t)1 << 63 | i << 40, 0x3fff };
		memcpy(image + 32 + 16 * i, number, 10);
	}
	uint16_t x87[] = { setting->control, setting->raised, setting->used };
	memcpy(image, x87, sizeof(x87));
	memcpy(image + 24, &setting->mxcsr, 4);
	memcpy(image + 512, &state_components, 8);
}

// Says what a call has changed. The word that is returned is looked at by the caller.
static int state_differs(const struct setting *setting, const char *call)
{
	uint64_t flags = state_before.flags ^ state_after.flags;
	const uint8_t *before = state_before.image, *after = state_after.image;
	const char *what = NULL;
	uint32_t offset, size;

	if (!is_system_call)
		flags &= ~(uint64_t)ARITHMETIC;
	if (flags != 0)
		what = "flags";
	if (memcmp(state_before.kept, state_after.kept, sizeof(state_before.kept)))
		what = "RBX, RBP, R12 to R15";
	if (state_before.fs != state_after.fs || state_before.gs != state_after.gs)
		what = "the bases of FS and GS";
	if (memcmp(before, after, 2))
		what = "the x87 control word";
	if ((before[2] ^ after[2]) & 0x7f)
		what = "the x87 exception flags";
	if (memcmp(before + 24, after + 24, 4))
		what = "MXCSR";
	if (is_system_call) {
		if (memcmp(state_before.arguments, state_after.arguments, sizeof(state_before.arguments)))
			what = "a register of an argument";
		// With TF a signal follows the return, at a stack pointer 8 bytes higher: the lowest word is below its red zone.
		int first = setting->flags & TF ? 1 : 0;
		if (memcmp(state_before.red_zone + first, state_after.red_zone + first, (16 - first) * sizeof(uint64_t)))
			what = "the red zone";
		if (before[3] != after[3] || before[4] != after[4])
			what = "the x87 tags";
		for (size_t i = 0; i < 8 && setting->used; i++)
			if (memcmp(before + 32 + 16 * i, after + 32 + 16 * i, 10))
				what = "an x87 register";
		if (memcmp(before + 160, after + 160, 256))
			what = "XMM";
		for (int index = 2; index < 8; index++)
			if (state_components & 1 << index && (size = component(index, &offset)) != 0 &&
			    memcmp(before + offset, after + offset, size))
				what = "the upper parts of vectors, or masks";
	}
	if (what != NULL)
		printf("%s: %s has changed %s (flags %#lx, %#lx)\n", setting->name, call, what, (long)state_before.flags,
		       (long)state_after.flags);
	return what != NULL;
}

// What is wrong, in all settings.
static int wrong;
// The one setting that is looked at, if not all are.
static const char *one_setting;

// Makes a system call, or calls the C library's function for it, in the state that was prepared.
static void call_in_state(long number, const void *function)
{
#ifdef RAW
	state_function = one_call;
	state_number = number;
	(void)function;
#else
	state_function = function;
	(void)number;
#endif
	state_call();
}

// Makes ioctl in a state. Returns what a system call does: an errno below 0.
static long ioctl_in(const struct setting *setting, const char *call, int fd, long request, const void *argument)
{
	const long words[] = { fd, request, (long)argument };
	stack_t alternate_before, alternate_after;
	sigset_t mask_before, mask_after;

	CHECK(sigaltstack(NULL, &alternate_before) == 0 && sigprocmask(SIG_BLOCK, NULL, &mask_before) == 0);
	prepare_state(setting, words);
	errno = 1234;
	call_in_state(SYS_ioctl, ioctl);
	int error = errno;
	wrong += state_differs(setting, call);
	CHECK(sigaltstack(NULL, &alternate_after) == 0 && sigprocmask(SIG_BLOCK, NULL, &mask_after) == 0);
	if (memcmp(&alternate_before, &alternate_after, sizeof(stack_t)) || memcmp(&mask_before, &mask_after, 8)) {
		printf("%s: %s has changed the alternate stack or the mask\n", setting->name, call);
		wrong++;
	}
#ifndef RAW
	if ((int)state_answer == -1) {
		state_answer = -error;
		error = 1234;
	}
#endif
	if (error != 1234) {
		printf("%s: %s has changed errno to %d\n", setting->name, call, error);
		wrong++;
	}
	return (int)state_answer;
}

#define RIGHT(condition)                                                                           \
	do {                                                                                       \
		if (!(condition)) {                                                                \
			printf("%s: line %d: %s\n", setting->name, __LINE__, #condition);          \
			wrong++;                                                                   \
		}                                                                                  \
	} while (0)

// mov cx, 3000; fninit; fld1; fldpi; fdivp; fstp qword [0x3100]; movsd xmm0, [0x3200]; divsd xmm0, [0x3208]; movsd [0x3108], xmm0;
// loop to fninit; stmxcsr [0x3110]; hlt; jmp to the beginning.
static const uint8_t floats[] = {
	0xb9, 0xb8, 0x0b, 0xdb, 0xe3, 0xd9, 0xe8, 0xd9, 0xeb, 0xde, 0xf9, 0xdd, 0x1e, 0x00, 0x31, 0xf2, 0x0f, 0x10,
	0x06, 0x00, 0x32, 0xf2, 0x0f, 0x5e, 0x06, 0x08, 0x32, 0xf2, 0x0f, 0x11, 0x06, 0x08, 0x31, 0xe2, 0xe0,
	0x0f, 0xae, 0x1e, 0x10, 0x31, 0xf4, 0xeb, 0xd5,
};

static volatile int traps;
static int trapped_kvm;

// Each instruction that is executed while TF is set, slat's among them.
static void on_trap(int number)
{
	CHECK(number == SIGTRAP);
	if (traps++ % 16 == 0)
		CHECK(IOCTL(trapped_kvm, KVM_GET_API_VERSION, 0) == KVM_API_VERSION);
}

static void set_flags(uint64_t flags)
{
	__asm__ volatile("push %0\npopfq" : : "r"(flags | 2) : "memory", "cc");
}

static volatile int interrupted;
static sigjmp_buf from_fault;

static void on_interrupt(int number)
{
	CHECK(number == SIGALRM && IOCTL(trapped_kvm, KVM_GET_API_VERSION, 0) == KVM_API_VERSION);
	interrupted++;
}

static void on_fault(int number)
{
	CHECK(number == SIGSEGV && IOCTL(trapped_kvm, KVM_GET_API_VERSION, 0) == KVM_API_VERSION);
	siglongjmp(from_fault, 1);
}

// Handlers that interrupt the program while it has AC set. They return to it with AC set.
static void handlers_with_flags(void)
{
	struct itimerval timer = { .it_value.tv_usec = 1000 };
	volatile int *volatile nowhere = (int *)64;
	uint64_t flags;

	for (int round = 1; round <= 10; round++) {
		interrupted = 0;
		signal(SIGALRM, on_interrupt);
		CHECK(setitimer(ITIMER_REAL, &timer, NULL) == 0);
		set_flags(AC | NT | ID);
		while (!interrupted)
			;
		__asm__ volatile("pushfq\npop %0" : "=r"(flags));
		set_flags(0);
		CHECK((flags & (AC | NT | ID)) == (AC | NT | ID));
		signal(SIGSEGV, on_fault);
		if (sigsetjmp(from_fault, 1) == 0) {
			set_flags(AC);
			*nowhere = 1;
		}
		set_flags(0);
		signal(SIGSEGV, SIG_DFL);
	}
}

// Finds out what state the processor has. Before the first `prepare_state`.
static void find_state(void)
{
	uint32_t a, b, c = 0, d;

	__get_cpuid(1, &a, &b, &c, &d);
	CHECK(c & bit_OSXSAVE);
	__asm__ volatile("xgetbv" : "=a"(a), "=d"(d) : "c"(0));
	state_components = a & (X87 | SSE | AVX | AVX512);
	// AT_HWCAP2: the instructions that read the bases exist.
	state_has_bases = getauxval(26) >> 1 & 1;
}

// Calls in all states: the answers are right, and the state is as it was.
static void states(void)
{
	const struct setting *setting = settings;
	struct vm vm = make(floats, sizeof(floats));
	struct kvm_sregs sregs;
	struct kvm_regs first, regs;
	static struct {
		struct kvm_cpuid2 head;
		struct kvm_cpuid_entry2 entries[200];
	} cpuid, first_cpuid;
	const double numbers[] = { 1, 3 };
	// The arguments of requests, at odd addresses: KVM does not mind.
	static char odd[sizeof(cpuid) + 1];

	wrong = 0;
	trapped_kvm = vm.kvm;
	signal(SIGTRAP, on_trap);
	find_state();
	// In a program that slat loads the base of GS is slat's.
	syscall(SYS_arch_prctl, 0x1001, 0x123450);
	CHECK(IOCTL(vm.vcpu, KVM_GET_SREGS, &sregs) == 0);
	sregs.cr4 |= 0x600;
	CHECK(IOCTL(vm.vcpu, KVM_SET_SREGS, &sregs) == 0);
	memcpy(vm.memory + 0x3200, numbers, sizeof(numbers));
	CHECK(IOCTL(vm.vcpu, KVM_GET_REGS, &first) == 0);
	first_cpuid.head.nent = 200;
	CHECK(IOCTL(vm.kvm, KVM_GET_SUPPORTED_CPUID, &first_cpuid) == 0);

	for (int way = 0; way < 2; way++) {
		for (setting = settings; setting < settings + sizeof(settings) / sizeof(settings[0]); setting++) {
			if (one_setting != NULL && strcmp(one_setting, setting->name))
				continue;
#define CALL(fd, request, argument) ioctl_in(setting, #request, fd, request, argument)
			RIGHT(CALL(vm.kvm, KVM_GET_API_VERSION, NULL) == KVM_API_VERSION);
			RIGHT(CALL(vm.vcpu, KVM_SET_REGS, &first) == 0);
			RIGHT(CALL(vm.vcpu, KVM_GET_REGS, &regs) == 0 && !memcmp(&first, &regs, sizeof(regs)));
			RIGHT(CALL(vm.vcpu, KVM_GET_REGS, odd + 1) == 0 && !memcmp(&first, odd + 1, sizeof(regs)));
			cpuid.head.nent = 200;
			RIGHT(CALL(vm.kvm, KVM_GET_SUPPORTED_CPUID, &cpuid) == 0 && cpuid.head.nent == first_cpuid.head.nent);
			RIGHT(CALL(vm.kvm, KVM_RUN, NULL) == -EINVAL);
			for (int round = 0; round < 3; round++) {
				uint64_t third = 0x3fd5555555555555, by_pi = 0x3fd45f306dc9c883;
				uint32_t inexact = 0x1fa0;

				memset(vm.memory + 0x3100, 0xff, 0x14);
				RIGHT(CALL(vm.vcpu, KVM_RUN, NULL) == 0);
				RIGHT(vm.run->exit_reason == KVM_EXIT_HLT);
				RIGHT(!memcmp(vm.memory + 0x3100, &by_pi, 8) && !memcmp(vm.memory + 0x3108, &third, 8));
				// Inexact, and no other exception.
				RIGHT(!memcmp(vm.memory + 0x3110, &inexact, 4));
			}
			int other = CALL(vm.kvm, KVM_CREATE_VM, NULL);
			RIGHT(other >= 0 && CLOSE(other) == 0);
		}
		// So many that their place gets a way of its own.
		setting = settings;
		for (int i = 0; i < 100 && way == 0; i++)
			RIGHT(CALL(vm.vcpu, KVM_RUN, NULL) == 0);
	}
	CHECK(wrong == 0);
	CHECK(traps > 0 || one_setting != NULL);
	signal(SIGTRAP, SIG_DFL);
	handlers_with_flags();
	syscall(SYS_arch_prctl, 0x1001, 0);
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

static void *no_work(void *argument)
{
	return argument;
}

// A thread is made without a wait for its first instruction: here it cannot run before its maker is done, or interrupted.
static void many_threads(void)
{
	enum { THREADS = 100 };
	pthread_t threads[THREADS];
	struct rusage before, after;
	cpu_set_t all, one;

	CHECK(sched_getaffinity(0, sizeof(all), &all) == 0);
	CPU_ZERO(&one);
	for (int cpu = 0; cpu < CPU_SETSIZE && CPU_COUNT(&one) == 0; cpu++)
		if (CPU_ISSET(cpu, &all))
			CPU_SET(cpu, &one);
	CHECK(sched_setaffinity(0, sizeof(one), &one) == 0);
	CHECK(getrusage(RUSAGE_THREAD, &before) == 0);
	for (int i = 0; i < THREADS; i++)
		CHECK(pthread_create(&threads[i], NULL, no_work, (void *)(long)i) == 0);
	CHECK(getrusage(RUSAGE_THREAD, &after) == 0);
	for (int i = 0; i < THREADS; i++) {
		void *result;

		CHECK(pthread_join(threads[i], &result) == 0 && result == (void *)(long)i);
	}
	CHECK(sched_setaffinity(0, sizeof(all), &all) == 0);
	printf("%ld waits for %d threads\n", after.ru_nvcsw - before.ru_nvcsw, THREADS);
	CHECK(after.ru_nvcsw - before.ru_nvcsw < THREADS / 4);
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
	many_threads();
}

#ifdef __GLIBC__ // musl's handler changes the registers that it finds, which are slat's: docs/dispatch.md.
// out 0x10, al; jmp to the beginning.
static const uint8_t writes[] = { 0xe6, 0x10, 0xeb, 0xfc };

static void *run_until_cancelled(void *argument)
{
	struct vm *vm = argument;
	int before;

	pthread_setcanceltype(PTHREAD_CANCEL_ASYNCHRONOUS, &before);
	for (;;)
		(void)(vm->kvm == -1 ? syscall(SYS_ioctl, vm->vcpu, KVM_RUN, 0) : IOCTL(vm->vcpu, KVM_RUN, 0));
	return NULL;
}

// KVM_RUN on a thread that is cancelled asynchronously ends, and leaves a vCPU that another thread can run.
static void cancellation(void)
{
	const struct {
		const void *code;
		size_t len;
	} guests[] = { { forever, sizeof(forever) }, { writes, sizeof(writes) } };

	for (int round = 0; round < 20; round++) {
		struct vm vm = make(guests[round & 1].code, guests[round & 1].len), given = vm;
		pthread_t thread;
		void *result;

		if (round & 2)
			given.kvm = -1;
		CHECK(pthread_create(&thread, NULL, run_until_cancelled, &given) == 0);
		usleep(20000);
		CHECK(pthread_cancel(thread) == 0);
		// slat does not see the first one where it comes just before the run.
		while (pthread_tryjoin_np(thread, &result) == EBUSY) {
			usleep(10000);
			pthread_cancel(thread);
		}
		CHECK(result == PTHREAD_CANCELED);
		vm.run->immediate_exit = 1;
		CHECK(IOCTL(vm.vcpu, KVM_RUN, 0) == -1 && errno == EINTR);
		drop(&vm);
	}
}
#endif

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

static volatile int trapped_calls;

// Answers a call that a filter traps.
static void on_trapped_call(int number, siginfo_t *info, void *context)
{
	CHECK(number == SIGSYS && info->si_syscall == SYS_getpgid);
	((ucontext_t *)context)->uc_mcontext.gregs[REG_RAX] = 55;
	trapped_calls++;
}

// The program's own calls of the vDSO.
static void vdso(void)
{
	const char *wrong_function = vdso_falls_back();

	if (wrong_function != NULL)
		puts(wrong_function);
	CHECK(wrong_function == NULL);
}

// A filter that forbids what slat makes no use of, answers getppid with an error, and has the program answer getpgid. In a
// static program it does not concern slat, and also forbids what slat uses.
static void filter(void)
{
	struct sigaction action = { .sa_sigaction = on_trapped_call, .sa_flags = SA_SIGINFO };
	struct sock_filter code[] = {
		BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
		BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_getppid, 0, 1),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | 77),
		BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_getpgid, 0, 1),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_TRAP),
		BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_getsid, 1, 0),
		BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, getauxval(AT_BASE) == 0 ? SYS_getrandom : SYS_getsid, 0, 1),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
	};
	struct sock_fprog program = { .len = sizeof(code) / sizeof(code[0]), .filter = code };

	char *has_ended = mmap(NULL, 1, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	CHECK(has_ended != MAP_FAILED);
	find_state();
	// The C library uses it once, for its memory.
	free(malloc(1));
	int child = FORK();

	if (child == 0) {
		CHECK(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0);
		CHECK(prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0);
		CHECK(syscall(SYS_getppid) == -1 && errno == 77);
		guest();
		CHECK(sigaction(SIGSYS, &action, NULL) == 0);
		for (const struct setting *setting = settings; setting < settings + sizeof(settings) / sizeof(settings[0]); setting++) {
			if (setting->flags & TF)
				continue;
			prepare_state(setting, (const long[]){ 0, 0, 0 });
			call_in_state(SYS_getpgid, getpgid);
			CHECK(state_answer == 55 && !state_differs(setting, "getpgid"));
		}
		CHECK(trapped_calls > 10);
		states();
		*has_ended = 1;
		syscall(SYS_getsid, 0);
		_exit(1);
	}
	CHECK(ended(child) == 256 + SIGSYS);
	CHECK(*has_ended);
}

static const struct {
	const char *name;
	void (*run)(void);
} parts[] = {
	{ "states", states },	{ "guest", guest },	  { "eventfds", eventfds }, { "threads", threads }, { "forks", forks },
	{ "signals", signals }, { "filter", filter },	  { "exits", exits },	    { "vdso", vdso },
#ifdef __GLIBC__
	{ "cancellation", cancellation },
#endif
};

int main(int count, char **words)
{
	const char *part = count > 1 ? words[1] : "";

	one_setting = count > 2 ? words[2] : NULL;
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
