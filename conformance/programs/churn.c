/*
 * A KVM client that allocates: four threads make VMs, run a guest in each, allocate and free blocks of all sizes between the
 * runs, and drop the VMs again. Meanwhile a timer interrupts the threads, and its handler changes memory mappings.
 *
 * Started with another malloc preloaded, it shows whether that malloc, the handlers and the KVM that answers get on with one
 * another. Exit status 0 when every run ended as it should; a hang is the caller's to find.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/kvm.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <unistd.h>

#define THREADS 4
#define ROUNDS 200
#define MEMORY 0x4000
#define BLOCKS 64

static int check(int value, const char *what)
{
	if (value < 0) {
		perror(what);
		exit(1);
	}
	return value;
}

static void *pages(size_t len)
{
	void *start = mmap(NULL, len, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	if (start == MAP_FAILED) {
		perror("mmap");
		exit(1);
	}
	return start;
}

static void on_alarm(int signal)
{
	int before = errno;
	char *page = pages(8192);

	(void)signal;
	madvise(page, 4096, MADV_DONTNEED);
	mprotect(page + 4096, 4096, PROT_READ);
	munmap(page, 8192);
	errno = before;
}

static void one_vm(int kvm, int run_size, unsigned *seed)
{
	/* out 0x10,al; jmp -4 */
	static const unsigned char code[] = { 0xe6, 0x10, 0xeb, 0xfc };
	int vm = check(ioctl(kvm, KVM_CREATE_VM, 0), "KVM_CREATE_VM");
	int vcpu = check(ioctl(vm, KVM_CREATE_VCPU, 0), "KVM_CREATE_VCPU");
	char *memory = pages(MEMORY);
	struct kvm_userspace_memory_region region = {
		.memory_size = MEMORY,
		.userspace_addr = (unsigned long)memory,
	};
	struct kvm_run *run = mmap(NULL, run_size, PROT_READ | PROT_WRITE, MAP_SHARED, vcpu, 0);
	struct kvm_sregs sregs;
	struct kvm_regs regs = { .rip = 0x1000, .rflags = 2 };
	void *blocks[BLOCKS] = { 0 };
	int exits = 0;

	if (run == MAP_FAILED)
		check(-1, "mmap of the vCPU");
	memcpy(memory + 0x1000, code, sizeof(code));
	check(ioctl(vm, KVM_SET_USER_MEMORY_REGION, &region), "KVM_SET_USER_MEMORY_REGION");
	check(ioctl(vcpu, KVM_GET_SREGS, &sregs), "KVM_GET_SREGS");
	sregs.cs.base = sregs.cs.selector = 0;
	check(ioctl(vcpu, KVM_SET_SREGS, &sregs), "KVM_SET_SREGS");
	check(ioctl(vcpu, KVM_SET_REGS, &regs), "KVM_SET_REGS");

	while (exits < 8) {
		if (ioctl(vcpu, KVM_RUN, 0) < 0) {
			if (errno != EINTR)
				check(-1, "KVM_RUN");
			continue;
		}
		if (run->exit_reason != KVM_EXIT_IO || run->io.port != 0x10) {
			fprintf(stderr, "exit reason %u\n", run->exit_reason);
			exit(1);
		}
		exits++;
		for (int i = 0; i < BLOCKS; i++) {
			size_t size = 1u << rand_r(seed) % 21;

			free(blocks[i]);
			blocks[i] = malloc(size);
			memset(blocks[i], i, size < 4096 ? size : 4096);
		}
	}
	for (int i = 0; i < BLOCKS; i++)
		free(blocks[i]);
	munmap(run, run_size);
	close(vcpu);
	close(vm);
	munmap(memory, MEMORY);
}

static void *churn(void *seed)
{
	unsigned state = (unsigned long)seed;
	int kvm = check(open("/dev/kvm", O_RDWR | O_CLOEXEC), "/dev/kvm");
	int run_size = check(ioctl(kvm, KVM_GET_VCPU_MMAP_SIZE, 0), "KVM_GET_VCPU_MMAP_SIZE");

	for (int round = 0; round < ROUNDS; round++)
		one_vm(kvm, run_size, &state);
	close(kvm);
	return NULL;
}

int main(void)
{
	struct sigaction action = { .sa_handler = on_alarm, .sa_flags = SA_RESTART };
	struct itimerval timer = { { 0, 1000 }, { 0, 1000 } };
	pthread_t threads[THREADS];

	check(sigaction(SIGALRM, &action, NULL), "sigaction");
	check(setitimer(ITIMER_REAL, &timer, NULL), "setitimer");
	for (long i = 0; i < THREADS; i++)
		if (pthread_create(&threads[i], NULL, churn, (void *)(i + 1)))
			check(-1, "pthread_create");
	for (int i = 0; i < THREADS; i++)
		pthread_join(threads[i], NULL);
	printf("%d threads made %d VMs each\n", THREADS, ROUNDS);
	return 0;
}
