// A library with clock_gettime and getrandom of its own, for LD_PRELOAD: wherever the program or slat calls one of them,
// it also makes system calls by code that is not the C library's. These are the calls that the vDSO leaves to the kernel,
// and some by its own instructions, as the dynamic linker makes them: of memory, a wait, the thread's signal mask. Where an
// answer is wrong the process ends by SIGABRT. FALLING_BACK names a file with a word that counts the calls; in a static
// program (SLAT_PROGRAM) those of slat on the program's first thread, once the program runs: then the base of GS is slat's.
#define _GNU_SOURCE
#include "vdso.h"
#include <asm/prctl.h>
#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

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
	return answer;
}

static _Atomic uint64_t *calls;
static int is_static;

__attribute__((constructor)) static void begin(void)
{
	const char *name = getenv("FALLING_BACK");
	int file = name == NULL ? -1 : open(name, O_RDWR | O_CLOEXEC);

	is_static = getenv("SLAT_PROGRAM") != NULL;
	if (file >= 0) {
		void *word = mmap(NULL, sizeof(*calls), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);

		close(file);
		if (word != MAP_FAILED)
			calls = word;
	}
}

static void need(int is_right)
{
	if (!is_right)
		abort();
}

static void fall_back(void)
{
	int before = errno;
	uint64_t mask, all = ~0ul, again, unblockable = 1 << (SIGKILL - 1) | 1 << (SIGSTOP - 1);
	struct timespec moment = { 0, 1000 };
	long page, base;

	need(vdso_falls_back() == NULL);
	page = raw(SYS_mmap, 0, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	need(page > 0);
	*(volatile char *)page = 1;
	need(raw(SYS_munmap, page, 4096, 0, 0, 0, 0) == 0);
	page = raw(SYS_clock_nanosleep, CLOCK_MONOTONIC, 0, (long)&moment, 0, 0, 0);
	need(page == 0 || page == -EINTR);
	// What must not be blocked is not for slat: a mask of all signals but that.
	need(raw(SYS_rt_sigprocmask, SIG_SETMASK, 0, (long)&mask, 8, 0, 0) == 0);
	all &= ~(1ul << (SIGSYS - 1)) & ~unblockable;
	need(raw(SYS_rt_sigprocmask, SIG_BLOCK, (long)&all, 0, 8, 0, 0) == 0);
	need(raw(SYS_rt_sigprocmask, SIG_SETMASK, (long)&mask, (long)&again, 8, 0, 0) == 0);
	need(again == (mask | all));
	need(raw(SYS_arch_prctl, ARCH_GET_GS, (long)&base, 0, 0, 0, 0) == 0);
	if (calls != NULL && (!is_static || (base != 0 && gettid() == getpid())))
		++*calls;
	errno = before;
}

int clock_gettime(clockid_t clock, struct timespec *to)
{
	fall_back();
	return syscall(SYS_clock_gettime, clock, to);
}

ssize_t getrandom(void *to, size_t len, unsigned flags)
{
	fall_back();
	return syscall(SYS_getrandom, to, len, flags);
}
