/* SPDX-License-Identifier: Apache-2.0 OR MIT */
/*
 * slat: the KVM API for C programs, without /dev/kvm.
 *
 *     int kvm = slat_open();
 *     int vm = slat_ioctl(kvm, KVM_CREATE_VM, 0);
 *     int vcpu = slat_ioctl(vm, KVM_CREATE_VCPU, 0);
 *     struct kvm_run *run = slat_mmap(NULL, slat_ioctl(kvm, KVM_GET_VCPU_MMAP_SIZE, 0), PROT_READ | PROT_WRITE, MAP_SHARED, vcpu, 0);
 *     slat_ioctl(vcpu, KVM_RUN, 0);
 *
 * Requests and structs are those of <linux/kvm.h>; link with `pkg-config --libs slat`.
 *
 * Descriptors are the process's own: poll, fcntl(F_SETFD) and the like work on them. Functions that stand for one of the C library's
 * return what that one returns, and set errno. A defect of the library that it notices ends the call with EIO, and the VM: its later
 * calls fail with EIO.
 *
 * The engine, slat_vm_create and what follows, is for hypervisors that run their guests themselves. Its functions return 0 or a negative
 * errno; `errno` itself says nothing then, slat_last_error does. A VM's functions may be called by any thread at any time, a vCPU's by one
 * thread at a time.
 *
 * Threads: every function of KVM's API may be called by any thread at any time. As with the kernel, a call of a vCPU waits for the one
 * before it: only one thread at a time runs a vCPU, and another one stops it by a signal or `immediate_exit`. A close does not end a
 * call in progress. In a forked child the parent's objects fail with EIO; closing them is allowed.
 *
 * Signals: the library handles SIGSEGV, SIGBUS and one real-time signal, from the first VM on, and passes on to the handlers that were
 * there what is not its own. Handlers for SIGSEGV and SIGBUS have to be installed before.
 *
 * This file is made by cbindgen from the crate slat-capi: SLAT_UPDATE=1 cargo test -p slat-capi --test header
 */


#ifndef SLAT_H
#define SLAT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

/**
 * The table format of Intel's EPT.
 */
#define SLAT_EPT 0

/**
 * The table format of AMD's nested paging.
 */
#define SLAT_NPT 1

/**
 * The table format of AArch64's stage 2.
 */
#define SLAT_STAGE2 2

/**
 * The table format of RISC-V's G-stage, with 48-bit addresses.
 */
#define SLAT_SV48X4 3

/**
 * The table format of Intel's EPT, with five levels.
 */
#define SLAT_EPT5 4

/**
 * The table format of AMD's nested paging, with five levels.
 */
#define SLAT_NPT5 5

/**
 * The table format of AArch64's stage 2, with 52-bit addresses (FEAT_LPA2).
 */
#define SLAT_STAGE2_LPA2 6

/**
 * The table format of RISC-V's G-stage, with 57-bit addresses.
 */
#define SLAT_SV57X4 7

/**
 * The table format of AArch64's stage 2 with a granule of 16 KiB. Frames have that size.
 */
#define SLAT_STAGE2_16K 8

/**
 * The table format of AArch64's stage 2 with a granule of 64 KiB. Frames have that size.
 */
#define SLAT_STAGE2_64K 9

/**
 * The guest reads data.
 */
#define SLAT_READ 0

/**
 * The guest writes data.
 */
#define SLAT_WRITE 1

/**
 * The guest fetches an instruction.
 */
#define SLAT_EXECUTE 2

/**
 * A fault's result: no memslot is there, or it is a write to a read-only one. The hypervisor emulates the access.
 */
#define SLAT_MMIO 1

/**
 * A vCPU.
 */
struct slat_vcpu;

/**
 * A VM.
 */
struct slat_vm;

/**
 * A page of the host's.
 */
struct slat_page {
  /**
   * The number of the frame that backs the page.
   */
  uint64_t frame;
  /**
   * Bytes that are next to each other on the host around it, aligned to themselves: 4 KiB, 2 MiB or 1 GiB, or what leaves of the
   * format have. The leaf is no larger.
   */
  uint64_t size;
  /**
   * Whether the guest may write.
   */
  bool writable;
  /**
   * Whether the guest may execute.
   */
  bool executable;
};

/**
 * What the machine provides. Each callback gets `context`, may be called by any thread, by several at once, and calls no function of
 * this library, but for `drain`. Only `drain` may be `NULL`. Frames are 4 KiB, or with `SLAT_STAGE2_16K` and `SLAT_STAGE2_64K` what these
 * say; a frame's number is its physical address divided by that, a guest frame's likewise.
 */
struct slat_platform {
  /**
   * Passed to each callback.
   */
  void *context;
  /**
   * Allocates `count` frames next to each other for tables, a power of two, the first aligned to all. Returns its number, or 0 without
   * memory. Must not wait for a vCPU.
   */
  uint64_t (*allocate)(void *context, size_t count);
  /**
   * Frees one of these frames, which no CPU can walk any more.
   */
  void (*free)(void *context, uint64_t frame);
  /**
   * Returns the address of one of these frames in this program, the same until it is freed. Called at each step of a walk.
   */
  void *(*address)(void *context, uint64_t frame);
  /**
   * Finds the page that backs the memory at `backing`, and describes it in `*page`. It backs that memory until `slat_vm_invalidate`. May
   * sleep. Returns 0; `-EFAULT` if there is none, or none that `access` may use (`SLAT_READ`, …); `-ENOMEM`; `-EINTR`; `-EAGAIN` if it is
   * not there yet.
   */
  int (*resolve)(void *context, uint64_t backing, uint32_t access, struct slat_page *page);
  /**
   * Flushes what CPUs have cached of the translations of the `pages` guest frames from `first` on, tables that they have cached on the
   * way included, and waits until none uses an old one.
   */
  void (*flush)(void *context, uint64_t first, uint64_t pages);
  /**
   * Passes time while the engine waits; `round` counts up from 0. Spin first, then yield the processor.
   */
  void (*wait)(void *context, uint32_t round);
  /**
   * Interrupts the CPUs that are in the guest, and returns when all that was in the buffers of their page walkers is passed to
   * `slat_vm_drain`. A dirty log by the policy `dirty_log=buffer` is got after it. `NULL` where no hardware fills a buffer.
   */
  void (*drain)(void *context);
};

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

/**
 * Opens KVM. Stands for `open("/dev/kvm", O_RDWR | O_CLOEXEC)`, but needs neither the file nor a right.
 *
 * Returns a descriptor; or -1 with errno `EINVAL` if the environment sets policies that do not exist, `EMFILE`, `ENFILE` or `ENOMEM`.
 */
int slat_open(void);

/**
 * Carries out a request of KVM's on a descriptor. Stands for `ioctl`, whose arguments, results and errno it has. Requests and
 * structs are those of `<linux/kvm.h>`. A request that creates a VM, a vCPU or a device returns its descriptor.
 *
 * For a descriptor that is not KVM's this is the C library's `ioctl`.
 *
 * # Safety
 * - As for `ioctl`: memory that the request names is valid for what it does. Memory of a memslot stays mapped for as long as the slot,
 *   or changes in `slat_around`.
 */
int slat_ioctl(int fd, unsigned long request, ...);

/**
 * Closes a descriptor. Stands for `close`. An object lives until its last descriptor is closed, and as long as objects that depend on
 * it: a VM as long as its vCPUs.
 *
 * KVM's descriptors must not be closed otherwise: the next file with the same number would be taken for KVM's.
 *
 * For a descriptor that is not KVM's this is the C library's `close`.
 */
int slat_close(int fd);

/**
 * Makes another descriptor of the object that `fd` refers to. Stands for `dup`.
 *
 * For a descriptor that is not KVM's this is the C library's `dup`.
 */
int slat_dup(int fd);

/**
 * Reads the statistics of a descriptor that `KVM_GET_STATS_FD` has returned. Stands for `pread`, which would read values of earlier.
 *
 * For any other descriptor this is the C library's `pread`.
 *
 * # Safety
 * - `size` bytes at `buffer` may be written.
 */
ssize_t slat_pread(int fd, void *buffer, size_t size, off_t offset);

/**
 * Allocates or frees pages of a guest_memfd. Stands for `fallocate`.
 *
 * For any other descriptor this is the C library's `fallocate`.
 */
int slat_fallocate(int fd, int mode, off_t offset, off_t size);

/**
 * Creates a VM without memory, whose tables have `format` (`SLAT_EPT`, …), and stores it in `*vm`.
 *
 * Returns 0; or `-EINVAL` if there is no such format or `platform` lacks a callback, `-ENOMEM`.
 *
 * # Safety
 * - `platform` and `vm` are valid. The callbacks keep what `struct slat_platform` says, until the VM is destroyed.
 */
int slat_vm_create(uint32_t format, const struct slat_platform *platform, struct slat_vm **vm);

/**
 * Destroys a VM, whose tables are freed with its last vCPU. Those of a VM in which a call has failed with `-EIO` are not. Does nothing with
 * `NULL`.
 *
 * # Safety
 * - `vm` is from `slat_vm_create` or `NULL`, and is not used any more. No CPU can walk its tables once its vCPUs are destroyed.
 */
void slat_vm_destroy(struct slat_vm *vm);

/**
 * Sets the policy `name` to `value`, two words as in `slat run --set NAME=VALUE`, for what the VM does from now on. `slat info` lists the
 * policies.
 *
 * Returns 0; or `-EINVAL` if there is no such policy, or it takes other values.
 *
 * # Safety
 * - `vm` is valid, and `name` and `value` are texts that end with a NUL.
 */
int slat_vm_set_policy(const struct slat_vm *vm, const char *name, const char *value);

/**
 * Gives the guest `size` bytes of memory at `gpa` as memslot `slot`, or moves this slot there, or changes its flags. `backing` means
 * something to the platform only, which is asked for the pages from there on. `flags` are KVM's: `KVM_MEM_LOG_DIRTY_PAGES`,
 * `KVM_MEM_READONLY`.
 *
 * Returns 0; or `-EINVAL`, `-EEXIST` for an overlap, `-ENOMEM`.
 *
 * # Safety
 * - `vm` is valid.
 */
int slat_vm_set_region(const struct slat_vm *vm, uint32_t slot, uint64_t gpa, uint64_t size, uint64_t backing, uint32_t flags);

/**
 * Deletes the memslot `slot`. No CPU reaches its memory when this returns.
 *
 * Returns 0; or `-EINVAL` if there is no such slot, `-ENOMEM`.
 *
 * # Safety
 * - `vm` is valid.
 */
int slat_vm_remove_region(const struct slat_vm *vm, uint32_t slot);

/**
 * Stores in `*frame` the number of the frame that has the root of the VM's tables: what the hardware is told.
 *
 * # Safety
 * - `vm` and `frame` are valid.
 */
int slat_vm_root(const struct slat_vm *vm, uint64_t *frame);

/**
 * Stores in `*frame` the number of the host frame to which the page at `gpa` is mapped now. Takes no fault.
 *
 * Returns 0; or `-ENOENT` if it is not mapped.
 *
 * # Safety
 * - `vm` and `frame` are valid.
 */
int slat_vm_lookup(const struct slat_vm *vm, uint64_t gpa, uint64_t *frame);

/**
 * Copies the dirty log of the memslot `slot`, a bit for each page, to `words` words at `bitmap`, clears it, and protects the pages:
 * `KVM_GET_DIRTY_LOG`.
 *
 * Returns 0; or `-ENOENT` if the slot does not log, `-EFAULT` if it has more than 64 pages for each word.
 *
 * # Safety
 * - `vm` is valid, and `words` words at `bitmap` may be written.
 */
int slat_vm_dirty_log(const struct slat_vm *vm, uint32_t slot, uint64_t *bitmap, size_t words);

/**
 * Notes in the dirty logs that the page walker of a CPU has written to the `count` pages at `gpas`: what it has left in its buffer, as
 * Intel's PML does, of which these are the entries, and Arm's HDBSS. Call when the CPU has left the guest, whatever the reason, and before
 * it enters again, for all that is in the buffer. Addresses whose memslot does not log by buffers (policy `dirty_log`) are passed over.
 *
 * Returns 0.
 *
 * # Safety
 * - `vm` is valid, and `count` addresses at `gpas` may be read.
 */
int slat_vm_drain(const struct slat_vm *vm, const uint64_t *gpas, size_t count);

/**
 * Calls `change(context)`, which changes what the platform has for `size` bytes of backing at `start`. The VM's translations are dropped
 * before, and made anew only after it. `change` must not wait for a vCPU, nor leave by `longjmp` or an exception.
 *
 * Returns what `change` returns; `-EINVAL`, without having called it, if the range goes beyond 64 bits.
 *
 * # Safety
 * - `vm` is valid, and `change` may be called with `context` on this thread.
 */
int slat_vm_invalidate(const struct slat_vm *vm, uint64_t start, uint64_t size, int (*change)(void *context), void *context);

/**
 * Creates a vCPU of a VM, and stores it in `*vcpu`. One thread at a time uses it.
 *
 * Returns 0; or `-ENOMEM`.
 *
 * # Safety
 * - `vm` and `vcpu` are valid.
 */
int slat_vcpu_create(const struct slat_vm *vm, struct slat_vcpu **vcpu);

/**
 * Destroys a vCPU. Does nothing with `NULL`.
 *
 * # Safety
 * - `vcpu` is from `slat_vcpu_create` or `NULL`, and is not used any more. Its CPU is not in the guest.
 */
void slat_vcpu_destroy(struct slat_vcpu *vcpu);

/**
 * Handles a second-level fault of the CPU, for `access` (`SLAT_READ`, …) to `gpa`: brings the tables to where they allow it.
 *
 * Returns 0: run the guest again, which repeats the access; `SLAT_MMIO`: emulate it; `-EACCES` for a fetch that is not allowed, `-EFAULT`
 * if the platform has no page, `-EAGAIN` if it has none yet, `-ENOMEM`.
 *
 * # Safety
 * - `vcpu` is valid, and no other thread uses it.
 */
int slat_vcpu_fault(struct slat_vcpu *vcpu, uint64_t gpa, uint32_t access);

/**
 * Returns why the engine has refused something to this thread last, and what to do about it: a text that is valid until the thread's next
 * call. Each call that returns a negative errno has one.
 */
const char *slat_last_error(void);

/**
 * Maps memory. Stands for `mmap`: a vCPU's descriptor has `struct kvm_run` and the pages behind it (`KVM_GET_VCPU_MMAP_SIZE` bytes), and
 * its dirty ring. With `MAP_FIXED`, no vCPU uses what was there before when this returns.
 *
 * Returns the address; or `MAP_FAILED` and errno.
 *
 * # Safety
 * - As for `mmap`: with `MAP_FIXED`, nothing but guests uses the memory that was there.
 */
void *slat_mmap(void *address, size_t size, int protection, int flags, int fd, off_t offset);

/**
 * Unmaps memory. Stands for `munmap`. No vCPU uses the memory when this returns: one whose guest does stops with `EFAULT`.
 *
 * # Safety
 * - As for `munmap`: nothing but guests uses the memory.
 */
int slat_munmap(void *address, size_t size);

/**
 * Calls `change(context)`, which changes mappings of guest memory within `size` bytes at `start`: by `mprotect`, `madvise`, `mremap`,
 * `fallocate` or another call that has no function here. Every VM drops its translations of the range before, and makes no new ones
 * until `change` has returned, as with MMU notifiers in the kernel: no vCPU reads or writes the memory meanwhile, so that its content
 * can be moved.
 *
 * Without it, vCPUs go on with what they know of the mapping that was there, until an access fails.
 *
 * `change` must not wait for a vCPU's thread, nor leave by `longjmp` or an exception. Returns what `change` returns, with the errno that
 * it leaves; or -1 with errno `EINVAL`, without having called it, if the range goes beyond the end of the addresses.
 *
 * # Safety
 * - `change` may be called with `context` on this thread.
 */
int slat_around(void *start, size_t size, int (*change)(void *context), void *context);

/**
 * Ends with `EINTR` the `KVM_RUN` that this thread is in. Call in a signal handler, before its own work. Async-signal-safe.
 *
 * The kernel's `KVM_RUN` ends for every signal; this library's for signals whose handlers call this, and within a millisecond if they
 * set `immediate_exit` in `struct kvm_run`. The handler calls no other function of this library.
 */
void slat_signal_arrived(void);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* SLAT_H */
