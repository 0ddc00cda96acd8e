/*
 * A client whose pthread_create is its own, as that of a sanitizer is: a new thread holds a lock of the client's for a while, before it
 * comes to its work. When a call of KVM's returns, no thread holds it, so that a child forked now can take it.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <linux/kvm.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <unistd.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static unsigned started;

struct start {
	void *(*main)(void *);
	void *argument;
};

static void *begin(void *argument)
{
	struct start start = *(struct start *)argument;
	free(argument);
	usleep(2000);
	pthread_mutex_unlock(&lock);
	return start.main(start.argument);
}

/* The new thread unlocks what this one has locked: allowed for a mutex of the default type on Linux, and fork() sees it held. */
int pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*main)(void *), void *argument)
{
	int (*next)(pthread_t *, const pthread_attr_t *, void *(*)(void *), void *) = dlsym(RTLD_NEXT, "pthread_create");
	struct start *start = malloc(sizeof *start);
	*start = (struct start){ main, argument };
	started++;
	pthread_mutex_lock(&lock);
	int error = next(thread, attributes, begin, start);
	if (error)
		pthread_mutex_unlock(&lock);
	return error;
}

static int need(int answer, const char *what)
{
	if (answer < 0) {
		perror(what);
		exit(1);
	}
	if (pthread_mutex_trylock(&lock)) {
		fprintf(stderr, "%s has left a thread that has not started\n", what);
		exit(1);
	}
	pthread_mutex_unlock(&lock);
	return answer;
}

int main(void)
{
	int kvm = need(open("/dev/kvm", O_RDWR), "open");
	int vm = need(ioctl(kvm, KVM_CREATE_VM, 0), "KVM_CREATE_VM");
	need(ioctl(vm, KVM_CREATE_IRQCHIP), "KVM_CREATE_IRQCHIP");
	uint8_t *memory = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	memcpy(memory, (uint8_t[]){ 0xb9, 0xff, 0xff, 0xe2, 0xfe, 0xe6, 0x10 }, 7); /* mov $-1, %cx; loop .; out %al, $0x10 */
	struct kvm_userspace_memory_region region = { .memory_size = 4096, .userspace_addr = (uintptr_t)memory };
	need(ioctl(vm, KVM_SET_USER_MEMORY_REGION, &region), "KVM_SET_USER_MEMORY_REGION");
	int vcpu = need(ioctl(vm, KVM_CREATE_VCPU, 0), "KVM_CREATE_VCPU");
	int size = need(ioctl(kvm, KVM_GET_VCPU_MMAP_SIZE, 0), "KVM_GET_VCPU_MMAP_SIZE");
	struct kvm_run *run = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, vcpu, 0);
	struct kvm_sregs sregs;
	need(ioctl(vcpu, KVM_GET_SREGS, &sregs), "KVM_GET_SREGS");
	sregs.cs.base = sregs.cs.selector = 0;
	need(ioctl(vcpu, KVM_SET_SREGS, &sregs), "KVM_SET_SREGS");
	struct kvm_regs regs = { .rflags = 2 };
	need(ioctl(vcpu, KVM_SET_REGS, &regs), "KVM_SET_REGS");
	need(ioctl(vcpu, KVM_RUN, 0), "KVM_RUN");
	if (run->exit_reason != KVM_EXIT_IO) {
		fprintf(stderr, "exit reason %u\n", run->exit_reason);
		return 1;
	}
	printf("%u threads started\n", started);
	return 0;
}
