/*
 * What KVM answers to calls of its interrupt controllers that are wrong in one way or another, for each kind of controller: a line per
 * call. interrupt_errors.expected has them as KVM of Linux 6.18 prints them, if it has SMM: without it, an SMI reaches nobody.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/kvm.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <unistd.h>

enum mode { NONE, PC, PC_TIMER, SPLIT, SPLIT_WIDE, MODES };

static const char *const names[MODES] = { "none", "pc", "pc, timer", "split", "split, wide ids" };

static int kvm, vm, vcpu;
static enum mode mode;

static const char *error_name(int error)
{
	static const struct {
		int number;
		const char *name;
	} known[] = {
		{ EPERM, "EPERM" },	{ ENOENT, "ENOENT" }, { EIO, "EIO" },	    { ENXIO, "ENXIO" },
		{ E2BIG, "E2BIG" },	{ EBADF, "EBADF" },   { EAGAIN, "EAGAIN" }, { ENOMEM, "ENOMEM" },
		{ EFAULT, "EFAULT" },	{ EBUSY, "EBUSY" },   { EEXIST, "EEXIST" }, { ENODEV, "ENODEV" },
		{ EINVAL, "EINVAL" },	{ ENOTTY, "ENOTTY" }, { ENOSPC, "ENOSPC" }, { EINTR, "EINTR" },
		{ EOPNOTSUPP, "EOPNOTSUPP" },
	};
	for (unsigned i = 0; i < sizeof known / sizeof *known; i++)
		if (known[i].number == error)
			return known[i].name;
	return strerror(error);
}

/* Prints what a call returned, after the call's title, which has the form of printf's arguments. */
__attribute__((format(printf, 2, 3))) static void show(int answer, const char *title, ...)
{
	int error = errno;
	va_list values;
	va_start(values, title);
	printf("%s: ", names[mode]);
	vprintf(title, values);
	va_end(values);
	if (answer < 0)
		printf(": %s\n", error_name(error));
	else
		printf(": %d\n", answer);
}

static int need(int answer, const char *what)
{
	if (answer < 0) {
		perror(what);
		exit(1);
	}
	return answer;
}

static int enable(int fd, uint32_t cap, uint64_t argument, uint32_t flags)
{
	struct kvm_enable_cap asked = { .cap = cap, .flags = flags, .args = { argument } };
	return ioctl(fd, KVM_ENABLE_CAP, &asked);
}

static void begin(enum mode wanted, int with_vcpu)
{
	mode = wanted;
	vm = need(ioctl(kvm, KVM_CREATE_VM, 0), "KVM_CREATE_VM");
	struct kvm_pit_config timer = { 0 };
	switch (mode) {
	case PC_TIMER:
	case PC:
		need(ioctl(vm, KVM_CREATE_IRQCHIP, 0), "KVM_CREATE_IRQCHIP");
		if (mode == PC_TIMER)
			need(ioctl(vm, KVM_CREATE_PIT2, &timer), "KVM_CREATE_PIT2");
		break;
	case SPLIT_WIDE:
		need(enable(vm, KVM_CAP_X2APIC_API, KVM_X2APIC_API_USE_32BIT_IDS, 0), "KVM_CAP_X2APIC_API");
		/* fall through */
	case SPLIT:
		need(enable(vm, KVM_CAP_SPLIT_IRQCHIP, 24, 0), "KVM_CAP_SPLIT_IRQCHIP");
		break;
	default:
		break;
	}
	vcpu = with_vcpu ? need(ioctl(vm, KVM_CREATE_VCPU, 0), "KVM_CREATE_VCPU") : -1;
}

static void end(void)
{
	if (vcpu >= 0)
		close(vcpu);
	close(vm);
}

static void irqfds(void)
{
	int event = eventfd(0, 0), other = eventfd(0, 0), full = eventfd(0, EFD_NONBLOCK);
	int file = open("/dev/null", O_RDWR), path = open("/dev/null", O_PATH), again = dup(event);
	uint64_t most = ULLONG_MAX - 1;
	need(write(full, &most, sizeof most), "eventfd");
	const struct {
		const char *title;
		int fd, gsi, flags, resample;
	} calls[] = {
		{ "irqfd deassign, none there", event, 5, KVM_IRQFD_FLAG_DEASSIGN, 0 },
		{ "irqfd", event, 5, 0, 0 },
		{ "irqfd again", event, 5, 0, 0 },
		{ "irqfd again, by another number", again, 5, 0, 0 },
		{ "irqfd again, other gsi", event, 6, 0, 0 },
		{ "irqfd same gsi, other eventfd", other, 5, 0, 0 },
		{ "irqfd deassign, other gsi", event, 6, KVM_IRQFD_FLAG_DEASSIGN, 0 },
		{ "irqfd still there", event, 5, 0, 0 },
		{ "irqfd deassign, by another number", again, 5, KVM_IRQFD_FLAG_DEASSIGN, 0 },
		{ "irqfd deassign again", event, 5, KVM_IRQFD_FLAG_DEASSIGN, 0 },
		{ "irqfd, after that", event, 5, 0, 0 },
		{ "irqfd full counter", full, 7, 0, 0 },
		{ "irqfd bad fd", -1, 5, 0, 0 },
		{ "irqfd closed fd", 1000, 5, 0, 0 },
		{ "irqfd no eventfd", file, 5, 0, 0 },
		{ "irqfd O_PATH", path, 5, 0, 0 },
		{ "irqfd the vm itself", vm, 5, 0, 0 },
		{ "irqfd bad flag", event, 5, 4, 0 },
		{ "irqfd bad flag, bad fd", -1, 5, 4, 0 },
		{ "irqfd all flags", event, 5, -1, 0 },
		{ "irqfd gsi 24", eventfd(0, 0), 24, 0, 0 },
		{ "irqfd gsi 4095", eventfd(0, 0), 4095, 0, 0 },
		{ "irqfd gsi 4096", eventfd(0, 0), 4096, 0, 0 },
		{ "irqfd gsi -1", eventfd(0, 0), -1, 0, 0 },
		{ "irqfd gsi 4096, bad fd", -1, 4096, 0, 0 },
		{ "irqfd deassign gsi 4096", event, 4096, KVM_IRQFD_FLAG_DEASSIGN, 0 },
		{ "irqfd deassign gsi 4096, bad fd", -1, 4096, KVM_IRQFD_FLAG_DEASSIGN, 0 },
		{ "irqfd deassign bad fd", -1, 5, KVM_IRQFD_FLAG_DEASSIGN, 0 },
		{ "irqfd deassign no eventfd", file, 5, KVM_IRQFD_FLAG_DEASSIGN, 0 },
		{ "irqfd deassign O_PATH", path, 5, KVM_IRQFD_FLAG_DEASSIGN, 0 },
		{ "irqfd deassign bad flag", event, 5, KVM_IRQFD_FLAG_DEASSIGN | 8, 0 },
		{ "irqfd resample", eventfd(0, 0), 9, KVM_IRQFD_FLAG_RESAMPLE, other },
		{ "irqfd resample, second of line", eventfd(0, 0), 9, KVM_IRQFD_FLAG_RESAMPLE, other },
		{ "irqfd resample bad fd", eventfd(0, 0), 9, KVM_IRQFD_FLAG_RESAMPLE, -1 },
		{ "irqfd resample no eventfd", eventfd(0, 0), 9, KVM_IRQFD_FLAG_RESAMPLE, file },
		{ "irqfd resample O_PATH", eventfd(0, 0), 9, KVM_IRQFD_FLAG_RESAMPLE, path },
		{ "irqfd resample busy, bad fd", event, 9, KVM_IRQFD_FLAG_RESAMPLE, -1 },
		{ "irqfd resample by itself", again, 10, KVM_IRQFD_FLAG_RESAMPLE, again },
		{ "irqfd resample deassign", event, 9, KVM_IRQFD_FLAG_RESAMPLE | KVM_IRQFD_FLAG_DEASSIGN, other },
		{ "irqfd resample deassign bad resamplefd", event, 9, KVM_IRQFD_FLAG_RESAMPLE | KVM_IRQFD_FLAG_DEASSIGN, -1 },
		{ "irqfd resample gsi 4096", eventfd(0, 0), 4096, KVM_IRQFD_FLAG_RESAMPLE, other },
	};
	for (unsigned i = 0; i < sizeof calls / sizeof *calls; i++) {
		struct kvm_irqfd asked = { .fd = calls[i].fd, .gsi = calls[i].gsi, .flags = calls[i].flags, .resamplefd = calls[i].resample };
		show(ioctl(vm, KVM_IRQFD, &asked), "%s", calls[i].title);
	}
	show(ioctl(vm, KVM_IRQFD, 8), "irqfd bad pointer");
	for (unsigned i = 0; i < sizeof calls / sizeof *calls; i++)
		if (calls[i].fd > 2 && calls[i].fd < 1000 && calls[i].fd != vm)
			close(calls[i].fd);
}

static void ioeventfds(void)
{
	const int MATCH = KVM_IOEVENTFD_FLAG_DATAMATCH, PIO = KVM_IOEVENTFD_FLAG_PIO, OFF = KVM_IOEVENTFD_FLAG_DEASSIGN;
	const int CCW = KVM_IOEVENTFD_FLAG_VIRTIO_CCW_NOTIFY;
	int event = eventfd(0, 0), other = eventfd(0, 0), again = dup(event);
	int file = open("/dev/null", O_RDWR), path = open("/dev/null", O_PATH);
	const uint64_t at = 0x10000000;
	const struct {
		const char *title;
		uint64_t match, address;
		uint32_t len;
		int fd, flags;
	} calls[] = {
		{ "deassign, none there", 0, at, 4, event, OFF },
		{ "4 bytes", 0, at, 4, event, 0 },
		{ "4 bytes again", 0, at, 4, event, 0 },
		{ "4 bytes, other eventfd", 0, at, 4, other, 0 },
		{ "4 bytes, value", 1, at, 4, other, MATCH },
		{ "8 bytes, same place", 0, at, 8, other, 0 },
		{ "any length, same place", 0, at, 0, other, 0 },
		{ "1 byte inside", 0, at + 1, 1, other, 0 },
		{ "any length, other place", 0, at + 64, 0, event, 0 },
		{ "any length, again", 0, at + 64, 0, other, 0 },
		{ "2 bytes at any length's", 0, at + 64, 2, other, 0 },
		{ "2 bytes, value, at any length's", 7, at + 64, 2, other, MATCH },
		{ "value 1", 1, at + 128, 2, event, MATCH },
		{ "value 2", 2, at + 128, 2, event, MATCH },
		{ "value 2 again", 2, at + 128, 2, other, MATCH },
		{ "value 2, 4 bytes", 2, at + 128, 4, other, MATCH },
		{ "no value beside values", 0, at + 128, 2, other, 0 },
		{ "value wider than the write", 0x1234, at + 192, 1, event, MATCH },
		{ "3 bytes", 0, at + 256, 3, event, 0 },
		{ "16 bytes", 0, at + 256, 16, event, 0 },
		{ "length -1", 0, at + 256, -1, event, 0 },
		{ "value without length", 5, at + 256, 0, event, MATCH },
		{ "end of the addresses", 0, -4ull, 4, event, 0 },
		{ "beyond the end", 0, -4ull, 8, event, 0 },
		{ "last address, 1 byte", 0, -1ull, 1, event, 0 },
		{ "last address, any length", 0, -1ull, 0, event, 0 },
		{ "bad flag", 0, at + 256, 4, event, 32 },
		{ "bad flag 1 << 31", 0, at + 256, 4, event, 1 << 31 },
		{ "bad flag, bad fd", 0, at + 256, 4, -1, 32 },
		{ "bad fd", 0, at + 256, 4, -1, 0 },
		{ "bad fd, bad length", 0, at + 256, 3, -1, 0 },
		{ "no eventfd", 0, at + 256, 4, file, 0 },
		{ "O_PATH", 0, at + 256, 4, path, 0 },
		{ "the fast bus", 0, at + 448, 4, event, 16 },
		{ "the fast bus, again", 0, at + 448, 4, event, 0 },
		{ "the bus of s390", 0, at + 320, 4, event, CCW },
		{ "the bus of s390, again", 0, at + 320, 4, event, CCW },
		{ "the bus of s390 and ports", 0, at + 384, 4, event, CCW | PIO },
		{ "the bus of s390, deassign", 0, at + 320, 4, event, CCW | OFF },
		{ "port", 0, 0x80, 1, event, PIO },
		{ "port again", 0, 0x80, 1, event, PIO },
		{ "port any length", 0, 0x84, 0, event, PIO },
		{ "port 8 bytes", 0, 0x88, 8, event, PIO },
		{ "port beyond 16 bits", 0, 0x10000, 1, event, PIO },
		{ "port of the 8259", 0, 0x20, 1, event, PIO },
		{ "the i/o apic", 0, 0xfec00000, 4, event, 0 },
		{ "the local apic", 0, 0xfee00000, 4, event, 0 },
		{ "deassign other eventfd", 0, at, 4, other, OFF },
		{ "deassign other length", 0, at, 2, event, OFF },
		{ "deassign with value", 0, at, 4, event, OFF | MATCH },
		{ "deassign bad flag", 0, at, 4, event, OFF | 32 },
		{ "deassign bad length", 0, at, 3, event, OFF },
		{ "deassign bad fd", 0, at, 4, -1, OFF },
		{ "deassign no eventfd", 0, at, 4, file, OFF },
		{ "deassign on the other bus", 0, at, 4, event, OFF | PIO },
		{ "deassign by another number", 0, at, 4, again, OFF },
		{ "deassign again", 0, at, 4, event, OFF },
		{ "deassign value 3", 3, at + 128, 2, event, OFF | MATCH },
		{ "deassign value 1 without value", 1, at + 128, 2, event, OFF },
		{ "deassign value 1", 1, at + 128, 2, event, OFF | MATCH },
		{ "deassign any length", 0, at + 64, 0, event, OFF },
		{ "deassign value without length", 5, at + 64, 0, event, OFF | MATCH },
		{ "deassign beyond the end", 0, -4ull, 8, event, OFF },
	};
	for (unsigned i = 0; i < sizeof calls / sizeof *calls; i++) {
		struct kvm_ioeventfd asked = {
			.datamatch = calls[i].match, .addr = calls[i].address, .len = calls[i].len, .fd = calls[i].fd, .flags = calls[i].flags,
		};
		show(ioctl(vm, KVM_IOEVENTFD, &asked), "ioeventfd %s", calls[i].title);
	}
	show(ioctl(vm, KVM_IOEVENTFD, 8), "ioeventfd bad pointer");
	int done = 0, answer;
	do {
		struct kvm_ioeventfd asked = { .addr = 0x20000000 + 8 * done, .len = 4, .fd = event };
		answer = ioctl(vm, KVM_IOEVENTFD, &asked);
	} while (answer == 0 && ++done < 5000);
	show(answer, "ioeventfd too many (more than 900: %d)", done > 900);
	close(event), close(other), close(again), close(file), close(path);
}

static struct kvm_irq_routing_entry chip(uint32_t gsi, uint32_t which, uint32_t pin)
{
	return (struct kvm_irq_routing_entry){ .gsi = gsi, .type = KVM_IRQ_ROUTING_IRQCHIP, .u.irqchip = { which, pin } };
}

static struct kvm_irq_routing_entry message(uint32_t gsi, uint32_t flags, uint32_t high)
{
	return (struct kvm_irq_routing_entry){
		.gsi = gsi, .type = KVM_IRQ_ROUTING_MSI, .flags = flags, .u.msi = { .address_lo = 0xfee00000, .address_hi = high, .data = 0x40 },
	};
}

static void route(const char *title, uint32_t flags, uint32_t count, const struct kvm_irq_routing_entry *entries)
{
	struct kvm_irq_routing *table = calloc(1, sizeof *table + 5000 * sizeof *entries);
	table->nr = count;
	table->flags = flags;
	memcpy(table->entries, entries, (count < 4 ? count : 4) * sizeof *entries);
	for (uint32_t i = 4; i < count && i < 5000; i++)
		table->entries[i] = message(i, 0, 0);
	show(ioctl(vm, KVM_SET_GSI_ROUTING, table), "routes: %s", title);
	free(table);
}

static void routing(void)
{
	enum { MASTER = KVM_IRQCHIP_PIC_MASTER, SLAVE = KVM_IRQCHIP_PIC_SLAVE, IOAPIC = KVM_IRQCHIP_IOAPIC };
#define ROUTES(...) (struct kvm_irq_routing_entry[4]){ __VA_ARGS__ }
	route("none", 0, 0, ROUTES({ 0 }));
	route("flags", 1, 0, ROUTES({ 0 }));
	route("4096", 0, 4096, ROUTES(message(0, 0, 0), message(1, 0, 0), message(2, 0, 0), message(3, 0, 0)));
	route("4097", 0, 4097, ROUTES(message(0, 0, 0), message(1, 0, 0), message(2, 0, 0), message(3, 0, 0)));
	route("4097, flags", 1, 4097, ROUTES(message(0, 0, 0), message(1, 0, 0), message(2, 0, 0), message(3, 0, 0)));
	route("-1", 0, -1, ROUTES(message(0, 0, 0)));
	route("message", 0, 1, ROUTES(message(0, 0, 0)));
	route("message to gsi 4095", 0, 1, ROUTES(message(4095, 0, 0)));
	route("message to gsi 4096", 0, 1, ROUTES(message(4096, 0, 0)));
	route("message to gsi -1", 0, 1, ROUTES(message(-1, 0, 0)));
	route("message with device id", 0, 1, ROUTES(message(3, KVM_MSI_VALID_DEVID, 0)));
	route("message with bad flag", 0, 1, ROUTES(message(3, 2, 0)));
	route("message, high address", 0, 1, ROUTES(message(3, 0, 0x100)));
	route("message, high address, reserved", 0, 1, ROUTES(message(3, 0, 0x01)));
	route("two messages of a gsi", 0, 2, ROUTES(message(3, 0, 0), message(3, 0, 0)));
	route("pin", 0, 1, ROUTES(chip(5, IOAPIC, 5)));
	route("pin 23", 0, 1, ROUTES(chip(5, IOAPIC, 23)));
	route("pin 24", 0, 1, ROUTES(chip(5, IOAPIC, 24)));
	route("pin -1", 0, 1, ROUTES(chip(5, IOAPIC, -1)));
	route("line 7", 0, 1, ROUTES(chip(5, MASTER, 7)));
	route("line 8", 0, 1, ROUTES(chip(5, MASTER, 8)));
	route("slave's line 7", 0, 1, ROUTES(chip(5, SLAVE, 7)));
	route("slave's line 8", 0, 1, ROUTES(chip(5, SLAVE, 8)));
	route("line and pin", 0, 2, ROUTES(chip(5, MASTER, 5), chip(5, IOAPIC, 5)));
	route("two lines", 0, 2, ROUTES(chip(5, MASTER, 5), chip(5, MASTER, 6)));
	route("master's and slave's", 0, 2, ROUTES(chip(5, MASTER, 5), chip(5, SLAVE, 6)));
	route("two pins", 0, 2, ROUTES(chip(5, IOAPIC, 5), chip(5, IOAPIC, 6)));
	route("two gsis to a pin", 0, 2, ROUTES(chip(5, IOAPIC, 5), chip(6, IOAPIC, 5)));
	route("pin and message", 0, 2, ROUTES(chip(5, IOAPIC, 5), message(5, 0, 0)));
	route("message and pin", 0, 2, ROUTES(message(5, 0, 0), chip(5, IOAPIC, 5)));
	route("chip 3", 0, 1, ROUTES(chip(5, 3, 5)));
	route("chip -1", 0, 1, ROUTES(chip(5, -1, 5)));
	route("pin with flags", 0, 1, ROUTES({ .gsi = 5, .type = KVM_IRQ_ROUTING_IRQCHIP, .flags = 1, .u.irqchip = { IOAPIC, 5 } }));
	route("kind 0", 0, 1, ROUTES({ .gsi = 5, .type = 0 }));
	route("an s390's adapter", 0, 1, ROUTES({ .gsi = 5, .type = KVM_IRQ_ROUTING_S390_ADAPTER }));
	route("kind 99", 0, 1, ROUTES({ .gsi = 5, .type = 99 }));
	route("bad after good", 0, 2, ROUTES(message(3, 0, 0), chip(5, 9, 5)));
	show(ioctl(vm, KVM_SET_GSI_ROUTING, 8), "routes: bad pointer");
	/* The table ends where no memory is. */
	char *pages = mmap(NULL, 8192, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	munmap(pages + 4096, 4096);
	struct kvm_irq_routing *cut = (void *)(pages + 4096 - sizeof *cut);
	cut->nr = 1;
	show(ioctl(vm, KVM_SET_GSI_ROUTING, cut), "routes: entries nowhere");
	cut->nr = 5000;
	show(ioctl(vm, KVM_SET_GSI_ROUTING, cut), "routes: too many entries nowhere");
	cut->nr = 0;
	show(ioctl(vm, KVM_SET_GSI_ROUTING, cut), "routes: none, before nowhere");
	munmap(pages, 4096);
}

static void lines(void)
{
	static const uint32_t gsis[] = { 0, 5, 15, 23, 24, 1023, 4095, 4096, -1u };
	for (unsigned i = 0; i < sizeof gsis / sizeof *gsis; i++)
		for (int step = 0; step < 4; step++) {
			int level = step % 2 == 0;
			struct kvm_irq_level asked = { .irq = gsis[i], .level = level };
			int answer = ioctl(vm, step < 2 ? KVM_IRQ_LINE : KVM_IRQ_LINE_STATUS, &asked);
			show(answer, "line %d %s%s", (int)gsis[i], level ? "up" : "down", step < 2 ? "" : ", status");
			if (answer == 0 && step >= 2)
				show(0, "  says %d", (int)asked.status);
		}
	struct kvm_irq_level odd = { .irq = 5, .level = -1 };
	show(ioctl(vm, KVM_IRQ_LINE, &odd), "line with level -1");
	show(ioctl(vm, KVM_IRQ_LINE, 8), "line bad pointer");
	show(ioctl(vm, KVM_IRQ_LINE_STATUS, 8), "line status bad pointer");
}

static void messages(void)
{
	/* KVM finds a vCPU's APIC by messages from the first change of an APIC on. */
	static struct kvm_lapic_state apic;
	if (mode != NONE) {
		need(ioctl(vcpu, KVM_GET_LAPIC, &apic), "KVM_GET_LAPIC");
		need(ioctl(vcpu, KVM_SET_LAPIC, &apic), "KVM_SET_LAPIC");
	}
	static const struct {
		const char *title;
		struct kvm_msi message;
	} calls[] = {
		{ "to nobody", { .address_lo = 0xfee7f000, .data = 0x40 } },
		{ "to an apic that is off", { .address_lo = 0xfee00000, .data = 0x40 } },
		{ "to all", { .address_lo = 0xfeeff000, .data = 0x40 } },
		{ "vector 0", { .address_lo = 0xfee00000, .data = 0 } },
		{ "nmi", { .address_lo = 0xfee00000, .data = 0x400 } },
		{ "init", { .address_lo = 0xfee00000, .data = 0x500 } },
		{ "sipi", { .address_lo = 0xfee00000, .data = 0x600 } },
		{ "smi", { .address_lo = 0xfee00000, .data = 0x200 } },
		{ "extint", { .address_lo = 0xfee00000, .data = 0x700 } },
		{ "reserved mode", { .address_lo = 0xfee00000, .data = 0x300 } },
		{ "lowest priority", { .address_lo = 0xfee0000c, .data = 0x140 } },
		{ "flags", { .address_lo = 0xfee00000, .data = 0x40, .flags = 2 } },
		{ "device id", { .address_lo = 0xfee00000, .data = 0x40, .flags = KVM_MSI_VALID_DEVID, .devid = 3 } },
		{ "padding", { .address_lo = 0xfee00000, .data = 0x40, .pad = { 1 } } },
		{ "high address", { .address_lo = 0xfee7f000, .address_hi = 0x100, .data = 0x40 } },
		{ "high address, reserved", { .address_lo = 0xfee00000, .address_hi = 1, .data = 0x40 } },
		{ "no apic's address", { .address_lo = 0x1000, .data = 0x40 } },
		{ "wide data", { .address_lo = 0xfee00000, .data = 0xffff0040 } },
	};
	for (unsigned i = 0; i < sizeof calls / sizeof *calls; i++) {
		struct kvm_msi asked = calls[i].message;
		show(ioctl(vm, KVM_SIGNAL_MSI, &asked), "message %s", calls[i].title);
	}
	show(ioctl(vm, KVM_SIGNAL_MSI, 8), "message bad pointer");
}

static void chips(void)
{
	static struct kvm_irqchip state;
	static struct kvm_pit_state2 timer;
	static struct kvm_pit_state old_timer;
	for (int id = -1; id <= 3; id++) {
		state.chip_id = id;
		show(ioctl(vm, KVM_GET_IRQCHIP, &state), "get chip %d", id);
		show(ioctl(vm, KVM_SET_IRQCHIP, &state), "set chip %d", id);
	}
	show(ioctl(vm, KVM_GET_IRQCHIP, 8), "get chip bad pointer");
	show(ioctl(vm, KVM_SET_IRQCHIP, 8), "set chip bad pointer");
	show(ioctl(vm, KVM_GET_PIT2, &timer), "get timer");
	show(ioctl(vm, KVM_SET_PIT2, &timer), "set timer");
	timer.flags = -1;
	show(ioctl(vm, KVM_SET_PIT2, &timer), "set timer flags");
	show(ioctl(vm, KVM_GET_PIT2, 8), "get timer bad pointer");
	show(ioctl(vm, KVM_SET_PIT2, 8), "set timer bad pointer");
	show(ioctl(vm, KVM_GET_PIT, &old_timer), "get old timer");
	show(ioctl(vm, KVM_SET_PIT, &old_timer), "set old timer");
	show(ioctl(vm, KVM_SET_PIT, 8), "set old timer bad pointer");
	static const uint8_t on[] = { 0, 1, 2, 255 };
	for (unsigned i = 0; i < sizeof on; i++) {
		struct kvm_reinject_control control = { .pit_reinject = on[i] };
		show(ioctl(vm, KVM_REINJECT_CONTROL, &control), "reinject %d", on[i]);
	}
	struct kvm_reinject_control control = { .pit_reinject = 1, .reserved = { 1 } };
	show(ioctl(vm, KVM_REINJECT_CONTROL, &control), "reinject reserved");
	show(ioctl(vm, KVM_REINJECT_CONTROL, 8), "reinject bad pointer");
}

static void creation(int with_vcpu)
{
	const char *when = with_vcpu ? "after a vcpu" : "before vcpus";
	static const uint64_t pins[] = { -1, 4097, 4096, 24, 24, 0 };
	static const uint64_t apis[] = { 16, -1, 1ull << 32, 0, 1, 2, 3, 0, 1, 2 };
	for (enum mode m = NONE; m < MODES; m++) {
		begin(m, with_vcpu);
		show(ioctl(vm, KVM_CREATE_PIT2, 8), "create pit bad pointer %s", when);
		for (unsigned i = 0; i < sizeof apis / sizeof *apis; i++) {
			show(enable(vm, KVM_CAP_X2APIC_API, apis[i], 0), "x2apic api %lld %s", (long long)apis[i], when);
		}
		show(enable(vm, KVM_CAP_X2APIC_API, 0, 1), "x2apic api flags %s", when);
		show(enable(vm, KVM_CAP_SPLIT_IRQCHIP, 24, 1), "split, flags %s", when);
		for (unsigned i = 0; i < sizeof pins / sizeof *pins; i++) {
			show(enable(vm, KVM_CAP_SPLIT_IRQCHIP, pins[i], 0), "split %lld %s", (long long)pins[i], when);
		}
		show(ioctl(vm, KVM_CREATE_IRQCHIP, 0), "create irqchip after that %s", when);
		show(ioctl(vm, KVM_CREATE_PIT, 0), "create pit after that %s", when);
		end();
		begin(m, with_vcpu);
		show(ioctl(vm, KVM_CREATE_PIT, 0), "create pit %s", when);
		struct kvm_pit_config timer = { .flags = -1 };
		show(ioctl(vm, KVM_CREATE_PIT2, &timer), "create pit2, flags %s", when);
		show(ioctl(vm, KVM_CREATE_IRQCHIP, 0), "create irqchip %s", when);
		show(ioctl(vm, KVM_CREATE_IRQCHIP, 0), "create irqchip again %s", when);
		show(ioctl(vm, KVM_CREATE_IRQCHIP, 1), "create irqchip with argument %s", when);
		show(enable(vm, KVM_CAP_SPLIT_IRQCHIP, 24, 0), "split after that %s", when);
		show(ioctl(vm, KVM_CREATE_PIT2, &timer), "create pit2, flags, after that %s", when);
		show(ioctl(vm, KVM_CREATE_PIT2, &timer), "create pit2 again %s", when);
		end();
	}
}

static void interrupts(void)
{
	static const uint32_t vectors[] = { 0, 32, 33, 255, 256, 0x7fffffff, -1u };
	for (unsigned i = 0; i < sizeof vectors / sizeof *vectors; i++) {
		struct kvm_interrupt asked = { .irq = vectors[i] };
		show(ioctl(vcpu, KVM_INTERRUPT, &asked), "interrupt %d", (int)vectors[i]);
	}
	show(ioctl(vcpu, KVM_INTERRUPT, 8), "interrupt bad pointer");
	static struct kvm_lapic_state apic;
	show(ioctl(vcpu, KVM_GET_LAPIC, &apic), "get lapic");
	show(ioctl(vcpu, KVM_SET_LAPIC, &apic), "set lapic");
	show(ioctl(vcpu, KVM_GET_LAPIC, 8), "get lapic bad pointer");
	show(ioctl(vcpu, KVM_SET_LAPIC, 8), "set lapic bad pointer");
	/* A request of a VM to a vCPU, and the other way around. */
	struct kvm_irq_level level = { .irq = 5, .level = 1 };
	show(ioctl(vcpu, KVM_IRQ_LINE, &level), "line of a vcpu");
	struct kvm_interrupt asked = { .irq = 32 };
	show(ioctl(vm, KVM_INTERRUPT, &asked), "interrupt of a vm");
	show(ioctl(kvm, KVM_CREATE_IRQCHIP, 0), "create irqchip on /dev/kvm");
}

int main(void)
{
	kvm = need(open("/dev/kvm", O_RDWR | O_CLOEXEC), "/dev/kvm");
	creation(0);
	creation(1);
	for (enum mode m = NONE; m < MODES; m++) {
		static void (*const groups[])(void) = { irqfds, ioeventfds, routing, lines, messages, chips, interrupts };
		for (unsigned i = 0; i < sizeof groups / sizeof *groups; i++) {
			/* The timer makes no difference to the others. */
			if (m == PC_TIMER && groups[i] != chips)
				continue;
			begin(m, 1);
			groups[i]();
			end();
		}
	}
	return 0;
}
