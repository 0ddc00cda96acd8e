/*
 * A client that needs what lies below its stack pointer. KVM's requests leave it alone, and QEMU 7.2 relies on that without knowing: it
 * gives microvm's firmware a header of the kernel from a frame that has ended, 7 KiB below the requests that its main thread makes next.
 * Such requests use at most 6 KiB here. Those that begin and end a log come when no loader is at work, and may use 10.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <linux/kvm.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <sys/mman.h>

enum { SOME = 6 << 10, MORE = 10 << 10, BELOW = 32 << 10, MEMORY = 4 << 20, PAINT = 0x5a };

static int failed;

/* Makes a request, and counts the bytes below this frame that it has changed. */
__attribute__((noinline)) static int request(int fd, const char *name, unsigned long number, void *argument, long most)
{
	volatile unsigned char *below = (volatile unsigned char *)__builtin_frame_address(0) - 512 - BELOW;
	for (long at = 0; at < BELOW; at++)
		below[at] = PAINT;
	int answer = ioctl(fd, number, argument);
	long first = 0;
	while (first < BELOW && below[first] == PAINT)
		first++;
	long used = BELOW + 512 - first;
	if (answer < 0) {
		perror(name);
		exit(1);
	}
	printf("%6ld bytes of stack: %s\n", used, name);
	if (used > most) {
		fprintf(stderr, "%s uses %ld bytes of its caller's stack, more than %ld\n", name, used, most);
		failed = 1;
	}
	return answer;
}

static void *table(uint32_t count)
{
	static uint32_t entries[1 + 10 * 256];
	for (unsigned at = 0; at < sizeof entries / sizeof *entries; at++)
		entries[at] = 0;
	entries[0] = count;
	return entries;
}

int main(void)
{
	/* The first requests start slat: a loader has not begun then. */
	int kvm = open("/dev/kvm", O_RDWR | O_CLOEXEC);
	int vm = ioctl(kvm, KVM_CREATE_VM, 0);
	if (kvm < 0 || vm < 0) {
		perror("a VM");
		return 1;
	}
	request(vm, "CREATE_IRQCHIP", KVM_CREATE_IRQCHIP, 0, BELOW);

	request(kvm, "CHECK_EXTENSION", KVM_CHECK_EXTENSION, (void *)KVM_CAP_NR_MEMSLOTS, SOME);
	request(kvm, "GET_SUPPORTED_CPUID", KVM_GET_SUPPORTED_CPUID, table(256), SOME);
	request(kvm, "GET_EMULATED_CPUID", KVM_GET_EMULATED_CPUID, table(256), SOME);
	request(kvm, "GET_MSR_INDEX_LIST", KVM_GET_MSR_INDEX_LIST, table(1024), SOME);
	request(kvm, "GET_MSR_FEATURE_INDEX_LIST", KVM_GET_MSR_FEATURE_INDEX_LIST, table(1024), SOME);

	void *memory = mmap(0, MEMORY, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	struct kvm_userspace_memory_region slot = { .memory_size = MEMORY, .userspace_addr = (uintptr_t)memory };
	request(vm, "a new slot", KVM_SET_USER_MEMORY_REGION, &slot, SOME);
	slot.flags = KVM_MEM_LOG_DIRTY_PAGES;
	request(vm, "a log begins", KVM_SET_USER_MEMORY_REGION, &slot, MORE);
	static uint64_t bitmap[MEMORY / 4096 / 64];
	struct kvm_dirty_log log = { .dirty_bitmap = bitmap };
	request(vm, "GET_DIRTY_LOG", KVM_GET_DIRTY_LOG, &log, SOME);
	slot.flags = 0;
	request(vm, "the log ends", KVM_SET_USER_MEMORY_REGION, &slot, MORE);
	slot.memory_size = 0;
	request(vm, "the slot is deleted", KVM_SET_USER_MEMORY_REGION, &slot, SOME);

	int event = eventfd(0, EFD_CLOEXEC);
	struct kvm_irqfd line = { .fd = event, .gsi = 5 };
	request(vm, "IRQFD", KVM_IRQFD, &line, SOME);
	struct kvm_ioeventfd door = { .addr = 0xd0000000, .len = 4, .fd = event };
	request(vm, "IOEVENTFD", KVM_IOEVENTFD, &door, SOME);
	static struct {
		struct kvm_irq_routing head;
		struct kvm_irq_routing_entry entries[64];
	} routing;
	routing.head.nr = 64;
	for (unsigned at = 0; at < 64; at++) {
		routing.entries[at].gsi = 63 - at;
		routing.entries[at].type = KVM_IRQ_ROUTING_MSI;
		routing.entries[at].u.msi.address_lo = 0xfee00000;
		routing.entries[at].u.msi.data = 0x40;
	}
	request(vm, "SET_GSI_ROUTING", KVM_SET_GSI_ROUTING, &routing, SOME);
	struct kvm_irq_level level = { .irq = 5, .level = 1 };
	request(vm, "IRQ_LINE", KVM_IRQ_LINE, &level, SOME);
	struct kvm_clock_data clock = { 0 };
	request(vm, "GET_CLOCK", KVM_GET_CLOCK, &clock, SOME);
	return failed;
}
