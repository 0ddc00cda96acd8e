//! The stubs of instructions without VEX that are not in [`pairs`], and of MMX instructions: the host's instruction for
//! each mnemonic, one per line.

use core::arch::naked_asm;

use iced_x86::Mnemonic as M;

use super::forms::{Kind, imm_stub, legacy_row, stub};
use super::host::Stub;
use super::pairs;

/// Returns the stub of an instruction whose operands are all XMM registers or memory.
pub(super) fn xmm(mnemonic: M) -> Option<(Kind, Stub)> {
    pairs::legacy(mnemonic).or_else(|| sha(mnemonic))
}

macro_rules! sha {
    ($($kind:ident $form:ident { $($mnemonic:ident),+ $(,)? })+) => {
        pub(super) const SHA: &[M] = &[$($(M::$mnemonic),+),+];

        fn sha(mnemonic: M) -> Option<(Kind, Stub)> {
            Some(match mnemonic {
                $($(M::$mnemonic => (Kind::$kind, legacy_row!($form stringify!($mnemonic))),)+)+
                _ => return None,
            })
        }
    };
}

sha! {
    Int v2 { Sha1nexte, Sha1msg1, Sha1msg2, Sha256msg1, Sha256msg2 }
    Int v2i { Sha1rnds4 }
    ImplicitXmm0 v4 { Sha256rnds2 }
}

macro_rules! shifts {
    ($($mnemonic:ident),+ $(,)?) => {
        pub(super) const SHIFTS: &[M] = &[$(M::$mnemonic),+];

        /// Returns the stub of a shift of an XMM register by a constant.
        pub(super) fn shift(mnemonic: M) -> Option<Stub> {
            Some(match mnemonic {
                $(M::$mnemonic => imm_stub!(concat!(stringify!($mnemonic), " $slat_imm, %xmm0")),)+
                _ => return None,
            })
        }
    };
}

shifts! {
    Psllw, Pslld, Psllq, Psrlw, Psrld, Psrlq,
    Psraw, Psrad, Pslldq, Psrldq,
}

macro_rules! strings {
    ($($mnemonic:ident $text:literal),+ $(,)?) => {
        pub(super) const STRINGS: &[M] = &[$(M::$mnemonic),+];

        /// Returns the stub of a string comparison.
        pub(super) fn string(mnemonic: M) -> Option<Stub> {
            Some(match mnemonic {
                $(M::$mnemonic => imm_stub!($text),)+
                _ => return None,
            })
        }
    };
}

strings! {
    Pcmpestri "pcmpestri $slat_imm, %xmm1, %xmm0", Pcmpestrm "pcmpestrm $slat_imm, %xmm1, %xmm0",
    Pcmpistri "pcmpistri $slat_imm, %xmm1, %xmm0", Pcmpistrm "pcmpistrm $slat_imm, %xmm1, %xmm0",
    // The forms with 64-bit lengths (REX.W) are written as bytes, because the assembler has no names for them.
    Pcmpestri64 ".byte 0x66, 0x48, 0x0f, 0x3a, 0x61, 0xc1, slat_imm",
    Pcmpestrm64 ".byte 0x66, 0x48, 0x0f, 0x3a, 0x60, 0xc1, slat_imm",
}

/// Defines functions that return the stub of an instruction with a general register, or memory, of `bytes` bytes.
macro_rules! gprs {
    ($($(#[$doc:meta])* $name:ident { $($mnemonic:ident $size:literal $text:literal),+ $(,)? })+) => {
        $($(#[$doc])*
        pub(super) fn $name(mnemonic: M, size: usize) -> Option<Stub> {
            Some(match (mnemonic, size) {
                $((M::$mnemonic, $size) => stub!($text),)+
                _ => return None,
            })
        })+
    };
}
pub(super) use gprs;

gprs! {
    /// Conversions from a general register of `bytes` bytes.
    from_gpr {
        Cvtsi2ss 4 "cvtsi2ss xmm0, eax", Cvtsi2ss 8 "cvtsi2ss xmm0, rax",
        Cvtsi2sd 4 "cvtsi2sd xmm0, eax", Cvtsi2sd 8 "cvtsi2sd xmm0, rax",
    }
    /// Conversions to a general register of `bytes` bytes.
    to_gpr {
        Cvtss2si 4 "cvtss2si eax, xmm1", Cvtss2si 8 "cvtss2si rax, xmm1",
        Cvttss2si 4 "cvttss2si eax, xmm1", Cvttss2si 8 "cvttss2si rax, xmm1",
        Cvtsd2si 4 "cvtsd2si eax, xmm1", Cvtsd2si 8 "cvtsd2si rax, xmm1",
        Cvttsd2si 4 "cvttsd2si eax, xmm1", Cvttsd2si 8 "cvttsd2si rax, xmm1",
    }
    /// Moves of sign bits to a general register.
    signs {
        Movmskps 4 "movmskps eax, xmm1", Movmskpd 4 "movmskpd eax, xmm1", Pmovmskb 4 "pmovmskb eax, xmm1",
    }
}

macro_rules! mmx {
    ($($form:ident { $($mnemonic:ident),+ $(,)? })+) => {
        /// Returns the stub of an instruction with an MMX operand. Its mnemonic is the same as with XMM registers, but
        /// the stub uses MMX registers.
        pub(super) fn mmx(mnemonic: M) -> Option<Stub> {
            Some(match mnemonic {
                $($(M::$mnemonic => mmx!(@$form stringify!($mnemonic)),)+)+
                _ => return None,
            })
        }
    };
    (@both $text:expr) => { stub!(concat!($text, " mm0, mm1")) };
    (@imm $text:expr) => { imm_stub!(concat!($text, " $slat_imm, %mm1, %mm0")) };
    (@to_xmm $text:expr) => { stub!(concat!($text, " xmm0, mm1")) };
    (@from_xmm $text:expr) => { stub!(concat!($text, " mm0, xmm1")) };
    (@to_gpr $text:expr) => { stub!(concat!($text, " eax, mm1")) };
}

mmx! {
    both {
        Paddb, Paddw, Paddd, Paddq,
        Paddsb, Paddsw, Paddusb, Paddusw,
        Psubb, Psubw, Psubd, Psubq,
        Psubsb, Psubsw, Psubusb, Psubusw,
        Pmullw, Pmulhw, Pmulhuw, Pmuludq, Pmaddwd,
        Pmulhrsw, Pmaddubsw,
        Pavgb, Pavgw, Psadbw,
        Pabsb, Pabsw, Pabsd,
        Psignb, Psignw, Psignd,
        Phaddw, Phaddd, Phaddsw,
        Phsubw, Phsubd, Phsubsw,
        Pminub, Pminsw, Pmaxub, Pmaxsw,
        Pand, Pandn, Por, Pxor,
        Pcmpeqb, Pcmpeqw, Pcmpeqd,
        Pcmpgtb, Pcmpgtw, Pcmpgtd,
        Psllw, Pslld, Psllq,
        Psrlw, Psrld, Psrlq, Psraw, Psrad,
        Packsswb, Packssdw, Packuswb,
        Punpcklbw, Punpcklwd, Punpckldq,
        Punpckhbw, Punpckhwd, Punpckhdq,
        Pshufb, Movq,
    }
    imm { Pshufw, Palignr }
    to_xmm { Cvtpi2ps, Cvtpi2pd, Movq2dq }
    from_xmm {
        Cvtps2pi, Cvttps2pi, Cvtpd2pi, Cvttpd2pi, Movdq2q,
    }
    to_gpr { Pmovmskb }
}

macro_rules! mmx_shifts {
    ($($mnemonic:ident),+ $(,)?) => {
        /// Returns the stub of a shift of an MMX register by a constant.
        pub(super) fn mmx_shift(mnemonic: M) -> Option<Stub> {
            Some(match mnemonic {
                $(M::$mnemonic => imm_stub!(concat!(stringify!($mnemonic), " $slat_imm, %mm0")),)+
                _ => return None,
            })
        }
    };
}

mmx_shifts! {
    Psllw, Pslld, Psllq, Psrlw, Psrld, Psrlq,
    Psraw, Psrad,
}
