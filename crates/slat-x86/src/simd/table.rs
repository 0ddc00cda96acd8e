//! Which host instruction executes each mnemonic: one line per mnemonic.

use core::arch::naked_asm;

use iced_x86::Mnemonic as M;

use super::host::Stub;

/// How a stub is to be called.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Kind {
    /// Bits in, bits out; MXCSR has no effect.
    Int,
    /// Rounds or raises floating-point exceptions.
    Float,
    /// Sets ZF, PF, CF and changes no register (PTEST).
    IntFlags,
    /// Sets ZF, PF, CF under MXCSR and changes no register (COMISS and its variants).
    FloatFlags,
    /// Reads XMM0 besides its operands.
    ImplicitXmm0,
}

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

/// Defines a stub with an immediate. The immediate is part of the instruction, so there are 256 stubs, eight bytes apart. AT&T
/// syntax, in which a counting symbol can be an immediate.
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

macro_rules! table {
    ($($kind:ident $form:ident { $($mnemonic:ident $text:literal),+ $(,)? })+) => {
        /// Returns the stub of an instruction whose operands are all in XMM registers or memory.
        pub(super) fn xmm(mnemonic: M) -> Option<(Kind, Stub)> {
            Some(match mnemonic {
                $($(M::$mnemonic => (Kind::$kind, table!(@$form $text)),)+)+
                _ => return None,
            })
        }
    };
    (@plain $text:literal) => { stub!(concat!($text, " xmm0, xmm1")) };
    (@imm $text:literal) => { imm_stub!(concat!($text, " $slat_imm, %xmm1, %xmm0")) };
    (@xmm0 $text:literal) => {
        stub!("movdqa xmm3, xmm0", "movdqa xmm0, xmm2", concat!($text, " xmm3, xmm1"), "movdqa xmm0, xmm3")
    };
}

table! {
    Int plain {
        // Integer arithmetic.
        Paddb "paddb", Paddw "paddw", Paddd "paddd", Paddq "paddq",
        Paddsb "paddsb", Paddsw "paddsw", Paddusb "paddusb", Paddusw "paddusw",
        Psubb "psubb", Psubw "psubw", Psubd "psubd", Psubq "psubq",
        Psubsb "psubsb", Psubsw "psubsw", Psubusb "psubusb", Psubusw "psubusw",
        Pmullw "pmullw", Pmulhw "pmulhw", Pmulhuw "pmulhuw", Pmuludq "pmuludq", Pmaddwd "pmaddwd",
        Pmulld "pmulld", Pmuldq "pmuldq", Pmulhrsw "pmulhrsw", Pmaddubsw "pmaddubsw",
        Pavgb "pavgb", Pavgw "pavgw", Psadbw "psadbw",
        Pabsb "pabsb", Pabsw "pabsw", Pabsd "pabsd",
        Psignb "psignb", Psignw "psignw", Psignd "psignd",
        Phaddw "phaddw", Phaddd "phaddd", Phaddsw "phaddsw",
        Phsubw "phsubw", Phsubd "phsubd", Phsubsw "phsubsw",
        Phminposuw "phminposuw",
        Pminub "pminub", Pminsw "pminsw", Pminsb "pminsb", Pminuw "pminuw", Pminsd "pminsd", Pminud "pminud",
        Pmaxub "pmaxub", Pmaxsw "pmaxsw", Pmaxsb "pmaxsb", Pmaxuw "pmaxuw", Pmaxsd "pmaxsd", Pmaxud "pmaxud",
        // Logic and comparison.
        Pand "pand", Pandn "pandn", Por "por", Pxor "pxor",
        Andps "andps", Andnps "andnps", Orps "orps", Xorps "xorps",
        Andpd "andpd", Andnpd "andnpd", Orpd "orpd", Xorpd "xorpd",
        Pcmpeqb "pcmpeqb", Pcmpeqw "pcmpeqw", Pcmpeqd "pcmpeqd", Pcmpeqq "pcmpeqq",
        Pcmpgtb "pcmpgtb", Pcmpgtw "pcmpgtw", Pcmpgtd "pcmpgtd", Pcmpgtq "pcmpgtq",
        // Shifts by a count in a register.
        Psllw "psllw", Pslld "pslld", Psllq "psllq",
        Psrlw "psrlw", Psrld "psrld", Psrlq "psrlq",
        Psraw "psraw", Psrad "psrad",
        // Order of elements.
        Packsswb "packsswb", Packssdw "packssdw", Packuswb "packuswb", Packusdw "packusdw",
        Punpcklbw "punpcklbw", Punpcklwd "punpcklwd", Punpckldq "punpckldq", Punpcklqdq "punpcklqdq",
        Punpckhbw "punpckhbw", Punpckhwd "punpckhwd", Punpckhdq "punpckhdq", Punpckhqdq "punpckhqdq",
        Unpcklps "unpcklps", Unpckhps "unpckhps", Unpcklpd "unpcklpd", Unpckhpd "unpckhpd",
        Pshufb "pshufb",
        Movhlps "movhlps", Movlhps "movlhps",
        Movddup "movddup", Movshdup "movshdup", Movsldup "movsldup",
        Pmovsxbw "pmovsxbw", Pmovsxbd "pmovsxbd", Pmovsxbq "pmovsxbq",
        Pmovsxwd "pmovsxwd", Pmovsxwq "pmovsxwq", Pmovsxdq "pmovsxdq",
        Pmovzxbw "pmovzxbw", Pmovzxbd "pmovzxbd", Pmovzxbq "pmovzxbq",
        Pmovzxwd "pmovzxwd", Pmovzxwq "pmovzxwq", Pmovzxdq "pmovzxdq",
        // Approximations and an exact conversion: neither rounds by MXCSR nor raises anything.
        Rcpps "rcpps", Rcpss "rcpss", Rsqrtps "rsqrtps", Rsqrtss "rsqrtss",
        Cvtdq2pd "cvtdq2pd",
        // Cryptography.
        Aesenc "aesenc", Aesenclast "aesenclast", Aesdec "aesdec", Aesdeclast "aesdeclast", Aesimc "aesimc",
        Sha1nexte "sha1nexte", Sha1msg1 "sha1msg1", Sha1msg2 "sha1msg2",
        Sha256msg1 "sha256msg1", Sha256msg2 "sha256msg2",
    }
    Int imm {
        Pshufd "pshufd", Pshufhw "pshufhw", Pshuflw "pshuflw", Shufps "shufps", Shufpd "shufpd",
        Palignr "palignr", Pblendw "pblendw", Blendps "blendps", Blendpd "blendpd",
        Mpsadbw "mpsadbw", Insertps "insertps",
        Pclmulqdq "pclmulqdq", Aeskeygenassist "aeskeygenassist", Sha1rnds4 "sha1rnds4",
    }
    ImplicitXmm0 xmm0 {
        Pblendvb "pblendvb", Blendvps "blendvps", Blendvpd "blendvpd", Sha256rnds2 "sha256rnds2",
    }
    IntFlags plain { Ptest "ptest" }
    Float plain {
        Addps "addps", Addpd "addpd", Addss "addss", Addsd "addsd",
        Subps "subps", Subpd "subpd", Subss "subss", Subsd "subsd",
        Mulps "mulps", Mulpd "mulpd", Mulss "mulss", Mulsd "mulsd",
        Divps "divps", Divpd "divpd", Divss "divss", Divsd "divsd",
        Minps "minps", Minpd "minpd", Minss "minss", Minsd "minsd",
        Maxps "maxps", Maxpd "maxpd", Maxss "maxss", Maxsd "maxsd",
        Sqrtps "sqrtps", Sqrtpd "sqrtpd", Sqrtss "sqrtss", Sqrtsd "sqrtsd",
        Addsubps "addsubps", Addsubpd "addsubpd",
        Haddps "haddps", Haddpd "haddpd", Hsubps "hsubps", Hsubpd "hsubpd",
        Cvtps2pd "cvtps2pd", Cvtpd2ps "cvtpd2ps", Cvtss2sd "cvtss2sd", Cvtsd2ss "cvtsd2ss",
        Cvtdq2ps "cvtdq2ps", Cvtps2dq "cvtps2dq", Cvttps2dq "cvttps2dq",
        Cvtpd2dq "cvtpd2dq", Cvttpd2dq "cvttpd2dq",
    }
    Float imm {
        Cmpps "cmpps", Cmppd "cmppd", Cmpss "cmpss", Cmpsd "cmpsd",
        Roundps "roundps", Roundpd "roundpd", Roundss "roundss", Roundsd "roundsd",
        Dpps "dpps", Dppd "dppd",
    }
    FloatFlags plain { Comiss "comiss", Comisd "comisd", Ucomiss "ucomiss", Ucomisd "ucomisd" }
}

macro_rules! shifts {
    ($($mnemonic:ident $text:literal),+ $(,)?) => {
        /// Returns the stub of a shift of one register by a constant.
        pub(super) fn shift(mnemonic: M) -> Option<Stub> {
            Some(match mnemonic {
                $(M::$mnemonic => imm_stub!(concat!($text, " $slat_imm, %xmm0")),)+
                _ => return None,
            })
        }
    };
}

shifts! {
    Psllw "psllw", Pslld "pslld", Psllq "psllq", Psrlw "psrlw", Psrld "psrld", Psrlq "psrlq",
    Psraw "psraw", Psrad "psrad", Pslldq "pslldq", Psrldq "psrldq",
}

macro_rules! strings {
    ($($mnemonic:ident $text:literal),+ $(,)?) => {
        /// Returns the stub of a string comparison, which has several results.
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
    // Instructions with 64-bit lengths (REX.W), for which the assembler has no name.
    Pcmpestri64 ".byte 0x66, 0x48, 0x0f, 0x3a, 0x61, 0xc1, slat_imm",
    Pcmpestrm64 ".byte 0x66, 0x48, 0x0f, 0x3a, 0x60, 0xc1, slat_imm",
}

/// Defines functions that return the stub of an instruction and an operand of the given bytes.
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
    /// Conversions of a general register of the given bytes.
    from_gpr {
        Cvtsi2ss 4 "cvtsi2ss xmm0, eax", Cvtsi2ss 8 "cvtsi2ss xmm0, rax",
        Cvtsi2sd 4 "cvtsi2sd xmm0, eax", Cvtsi2sd 8 "cvtsi2sd xmm0, rax",
    }
    /// Conversions to a general register of the given bytes.
    to_gpr {
        Cvtss2si 4 "cvtss2si eax, xmm1", Cvtss2si 8 "cvtss2si rax, xmm1",
        Cvttss2si 4 "cvttss2si eax, xmm1", Cvttss2si 8 "cvttss2si rax, xmm1",
        Cvtsd2si 4 "cvtsd2si eax, xmm1", Cvtsd2si 8 "cvtsd2si rax, xmm1",
        Cvttsd2si 4 "cvttsd2si eax, xmm1", Cvttsd2si 8 "cvttsd2si rax, xmm1",
    }
    /// Sign bits gathered in a general register.
    signs {
        Movmskps 4 "movmskps eax, xmm1", Movmskpd 4 "movmskpd eax, xmm1", Pmovmskb 4 "pmovmskb eax, xmm1",
    }
}

macro_rules! mmx {
    ($($form:ident { $($mnemonic:ident $text:literal),+ $(,)? })+) => {
        /// Returns the stub of an instruction with an MMX operand: the names of the XMM instructions, on the older registers.
        pub(super) fn mmx(mnemonic: M) -> Option<Stub> {
            Some(match mnemonic {
                $($(M::$mnemonic => mmx!(@$form $text),)+)+
                _ => return None,
            })
        }
    };
    (@both $text:literal) => { stub!(concat!($text, " mm0, mm1")) };
    (@imm $text:literal) => { imm_stub!(concat!($text, " $slat_imm, %mm1, %mm0")) };
    (@to_xmm $text:literal) => { stub!(concat!($text, " xmm0, mm1")) };
    (@from_xmm $text:literal) => { stub!(concat!($text, " mm0, xmm1")) };
    (@to_gpr $text:literal) => { stub!(concat!($text, " eax, mm1")) };
}

mmx! {
    both {
        Paddb "paddb", Paddw "paddw", Paddd "paddd", Paddq "paddq",
        Paddsb "paddsb", Paddsw "paddsw", Paddusb "paddusb", Paddusw "paddusw",
        Psubb "psubb", Psubw "psubw", Psubd "psubd", Psubq "psubq",
        Psubsb "psubsb", Psubsw "psubsw", Psubusb "psubusb", Psubusw "psubusw",
        Pmullw "pmullw", Pmulhw "pmulhw", Pmulhuw "pmulhuw", Pmuludq "pmuludq", Pmaddwd "pmaddwd",
        Pmulhrsw "pmulhrsw", Pmaddubsw "pmaddubsw",
        Pavgb "pavgb", Pavgw "pavgw", Psadbw "psadbw",
        Pabsb "pabsb", Pabsw "pabsw", Pabsd "pabsd",
        Psignb "psignb", Psignw "psignw", Psignd "psignd",
        Phaddw "phaddw", Phaddd "phaddd", Phaddsw "phaddsw",
        Phsubw "phsubw", Phsubd "phsubd", Phsubsw "phsubsw",
        Pminub "pminub", Pminsw "pminsw", Pmaxub "pmaxub", Pmaxsw "pmaxsw",
        Pand "pand", Pandn "pandn", Por "por", Pxor "pxor",
        Pcmpeqb "pcmpeqb", Pcmpeqw "pcmpeqw", Pcmpeqd "pcmpeqd",
        Pcmpgtb "pcmpgtb", Pcmpgtw "pcmpgtw", Pcmpgtd "pcmpgtd",
        Psllw "psllw", Pslld "pslld", Psllq "psllq",
        Psrlw "psrlw", Psrld "psrld", Psrlq "psrlq", Psraw "psraw", Psrad "psrad",
        Packsswb "packsswb", Packssdw "packssdw", Packuswb "packuswb",
        Punpcklbw "punpcklbw", Punpcklwd "punpcklwd", Punpckldq "punpckldq",
        Punpckhbw "punpckhbw", Punpckhwd "punpckhwd", Punpckhdq "punpckhdq",
        Pshufb "pshufb", Movq "movq",
    }
    imm { Pshufw "pshufw", Palignr "palignr" }
    to_xmm { Cvtpi2ps "cvtpi2ps", Cvtpi2pd "cvtpi2pd", Movq2dq "movq2dq" }
    from_xmm {
        Cvtps2pi "cvtps2pi", Cvttps2pi "cvttps2pi", Cvtpd2pi "cvtpd2pi", Cvttpd2pi "cvttpd2pi", Movdq2q "movdq2q",
    }
    to_gpr { Pmovmskb "pmovmskb" }
}

macro_rules! mmx_shifts {
    ($($mnemonic:ident $text:literal),+ $(,)?) => {
        /// Returns the stub of a shift of an MMX register by a constant.
        pub(super) fn mmx_shift(mnemonic: M) -> Option<Stub> {
            Some(match mnemonic {
                $(M::$mnemonic => imm_stub!(concat!($text, " $slat_imm, %mm0")),)+
                _ => return None,
            })
        }
    };
}

mmx_shifts! {
    Psllw "psllw", Pslld "pslld", Psllq "psllq", Psrlw "psrlw", Psrld "psrld", Psrlq "psrlq",
    Psraw "psraw", Psrad "psrad",
}
