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

/**
 * The type of the device of KVM_CREATE_DEVICE that reads the dirty logs of a VM besides the client, and the groups and attributes of
 * KVM_SET_DEVICE_ATTR and KVM_GET_DEVICE_ATTR (docs/run.md, "Several readers of the dirty log").
 */
#define KVM_DEV_TYPE_SLAT_LOG_READER 0x736c0001u
#define KVM_DEV_SLAT_LOG_READER_EPOCH 0
#define KVM_DEV_SLAT_LOG_READER_BEGIN 0
#define KVM_DEV_SLAT_LOG_READER_COMMIT 1
#define KVM_DEV_SLAT_LOG_READER_ABORT 2
#define KVM_DEV_SLAT_LOG_READER_RANGES 1

/**
 * The request for the dirty pages of an epoch: `addr` of attribute 0 of the group KVM_DEV_SLAT_LOG_READER_RANGES.
 */
struct slat_dirty_ranges {
  uint64_t gfn;           /**< In: the first frame of interest. Out: where the next request continues. */
  uint32_t address_space; /**< In and out: the address space of that frame. */
  uint32_t count;         /**< In: elements at `ranges`. Out: elements written; fewer than asked for if there are no more dirty pages. */
  uint64_t min_gap;       /**< Runs with fewer clean pages between them are one range. */
  uint64_t max_pages;     /**< The greatest number of pages of a range; 0 means any number. */
  uint64_t ranges;        /**< The address of an array of `struct slat_dirty_range`. */
};

/**
 * Pages that were written, all of one memslot.
 */
struct slat_dirty_range {
  uint32_t slot;           /**< The memslot's number; the upper 16 bits are the address space. */
  uint32_t padding;        /**< 0. */
  uint64_t gfn;            /**< The first guest frame. */
  uint64_t pages;          /**< The number of pages. */
  uint64_t userspace_addr; /**< The address of the first page. */
};


#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

/**
 * Opens KVM. Replaces `open("/dev/kvm", O_RDWR | O_CLOEXEC)`, but needs neither the file nor the right to open it.
 *
 * Returns a descriptor; or -1 with errno `EINVAL` if the environment sets policies that do not exist, `EMFILE`,
 * `ENFILE` or `ENOMEM`.
 */
int slat_open(void);

/**
 * Carries out a KVM request on a descriptor. Replaces `ioctl`, and has the same arguments, results and errno. Requests
 * and structs are those of `<linux/kvm.h>`. A request that creates a VM, a vCPU or a device returns its descriptor.
 *
 * For a descriptor that is not KVM's, this calls the C library's `ioctl`.
 *
 * # Safety
 * - As for `ioctl`, the memory that the request names is valid for the request. Memory of a memslot stays mapped as
 *   long as the slot exists, or is changed in `slat_around`.
 */
int slat_ioctl(int fd, unsigned long request, ...);

/**
 * Closes a descriptor. Replaces `close`. An object lives until its last descriptor is closed, and at least as long as
 * the objects that depend on it: a VM lives as long as its vCPUs.
 *
 * Close KVM's descriptors only by this function. Otherwise the next file that gets the same number would be taken for
 * KVM's.
 *
 * For a descriptor that is not KVM's, this calls the C library's `close`.
 */
int slat_close(int fd);

/**
 * Makes another descriptor of the object that `fd` refers to. Replaces `dup`.
 *
 * For a descriptor that is not KVM's, this calls the C library's `dup`.
 */
int slat_dup(int fd);

/**
 * Reads the statistics of a descriptor that `KVM_GET_STATS_FD` has returned. Replaces `pread`, which would read old
 * values.
 *
 * For any other descriptor, this calls the C library's `pread`.
 *
 * # Safety
 * - `size` bytes at `buffer` may be written.
 */
ssize_t slat_pread(int fd, void *buffer, size_t size, off_t offset);

/**
 * Allocates or frees pages of a guest_memfd. Replaces `fallocate`.
 *
 * For any other descriptor, this calls the C library's `fallocate`.
 */
int slat_fallocate(int fd, int mode, off_t offset, off_t size);

/**
 * Maps memory. Replaces `mmap`. A vCPU's descriptor can be mapped: it has `struct kvm_run` and the pages after it
 * (`KVM_GET_VCPU_MMAP_SIZE` bytes), and its dirty ring. With `MAP_FIXED`, no vCPU uses the earlier mappings of the
 * range when this returns.
 *
 * Returns the address; or `MAP_FAILED` and errno.
 *
 * # Safety
 * - As for `mmap`: with `MAP_FIXED`, only guests use the memory that was mapped there before.
 */
void *slat_mmap(void *address, size_t size, int protection, int flags, int fd, off_t offset);

/**
 * Unmaps memory. Replaces `munmap`. No vCPU uses the memory when this returns. If a guest accesses it later, `KVM_RUN`
 * fails with `EFAULT`.
 *
 * # Safety
 * - As for `munmap`: only guests use the memory.
 */
int slat_munmap(void *address, size_t size);

/**
 * Calls `change(context)`, which changes mappings of guest memory within `size` bytes at `start`: by `mprotect`,
 * `madvise`, `mremap`, `fallocate`, or another call that this library does not replace. Before that, every VM drops
 * its translations of the range, and makes no new ones until `change` has returned, like the kernel's MMU notifiers.
 * So no vCPU reads or writes the memory meanwhile, and `change` may move its content.
 *
 * Without this call, vCPUs continue to use the properties of the old mapping, until an access fails.
 *
 * `change` must not wait for a vCPU's thread, nor leave by `longjmp` or an exception. Returns the result of `change`,
 * with its errno; or -1 with errno `EINVAL`, without calling `change`, if the range goes beyond the end of the
 * addresses.
 *
 * # Safety
 * - `change` may be called with `context` on this thread.
 */
int slat_around(void *start, size_t size, int (*change)(void *context), void *context);

/**
 * Ends this thread's current `KVM_RUN` with `EINTR`. Call in a signal handler, before the handler's own work.
 * Async-signal-safe.
 *
 * The kernel's `KVM_RUN` ends for every signal. This library's `KVM_RUN` ends for signals whose handlers call this
 * function, and within a millisecond for signals whose handlers set `immediate_exit` in `struct kvm_run`. The handler
 * calls no other function of this library.
 */
void slat_signal_arrived(void);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* SLAT_H */
