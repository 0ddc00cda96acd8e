//! Macros that make the stubs in the instruction tables, and the kinds of stubs. A stub is a function that executes one
//! SIMD instruction on the host.

use super::lanes::Lanes;

/// The kind of a stub, which determines how the stub is called.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Kind {
    /// The instruction is on integers or bits, so MXCSR has no effect.
    Int,
    /// The instruction is on floating-point numbers, and uses MXCSR. [`Lanes`] says which elements of the result can
    /// underflow.
    Float(Lanes),
    /// The instruction sets ZF, PF and CF, and changes no vector register (PTEST).
    IntFlags,
    /// The instruction sets ZF, PF and CF, uses MXCSR, and changes no vector register (COMISS and its variants).
    FloatFlags,
    /// The instruction reads XMM0 in addition to its operands.
    ImplicitXmm0,
}

/// Returns the kind of stub for the name of a group of rows.
macro_rules! kind {
    (Int) => {
        Kind::Int
    };
    (IntFlags) => {
        Kind::IntFlags
    };
    (FloatFlags) => {
        Kind::FloatFlags
    };
    ($lanes:ident) => {
        Kind::Float(Lanes::$lanes)
    };
}
pub(super) use kind;

macro_rules! stub {
    ($($line:expr),+) => {{
        #[unsafe(naked)]
        unsafe extern "C" fn stub() {
            naked_asm!($($line,)+ "ret")
        }
        stub as Stub
    }};
}
pub(super) use stub;

/// Defines a stub for an instruction with an immediate. The immediate is part of the instruction, so the stub has 256
/// copies of the instruction, eight bytes apart. It is written in AT&T syntax, in which the immediate can be a symbol
/// that the assembler increments.
macro_rules! imm_stub {
    ($op:expr) => {{
        #[unsafe(naked)]
        unsafe extern "C" fn stub() {
            naked_asm!(
                "leaq 2f(%rip), %r8",
                "leaq (%r8, %rcx, 8), %r8",
                "jmp *%r8",
                ".balign 8",
                "2:",
                ".set slat_imm, 0",
                ".rept 256",
                $op,
                "ret",
                ".balign 8",
                ".set slat_imm, slat_imm + 1",
                ".endr",
                options(att_syntax)
            )
        }
        stub as Stub
    }};
}
pub(super) use imm_stub;

/// Makes the stub of one row's instruction with a VEX prefix, for 128 bits (`false`) or 256 bits (`true`). Operand `k`
/// is in register `k`.
macro_rules! row {
    // Instructions with two or three operands of the vector's size.
    (v2 false $text:expr) => { stub!(concat!($text, " xmm0, xmm1")) };
    (v2 true $text:expr) => { stub!(concat!($text, " ymm0, ymm1")) };
    (v3 false $text:expr) => { stub!(concat!($text, " xmm0, xmm1, xmm2")) };
    (v3 true $text:expr) => { stub!(concat!($text, " ymm0, ymm1, ymm2")) };
    (v4 false $text:expr) => { stub!(concat!($text, " xmm0, xmm1, xmm2, xmm3")) };
    (v4 true $text:expr) => { stub!(concat!($text, " ymm0, ymm1, ymm2, ymm3")) };
    // Instructions that exist only for 128 bits, such as scalar instructions.
    (x2 false $text:expr) => { row!(v2 false $text) };
    (x3 false $text:expr) => { row!(v3 false $text) };
    // Instructions that exist only for 256 bits.
    (y3 true $text:expr) => { row!(v3 true $text) };
    // Instructions whose source is half as large as their result, or twice as large.
    (widen false $text:expr) => { row!(v2 false $text) };
    (widen true $text:expr) => { stub!(concat!($text, " ymm0, xmm1")) };
    (narrow false $text:expr) => { row!(v2 false $text) };
    (narrow true $text:expr) => { stub!(concat!($text, " xmm0, ymm1")) };
    // Instructions whose last operand is a count of 64 bits.
    (shift false $text:expr) => { row!(v3 false $text) };
    (shift true $text:expr) => { stub!(concat!($text, " ymm0, ymm1, xmm2")) };
    // Instructions with an immediate as their last operand.
    (v2i false $text:expr) => { imm_stub!(concat!($text, " $slat_imm, %xmm1, %xmm0")) };
    (v2i true $text:expr) => { imm_stub!(concat!($text, " $slat_imm, %ymm1, %ymm0")) };
    (v3i false $text:expr) => { imm_stub!(concat!($text, " $slat_imm, %xmm2, %xmm1, %xmm0")) };
    (v3i true $text:expr) => { imm_stub!(concat!($text, " $slat_imm, %ymm2, %ymm1, %ymm0")) };
    (x2i false $text:expr) => { row!(v2i false $text) };
    (x3i false $text:expr) => { row!(v3i false $text) };
    (y2i true $text:expr) => { row!(v2i true $text) };
    (y3i true $text:expr) => { row!(v3i true $text) };
    (narrow_i false $text:expr) => { row!(v2i false $text) };
    (narrow_i true $text:expr) => { row!(extract true $text) };
    (extract true $text:expr) => { imm_stub!(concat!($text, " $slat_imm, %ymm1, %xmm0")) };
    (insert true $text:expr) => { imm_stub!(concat!($text, " $slat_imm, %xmm2, %ymm1, %ymm0")) };
    // Broadcasts: all elements of the result are copies of the source's first element, or of its first 128 bits. They
    // consist of other instructions, because hosts without AVX2 cannot broadcast from a register.
    (broadcast32 false $text:expr) => { stub!("vshufps xmm0, xmm1, xmm1, 0") };
    (broadcast32 true $text:expr) => { stub!("vshufps xmm0, xmm1, xmm1, 0", "vinsertf128 ymm0, ymm0, xmm0, 1") };
    (broadcast64 true $text:expr) => { stub!("vmovddup xmm0, xmm1", "vinsertf128 ymm0, ymm0, xmm0, 1") };
    (broadcast128 true $text:expr) => { stub!("vinsertf128 ymm0, ymm1, xmm1, 1") };
    // No other combination of form and width exists.
    ($form:ident $wide:ident $text:expr) => { return None };
}
pub(super) use row;

/// Whether the instructions of a form compute each 128-bit half of a 256-bit vector on its own.
#[cfg(feature = "jit")]
macro_rules! by_halves {
    (v2) => {
        true
    };
    (v3) => {
        true
    };
    (v4) => {
        true
    };
    (v2i) => {
        true
    };
    (v3i) => {
        true
    };
    ($form:ident) => {
        false
    };
}
#[cfg(feature = "jit")]
pub(super) use by_halves;

/// Makes the stub of one row's instruction without a VEX prefix, from the form with the prefix. The first operand is
/// also the first source. If the form has four operands, the last one is XMM0.
macro_rules! legacy_row {
    (v2i $text:expr) => { imm_stub!(concat!($text, " $slat_imm, %xmm1, %xmm0")) };
    (v3i $text:expr) => { legacy_row!(v2i $text) };
    (x2i $text:expr) => { legacy_row!(v2i $text) };
    (x3i $text:expr) => { legacy_row!(v2i $text) };
    (v4 $text:expr) => {
        stub!("movdqa xmm3, xmm0", "movdqa xmm0, xmm2", concat!($text, " xmm3, xmm1"), "movdqa xmm0, xmm3")
    };
    ($form:ident $text:expr) => { stub!(concat!($text, " xmm0, xmm1")) };
}
pub(super) use legacy_row;
