//! The engine for hypervisors written in C: second-level tables, memslots, faults, dirty logs. The hypervisor provides
//! the platform as callbacks.
//!
//! The hypervisor runs its guests itself. For KVM's API, with a CPU in software, see the library of the crate
//! `slat-capi`. Functions return 0 or a negative errno, and set no `errno`. cbindgen generates `include/slat-engine.h`
//! from this crate (`tests/header.rs`).
//!
//! | file | contents |
//! |---|---|
//! | this one | the functions, and the border between C and Rust |
//! | [`platform`] | implements the engine's platform by the callbacks |
//! | `vm` | a VM and a vCPU of any table format |
//! | [`message`] | the reason why a call has failed, as text |
//!
//! # The border between C and Rust
//! No panic leaves the library: a call that panics fails with `EIO`, and so do all later calls of the same VM.

#![allow(non_camel_case_types)] // C names.

pub mod message;
pub mod platform;
mod vm;

use message::refused;
use platform::{Callbacks, slat_platform};
use slat::format::{Ept, Ept5, Npt, Npt5, Stage2, Stage2Kib16, Stage2Kib64, Sv48x4, Sv57x4};
use slat::{Access, Config, Gpa, Hva, Region, Setting, SlotFlags};
use std::ffi::{CStr, c_char, c_int, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use vm::{AnyVcpu, AnyVm};

/// The table format of Intel's EPT.
pub const SLAT_EPT: u32 = 0;
/// The table format of AMD's nested paging.
pub const SLAT_NPT: u32 = 1;
/// The table format of AArch64's stage 2.
pub const SLAT_STAGE2: u32 = 2;
/// The table format of RISC-V's G-stage, with 48-bit addresses.
pub const SLAT_SV48X4: u32 = 3;
/// The table format of Intel's EPT, with five levels.
pub const SLAT_EPT5: u32 = 4;
/// The table format of AMD's nested paging, with five levels.
pub const SLAT_NPT5: u32 = 5;
/// The table format of AArch64's stage 2, with 52-bit addresses (FEAT_LPA2).
pub const SLAT_STAGE2_LPA2: u32 = 6;
/// The table format of RISC-V's G-stage, with 57-bit addresses.
pub const SLAT_SV57X4: u32 = 7;
/// The table format of AArch64's stage 2 with a granule of 16 KiB. Frames have that size.
pub const SLAT_STAGE2_16K: u32 = 8;
/// The table format of AArch64's stage 2 with a granule of 64 KiB. Frames have that size.
pub const SLAT_STAGE2_64K: u32 = 9;

/// The guest reads data.
pub const SLAT_READ: u32 = 0;
/// The guest writes data.
pub const SLAT_WRITE: u32 = 1;
/// The guest fetches an instruction.
pub const SLAT_EXECUTE: u32 = 2;

/// The result of a fault for which no memslot contains the address, or which is a write to a read-only memslot. The
/// hypervisor emulates the access.
pub const SLAT_MMIO: c_int = 1;

/// A VM.
pub struct slat_vm(Arc<Handle>);

/// A vCPU.
pub struct slat_vcpu {
    vm: Arc<Handle>,
    vcpu: Box<dyn AnyVcpu>,
}

struct Handle {
    vm: Box<dyn AnyVm>,
    /// Whether a call of the VM has panicked: then the VM's state is unknown, and locks may still be held.
    dead: AtomicBool,
}

type Done = Result<c_int, c_int>;

/// The text of the error of every call after a panic.
const DEAD: &str = "a call of this VM has failed in the engine or in a callback, which is a defect of either; destroy the VM";

/// Returns the result of `work`. `None`: `work` has panicked, and the panic's message was printed.
fn without_panic<R>(work: impl FnOnce() -> R) -> Option<R> {
    catch_unwind(AssertUnwindSafe(work)).ok()
}

impl Handle {
    /// Runs `work`, a call of this VM or of one of its vCPUs. If a call has panicked, this call or an earlier one,
    /// fails with `EIO`.
    fn call(&self, work: impl FnOnce() -> Done) -> c_int {
        message::begin();
        if self.dead.load(SeqCst) {
            return -refused(libc::EIO, &DEAD);
        }
        let done = without_panic(work).unwrap_or_else(|| {
            self.dead.store(true, SeqCst);
            Err(refused(libc::EIO, &DEAD))
        });
        done.unwrap_or_else(|errno| -errno)
    }
}

/// Creates a VM without memory, whose tables have `format` (`SLAT_EPT`, …), and stores it in `*vm`.
///
/// Returns 0; or `-EINVAL` if there is no such format or `platform` lacks a callback, `-ENOMEM`.
///
/// # Safety
/// - `platform` and `vm` are valid. The callbacks do what `struct slat_platform` says, until the VM is destroyed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn slat_vm_create(
    format: u32,
    platform: *const slat_platform,
    vm: *mut *mut slat_vm,
) -> c_int {
    let create = || {
        // SAFETY: `platform` is valid, and its callbacks do what `struct slat_platform` says, as this function's
        // `# Safety` asks of its caller.
        let platform = unsafe { Callbacks::new(&*platform) };
        let platform = platform.map_err(|missing| {
            let text =
                format_args!("creating a VM: struct slat_platform lacks the callback {missing}");
            refused(libc::EINVAL, &text)
        })?;
        let config = Config::default();
        let created = match format {
            SLAT_EPT => vm::create::<Ept>(platform, config),
            SLAT_NPT => vm::create::<Npt>(platform, config),
            SLAT_STAGE2 => vm::create::<Stage2<48>>(platform, config),
            SLAT_SV48X4 => vm::create::<Sv48x4>(platform, config),
            SLAT_EPT5 => vm::create::<Ept5>(platform, config),
            SLAT_NPT5 => vm::create::<Npt5>(platform, config),
            SLAT_STAGE2_LPA2 => vm::create::<Stage2<52>>(platform, config),
            SLAT_SV57X4 => vm::create::<Sv57x4>(platform, config),
            SLAT_STAGE2_16K => vm::create::<Stage2Kib16<48>>(platform, config),
            SLAT_STAGE2_64K => vm::create::<Stage2Kib64<48>>(platform, config),
            _ => {
                let text = format_args!(
                    "creating a VM: there is no format {format}; SLAT_EPT is {SLAT_EPT}, the last one {SLAT_STAGE2_64K}"
                );
                Err(refused(libc::EINVAL, &text))
            }
        };
        let handle = Arc::new(Handle {
            vm: created?,
            dead: AtomicBool::new(false),
        });
        // SAFETY: `vm` is valid, as this function's `# Safety` asks of its caller.
        unsafe { *vm = Box::into_raw(Box::new(slat_vm(handle))) };
        Ok(0)
    };
    let done: Done = without_panic(create).unwrap_or_else(|| Err(refused(libc::EIO, &DEAD)));
    done.unwrap_or_else(|errno| -errno)
}

/// Destroys a VM. Its tables are freed with its last vCPU, unless a call of the VM has failed with `-EIO`. Does nothing
/// with `NULL`.
///
/// # Safety
/// - `vm` is from `slat_vm_create` or `NULL`, and is not used any more. No CPU can walk its tables after its vCPUs were
///   destroyed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn slat_vm_destroy(vm: *mut slat_vm) {
    if vm.is_null() {
        return;
    }
    // SAFETY: `vm` is from `Box::into_raw` in `slat_vm_create`, and is not used any more, as this function's `# Safety`
    // asks of its caller.
    let slat_vm(handle) = *unsafe { Box::from_raw(vm) };
    discard(handle.clone(), handle);
}

/// Drops `what`, a VM or a vCPU, unless a call of the VM has panicked.
fn discard<T>(handle: Arc<Handle>, what: T) {
    match handle.dead.load(SeqCst) {
        true => std::mem::forget((handle, what)),
        false => {
            let _ = without_panic(|| drop((what, handle)));
        }
    }
}

/// Sets the policy `name` to `value`, two words as in `slat run --set NAME=VALUE`, for what the VM does from now on.
/// The documentation of the crate `slat` (`Policy`), `docs/run.md` and `slat info` list the policies.
///
/// Returns 0; or `-EINVAL` if there is no such policy, or the policy does not take the value.
///
/// # Safety
/// - `vm` is valid, and `name` and `value` are texts that end with a NUL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn slat_vm_set_policy(
    vm: *const slat_vm,
    name: *const c_char,
    value: *const c_char,
) -> c_int {
    // SAFETY: `vm` is valid, as this function's `# Safety` asks of its caller.
    let slat_vm(handle) = unsafe { &*vm };
    handle.call(|| {
        // SAFETY: both are texts that end with a NUL, as this function's `# Safety` asks of its caller.
        let [name, value] = [name, value].map(|text| unsafe { CStr::from_ptr(text) });
        let [name, value] = [name, value].map(CStr::to_string_lossy);
        let setting = Setting::parse(&name, &value)
            .map_err(|error| refused(libc::EINVAL, &format_args!("policy {name}: {error}")))?;
        handle.vm.set_policy(setting);
        Ok(0)
    })
}

/// Gives the guest `size` bytes of memory at `gpa` as memslot `slot`, or moves this slot there, or changes its flags.
/// Only the platform interprets `backing`: the platform is asked for the pages from that address on. `flags` are KVM's:
/// `KVM_MEM_LOG_DIRTY_PAGES`, `KVM_MEM_READONLY`.
///
/// Returns 0; or `-EINVAL`, `-EEXIST` for an overlap, `-ENOMEM`.
///
/// # Safety
/// - `vm` is valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn slat_vm_set_region(
    vm: *const slat_vm,
    slot: u32,
    gpa: u64,
    size: u64,
    backing: u64,
    flags: u32,
) -> c_int {
    // SAFETY: `vm` is valid, as this function's `# Safety` asks of its caller.
    let slat_vm(handle) = unsafe { &*vm };
    handle.call(|| {
        let region = Region::new(slot, Gpa(gpa), size, Hva(backing));
        handle.vm.set_region(&region.with_flags(SlotFlags(flags)))
    })
}

/// Deletes the memslot `slot`. No CPU reaches its memory when this returns.
///
/// Returns 0; or `-EINVAL` if there is no such slot, `-ENOMEM`.
///
/// # Safety
/// - `vm` is valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn slat_vm_remove_region(vm: *const slat_vm, slot: u32) -> c_int {
    // SAFETY: `vm` is valid, as this function's `# Safety` asks of its caller.
    let slat_vm(handle) = unsafe { &*vm };
    handle.call(|| handle.vm.remove_region(slot))
}

/// Stores in `*frame` the number of the frame that has the root of the VM's tables. The hardware needs this number.
///
/// # Safety
/// - `vm` and `frame` are valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn slat_vm_root(vm: *const slat_vm, frame: *mut u64) -> c_int {
    // SAFETY: `vm` is valid, as this function's `# Safety` asks of its caller.
    let slat_vm(handle) = unsafe { &*vm };
    handle.call(|| {
        let none = || refused(libc::ENOENT, &"the VM's MMU has no root table");
        let root = handle.vm.root().ok_or_else(none)?;
        // SAFETY: `frame` is valid, as this function's `# Safety` asks of its caller.
        unsafe { *frame = root.0 };
        Ok(0)
    })
}

/// Stores in `*frame` the number of the host frame to which the page at `gpa` is mapped now. Takes no fault.
///
/// Returns 0; or `-ENOENT` if the page is not mapped.
///
/// # Safety
/// - `vm` and `frame` are valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn slat_vm_lookup(vm: *const slat_vm, gpa: u64, frame: *mut u64) -> c_int {
    // SAFETY: `vm` is valid, as this function's `# Safety` asks of its caller.
    let slat_vm(handle) = unsafe { &*vm };
    handle.call(|| {
        let none = || {
            refused(
                libc::ENOENT,
                &format_args!("looking up {gpa:#x}: it is not mapped"),
            )
        };
        let mapping = handle.vm.lookup(Gpa(gpa)).ok_or_else(none)?;
        // SAFETY: `frame` is valid, as this function's `# Safety` asks of its caller.
        unsafe { *frame = mapping.pfn.0 };
        Ok(0)
    })
}

/// Copies the dirty log of the memslot `slot` to the `words` words at `bitmap`, one bit for each page, clears the log,
/// and protects the pages: `KVM_GET_DIRTY_LOG`.
///
/// Returns 0; or `-ENOENT` if the slot does not log, `-EFAULT` if the slot has more than 64 pages for each word.
///
/// # Safety
/// - `vm` is valid, and `words` words at `bitmap` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn slat_vm_dirty_log(
    vm: *const slat_vm,
    slot: u32,
    bitmap: *mut u64,
    words: usize,
) -> c_int {
    // SAFETY: `vm` is valid, as this function's `# Safety` asks of its caller.
    let slat_vm(handle) = unsafe { &*vm };
    let bitmap = match words {
        0 => &mut [],
        // SAFETY: `words` words at `bitmap` may be written, as this function's `# Safety` asks of its caller.
        _ => unsafe { std::slice::from_raw_parts_mut(bitmap, words) },
    };
    handle.call(|| handle.vm.dirty_log(slot, bitmap))
}

/// Notes in the dirty logs that the page walker of a CPU has written to the `count` pages at `gpas`: the entries that
/// the walker has written to its buffer (Intel's PML, Arm's HDBSS). Call with all entries of the buffer whenever the
/// CPU has left the guest, and before it enters the guest again. Ignores addresses whose memslot does not log by
/// buffers (policy `dirty_log`).
///
/// Returns 0.
///
/// # Safety
/// - `vm` is valid, and `count` addresses at `gpas` may be read.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn slat_vm_drain(
    vm: *const slat_vm,
    gpas: *const u64,
    count: usize,
) -> c_int {
    // SAFETY: `vm` is valid, as this function's `# Safety` asks of its caller.
    let slat_vm(handle) = unsafe { &*vm };
    let gpas = match count {
        0 => &[],
        // SAFETY: `count` addresses at `gpas` may be read, as this function's `# Safety` asks of its caller.
        _ => unsafe { std::slice::from_raw_parts(gpas, count) },
    };
    handle.call(|| {
        handle.vm.drain(gpas);
        Ok(0)
    })
}

/// Calls `change(context)`, which changes the pages that the platform has for the `size` bytes of backing from `start`
/// on. The VM's translations of these pages are dropped before, and none are made until `change` has returned. `change`
/// must not wait for a vCPU, nor leave by `longjmp` or an exception.
///
/// Returns the result of `change`; or `-EINVAL`, without calling `change`, if the range goes beyond 64 bits.
///
/// # Safety
/// - `vm` is valid, and `change` may be called with `context` on this thread.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn slat_vm_invalidate(
    vm: *const slat_vm,
    start: u64,
    size: u64,
    change: extern "C-unwind" fn(context: *mut c_void) -> c_int,
    context: *mut c_void,
) -> c_int {
    // SAFETY: `vm` is valid, as this function's `# Safety` asks of its caller.
    let slat_vm(handle) = unsafe { &*vm };
    handle.call(|| {
        let beyond = || {
            let text = format_args!(
                "invalidating {size:#x} bytes at {start:#x}: the range goes beyond 64 bits"
            );
            refused(libc::EINVAL, &text)
        };
        let end = start.checked_add(size).ok_or_else(beyond)?;
        Ok((handle.vm).invalidate(Hva(start)..Hva(end), &mut || change(context)))
    })
}

/// Creates a vCPU of a VM, and stores it in `*vcpu`. Only one thread at a time may use the vCPU.
///
/// Returns 0; or `-ENOMEM`.
///
/// # Safety
/// - `vm` and `vcpu` are valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn slat_vcpu_create(vm: *const slat_vm, vcpu: *mut *mut slat_vcpu) -> c_int {
    // SAFETY: `vm` is valid, as this function's `# Safety` asks of its caller.
    let slat_vm(handle) = unsafe { &*vm };
    handle.call(|| {
        let created = slat_vcpu {
            vcpu: handle.vm.create_vcpu()?,
            vm: handle.clone(),
        };
        // SAFETY: `vcpu` is valid, as this function's `# Safety` asks of its caller.
        unsafe { *vcpu = Box::into_raw(Box::new(created)) };
        Ok(0)
    })
}

/// Destroys a vCPU. Does nothing with `NULL`.
///
/// # Safety
/// - `vcpu` is from `slat_vcpu_create` or `NULL`, and is not used any more. Its CPU is not in the guest.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn slat_vcpu_destroy(vcpu: *mut slat_vcpu) {
    if vcpu.is_null() {
        return;
    }
    // SAFETY: `vcpu` is from `Box::into_raw` in `slat_vcpu_create`, and is not used any more, as this function's
    // `# Safety` asks of its caller.
    let slat_vcpu { vm, vcpu } = *unsafe { Box::from_raw(vcpu) };
    discard(vm, vcpu);
}

/// Handles a second-level fault of the CPU, for `access` (`SLAT_READ`, …) to `gpa`: changes the tables so that they
/// allow the access.
///
/// Returns 0: run the guest again, which repeats the access; `SLAT_MMIO`: emulate the access; `-EACCES` for a fetch
/// that is not allowed, `-EFAULT` if the platform has no page, `-EAGAIN` if the page is not there yet, `-ENOMEM`.
///
/// # Safety
/// - `vcpu` is valid, and no other thread uses it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn slat_vcpu_fault(vcpu: *mut slat_vcpu, gpa: u64, access: u32) -> c_int {
    // SAFETY: `vcpu` is valid, and no other thread uses it, as this function's `# Safety` asks of its caller.
    let slat_vcpu { vm, vcpu } = unsafe { &mut *vcpu };
    vm.call(|| {
        let access = match access {
            SLAT_READ => Access::Read,
            SLAT_WRITE => Access::Write,
            SLAT_EXECUTE => Access::Execute,
            _ => {
                let text = format_args!("a fault at {gpa:#x}: there is no access {access}; take SLAT_READ, SLAT_WRITE or SLAT_EXECUTE");
                return Err(refused(libc::EINVAL, &text));
            }
        };
        vcpu.fault(Gpa(gpa), access)
    })
}
