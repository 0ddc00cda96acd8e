//! The instructions that exist both without and with a VEX prefix. Each such pair has one row, which interpreter and
//! compiler use.
//!
//! A row begins with the two mnemonics, which are also their names in the host's assembler. The name of the row's group
//! says how the stubs are called ([`Kind`]), and which operands the form with VEX has (`forms::row`). After `=` is what
//! the instruction does, for the compiler, which translates it. For a row without this, the compiler emits a call of
//! the stub.

use core::arch::naked_asm;

#[cfg(feature = "jit")]
use super::forms::by_halves;
use super::forms::{Kind, imm_stub, kind, legacy_row, row, stub};
use super::host::Stub;
use super::lanes::Lanes;
#[cfg(feature = "jit")]
use super::meaning::{Each, Elements};
use iced_x86::Mnemonic as M;

/// Returns the kind of the stub without VEX, from the kind of the stub with VEX and its form.
macro_rules! legacy_kind {
    (Int v4) => {
        Kind::ImplicitXmm0
    };
    ($kind:ident $form:ident) => {
        kind!($kind)
    };
}

/// Whether the last operand of a form is an immediate.
macro_rules! has_immediate {
    (v2i) => {
        true
    };
    (v3i) => {
        true
    };
    (x2i) => {
        true
    };
    (x3i) => {
        true
    };
    ($form:ident) => {
        false
    };
}

macro_rules! pairs {
    ($($kind:ident $form:ident { $($legacy:ident $vex:ident $(= $each:ident $elements:ident)?),+ $(,)? })+) => {
        /// The mnemonics without VEX. The next constant is the mnemonics with VEX, in the same order.
        pub(super) const LEGACY: &[M] = &[$($(M::$legacy),+),+];
        pub(super) const VEX: &[M] = &[$($(M::$vex),+),+];

        /// Returns the stub of an instruction without VEX whose operands are all XMM registers or memory.
        pub(super) fn legacy(mnemonic: M) -> Option<(Kind, Stub)> {
            Some(match mnemonic {
                $($(M::$legacy => (legacy_kind!($kind $form), legacy_row!($form stringify!($legacy))),)+)+
                _ => return None,
            })
        }

        /// Returns the stub of an instruction with VEX, with or without an immediate; if `wide`, the stub for 256 bits.
        #[allow(unreachable_code, reason = "rows without one of the sizes")]
        pub(super) fn vex(mnemonic: M, wide: bool, immediate: bool) -> Option<(Kind, Stub)> {
            Some(match (mnemonic, wide) {
                $($((M::$vex, false) if has_immediate!($form) == immediate => {
                    (kind!($kind), row!($form false stringify!($vex)))
                }
                (M::$vex, true) if has_immediate!($form) == immediate => {
                    (kind!($kind), row!($form true stringify!($vex)))
                })+)+
                _ => return None,
            })
        }

        /// Whether the 256-bit form computes each 128-bit half like the 128-bit form: see
        /// [`simd::vex::table`](super::vex).
        #[cfg(feature = "jit")]
        pub(super) fn is_by_halves(mnemonic: M) -> bool {
            match mnemonic {
                $($(M::$vex => by_halves!($form),)+)+
                _ => false,
            }
        }

        /// Returns the operation that an instruction applies to each element of its two sources. `None`: the compiler
        /// cannot translate the instruction.
        #[cfg(feature = "jit")]
        pub(crate) fn meaning(mnemonic: M) -> Option<(Each, Elements)> {
            Some(match mnemonic {
                $($($(M::$legacy | M::$vex => (Each::$each, Elements::$elements),)?)+)+
                _ => return None,
            })
        }
    };
}

pairs! {
    Int v3 {
        // Integer arithmetic:
        Paddb Vpaddb = Add Bytes, Paddw Vpaddw = Add Words, Paddd Vpaddd = Add Doublewords, Paddq Vpaddq = Add Quadwords,
        Psubb Vpsubb = Subtract Bytes, Psubw Vpsubw = Subtract Words,
        Psubd Vpsubd = Subtract Doublewords, Psubq Vpsubq = Subtract Quadwords,
        Pmullw Vpmullw = Multiply Words, Pmulld Vpmulld = Multiply Doublewords,
        Pminsw Vpminsw = Min Words, Pminsd Vpminsd = Min Doublewords,
        Pmaxsw Vpmaxsw = Max Words, Pmaxsd Vpmaxsd = Max Doublewords,
        Pminub Vpminub = MinUnsigned Bytes, Pminud Vpminud = MinUnsigned Doublewords,
        Pmaxub Vpmaxub = MaxUnsigned Bytes, Pmaxud Vpmaxud = MaxUnsigned Doublewords,
        Pminsb Vpminsb, Pminuw Vpminuw, Pmaxsb Vpmaxsb, Pmaxuw Vpmaxuw,
        Paddsb Vpaddsb, Paddsw Vpaddsw, Paddusb Vpaddusb, Paddusw Vpaddusw,
        Psubsb Vpsubsb, Psubsw Vpsubsw, Psubusb Vpsubusb, Psubusw Vpsubusw,
        Pmulhw Vpmulhw, Pmulhuw Vpmulhuw, Pmuludq Vpmuludq, Pmaddwd Vpmaddwd,
        Pmuldq Vpmuldq, Pmulhrsw Vpmulhrsw, Pmaddubsw Vpmaddubsw,
        Pavgb Vpavgb, Pavgw Vpavgw, Psadbw Vpsadbw,
        Psignb Vpsignb, Psignw Vpsignw, Psignd Vpsignd,
        Phaddw Vphaddw, Phaddd Vphaddd, Phaddsw Vphaddsw, Phsubw Vphsubw, Phsubd Vphsubd, Phsubsw Vphsubsw,
        // Logic and comparison:
        Pand Vpand = And Bytes, Pandn Vpandn = AndNot Bytes, Por Vpor = Or Bytes, Pxor Vpxor = Xor Bytes,
        Andps Vandps = And Bytes, Andnps Vandnps = AndNot Bytes, Orps Vorps = Or Bytes, Xorps Vxorps = Xor Bytes,
        Andpd Vandpd = And Bytes, Andnpd Vandnpd = AndNot Bytes, Orpd Vorpd = Or Bytes, Xorpd Vxorpd = Xor Bytes,
        Pcmpeqb Vpcmpeqb = Equal Bytes, Pcmpeqw Vpcmpeqw = Equal Words,
        Pcmpeqd Vpcmpeqd = Equal Doublewords, Pcmpeqq Vpcmpeqq = Equal Quadwords,
        Pcmpgtb Vpcmpgtb = Greater Bytes, Pcmpgtw Vpcmpgtw = Greater Words,
        Pcmpgtd Vpcmpgtd = Greater Doublewords, Pcmpgtq Vpcmpgtq = Greater Quadwords,
        // Reordering of elements:
        Punpcklbw Vpunpcklbw = InterleaveLow Bytes, Punpckhbw Vpunpckhbw = InterleaveHigh Bytes,
        Punpcklwd Vpunpcklwd = InterleaveLow Words, Punpckhwd Vpunpckhwd = InterleaveHigh Words,
        Punpckldq Vpunpckldq = InterleaveLow Doublewords, Punpckhdq Vpunpckhdq = InterleaveHigh Doublewords,
        Punpcklqdq Vpunpcklqdq = InterleaveLow Quadwords, Punpckhqdq Vpunpckhqdq = InterleaveHigh Quadwords,
        Unpcklps Vunpcklps = InterleaveLow Doublewords, Unpckhps Vunpckhps = InterleaveHigh Doublewords,
        Unpcklpd Vunpcklpd = InterleaveLow Quadwords, Unpckhpd Vunpckhpd = InterleaveHigh Quadwords,
        Packsswb Vpacksswb, Packssdw Vpackssdw, Packuswb Vpackuswb, Packusdw Vpackusdw, Pshufb Vpshufb,
        // Cryptography. The 256-bit forms belong to VAES.
        Aesenc Vaesenc, Aesenclast Vaesenclast, Aesdec Vaesdec, Aesdeclast Vaesdeclast,
    }
    Int v2 {
        Pabsb Vpabsb, Pabsw Vpabsw, Pabsd Vpabsd, Movddup Vmovddup, Movshdup Vmovshdup, Movsldup Vmovsldup,
        // These approximations, and the scalar ones below, do not round by MXCSR, and raise no exceptions.
        Rcpps Vrcpps, Rsqrtps Vrsqrtps,
    }
    Int x2 {
        Phminposuw Vphminposuw, Aesimc Vaesimc,
    }
    // Shifts with the count in a register. Shifts by an immediate have other stubs.
    Int shift {
        Psllw Vpsllw = ShiftLeft Words, Pslld Vpslld = ShiftLeft Doublewords, Psllq Vpsllq = ShiftLeft Quadwords,
        Psrlw Vpsrlw = ShiftRight Words, Psrld Vpsrld = ShiftRight Doublewords, Psrlq Vpsrlq = ShiftRight Quadwords,
        Psraw Vpsraw = ShiftSigned Words, Psrad Vpsrad = ShiftSigned Doublewords,
    }
    Int x3 {
        Movhlps Vmovhlps, Movlhps Vmovlhps = InterleaveLow Quadwords, Rcpss Vrcpss, Rsqrtss Vrsqrtss,
    }
    Int widen {
        Pmovsxbw Vpmovsxbw, Pmovsxbd Vpmovsxbd, Pmovsxbq Vpmovsxbq, Pmovsxwd Vpmovsxwd, Pmovsxwq Vpmovsxwq, Pmovsxdq Vpmovsxdq,
        Pmovzxbw Vpmovzxbw, Pmovzxbd Vpmovzxbd, Pmovzxbq Vpmovzxbq, Pmovzxwd Vpmovzxwd, Pmovzxwq Vpmovzxwq, Pmovzxdq Vpmovzxdq,
        Cvtdq2pd Vcvtdq2pd,
    }
    Int v2i {
        Pshufd Vpshufd, Pshufhw Vpshufhw, Pshuflw Vpshuflw,
    }
    Int v3i {
        Shufps Vshufps, Shufpd Vshufpd, Palignr Vpalignr, Pblendw Vpblendw, Blendps Vblendps, Blendpd Vblendpd,
        Mpsadbw Vmpsadbw, Pclmulqdq Vpclmulqdq,
    }
    Int x3i {
        Insertps Vinsertps,
    }
    Int x2i {
        Aeskeygenassist Vaeskeygenassist,
    }
    Int v4 {
        Pblendvb Vpblendvb, Blendvps Vblendvps, Blendvpd Vblendvpd,
    }
    IntFlags v2 {
        Ptest Vptest,
    }
    Single v3 {
        Addps Vaddps = Add Singles, Subps Vsubps = Subtract Singles, Mulps Vmulps = Multiply Singles,
        Divps Vdivps = Divide Singles, Addsubps Vaddsubps, Haddps Vhaddps, Hsubps Vhsubps,
    }
    Double v3 {
        Addpd Vaddpd = Add Doubles, Subpd Vsubpd = Subtract Doubles, Mulpd Vmulpd = Multiply Doubles,
        Divpd Vdivpd = Divide Doubles, Addsubpd Vaddsubpd, Haddpd Vhaddpd, Hsubpd Vhsubpd,
    }
    ScalarSingle x3 {
        Addss Vaddss = Add Single, Subss Vsubss = Subtract Single, Mulss Vmulss = Multiply Single, Divss Vdivss = Divide Single,
        Cvtsd2ss Vcvtsd2ss,
    }
    ScalarDouble x3 {
        Addsd Vaddsd = Add Double, Subsd Vsubsd = Subtract Double, Mulsd Vmulsd = Multiply Double, Divsd Vdivsd = Divide Double,
    }
    None v3 {
        Minps Vminps, Minpd Vminpd, Maxps Vmaxps, Maxpd Vmaxpd,
    }
    None x3 {
        Minss Vminss, Minsd Vminsd, Maxss Vmaxss, Maxsd Vmaxsd, Sqrtss Vsqrtss, Sqrtsd Vsqrtsd, Cvtss2sd Vcvtss2sd,
    }
    None v2 {
        Sqrtps Vsqrtps, Sqrtpd Vsqrtpd, Cvtdq2ps Vcvtdq2ps, Cvtps2dq Vcvtps2dq, Cvttps2dq Vcvttps2dq,
    }
    None widen {
        Cvtps2pd Vcvtps2pd,
    }
    Single narrow {
        Cvtpd2ps Vcvtpd2ps,
    }
    None narrow {
        Cvtpd2dq Vcvtpd2dq, Cvttpd2dq Vcvttpd2dq,
    }
    None v3i {
        Cmpps Vcmpps, Cmppd Vcmppd,
    }
    None x3i {
        Cmpss Vcmpss, Cmpsd Vcmpsd, Roundss Vroundss, Roundsd Vroundsd,
    }
    None v2i {
        Roundps Vroundps, Roundpd Vroundpd,
    }
    Single v3i {
        Dpps Vdpps,
    }
    Double x3i {
        Dppd Vdppd,
    }
    FloatFlags x2 {
        Comiss Vcomiss, Comisd Vcomisd, Ucomiss Vucomiss, Ucomisd Vucomisd,
    }
}
