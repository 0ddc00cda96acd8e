// Forks while other threads make the process's first VMs, vCPUs, dirty logs and interrupts. The child does the same within a time limit: it
// must not wait for a thread that it does not have.
//
//	forking [ROUNDS [SEED]]
#define _GNU_SOURCE
#include <fcntl.h>
#include <linux/kvm.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

enum { MEMORY = 1 << 16, THREADS = 3, PATIENCE = 30 };

// Makes a VM, uses it and drops it. Returns the line of what has failed, or 0.
#define CHECK(condition)                                                                           \
	do {                                                                                       \
		if (!(condition))                                                                  \
			return __LINE__ % 250 + 1;                                                 \
	} while (0)
static int use(void)
{
	static const uint8_t code[] = { 0xe6, 0x10, 0xeb, 0xfc };
	uint64_t bitmap = 0;
	struct kvm_dirty_log log = { .dirty_bitmap = &bitmap };
	struct kvm_sregs sregs;
	struct kvm_regs regs = { .rflags = 2 };
	static struct {
		struct kvm_cpuid2 head;
		struct kvm_cpuid_entry2 entries[200];
	} none;
	struct kvm_cpuid2 *cpuid = calloc(1, sizeof(none));
	int kvm = open("/dev/kvm", O_RDWR | O_CLOEXEC), vm = ioctl(kvm, KVM_CREATE_VM, 0);

	CHECK(cpuid != NULL && kvm >= 0 && vm >= 0);
	cpuid->nent = 200;
	CHECK(ioctl(kvm, KVM_GET_SUPPORTED_CPUID, cpuid) == 0);
	char *memory = mmap(NULL, MEMORY, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	struct kvm_userspace_memory_region region = {
		.flags = KVM_MEM_LOG_DIRTY_PAGES,
		.memory_size = MEMORY,
		.userspace_addr = (uintptr_t)memory,
	};
	CHECK(memory != MAP_FAILED);
	memcpy(memory, code, sizeof(code));
	CHECK(ioctl(vm, KVM_SET_USER_MEMORY_REGION, &region) == 0);
	CHECK(ioctl(vm, KVM_CREATE_IRQCHIP, 0) == 0);
	struct kvm_irqfd irqfd = { .fd = eventfd(0, EFD_CLOEXEC), .gsi = 5 };
	CHECK(ioctl(vm, KVM_IRQFD, &irqfd) == 0);
	int vcpu = ioctl(vm, KVM_CREATE_VCPU, 0), size = ioctl(kvm, KVM_GET_VCPU_MMAP_SIZE, 0);
	CHECK(vcpu >= 0);
	struct kvm_run *run = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, vcpu, 0);
	CHECK(run != MAP_FAILED && ioctl(vcpu, KVM_SET_CPUID2, cpuid) == 0);
	CHECK(ioctl(vcpu, KVM_GET_SREGS, &sregs) == 0);
	sregs.cs.base = sregs.cs.selector = 0;
	CHECK(ioctl(vcpu, KVM_SET_SREGS, &sregs) == 0 && ioctl(vcpu, KVM_SET_REGS, &regs) == 0);
	for (int i = 0; i < 20; i++)
		CHECK(ioctl(vcpu, KVM_RUN, 0) == 0 && run->exit_reason == KVM_EXIT_IO);
	CHECK(ioctl(vm, KVM_GET_DIRTY_LOG, &log) == 0);
	CHECK(madvise(memory + 4096, 4096, MADV_DONTNEED) == 0 && munmap(run, size) == 0);
	CHECK(close(vcpu) == 0 && close(vm) == 0 && close(kvm) == 0 && close(irqfd.fd) == 0);
	CHECK(munmap(memory, MEMORY) == 0);
	free(cpuid);
	return 0;
}

static void *uses(void *argument)
{
	for (;;)
		if (use() != 0)
			_exit(99);
	return argument;
}

static int ended(int child)
{
	int status = -1;

	waitpid(child, &status, 0);
	return WIFEXITED(status) ? WEXITSTATUS(status) : 256 + WTERMSIG(status);
}

// Runs in a process that has not used KVM. Returns how the child has ended.
static int round_of(int microseconds, int by_number)
{
	pthread_t thread;

	alarm(2 * PATIENCE);
	for (int i = 0; i < THREADS; i++)
		pthread_create(&thread, NULL, uses, NULL);
	usleep(microseconds);
	int child = by_number ? (int)syscall(SYS_fork) : fork();
	if (child == 0) {
		alarm(PATIENCE);
		_exit(use());
	}
	return ended(child);
}

int main(int count, char **words)
{
	int rounds = count > 1 ? atoi(words[1]) : 60, failed = 0;

	srand(count > 2 ? atoi(words[2]) : 1);
	for (int i = 0; i < rounds; i++) {
		int microseconds = rand() % 20000, by_number = rand() & 1;
		int child = fork();

		if (child == 0) {
			int how = round_of(microseconds, by_number);
			_exit(how > 255 ? 255 : how);
		}
		int how = ended(child);
		if (how != 0) {
			printf("after %d microseconds%s: %d%s\n", microseconds, by_number ? ", by number" : "", how,
			       how == 255 ? ": the child hangs" : "");
			failed++;
		}
	}
	printf("%d of %d rounds failed\n", failed, rounds);
	return failed != 0;
}
