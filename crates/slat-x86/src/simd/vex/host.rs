//! Executes one VEX-encoded instruction on the host CPU.
//!
//! Each VEX-encoded instruction has a stub with fixed registers, like an SSE instruction without VEX. All 256 bits of
//! the registers are passed to the stub. The instruction itself determines whether it uses the upper halves of its
//! sources, and whether it clears the upper half of its destination. The functions here clear the upper halves of the
//! host's registers before they return, because SSE code without VEX would be slower otherwise.

use core::arch::asm;

/// A stub: code with the following calling convention. Operand 0 (in and out) is in ymm0, operands 1 to 3 in ymm1 to
/// ymm3, an immediate in rcx, and a general register operand (in and out) in rax. The code may change r8.
pub(super) use super::super::host::{Entry, Stub};
use super::super::host::{MASKS, load_guest_mxcsr, load_host_mxcsr};

/// The value of a YMM register: first bits 127 to 0, then bits 255 to 128.
pub(super) type Ymm = [u128; 2];

/// The operands of a stub before the call, and its results after it.
#[derive(Default)]
#[repr(C)]
pub(super) struct Work {
    pub v: [Ymm; 4],
    pub gpr: u64,
    pub imm: u8,
}

/// Runs `$before`, a stub, and `$after`. Loads and stores each register in two halves, because other code writes the
/// memory in halves, too.
macro_rules! call {
    ($stub:ident, $work:ident, [$($before:expr,)*], [$($after:expr,)*], $($operands:tt)*) => {
        asm!(
            "vmovdqu xmm0, [{work}]", "vinsertf128 ymm0, ymm0, [{work} + 16], 1",
            "vmovdqu xmm1, [{work} + 32]", "vinsertf128 ymm1, ymm1, [{work} + 48], 1",
            "vmovdqu xmm2, [{work} + 64]", "vinsertf128 ymm2, ymm2, [{work} + 80], 1",
            "vmovdqu xmm3, [{work} + 96]", "vinsertf128 ymm3, ymm3, [{work} + 112], 1",
            $($before,)*
            "call {stub}",
            "pushfq",
            "pop rdx",
            $($after,)*
            "vmovdqu [{work}], xmm0", "vextractf128 [{work} + 16], ymm0, 1",
            "vzeroupper",
            stub = in(reg) $stub.0, work = in(reg) &raw mut $work.v, inout("rax") $work.gpr,
            in("rcx") u64::from($work.imm), out("r8") _,
            // VZEROUPPER changes all vector registers, which matters if this crate is compiled with AVX.
            out("xmm0") _, out("xmm1") _, out("xmm2") _, out("xmm3") _, out("xmm4") _, out("xmm5") _, out("xmm6") _,
            out("xmm7") _, out("xmm8") _, out("xmm9") _, out("xmm10") _, out("xmm11") _, out("xmm12") _,
            out("xmm13") _, out("xmm14") _, out("xmm15") _,
            $($operands)*
        )
    };
}

/// Runs an integer instruction. Returns the arithmetic flags that it has set.
#[inline(always)]
pub(super) fn int(stub: Entry, work: &mut Work) -> u64 {
    let flags: u64;
    // SAFETY: a stub keeps the convention of [`Stub`]. This block names all registers of the convention, and balances
    // the stack. A stub is called only if the host has its instruction, and therefore AVX.
    unsafe { call!(stub, work, [], [], out("rdx") flags) };
    flags
}

/// Runs a floating-point instruction with the guest's MXCSR, like [`float`](super::super::host::float). `mxcsr` must
/// mask all exceptions. Returns the arithmetic flags that the instruction has set.
#[inline(always)]
pub(super) fn float(stub: Entry, work: &mut Work, mxcsr: &mut u32) -> u64 {
    debug_assert_eq!(*mxcsr & MASKS, MASKS);
    let mut host = 0u32;
    let flags: u64;
    // SAFETY: a stub keeps the convention of [`Stub`]. This block names all registers of the convention, and restores
    // MXCSR's control bits. The host has AVX, because it has the stub's instruction.
    unsafe {
        call!(stub, work, [load_guest_mxcsr!(),], [load_host_mxcsr!(),],
            guest = in(reg) mxcsr, host = in(reg) &raw mut host, out("rdx") flags)
    };
    flags
}
