/* SPDX-License-Identifier: Apache-2.0 OR MIT */
/*
 * slat: the KVM API for C programs, without /dev/kvm. <slat-engine.h> has page tables for hypervisors that run their guests themselves.
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

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

/**
 * Opens KVM. Stands for `open("/dev/kvm", O_RDWR | O_CLOEXEC)`, but needs neither the file nor a right.
 *
 * Returns a descriptor; or -1 with errno `EINVAL` if the environment sets policies that do not exist, `EMFILE`,
 * `ENFILE` or `ENOMEM`.
 */
int slat_open(void);

/**
 * Carries out a request of KVM's on a descriptor. Stands for `ioctl`, whose arguments, results and errno it
 * has. Requests and structs are those of `<linux/kvm.h>`. A request that creates a VM, a vCPU or a device
 * returns its descriptor.
 *
 * For a descriptor that is not KVM's this is the C library's `ioctl`.
 *
 * # Safety
 * - As for `ioctl`: memory that the request names is valid for what it does. Memory of a memslot stays mapped for as
 *   long as the slot, or changes in `slat_around`.
 */
int slat_ioctl(int fd, unsigned long request, ...);

/**
 * Closes a descriptor. Stands for `close`. An object lives until its last descriptor is closed, and as long as objects
 * that depend on it: a VM as long as its vCPUs.
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
 * Reads the statistics of a descriptor that `KVM_GET_STATS_FD` has returned. Stands for `pread`, which would
 * read values of earlier.
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
 * Maps memory. Stands for `mmap`: a vCPU's descriptor has `struct kvm_run` and the pages behind it
 * (`KVM_GET_VCPU_MMAP_SIZE` bytes), and its dirty ring. With `MAP_FIXED`, no vCPU uses what was there
 * before when this returns.
 *
 * Returns the address; or `MAP_FAILED` and errno.
 *
 * # Safety
 * - As for `mmap`: with `MAP_FIXED`, nothing but guests uses the memory that was there.
 */
void *slat_mmap(void *address, size_t size, int protection, int flags, int fd, off_t offset);

/**
 * Unmaps memory. Stands for `munmap`. No vCPU uses the memory when this returns: one whose guest does
 * stops with `EFAULT`.
 *
 * # Safety
 * - As for `munmap`: nothing but guests uses the memory.
 */
int slat_munmap(void *address, size_t size);

/**
 * Calls `change(context)`, which changes mappings of guest memory within `size` bytes at `start`: by `mprotect`,
 * `madvise`, `mremap`, `fallocate` or another call that has no function here. Every VM drops its translations of the
 * range before, and makes no new ones until `change` has returned, as with MMU notifiers in the kernel: no vCPU reads
 * or writes the memory meanwhile, so that its content can be moved.
 *
 * Without it, vCPUs go on with what they know of the mapping that was there, until an access fails.
 *
 * `change` must not wait for a vCPU's thread, nor leave by `longjmp` or an exception. Returns what `change` returns,
 * with the errno that it leaves; or -1 with errno `EINVAL`, without having called it, if the range goes beyond the
 * end of the addresses.
 *
 * # Safety
 * - `change` may be called with `context` on this thread.
 */
int slat_around(void *start, size_t size, int (*change)(void *context), void *context);

/**
 * Ends with `EINTR` the `KVM_RUN` that this thread is in. Call in a signal handler, before its own
 * work. Async-signal-safe.
 *
 * The kernel's `KVM_RUN` ends for every signal; this library's for signals whose handlers call this, and within a
 * millisecond if they set `immediate_exit` in `struct kvm_run`. The handler calls no other function of this library.
 */
void slat_signal_arrived(void);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* SLAT_H */
