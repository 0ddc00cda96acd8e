// A VM that does as little as is real: its guest writes a byte to a port, and halts. Include it after defining NAME, the program's name in
// messages.
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/kvm.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#define CHECK(condition)                                                                           \
	do {                                                                                       \
		if (!(condition)) {                                                                \
			fprintf(stderr, NAME ", line %d: %s: %s\n", __LINE__, #condition,         \
				strerror(errno));                                                  \
			_exit(1);                                                                  \
		}                                                                                  \
	} while (0)

// mov al, 42; out 0x10, al; hlt.
static const uint8_t code[] = { 0xb0, 42, 0xe6, 0x10, 0xf4 };

static void run(const char *path)
{
	int kvm = open(path, O_RDWR | O_CLOEXEC), vm, vcpu;
	void *memory = mmap(NULL, 0x10000, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	struct kvm_userspace_memory_region region = { .memory_size = 0x10000, .userspace_addr = (uintptr_t)memory };
	struct kvm_regs regs = { .rip = 0x1000, .rflags = 2 };
	struct kvm_sregs sregs;
	struct kvm_run *state;
	struct stat looks;

	CHECK(kvm >= 0 && memory != MAP_FAILED);
	CHECK(ioctl(kvm, KVM_GET_API_VERSION, 0) == KVM_API_VERSION);
	CHECK(fstat(kvm, &looks) == 0 && looks.st_mode == (S_IFCHR | 0666));
	CHECK((vm = ioctl(kvm, KVM_CREATE_VM, 0)) >= 0);
	CHECK(ioctl(vm, KVM_SET_USER_MEMORY_REGION, &region) == 0);
	CHECK((vcpu = ioctl(vm, KVM_CREATE_VCPU, 0)) >= 0);
	state = mmap(NULL, ioctl(kvm, KVM_GET_VCPU_MMAP_SIZE, 0), PROT_READ | PROT_WRITE, MAP_SHARED, vcpu, 0);
	CHECK(state != MAP_FAILED);
	memcpy((char *)memory + 0x1000, code, sizeof(code));
	CHECK(ioctl(vcpu, KVM_GET_SREGS, &sregs) == 0);
	sregs.cs.base = sregs.cs.selector = 0;
	CHECK(ioctl(vcpu, KVM_SET_SREGS, &sregs) == 0 && ioctl(vcpu, KVM_SET_REGS, &regs) == 0);
	CHECK(ioctl(vcpu, KVM_RUN, 0) == 0 && state->exit_reason == KVM_EXIT_IO && state->io.port == 0x10);
	CHECK(*((char *)state + state->io.data_offset) == 42);
	CHECK(ioctl(vcpu, KVM_RUN, 0) == 0 && state->exit_reason == KVM_EXIT_HLT);
}
