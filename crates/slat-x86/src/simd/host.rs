//! Executes one SIMD instruction on the host CPU.
//!
//! Every supported mnemonic has a *stub*: the same instruction of the host with fixed registers, and a `ret`. The
//! functions here load the guest's operands into the stub's registers and call the stub. So the instruction is not
//! emulated: the hardware determines NaN payloads, rounding and exception flags.

use crate::state::MXCSR_MM;
use core::arch::asm;
use core::arch::x86_64::__m128i;

/// A stub: code with the following calling convention. The destination (in and out) is in xmm0, the source in xmm1, and
/// the guest's XMM0 in xmm2 if the instruction reads it implicitly. An immediate is in rcx, and a general register
/// operand (in and out) in rax. MMX operands are in mm0 and mm1. The code may change r8 and xmm3.
pub(crate) type Stub = unsafe extern "C" fn();

/// The address of a [`Stub`], as an operation stores it.
#[derive(Clone, Copy)]
pub(crate) struct Entry(pub u64);

/// The operands of a stub before the call, and its results after it.
pub(crate) struct Work {
    pub dst: u128,
    pub src: u128,
    pub gpr: u64,
    pub imm: u8,
}

fn to_host(v: u128) -> __m128i {
    // SAFETY: both types consist of 16 bytes of which every value is valid.
    unsafe { core::mem::transmute::<u128, __m128i>(v) }
}

fn from_host(v: __m128i) -> u128 {
    // SAFETY: both types consist of 16 bytes of which every value is valid.
    unsafe { core::mem::transmute::<__m128i, u128>(v) }
}

/// Runs an integer instruction on XMM registers.
#[inline(always)]
pub(crate) fn int(stub: Entry, dst: u128, src: u128, imm: u8) -> u128 {
    let mut d = to_host(dst);
    // SAFETY: a stub keeps the convention of [`Stub`]. This block names all registers of the convention.
    unsafe {
        asm!("call {stub}", stub = in(reg) stub.0, inout("xmm0") d, inout("xmm1") to_host(src) => _,
            out("xmm3") _, in("rcx") u64::from(imm), out("r8") _);
    }
    from_host(d)
}

/// Runs an integer instruction that also reads or writes a general register.
#[inline(always)]
pub(crate) fn int_gpr(stub: Entry, work: &mut Work) {
    let mut d = to_host(work.dst);
    // SAFETY: a stub keeps the convention of [`Stub`]. This block names all registers of the convention.
    unsafe {
        asm!("call {stub}", stub = in(reg) stub.0, inout("xmm0") d, inout("xmm1") to_host(work.src) => _,
            out("xmm3") _, in("rcx") u64::from(work.imm), out("r8") _, inout("rax") work.gpr);
    }
    work.dst = from_host(d);
}

/// Runs an instruction that reads XMM0 implicitly. Returns the destination.
pub(crate) fn implicit_xmm0(stub: Entry, dst: u128, src: u128, xmm0: u128) -> u128 {
    let mut d = to_host(dst);
    // SAFETY: a stub keeps the convention of [`Stub`]. This block names all registers of the convention.
    unsafe {
        asm!("call {stub}", stub = in(reg) stub.0, inout("xmm0") d, inout("xmm1") to_host(src) => _,
            in("xmm2") to_host(xmm0), out("xmm3") _, out("r8") _);
    }
    from_host(d)
}

/// Runs an integer instruction that only sets flags. Returns the flags.
pub(crate) fn int_flags(stub: Entry, dst: u128, src: u128) -> u64 {
    let flags: u64;
    // SAFETY: a stub keeps the convention of [`Stub`]. This block names all registers of the convention, and balances
    // the stack.
    unsafe {
        asm!("call {stub}", "pushfq", "pop rax", stub = in(reg) stub.0, inout("xmm0") to_host(dst) => _,
            inout("xmm1") to_host(src) => _, out("rax") flags);
    }
    flags
}

/// The results of a string comparison (PCMPESTRI and its variants). The stub gets the lengths in rax and rdx, and
/// returns an index in ecx or a mask in xmm0.
pub(crate) struct Strings {
    pub mask: u128,
    pub index: u32,
    pub flags: u64,
}

pub(crate) fn strings(stub: Entry, a: u128, b: u128, lengths: (u64, u64), imm: u8) -> Strings {
    let mut d = to_host(a);
    let index: u64;
    let flags: u64;
    // SAFETY: a stub keeps the convention of [`Stub`], except that rdx is a second length and ecx a result. This block
    // names all these registers.
    unsafe {
        asm!("call {stub}", "pushfq", "pop rax", stub = in(reg) stub.0, inout("xmm0") d,
            inout("xmm1") to_host(b) => _, out("xmm3") _, inout("rcx") u64::from(imm) => index, out("r8") _,
            inout("rax") lengths.0 => flags, inout("rdx") lengths.1 => _);
    }
    Strings {
        mask: from_host(d),
        index: index as u32,
        flags,
    }
}

/// Runs an instruction on MMX registers; conversions also use XMM registers. `mm` has the destination and the source.
/// Leaves the host's MMX state empty, as Rust code expects it.
pub(crate) fn mmx(stub: Entry, mm: &mut [u64; 2], work: &mut Work, mxcsr: &mut u32) {
    let mut d = to_host(work.dst);
    let host = 0u32;
    // SAFETY: a stub keeps the convention of [`Stub`]. This block names all registers of the convention, and restores
    // MXCSR's control bits and the x87 tags.
    unsafe {
        asm!("stmxcsr [{host}]", "ldmxcsr [{guest}]",
            "movq mm0, [{mm}]", "movq mm1, [{mm} + 8]",
            "call {stub}",
            "movq [{mm}], mm0",
            "emms",
            "stmxcsr [{guest}]", "ldmxcsr [{host}]",
            stub = in(reg) stub.0, mm = in(reg) mm.as_mut_ptr(), guest = in(reg) mxcsr, host = in(reg) &raw const host,
            inout("xmm0") d, inout("xmm1") to_host(work.src) => _, out("xmm3") _,
            in("rcx") u64::from(work.imm), out("r8") _, inout("rax") work.gpr,
            out("mm0") _, out("mm1") _, out("st(0)") _, out("st(1)") _, out("st(2)") _, out("st(3)") _,
            out("st(4)") _, out("st(5)") _, out("st(6)") _, out("st(7)") _);
    }
    work.dst = from_host(d);
}

/// The sticky exception flags of MXCSR.
pub(crate) const FLAGS: u32 = 0x3f;
/// The exception masks of MXCSR. An exception whose mask is clear traps when it occurs.
pub(crate) const MASKS: u32 = 0x1f80;

/// The bits of the guest's MXCSR, other than masks and flags, that are left out of the host's MXCSR while a stub runs:
/// the host may lack the bit MM, which only affects memory operands.
pub(crate) const NOT_FOR_HOST: u32 = MXCSR_MM;

/// Whether the host may compute with the guest's MXCSR `mxcsr`: whether it masks all exceptions.
pub(crate) fn runs_on_host(mxcsr: u32) -> bool {
    mxcsr & (MASKS | NOT_FOR_HOST) == MASKS
}

/// Loads MXCSR. Returns its old value.
///
/// # Safety
/// The host has all bits of `new`, and `new` masks all exceptions. Rust code must not compute floating point until its
/// own control bits are loaded again.
#[cfg(feature = "jit")]
pub(crate) unsafe fn exchange_mxcsr(new: u32) -> u32 {
    let mut old = 0u32;
    // SAFETY: the host has all bits of `new`, which masks all exceptions, as this function's `# Safety` demands. Both
    // operands are local variables.
    unsafe {
        asm!("stmxcsr [{old}]", "ldmxcsr [{new}]", old = in(reg) &raw mut old, new = in(reg) &raw const new,
            options(nostack, preserves_flags))
    };
    old
}

/// When this value is dropped, restores the exception flags of the host's MXCSR, and clears the flags of the x87 unit.
/// The flags of MXCSR belong to the caller of the run, but guest instructions may have changed them.
pub(crate) struct HostFlags {
    mxcsr: u32,
}

impl HostFlags {
    pub(crate) fn keep() -> HostFlags {
        let mut mxcsr = 0u32;
        // SAFETY: the instruction stores MXCSR to a local variable.
        unsafe { asm!("stmxcsr [{}]", in(reg) &raw mut mxcsr, options(nostack, preserves_flags)) };
        HostFlags { mxcsr }
    }
}

impl Drop for HostFlags {
    fn drop(&mut self) {
        let mut now = 0u32;
        // SAFETY: the code stores MXCSR to a local variable, and loads the old value if it differs. (Comparing is
        // faster than loading.) The control bits are the same in both values. The x87 unit is empty, and Rust code does
        // not use its flags.
        unsafe {
            asm!(
                "stmxcsr [{now}]", "mov eax, [{now}]", "cmp eax, [{old}]", "je 2f", "ldmxcsr [{old}]", "2:",
                "fnstsw ax", "test al, 0x7f", "jz 3f", "fnclex", "3:",
                now = in(reg) &raw mut now, old = in(reg) &raw const self.mxcsr, out("eax") _, options(nostack)
            )
        };
    }
}

/// Stores the host's MXCSR to `{host}`. Loads the guest's MXCSR from `{guest}`, unless the register already has this
/// value. Changes r8.
macro_rules! load_guest_mxcsr {
    () => {
        "stmxcsr [{host}]
        mov r8d, [{guest}]
        cmp r8d, [{host}]
        je 2f
        ldmxcsr [{guest}]
        2:"
    };
}
pub(super) use load_guest_mxcsr;

/// Stores the guest's MXCSR to `{guest}`. If its control bits differ from those in `{host}`, loads MXCSR with the
/// control bits in `{host}` and the guest's flags. Changes r8.
macro_rules! load_host_mxcsr {
    () => {
        "stmxcsr [{guest}]
        mov r8d, [{guest}]
        and r8d, 0x3f
        and dword ptr [{host}], 0xffc0
        or r8d, [{host}]
        cmp r8d, [{guest}]
        je 3f
        mov [{host}], r8d
        ldmxcsr [{host}]
        3:"
    };
}
pub(super) use load_host_mxcsr;

/// Runs a floating-point instruction with the guest's MXCSR. `mxcsr` must mask all exceptions. The caller checks the
/// exception flags afterwards. Returns the arithmetic flags, which comparisons set.
///
/// Loading MXCSR takes longer than most of these instructions. So the load is skipped if the host's register already
/// has the guest's value. To make this the usual case, only the control bits are restored afterwards, and the guest's
/// sticky flags stay in the host's register. (Rust code allows any flags.)
#[inline(always)]
pub(crate) fn float(stub: Entry, work: &mut Work, mxcsr: &mut u32) -> u64 {
    debug_assert_eq!(*mxcsr & MASKS, MASKS);
    let mut d = to_host(work.dst);
    let mut host = 0u32;
    let flags: u64;
    // SAFETY: a stub keeps the convention of [`Stub`]. This block names all registers of the convention, restores
    // MXCSR's control bits, and balances the stack.
    unsafe {
        asm!(
            load_guest_mxcsr!(),
            "call {stub}",
            "pushfq",
            "pop rdx",
            load_host_mxcsr!(),
            stub = in(reg) stub.0, guest = in(reg) mxcsr, host = in(reg) &raw mut host,
            inout("xmm0") d, inout("xmm1") to_host(work.src) => _, out("xmm3") _,
            in("rcx") u64::from(work.imm), out("r8") _, inout("rax") work.gpr, out("rdx") flags);
    }
    work.dst = from_host(d);
    flags
}
