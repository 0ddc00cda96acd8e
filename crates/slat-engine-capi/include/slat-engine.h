/* SPDX-License-Identifier: Apache-2.0 OR MIT */
/*
 * slat-engine: second-level page tables for hypervisors that run their guests themselves.
 *
 *     slat_vm_create(SLAT_EPT, &platform, &vm);
 *     slat_vm_set_region(vm, 0, gpa, size, backing, 0);
 *     slat_vcpu_create(vm, &vcpu);
 *     slat_vm_root(vm, &frame);                        what the hardware is told
 *     slat_vcpu_fault(vcpu, gpa, SLAT_WRITE);          after each EPT violation, nested page fault, stage 2 abort, guest page fault
 *
 * Link with `pkg-config --libs slat-engine`. A program that wants KVM's API, with a CPU in software, takes <slat.h> instead.
 *
 * Functions return 0 or a negative errno, and slat_last_error says why; `errno` itself says nothing. A VM's functions may be called by any
 * thread at any time, a vCPU's by one thread at a time. A defect of the library that it notices ends the call with -EIO, and the VM: its
 * later calls fail with -EIO. The library handles no signal, starts no thread and opens no file.
 *
 * This file is made by cbindgen from the crate slat-engine-capi: SLAT_UPDATE=1 cargo test -p slat-engine-capi --test header
 */


#ifndef SLAT_ENGINE_H
#define SLAT_ENGINE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

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
 * The result of a fault for which no memslot contains the address, or which is a write to a read-only memslot. The
 * hypervisor emulates the access.
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
   * Size in bytes of the aligned block around the page that is contiguous on the host: 4 KiB, 2 MiB or 1 GiB, or
   * another size that leaves of the format have. The leaf for the page is not larger than this.
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
 * The services of the machine. Each callback gets `context`, and may be called by any thread, and by several threads
 * at once. No callback except `drain` may call functions of this library. Only `drain` may be `NULL`. Frames have 4
 * KiB; with `SLAT_STAGE2_16K` and `SLAT_STAGE2_64K` they have 16 or 64 KiB. A frame's number is its physical address
 * divided by that size; the same holds for guest frames.
 */
struct slat_platform {
  /**
   * Passed to each callback.
   */
  void *context;
  /**
   * Allocates `count` contiguous frames for tables, aligned to their whole size; `count` is a power of two. Returns
   * the number of the first frame, or 0 if there is no memory. Must not wait for a vCPU.
   */
  uint64_t (*allocate)(void *context, size_t count);
  /**
   * Frees one of the frames that `allocate` has returned. No CPU walks it any more.
   */
  void (*free)(void *context, uint64_t frame);
  /**
   * Returns the address in this program of a frame that `allocate` has returned, which must not change until the
   * frame is freed. Called at each step of a walk.
   */
  void *(*address)(void *context, uint64_t frame);
  /**
   * Finds the page that backs the memory at `backing`, and describes the page in `*page`. The page backs that memory
   * until `slat_vm_invalidate`. May sleep. Returns 0; `-EFAULT` if there is no page, or if the page does not allow
   * `access` (`SLAT_READ`, …); `-ENOMEM`; `-EINTR`; `-EAGAIN` if the page is not there yet.
   */
  int (*resolve)(void *context, uint64_t backing, uint32_t access, struct slat_page *page);
  /**
   * Makes CPUs drop everything that they have cached of the `pages` guest frames from `first` on: the translations
   * of these frames, and the entries of tables on the paths to them. Returns when no CPU uses an old translation.
   */
  void (*flush)(void *context, uint64_t first, uint64_t pages);
  /**
   * Passes time while the engine waits; `round` counts up from 0. Spin first, then yield the processor.
   */
  void (*wait)(void *context, uint32_t round);
  /**
   * Interrupts the CPUs that are in the guest. Returns when everything in the buffers of their page walkers was
   * passed to `slat_vm_drain`. Called before a dirty log is read, with the policy `dirty_log=buffer`. `NULL` if no
   * hardware fills a buffer.
   */
  void (*drain)(void *context);
};

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

/**
 * Creates a VM without memory, whose tables have `format` (`SLAT_EPT`, …), and stores it in `*vm`.
 *
 * Returns 0; or `-EINVAL` if there is no such format or `platform` lacks a callback, `-ENOMEM`.
 *
 * # Safety
 * - `platform` and `vm` are valid. The callbacks do what `struct slat_platform` says, until the VM is destroyed.
 */
int slat_vm_create(uint32_t format, const struct slat_platform *platform, struct slat_vm **vm);

/**
 * Destroys a VM. Its tables are freed with its last vCPU, unless a call of the VM has failed with `-EIO`. Does nothing
 * with `NULL`.
 *
 * # Safety
 * - `vm` is from `slat_vm_create` or `NULL`, and is not used any more. No CPU can walk its tables after its vCPUs were
 *   destroyed.
 */
void slat_vm_destroy(struct slat_vm *vm);

/**
 * Sets the policy `name` to `value`, two words as in `slat run --set NAME=VALUE`, for what the VM does from now on.
 * The documentation of the crate `slat` (`Policy`), `docs/run.md` and `slat info` list the policies.
 *
 * Returns 0; or `-EINVAL` if there is no such policy, or the policy does not take the value.
 *
 * # Safety
 * - `vm` is valid, and `name` and `value` are texts that end with a NUL.
 */
int slat_vm_set_policy(const struct slat_vm *vm, const char *name, const char *value);

/**
 * Gives the guest `size` bytes of memory at `gpa` as memslot `slot`, or moves this slot there, or changes its flags.
 * Only the platform interprets `backing`: the platform is asked for the pages from that address on. `flags` are KVM's:
 * `KVM_MEM_LOG_DIRTY_PAGES`, `KVM_MEM_READONLY`.
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
 * Stores in `*frame` the number of the frame that has the root of the VM's tables. The hardware needs this number.
 *
 * # Safety
 * - `vm` and `frame` are valid.
 */
int slat_vm_root(const struct slat_vm *vm, uint64_t *frame);

/**
 * Stores in `*frame` the number of the host frame to which the page at `gpa` is mapped now. Takes no fault.
 *
 * Returns 0; or `-ENOENT` if the page is not mapped.
 *
 * # Safety
 * - `vm` and `frame` are valid.
 */
int slat_vm_lookup(const struct slat_vm *vm, uint64_t gpa, uint64_t *frame);

/**
 * Copies the dirty log of the memslot `slot` to the `words` words at `bitmap`, one bit for each page, clears the log,
 * and protects the pages: `KVM_GET_DIRTY_LOG`.
 *
 * Returns 0; or `-ENOENT` if the slot does not log, `-EFAULT` if the slot has more than 64 pages for each word.
 *
 * # Safety
 * - `vm` is valid, and `words` words at `bitmap` may be written.
 */
int slat_vm_dirty_log(const struct slat_vm *vm, uint32_t slot, uint64_t *bitmap, size_t words);

/**
 * Notes in the dirty logs that the page walker of a CPU has written to the `count` pages at `gpas`: the entries that
 * the walker has written to its buffer (Intel's PML, Arm's HDBSS). Call with all entries of the buffer whenever the
 * CPU has left the guest, and before it enters the guest again. Ignores addresses whose memslot does not log by
 * buffers (policy `dirty_log`).
 *
 * Returns 0.
 *
 * # Safety
 * - `vm` is valid, and `count` addresses at `gpas` may be read.
 */
int slat_vm_drain(const struct slat_vm *vm, const uint64_t *gpas, size_t count);

/**
 * Calls `change(context)`, which changes the pages that the platform has for the `size` bytes of backing from `start`
 * on. The VM's translations of these pages are dropped before, and none are made until `change` has returned. `change`
 * must not wait for a vCPU, nor leave by `longjmp` or an exception.
 *
 * Returns the result of `change`; or `-EINVAL`, without calling `change`, if the range goes beyond 64 bits.
 *
 * # Safety
 * - `vm` is valid, and `change` may be called with `context` on this thread.
 */
int slat_vm_invalidate(const struct slat_vm *vm, uint64_t start, uint64_t size, int (*change)(void *context), void *context);

/**
 * Creates a vCPU of a VM, and stores it in `*vcpu`. Only one thread at a time may use the vCPU.
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
 * Handles a second-level fault of the CPU, for `access` (`SLAT_READ`, …) to `gpa`: changes the tables so that they
 * allow the access.
 *
 * Returns 0: run the guest again, which repeats the access; `SLAT_MMIO`: emulate the access; `-EACCES` for a fetch
 * that is not allowed, `-EFAULT` if the platform has no page, `-EAGAIN` if the page is not there yet, `-ENOMEM`.
 *
 * # Safety
 * - `vcpu` is valid, and no other thread uses it.
 */
int slat_vcpu_fault(struct slat_vcpu *vcpu, uint64_t gpa, uint32_t access);

/**
 * Returns the reason why the engine has last refused a call of this thread, and what to do about it. The text is valid
 * until the thread's next call. Each call that returns a negative errno has such a text.
 */
const char *slat_last_error(void);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* SLAT_ENGINE_H */
