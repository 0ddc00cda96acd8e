//! Instruction-set extensions that the software CPU has beyond the x86-64 baseline, as CPUID bits.

/// XSAVE, in leaf 1 ECX.
pub const XSAVE: u32 = 1 << 26;
/// Leaf 1 ECX: SSE3, SSSE3, SSE4.1, SSE4.2, MOVBE, POPCNT as far as they work.
pub const LEAF1_ECX: u32 = 1 << 23;
/// Leaf 7 EBX.
pub const LEAF7_EBX: u32 = 0;
/// Leaf 7 ECX.
pub const LEAF7_ECX: u32 = 0;
/// Leaf 0x8000_0001 ECX.
pub const EXT1_ECX: u32 = 0;
