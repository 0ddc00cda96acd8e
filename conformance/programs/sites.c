// Call sites of a static program, each at a place of its own: which of them slat rewrites after many calls, and that
// all go on as before.
//
//	cc -static sites.c -lpthread
//	sites          checks that those are rewritten that may be, and no others
//	sites stay     checks that none is (SLAT_REWRITE=0)
#define _GNU_SOURCE
#include <cpuid.h>
#include <errno.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

// Headers before Linux 6.3 do not have these.
#ifndef PR_SET_MDWE
#define PR_SET_MDWE 65
#define PR_MDWE_REFUSE_EXEC_GAIN 1
#endif

#define CHECK(condition)                                                                           \
	do {                                                                                       \
		if (!(condition)) {                                                                \
			printf("line %d: %s: errno %d\n", __LINE__, #condition, errno);            \
			fflush(stdout);                                                            \
			_exit(1);                                                                  \
		}                                                                                  \
	} while (0)

// KVM_RUN of no descriptor counts as a call of the site, too.
enum { RUN = 0xae80, ENOUGH = 200, PAGE = 4096 };

typedef const uint8_t site[];
extern site plain, quadword_end, line_end, page_end, child_site, protected_site, filtered_site, pairs, pairs_end, copied, copied_end;

// Functions that are a call and padding after it: at the end of a quadword and of a cache line, and so that the padding is
// in two pages.
// What follows a call puts a number into R8, by which one sees where the program goes on.
#define PADDING ".p2align 4, 0x90\n"
#define CALL(number) "syscall\nmov $" #number ", %r8d\nret\n"
__asm__(".text\n.p2align 12\n"
	"plain:\n" CALL(1) PADDING
	"child_site:\n" CALL(2) PADDING
	"filtered_site:\n" CALL(3) PADDING
	".skip 7, 0x90\nquadword_end:\n" CALL(7) PADDING
	".p2align 6, 0x90\n.skip 63, 0x90\nline_end:\n" CALL(4) PADDING
	"protected_site:\n" CALL(8) PADDING
	".p2align 12, 0x90\n.skip 4096 - 12, 0x90\npage_end:\n" CALL(5) ".skip 19, 0x90\n" PADDING
	".p2align 12, 0x90\ncopied:\n" CALL(6) PADDING "copied_end:\n"
	// Two functions each that have one padding.
	".p2align 12\npairs:\n.rept 10\n" CALL(1) CALL(2) ".p2align 7, 0x90\n.endr\npairs_end:\n"
	// A function in the same page.
	"beside:\nret\n.p2align 12\n");
extern void beside(void);
enum { PAIR = 128, PAIRS = 10, SECOND = 9, BESIDE = 3 };

// Calls ioctl from a site. Returns its answer, and in `end` the number after the call.
static long call(const uint8_t *site, long request, long *end)
{
	register long r8 __asm__("r8") = 0;
	long answer = SYS_ioctl;

	// Below the red zone.
	__asm__ volatile("lea -128(%%rsp), %%rsp\ncall *%[site]\nlea 128(%%rsp), %%rsp"
			 : "+a"(answer), "+r"(r8)
			 : [site] "b"(site), "D"(-1L), "S"(request), "d"(0L)
			 : "rcx", "r11", "memory");
	*end = r8;
	return answer;
}

// Makes so many calls that the site is rewritten if it may be, and some more.
static void calls(const uint8_t *site, long number)
{
	long end;

	for (int i = 0; i < ENOUGH; i++) {
		CHECK(call(site, RUN, &end) == -EBADF);
		CHECK(end == number);
	}
}

static int is_rewritten(const uint8_t *site)
{
	CHECK((site[0] == 0x0f && site[1] == 0x05) || site[0] == 0xeb);
	return site[0] == 0xeb;
}

// Checks what the mapping of an address allows, by the letters of /proc/PID/maps.
static void check_access(const uint8_t *address, const char *expected)
{
	FILE *maps = fopen("/proc/self/maps", "r");
	unsigned long from, to;
	char access[5], line[512];

	CHECK(maps);
	while (fgets(line, sizeof(line), maps)) {
		CHECK(sscanf(line, "%lx-%lx %4s", &from, &to, access) == 3);
		if (from <= (uintptr_t)address && (uintptr_t)address < to) {
			CHECK(!strcmp(access, expected));
			fclose(maps);
			return;
		}
	}
	CHECK(!"not mapped");
}

static int ended(int child)
{
	int status;

	CHECK(child > 0 && waitpid(child, &status, 0) == child);
	return WIFEXITED(status) ? WEXITSTATUS(status) : 256 + WTERMSIG(status);
}

// Whether the processor has INVLPGB: Linux may change translations while another processor executes there.
static int has_invlpgb(void)
{
	unsigned a, b, c, d;

	return __get_cpuid(0x80000008, &a, &b, &c, &d) && b >> 3 & 1;
}

// With INVLPGB the first two cannot be rewritten: half of them could be seen. That keeps no other one from it.
static void places(int rewrites)
{
	calls(quadword_end, 7);
	CHECK(is_rewritten(quadword_end) == (rewrites && !has_invlpgb()));
	calls(line_end, 4);
	CHECK(is_rewritten(line_end) == (rewrites && !has_invlpgb()));
	calls(plain, 1);
	CHECK(is_rewritten(plain) == rewrites);
	calls(page_end, 5);
	CHECK(is_rewritten(page_end) == rewrites);
	check_access(plain, "r-xp");
	check_access(page_end, "r-xp");
	check_access(page_end + PAGE, "r-xp");
	calls(plain, 1);
}

// Code that the program writes itself, or has in a file's memory, stays. A site may be unmapped, and another one mapped
// there.
static void mappings(int rewrites)
{
	size_t len = copied_end - copied;
	uint8_t *own = mmap(NULL, PAGE, PROT_READ | PROT_WRITE | PROT_EXEC, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	int file = memfd_create("code", 0);

	CHECK(own != MAP_FAILED);
	memcpy(own, copied, len);
	memcpy(own + 64, copied, len);
	calls(own, 6);
	CHECK(!memcmp(own, copied, len));
	check_access(own, "rwxp");
	CHECK(ftruncate(file, PAGE) == 0 && pwrite(file, copied, len, 0) == (ssize_t)len);
	uint8_t *shared = mmap(NULL, PAGE, PROT_READ | PROT_EXEC, MAP_SHARED, file, 0);
	CHECK(shared != MAP_FAILED);
	calls(shared, 6);
	CHECK(!memcmp(shared, copied, len));
	for (int round = 0; round < 2; round++) {
		CHECK(mprotect(own, PAGE, PROT_READ | PROT_EXEC) == 0);
		calls(own + 64, 6 + round);
		// The first one alone: what is at its address afterwards has been counted already.
		CHECK(round || is_rewritten(own + 64) == rewrites);
		check_access(own, "r-xp");
		CHECK(munmap(own, PAGE) == 0);
		CHECK(mmap(own, PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == own);
		memcpy(own + 64, copied, len);
		own[64 + 4] = 7;
	}
	CHECK(munmap(own, PAGE) == 0 && munmap(shared, PAGE) == 0 && close(file) == 0);
}

// A filter judges the calls of a site that was rewritten, and sees where they come from.
static void filters(void)
{
	struct sock_filter code[] = {
		BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
		BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_ioctl, 0, 6),
		BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, args[1])),
		BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, RUN + 1, 0, 1),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | 77),
		BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, instruction_pointer)),
		BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, (uint32_t)(uintptr_t)filtered_site + 2, 1, 0),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | 78),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
	};
	struct sock_fprog program = { .len = sizeof(code) / sizeof(code[0]), .filter = code };
	int child;
	long end;

	calls(filtered_site, 3);
	child = fork();
	if (child == 0) {
		CHECK(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0);
		CHECK(prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0);
		CHECK(call(filtered_site, RUN + 1, &end) == -77);
		CHECK(call(filtered_site, RUN, &end) == -EBADF);
		CHECK(call(plain, RUN + 1, &end) == -77);
		CHECK(call(plain, RUN, &end) == -78);
		_exit(7);
	}
	CHECK(ended(child) == 7);
}

// A process with a debugger: its breakpoints may be anywhere.
static void traced(void)
{
	int child = fork(), status;

	if (child == 0) {
		CHECK(ptrace(PTRACE_TRACEME, 0, 0, 0) == 0);
		calls(child_site, 2);
		CHECK(!is_rewritten(child_site));
		_exit(7);
	}
	while (waitpid(child, &status, 0) == child && WIFSTOPPED(status))
		CHECK(ptrace(PTRACE_CONT, child, 0, WSTOPSIG(status)) == 0);
	CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 7);
}

// The kernel refuses memory of this process that is writable and executable, and memory that becomes executable.
static void protected(int rewrites)
{
	int child = fork();

	if (child == 0) {
		if (prctl(PR_SET_MDWE, PR_MDWE_REFUSE_EXEC_GAIN, 0, 0, 0) != 0) {
			CHECK(errno == EINVAL);
			puts("this kernel is older than 6.3: nothing watches the rights of memory");
			fflush(stdout);
			_exit(7);
		}
		CHECK(mmap(NULL, PAGE, PROT_READ | PROT_WRITE | PROT_EXEC, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0) ==
		      MAP_FAILED);
		calls(protected_site, 8);
		CHECK(is_rewritten(protected_site) == rewrites);
		check_access(protected_site, "r-xp");
		_exit(7);
	}
	CHECK(ended(child) == 7);
}

static pthread_barrier_t barrier;
static volatile int is_done;

static void *in_step(void *argument)
{
	long second = (long)argument;

	for (int pair = 0; pair < PAIRS; pair++) {
		pthread_barrier_wait(&barrier);
		calls(pairs + PAIR * pair + SECOND * second, 1 + second);
		pthread_barrier_wait(&barrier);
		calls(pairs + PAIR * pair + SECOND * second, 1 + second);
	}
	return NULL;
}

static void *executes(void *argument)
{
	while (!is_done)
		beside();
	return argument;
}

// Threads whose sites have one padding, in a page where other threads execute.
static void threads(int rewrites)
{
	for (int round = 0; round < 3; round++) {
		int child = fork();

		if (child == 0) {
			pthread_t thread[2 + BESIDE];

			CHECK(pthread_barrier_init(&barrier, NULL, 2) == 0);
			for (int i = 0; i < BESIDE; i++)
				CHECK(pthread_create(&thread[2 + i], NULL, executes, NULL) == 0);
			for (long i = 0; i < 2; i++)
				CHECK(pthread_create(&thread[i], NULL, in_step, (void *)i) == 0);
			for (int i = 0; i < 2; i++)
				CHECK(pthread_join(thread[i], NULL) == 0);
			is_done = 1;
			for (int i = 0; i < BESIDE; i++)
				CHECK(pthread_join(thread[2 + i], NULL) == 0);
			for (int pair = 0; pair < PAIRS; pair++) {
				const uint8_t *first = pairs + PAIR * pair;

				CHECK(is_rewritten(first) + is_rewritten(first + SECOND) == rewrites);
			}
			_exit(7);
		}
		CHECK(ended(child) == 7);
	}
}

int main(int count, char **words)
{
	int rewrites = !(count > 1 && !strcmp(words[1], "stay"));

	CHECK(pairs_end - pairs == PAIR * PAIRS);
	// Before the others: processes that are made have what was counted.
	threads(rewrites);
	traced();
	protected(rewrites);
	places(rewrites);
	mappings(rewrites);
	filters();
	puts("all parts passed");
	return 0;
}
