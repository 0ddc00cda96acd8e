/*
 * A VMM in C that needs no /dev/kvm. Its guest prints a line through a serial port.
 *
 *     cc tiny_vmm.c $(pkg-config --cflags --libs slat) && ./a.out
 *
 * The same program for the kernel's KVM has open("/dev/kvm", O_RDWR) in place of slat_open(), and the calls without "slat_".
 */
#include <linux/kvm.h>
#include <slat.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum { CODE = 0x1000, MEMORY = 0x4000, SERIAL = 0x3f8 };

static const char guest[] =
    "\xba\xf8\x03"                   /*      mov dx, SERIAL         */
    "\xbe\x0f\x10"                   /*      mov si, CODE + 0xf     */
    "\xac"                           /* next: lodsb                 */
    "\x84\xc0"                       /*      test al, al            */
    "\x74\x03"                       /*      jz end                 */
    "\xee"                           /*      out dx, al             */
    "\xeb\xf8"                       /*      jmp next               */
    "\xf4"                           /* end: hlt                    */
    "Hello from a guest in C.\n";

/* Returns a call's value; ends the program if the call has failed. */
static int check(int value, const char *what)
{
    if (value < 0) {
        perror(what);
        exit(1);
    }
    return value;
}

static void *map(size_t size, int flags, int fd)
{
    void *start = slat_mmap(NULL, size, PROT_READ | PROT_WRITE, flags, fd, 0);
    check(start == MAP_FAILED ? -1 : 0, "mmap");
    return start;
}

int main(void)
{
    int kvm = check(slat_open(), "open");
    int vm = check(slat_ioctl(kvm, KVM_CREATE_VM, 0), "KVM_CREATE_VM");
    char *memory = map(MEMORY, MAP_PRIVATE | MAP_ANONYMOUS, -1);
    struct kvm_userspace_memory_region region = {
        .memory_size = MEMORY,
        .userspace_addr = (__u64)memory,
    };
    memcpy(memory + CODE, guest, sizeof guest);
    check(slat_ioctl(vm, KVM_SET_USER_MEMORY_REGION, &region), "KVM_SET_USER_MEMORY_REGION");

    int vcpu = check(slat_ioctl(vm, KVM_CREATE_VCPU, 0), "KVM_CREATE_VCPU");
    int run_size = check(slat_ioctl(kvm, KVM_GET_VCPU_MMAP_SIZE, 0), "KVM_GET_VCPU_MMAP_SIZE");
    struct kvm_run *run = map(run_size, MAP_SHARED, vcpu);
    struct kvm_sregs sregs;
    check(slat_ioctl(vcpu, KVM_GET_SREGS, &sregs), "KVM_GET_SREGS");
    sregs.cs.base = sregs.cs.selector = 0;
    check(slat_ioctl(vcpu, KVM_SET_SREGS, &sregs), "KVM_SET_SREGS");
    struct kvm_regs regs = { .rip = CODE, .rflags = 2 };
    check(slat_ioctl(vcpu, KVM_SET_REGS, &regs), "KVM_SET_REGS");

    do {
        check(slat_ioctl(vcpu, KVM_RUN, 0), "KVM_RUN");
        if (run->exit_reason == KVM_EXIT_IO && run->io.port == SERIAL)
            putchar(((char *)run)[run->io.data_offset]);
    } while (run->exit_reason == KVM_EXIT_IO);
    int halted = run->exit_reason == KVM_EXIT_HLT;

    slat_munmap(run, run_size);
    slat_close(vcpu);
    slat_close(vm);
    slat_close(kvm);
    slat_munmap(memory, MEMORY);
    return halted ? 0 : 1;
}
