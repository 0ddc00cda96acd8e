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
   * Size in bytes of the aligned block around the page that is contiguous on the host: 4 KiB, 2 MiB or 1 GiB, or
   * another size that leaves of the format have. The leaf is no larger.
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
 * What the machine provides. Each callback gets `context`, may be called by any thread, by several at once, and calls
 * no function of this library, but for `drain`. Only `drain` may be `NULL`. Frames are 4 KiB, or with
 * `SLAT_STAGE2_16K` and `SLAT_STAGE2_64K` what these say; a frame's number is its physical address divided by that, a
 * guest frame's likewise.
 */
struct slat_platform {
  /**
   * Passed to each callback.
   */
  void *context;
  /**
   * Allocates `count` contiguous frames for tables, aligned to their whole size; `count` is a power of two. Returns
   * the number of the first frame, or 0 without memory. Must not wait for a vCPU.
   */
  uint64_t (*allocate)(void *context, size_t count);
  /**
   * Frees one of the frames that `allocate` has returned. No CPU walks it any more.
   */
  void (*free)(void *context, uint64_t frame);
  /**
   * Returns the address in this program of a frame that `allocate` has returned, always the same until the frame is
   * freed. Called at each step of a walk.
   */
  void *(*address)(void *context, uint64_t frame);
  /**
   * Finds the page that backs the memory at `backing`, and describes the page in `*page`. The page backs that memory
   * until `slat_vm_invalidate`. May sleep. Returns 0; `-EFAULT` if there is no page, or none that `access`
   * (`SLAT_READ`, …) may use; `-ENOMEM`; `-EINTR`; `-EAGAIN` if the page is not there yet.
   */
  int (*resolve)(void *context, uint64_t backing, uint32_t access, struct slat_page *page);
  /**
   * Flushes what CPUs have cached of the `pages` guest frames from `first` on: their translations, and the entries
   * of tables that lead to them. Returns when no CPU uses an old translation.
   */
  void (*flush)(void *context, uint64_t first, uint64_t pages);
  /**
   * Passes time while the engine waits; `round` counts up from 0. Spin first, then yield the processor.
   */
  void (*wait)(void *context, uint32_t round);
  /**
   * Interrupts the CPUs that are in the guest. Returns when everything in the buffers of their page walkers was
   * passed to `slat_vm_drain`. Called before a dirty log is got with the policy `dirty_log=buffer`. `NULL` where no
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
 * - `platform` and `vm` are valid. The callbacks keep what `struct slat_platform` says, until the VM is destroyed.
 */
int slat_vm_create(uint32_t format, const struct slat_platform *platform, struct slat_vm **vm);

/**
 * Destroys a VM, whose tables are freed with its last vCPU. Those of a VM in which a call has failed with `-EIO` are
 * not. Does nothing with `NULL`.
 *
 * # Safety
 * - `vm` is from `slat_vm_create` or `NULL`, and is not used any more. No CPU can walk its tables once its
 *   vCPUs are destroyed.
 */
void slat_vm_destroy(struct slat_vm *vm);

/**
 * Sets the policy `name` to `value`, two words as in `slat run --set NAME=VALUE`, for what the VM does from now on.
 * The documentation of the crate `slat` (`Policy`), `docs/run.md` and `slat info` list the policies.
 *
 * Returns 0; or `-EINVAL` if there is no such policy, or it takes other values.
 *
 * # Safety
 * - `vm` is valid, and `name` and `value` are texts that end with a NUL.
 */
int slat_vm_set_policy(const struct slat_vm *vm, const char *name, const char *value);

/**
 * Gives the guest `size` bytes of memory at `gpa` as memslot `slot`, or moves this slot there, or changes its flags.
 * `backing` means something to the platform only, which is asked for the pages from there on. `flags` are KVM's:
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
 * Copies the dirty log of the memslot `slot`, a bit for each page, to `words` words at `bitmap`, clears it, and
 * protects the pages: `KVM_GET_DIRTY_LOG`.
 *
 * Returns 0; or `-ENOENT` if the slot does not log, `-EFAULT` if it has more than 64 pages for each word.
 *
 * # Safety
 * - `vm` is valid, and `words` words at `bitmap` may be written.
 */
int slat_vm_dirty_log(const struct slat_vm *vm, uint32_t slot, uint64_t *bitmap, size_t words);

/**
 * Notes in the dirty logs that the page walker of a CPU has written to the `count` pages at `gpas`: what it has left
 * in its buffer, as Intel's PML does, of which these are the entries, and Arm's HDBSS. Call when the CPU has left the
 * guest, whatever the reason, and before it enters again, for all that is in the buffer. Addresses whose memslot does
 * not log by buffers (policy `dirty_log`) are passed over.
 *
 * Returns 0.
 *
 * # Safety
 * - `vm` is valid, and `count` addresses at `gpas` may be read.
 */
int slat_vm_drain(const struct slat_vm *vm, const uint64_t *gpas, size_t count);

/**
 * Calls `change(context)`, which changes what the platform has for `size` bytes of backing at `start`. The VM's
 * translations are dropped before, and made anew only after it. `change` must not wait for a vCPU, nor leave by
 * `longjmp` or an exception.
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
 * Handles a second-level fault of the CPU, for `access` (`SLAT_READ`, …) to `gpa`: brings the tables to
 * where they allow it.
 *
 * Returns 0: run the guest again, which repeats the access; `SLAT_MMIO`: emulate it; `-EACCES` for a fetch that is not
 * allowed, `-EFAULT` if the platform has no page, `-EAGAIN` if it has none yet, `-ENOMEM`.
 *
 * # Safety
 * - `vcpu` is valid, and no other thread uses it.
 */
int slat_vcpu_fault(struct slat_vcpu *vcpu, uint64_t gpa, uint32_t access);

/**
 * Returns why the engine has refused something to this thread last, and what to do about it: a text that is valid
 * until the thread's next call. Each call that returns a negative errno has one.
 */
const char *slat_last_error(void);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* SLAT_ENGINE_H */
