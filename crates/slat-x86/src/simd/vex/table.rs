//! Which host instruction executes each VEX-encoded mnemonic: one line per mnemonic, with the registers in the name of its group.

use core::arch::naked_asm;

use iced_x86::Mnemonic as M;

use super::super::lanes::Lanes;
use super::super::table::{gprs, imm_stub, stub};
use super::host::Stub;

/// How a stub is to be called.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Kind {
    /// Bits in, bits out; MXCSR has no effect.
    Int,
    /// Rounds or raises floating-point exceptions; the elements of the result that can underflow.
    Float(Lanes),
    /// Only sets ZF, PF, CF.
    IntFlags,
    /// Only sets ZF, PF, CF, under MXCSR.
    FloatFlags,
}

/// Returns the kind of a group by its name.
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

/// Makes the stub of one row: of 128 bits for `false`, of 256 for `true`. Operand 0 is in register 0, operand 1 in register 1, …
macro_rules! row {
    // Two operands, and three, of the vector's size.
    ($text:literal v2 false) => { stub!(concat!($text, " xmm0, xmm1")) };
    ($text:literal v2 true) => { stub!(concat!($text, " ymm0, ymm1")) };
    ($text:literal v3 false) => { stub!(concat!($text, " xmm0, xmm1, xmm2")) };
    ($text:literal v3 true) => { stub!(concat!($text, " ymm0, ymm1, ymm2")) };
    ($text:literal v4 false) => { stub!(concat!($text, " xmm0, xmm1, xmm2, xmm3")) };
    ($text:literal v4 true) => { stub!(concat!($text, " ymm0, ymm1, ymm2, ymm3")) };
    // Forms of 128 bits only, scalars among them.
    ($text:literal x2 false) => { row!($text v2 false) };
    ($text:literal x3 false) => { row!($text v3 false) };
    // Forms of 256 bits only.
    ($text:literal y3 true) => { row!($text v3 true) };
    // The source is half as large as the result, or the other way round.
    ($text:literal widen false) => { row!($text v2 false) };
    ($text:literal widen true) => { stub!(concat!($text, " ymm0, xmm1")) };
    ($text:literal narrow false) => { row!($text v2 false) };
    ($text:literal narrow true) => { stub!(concat!($text, " xmm0, ymm1")) };
    // The last operand is a count of 64 bits.
    ($text:literal shift false) => { row!($text v3 false) };
    ($text:literal shift true) => { stub!(concat!($text, " ymm0, ymm1, xmm2")) };
    // With an immediate.
    ($text:literal v2i false) => { imm_stub!(concat!($text, " $slat_imm, %xmm1, %xmm0")) };
    ($text:literal v2i true) => { imm_stub!(concat!($text, " $slat_imm, %ymm1, %ymm0")) };
    ($text:literal v3i false) => { imm_stub!(concat!($text, " $slat_imm, %xmm2, %xmm1, %xmm0")) };
    ($text:literal v3i true) => { imm_stub!(concat!($text, " $slat_imm, %ymm2, %ymm1, %ymm0")) };
    ($text:literal x2i false) => { row!($text v2i false) };
    ($text:literal x3i false) => { row!($text v3i false) };
    ($text:literal y2i true) => { row!($text v2i true) };
    ($text:literal y3i true) => { row!($text v3i true) };
    ($text:literal narrow_i false) => { row!($text v2i false) };
    ($text:literal narrow_i true) => { row!($text extract true) };
    ($text:literal extract true) => { imm_stub!(concat!($text, " $slat_imm, %ymm1, %xmm0")) };
    ($text:literal insert true) => { imm_stub!(concat!($text, " $slat_imm, %xmm2, %ymm1, %ymm0")) };
    // All elements are the source's first one, or its first 128 bits. Hosts without AVX2 have no such form on registers.
    ($text:literal broadcast32 false) => { stub!("vshufps xmm0, xmm1, xmm1, 0") };
    ($text:literal broadcast32 true) => { stub!("vshufps xmm0, xmm1, xmm1, 0", "vinsertf128 ymm0, ymm0, xmm0, 1") };
    ($text:literal broadcast64 true) => { stub!("vmovddup xmm0, xmm1", "vinsertf128 ymm0, ymm0, xmm0, 1") };
    ($text:literal broadcast128 true) => { stub!("vinsertf128 ymm0, ymm1, xmm1, 1") };
    // Any other combination does not exist.
    ($text:literal $form:ident $wide:ident) => { return None };
}

/// Whether the rows of a form compute each half of 256 bits as one of 128.
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

macro_rules! table {
    ($(#[$doc:meta])* $name:ident, $halves:ident: $($kind:ident $form:ident { $($mnemonic:ident $text:literal),+ $(,)? })+) => {
        $(#[$doc])*
        #[allow(unreachable_code, reason = "rows without one of the sizes")]
        pub(super) fn $name(mnemonic: M, wide: bool) -> Option<(Kind, Stub)> {
            Some(match (mnemonic, wide) {
                $($((M::$mnemonic, false) => (kind!($kind), row!($text $form false)),
                (M::$mnemonic, true) => (kind!($kind), row!($text $form true)),)+)+
                _ => return None,
            })
        }

        #[cfg(feature = "jit")]
        fn $halves(mnemonic: M) -> bool {
            match mnemonic {
                $($(M::$mnemonic => by_halves!($form),)+)+
                _ => false,
            }
        }
    };
}

/// Whether an instruction computes each half of 256 bits from the same halves of its operands as one of 128, but for the immediate.
#[cfg(feature = "jit")]
pub(super) fn is_by_halves(mnemonic: M) -> bool {
    plain_by_halves(mnemonic) || immediate_by_halves(mnemonic)
}

table! {
    /// Returns the stub of an instruction without an immediate, all of whose operands are vectors or memory; `wide`: of 256 bits.
    plain, plain_by_halves:
    Int v3 {
        // Integer arithmetic.
        Vpaddb "vpaddb", Vpaddw "vpaddw", Vpaddd "vpaddd", Vpaddq "vpaddq",
        Vpaddsb "vpaddsb", Vpaddsw "vpaddsw", Vpaddusb "vpaddusb", Vpaddusw "vpaddusw",
        Vpsubb "vpsubb", Vpsubw "vpsubw", Vpsubd "vpsubd", Vpsubq "vpsubq",
        Vpsubsb "vpsubsb", Vpsubsw "vpsubsw", Vpsubusb "vpsubusb", Vpsubusw "vpsubusw",
        Vpmullw "vpmullw", Vpmulhw "vpmulhw", Vpmulhuw "vpmulhuw", Vpmuludq "vpmuludq", Vpmaddwd "vpmaddwd",
        Vpmulld "vpmulld", Vpmuldq "vpmuldq", Vpmulhrsw "vpmulhrsw", Vpmaddubsw "vpmaddubsw",
        Vpavgb "vpavgb", Vpavgw "vpavgw", Vpsadbw "vpsadbw",
        Vpsignb "vpsignb", Vpsignw "vpsignw", Vpsignd "vpsignd",
        Vphaddw "vphaddw", Vphaddd "vphaddd", Vphaddsw "vphaddsw",
        Vphsubw "vphsubw", Vphsubd "vphsubd", Vphsubsw "vphsubsw",
        Vpminub "vpminub", Vpminsw "vpminsw", Vpminsb "vpminsb",
        Vpminuw "vpminuw", Vpminsd "vpminsd", Vpminud "vpminud",
        Vpmaxub "vpmaxub", Vpmaxsw "vpmaxsw", Vpmaxsb "vpmaxsb",
        Vpmaxuw "vpmaxuw", Vpmaxsd "vpmaxsd", Vpmaxud "vpmaxud",
        // Logic and comparison.
        Vpand "vpand", Vpandn "vpandn", Vpor "vpor", Vpxor "vpxor",
        Vandps "vandps", Vandnps "vandnps", Vorps "vorps", Vxorps "vxorps",
        Vandpd "vandpd", Vandnpd "vandnpd", Vorpd "vorpd", Vxorpd "vxorpd",
        Vpcmpeqb "vpcmpeqb", Vpcmpeqw "vpcmpeqw", Vpcmpeqd "vpcmpeqd", Vpcmpeqq "vpcmpeqq",
        Vpcmpgtb "vpcmpgtb", Vpcmpgtw "vpcmpgtw", Vpcmpgtd "vpcmpgtd", Vpcmpgtq "vpcmpgtq",
        // Shifts, each element by its own count.
        Vpsllvd "vpsllvd", Vpsllvq "vpsllvq", Vpsrlvd "vpsrlvd", Vpsrlvq "vpsrlvq", Vpsravd "vpsravd",
        // Order of elements.
        Vpacksswb "vpacksswb", Vpackssdw "vpackssdw", Vpackuswb "vpackuswb", Vpackusdw "vpackusdw",
        Vpunpcklbw "vpunpcklbw", Vpunpcklwd "vpunpcklwd", Vpunpckldq "vpunpckldq", Vpunpcklqdq "vpunpcklqdq",
        Vpunpckhbw "vpunpckhbw", Vpunpckhwd "vpunpckhwd", Vpunpckhdq "vpunpckhdq", Vpunpckhqdq "vpunpckhqdq",
        Vunpcklps "vunpcklps", Vunpckhps "vunpckhps", Vunpcklpd "vunpcklpd", Vunpckhpd "vunpckhpd",
        Vpshufb "vpshufb", Vpermilps "vpermilps", Vpermilpd "vpermilpd",
        // Cryptography: those of 256 bits are VAES.
        Vaesenc "vaesenc", Vaesenclast "vaesenclast", Vaesdec "vaesdec", Vaesdeclast "vaesdeclast",
    }
    Int y3 { Vpermps "vpermps", Vpermd "vpermd" }
    Int x3 {
        Vmovhlps "vmovhlps", Vmovlhps "vmovlhps", Vrsqrtss "vrsqrtss", Vrcpss "vrcpss",
    }
    Int v4 { Vblendvps "vblendvps", Vblendvpd "vblendvpd", Vpblendvb "vpblendvb" }
    Int shift {
        Vpsllw "vpsllw", Vpslld "vpslld", Vpsllq "vpsllq",
        Vpsrlw "vpsrlw", Vpsrld "vpsrld", Vpsrlq "vpsrlq", Vpsraw "vpsraw", Vpsrad "vpsrad",
    }
    Int v2 {
        Vpabsb "vpabsb", Vpabsw "vpabsw", Vpabsd "vpabsd",
        Vmovddup "vmovddup", Vmovshdup "vmovshdup", Vmovsldup "vmovsldup",
        Vrcpps "vrcpps", Vrsqrtps "vrsqrtps",
    }
    Int x2 { Vphminposuw "vphminposuw", Vaesimc "vaesimc" }
    Int widen {
        Vpmovsxbw "vpmovsxbw", Vpmovsxbd "vpmovsxbd", Vpmovsxbq "vpmovsxbq",
        Vpmovsxwd "vpmovsxwd", Vpmovsxwq "vpmovsxwq", Vpmovsxdq "vpmovsxdq",
        Vpmovzxbw "vpmovzxbw", Vpmovzxbd "vpmovzxbd", Vpmovzxbq "vpmovzxbq",
        Vpmovzxwd "vpmovzxwd", Vpmovzxwq "vpmovzxwq", Vpmovzxdq "vpmovzxdq",
        Vpbroadcastb "vpbroadcastb", Vpbroadcastw "vpbroadcastw",
        Vpbroadcastd "vpbroadcastd", Vpbroadcastq "vpbroadcastq",
        Vcvtdq2pd "vcvtdq2pd",
    }
    Int broadcast32 { Vbroadcastss "vbroadcastss" }
    Int broadcast64 { Vbroadcastsd "vbroadcastsd" }
    Int broadcast128 { Vbroadcastf128 "vbroadcastf128", Vbroadcasti128 "vbroadcasti128" }
    IntFlags v2 { Vptest "vptest", Vtestps "vtestps", Vtestpd "vtestpd" }
    Single v3 {
        Vaddps "vaddps", Vsubps "vsubps", Vmulps "vmulps", Vdivps "vdivps",
        Vaddsubps "vaddsubps", Vhaddps "vhaddps", Vhsubps "vhsubps",
        Vfmadd132ps "vfmadd132ps", Vfmadd213ps "vfmadd213ps", Vfmadd231ps "vfmadd231ps",
        Vfmsub132ps "vfmsub132ps", Vfmsub213ps "vfmsub213ps", Vfmsub231ps "vfmsub231ps",
        Vfnmadd132ps "vfnmadd132ps", Vfnmadd213ps "vfnmadd213ps", Vfnmadd231ps "vfnmadd231ps",
        Vfnmsub132ps "vfnmsub132ps", Vfnmsub213ps "vfnmsub213ps", Vfnmsub231ps "vfnmsub231ps",
        Vfmaddsub132ps "vfmaddsub132ps", Vfmaddsub213ps "vfmaddsub213ps", Vfmaddsub231ps "vfmaddsub231ps",
        Vfmsubadd132ps "vfmsubadd132ps", Vfmsubadd213ps "vfmsubadd213ps", Vfmsubadd231ps "vfmsubadd231ps",
    }
    Double v3 {
        Vaddpd "vaddpd", Vsubpd "vsubpd", Vmulpd "vmulpd", Vdivpd "vdivpd",
        Vaddsubpd "vaddsubpd", Vhaddpd "vhaddpd", Vhsubpd "vhsubpd",
        Vfmadd132pd "vfmadd132pd", Vfmadd213pd "vfmadd213pd", Vfmadd231pd "vfmadd231pd",
        Vfmsub132pd "vfmsub132pd", Vfmsub213pd "vfmsub213pd", Vfmsub231pd "vfmsub231pd",
        Vfnmadd132pd "vfnmadd132pd", Vfnmadd213pd "vfnmadd213pd", Vfnmadd231pd "vfnmadd231pd",
        Vfnmsub132pd "vfnmsub132pd", Vfnmsub213pd "vfnmsub213pd", Vfnmsub231pd "vfnmsub231pd",
        Vfmaddsub132pd "vfmaddsub132pd", Vfmaddsub213pd "vfmaddsub213pd", Vfmaddsub231pd "vfmaddsub231pd",
        Vfmsubadd132pd "vfmsubadd132pd", Vfmsubadd213pd "vfmsubadd213pd", Vfmsubadd231pd "vfmsubadd231pd",
    }
    ScalarSingle x3 {
        Vaddss "vaddss", Vsubss "vsubss", Vmulss "vmulss", Vdivss "vdivss", Vcvtsd2ss "vcvtsd2ss",
        Vfmadd132ss "vfmadd132ss", Vfmadd213ss "vfmadd213ss", Vfmadd231ss "vfmadd231ss",
        Vfmsub132ss "vfmsub132ss", Vfmsub213ss "vfmsub213ss", Vfmsub231ss "vfmsub231ss",
        Vfnmadd132ss "vfnmadd132ss", Vfnmadd213ss "vfnmadd213ss", Vfnmadd231ss "vfnmadd231ss",
        Vfnmsub132ss "vfnmsub132ss", Vfnmsub213ss "vfnmsub213ss", Vfnmsub231ss "vfnmsub231ss",
    }
    ScalarDouble x3 {
        Vaddsd "vaddsd", Vsubsd "vsubsd", Vmulsd "vmulsd", Vdivsd "vdivsd",
        Vfmadd132sd "vfmadd132sd", Vfmadd213sd "vfmadd213sd", Vfmadd231sd "vfmadd231sd",
        Vfmsub132sd "vfmsub132sd", Vfmsub213sd "vfmsub213sd", Vfmsub231sd "vfmsub231sd",
        Vfnmadd132sd "vfnmadd132sd", Vfnmadd213sd "vfnmadd213sd", Vfnmadd231sd "vfnmadd231sd",
        Vfnmsub132sd "vfnmsub132sd", Vfnmsub213sd "vfnmsub213sd", Vfnmsub231sd "vfnmsub231sd",
    }
    None v3 { Vminps "vminps", Vminpd "vminpd", Vmaxps "vmaxps", Vmaxpd "vmaxpd" }
    None x3 {
        Vminss "vminss", Vminsd "vminsd", Vmaxss "vmaxss", Vmaxsd "vmaxsd",
        Vsqrtss "vsqrtss", Vsqrtsd "vsqrtsd", Vcvtss2sd "vcvtss2sd",
    }
    None v2 {
        Vsqrtps "vsqrtps", Vsqrtpd "vsqrtpd",
        Vcvtdq2ps "vcvtdq2ps", Vcvtps2dq "vcvtps2dq", Vcvttps2dq "vcvttps2dq",
    }
    None widen { Vcvtps2pd "vcvtps2pd", Vcvtph2ps "vcvtph2ps" }
    Single narrow { Vcvtpd2ps "vcvtpd2ps" }
    None narrow { Vcvtpd2dq "vcvtpd2dq", Vcvttpd2dq "vcvttpd2dq" }
    FloatFlags x2 { Vcomiss "vcomiss", Vcomisd "vcomisd", Vucomiss "vucomiss", Vucomisd "vucomisd" }
}

table! {
    /// Like [`plain`], with an immediate as the last operand.
    immediate, immediate_by_halves:
    Int v2i {
        Vpshufd "vpshufd", Vpshufhw "vpshufhw", Vpshuflw "vpshuflw",
        Vpermilps "vpermilps", Vpermilpd "vpermilpd", Vpslldq "vpslldq", Vpsrldq "vpsrldq",
    }
    Int v3i {
        Vshufps "vshufps", Vshufpd "vshufpd", Vpalignr "vpalignr", Vmpsadbw "vmpsadbw",
        Vpblendw "vpblendw", Vpblendd "vpblendd", Vblendps "vblendps", Vblendpd "vblendpd",
        Vpclmulqdq "vpclmulqdq",
    }
    Int x2i { Vaeskeygenassist "vaeskeygenassist" }
    Int x3i { Vinsertps "vinsertps" }
    Int y2i { Vpermq "vpermq", Vpermpd "vpermpd" }
    Int y3i { Vperm2f128 "vperm2f128", Vperm2i128 "vperm2i128" }
    Int insert { Vinsertf128 "vinsertf128", Vinserti128 "vinserti128" }
    Int extract { Vextractf128 "vextractf128", Vextracti128 "vextracti128" }
    None v2i { Vroundps "vroundps", Vroundpd "vroundpd" }
    None v3i { Vcmpps "vcmpps", Vcmppd "vcmppd" }
    None x3i { Vcmpss "vcmpss", Vcmpsd "vcmpsd", Vroundss "vroundss", Vroundsd "vroundsd" }
    Single v3i { Vdpps "vdpps" }
    Double x3i { Vdppd "vdppd" }
    Half narrow_i { Vcvtps2ph "vcvtps2ph" }
}

gprs! {
    /// Conversions of a general register of the given bytes.
    from_gpr {
        Vcvtsi2ss 4 "vcvtsi2ss xmm0, xmm1, eax", Vcvtsi2ss 8 "vcvtsi2ss xmm0, xmm1, rax",
        Vcvtsi2sd 4 "vcvtsi2sd xmm0, xmm1, eax", Vcvtsi2sd 8 "vcvtsi2sd xmm0, xmm1, rax",
    }
    /// Conversions to a general register of the given bytes.
    to_gpr {
        Vcvtss2si 4 "vcvtss2si eax, xmm1", Vcvtss2si 8 "vcvtss2si rax, xmm1",
        Vcvttss2si 4 "vcvttss2si eax, xmm1", Vcvttss2si 8 "vcvttss2si rax, xmm1",
        Vcvtsd2si 4 "vcvtsd2si eax, xmm1", Vcvtsd2si 8 "vcvtsd2si rax, xmm1",
        Vcvttsd2si 4 "vcvttsd2si eax, xmm1", Vcvttsd2si 8 "vcvttsd2si rax, xmm1",
    }
    /// Sign bits of a vector of the given bytes, gathered in a general register.
    signs {
        Vmovmskps 16 "vmovmskps eax, xmm1", Vmovmskps 32 "vmovmskps eax, ymm1",
        Vmovmskpd 16 "vmovmskpd eax, xmm1", Vmovmskpd 32 "vmovmskpd eax, ymm1",
        Vpmovmskb 16 "vpmovmskb eax, xmm1", Vpmovmskb 32 "vpmovmskb eax, ymm1",
    }
}
