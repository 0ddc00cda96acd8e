//! The CPU state on which decoding depends, as bits. It is part of a block's key.

/// The default operand and address size. Its values are [`BITS_16`], [`BITS_32`], [`BITS_64`] and [`FLAT_32`].
pub const BITS: u8 = 3;
pub const BITS_16: u8 = 0;
pub const BITS_32: u8 = 1;
pub const BITS_64: u8 = 2;
/// 32-bit code with flat segments: offsets in ES, CS, SS and DS are linear addresses, and need no check of a limit. The
/// stack pointer has 32 bits.
pub const FLAT_32: u8 = 3;
/// SSE instructions raise #UD (CR0.EM is set, or CR4.OSFXSR is clear).
pub const NO_SSE: u8 = 1 << 2;
/// x87 instructions raise #NM (CR0.EM is set).
pub const NO_X87: u8 = 1 << 3;
/// x87 and SSE instructions raise #NM (CR0.TS is set).
pub const TASK_SWITCHED: u8 = 1 << 4;
/// The CPL is 3. Because of this bit, user code and supervisor code have different keys.
pub const USER: u8 = 1 << 5;
/// VEX-encoded vector instructions raise #UD (CR4.OSXSAVE or a bit of XCR0 is clear, or the mode has no VEX prefix).
pub const NO_AVX: u8 = 1 << 6;
/// VEX prefixes raise #UD (real mode and virtual-8086 mode).
pub const NO_VEX: u8 = 1 << 7;

/// Returns a mode's address size in bits. Outside 64-bit mode, it is also the default operand size.
pub fn width(mode: u8) -> u32 {
    match mode & BITS {
        BITS_16 => 16,
        BITS_64 => 64,
        _ => 32,
    }
}

/// Whether segments have bases and limits: offsets in ES, CS, SS and DS are not linear addresses.
#[cfg(feature = "jit")]
pub fn has_segments(mode: u8) -> bool {
    matches!(mode & BITS, BITS_16 | BITS_32)
}

/// Whether segment bases are 16 times the selector, as in real mode and virtual-8086 mode.
#[cfg(feature = "jit")]
pub fn has_paragraphs(mode: u8) -> bool {
    mode & NO_VEX != 0
}

/// Returns the mask of a linear address: 32 or 64 bits.
#[cfg(feature = "jit")]
pub fn linear(mode: u8) -> u64 {
    match mode & BITS {
        BITS_64 => u64::MAX,
        _ => 0xffff_ffff,
    }
}
