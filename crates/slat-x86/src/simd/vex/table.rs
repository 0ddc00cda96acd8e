//! The stubs of VEX-encoded instructions that are not in [`pairs`]: the host's instruction for each mnemonic. The name
//! of a group says which registers its stubs use.

use core::arch::naked_asm;

use iced_x86::Mnemonic as M;

use super::host::Stub;
#[cfg(feature = "jit")]
use crate::simd::forms::by_halves;
use crate::simd::forms::{Kind, imm_stub, kind, row, stub};
use crate::simd::lanes::Lanes;
use crate::simd::pairs;
use crate::simd::table::gprs;

macro_rules! table {
    ($name:ident, $mnemonics:ident, $halves:ident: $($kind:ident $form:ident { $($mnemonic:ident),+ $(,)? })+) => {
        pub(super) const $mnemonics: &[M] = &[$($(M::$mnemonic),+),+];

        #[allow(unreachable_code, reason = "rows without one of the sizes")]
        fn $name(mnemonic: M, wide: bool) -> Option<(Kind, Stub)> {
            Some(match (mnemonic, wide) {
                $($((M::$mnemonic, false) => (kind!($kind), row!($form false stringify!($mnemonic))),
                (M::$mnemonic, true) => (kind!($kind), row!($form true stringify!($mnemonic))),)+)+
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

/// Returns the stub of an instruction without an immediate, whose operands are all vectors or memory; if `wide`, the
/// stub for 256 bits.
pub(super) fn plain(mnemonic: M, wide: bool) -> Option<(Kind, Stub)> {
    pairs::vex(mnemonic, wide, false).or_else(|| vex_only(mnemonic, wide))
}

/// Returns the kind and the stub of an instruction like [`plain`], but for an instruction with an immediate as its last
/// operand.
pub(super) fn immediate(mnemonic: M, wide: bool) -> Option<(Kind, Stub)> {
    pairs::vex(mnemonic, wide, true).or_else(|| vex_only_immediate(mnemonic, wide))
}

/// Whether the 256-bit form of an instruction computes each half of its result from the same halves of its operands,
/// like the 128-bit form. The two halves may use different bits of the immediate.
#[cfg(feature = "jit")]
pub(super) fn is_by_halves(mnemonic: M) -> bool {
    pairs::is_by_halves(mnemonic) || plain_by_halves(mnemonic) || immediate_by_halves(mnemonic)
}

table! {
    vex_only, PLAIN, plain_by_halves:
    Int v3 {
        Vpsllvd, Vpsllvq, Vpsrlvd, Vpsrlvq, Vpsravd, Vpermilps, Vpermilpd,
    }
    Int y3 {
        Vpermps, Vpermd,
    }
    Int widen {
        Vpbroadcastb, Vpbroadcastw, Vpbroadcastd, Vpbroadcastq,
    }
    Int broadcast32 {
        Vbroadcastss,
    }
    Int broadcast64 {
        Vbroadcastsd,
    }
    Int broadcast128 {
        Vbroadcastf128, Vbroadcasti128,
    }
    IntFlags v2 {
        Vtestps, Vtestpd,
    }
    Single v3 {
        Vfmadd132ps, Vfmadd213ps, Vfmadd231ps, Vfmsub132ps, Vfmsub213ps, Vfmsub231ps, Vfnmadd132ps, Vfnmadd213ps, Vfnmadd231ps,
        Vfnmsub132ps, Vfnmsub213ps, Vfnmsub231ps, Vfmaddsub132ps, Vfmaddsub213ps, Vfmaddsub231ps, Vfmsubadd132ps,
        Vfmsubadd213ps, Vfmsubadd231ps,
    }
    Double v3 {
        Vfmadd132pd, Vfmadd213pd, Vfmadd231pd, Vfmsub132pd, Vfmsub213pd, Vfmsub231pd, Vfnmadd132pd, Vfnmadd213pd, Vfnmadd231pd,
        Vfnmsub132pd, Vfnmsub213pd, Vfnmsub231pd, Vfmaddsub132pd, Vfmaddsub213pd, Vfmaddsub231pd, Vfmsubadd132pd,
        Vfmsubadd213pd, Vfmsubadd231pd,
    }
    ScalarSingle x3 {
        Vfmadd132ss, Vfmadd213ss, Vfmadd231ss, Vfmsub132ss, Vfmsub213ss, Vfmsub231ss, Vfnmadd132ss, Vfnmadd213ss, Vfnmadd231ss,
        Vfnmsub132ss, Vfnmsub213ss, Vfnmsub231ss,
    }
    ScalarDouble x3 {
        Vfmadd132sd, Vfmadd213sd, Vfmadd231sd, Vfmsub132sd, Vfmsub213sd, Vfmsub231sd, Vfnmadd132sd, Vfnmadd213sd, Vfnmadd231sd,
        Vfnmsub132sd, Vfnmsub213sd, Vfnmsub231sd,
    }
    None widen {
        Vcvtph2ps,
    }
}

table! {
    vex_only_immediate, IMMEDIATE, immediate_by_halves:
    Int v2i {
        Vpermilps, Vpermilpd, Vpslldq, Vpsrldq,
    }
    Int v3i {
        Vpblendd,
    }
    Int y2i {
        Vpermq, Vpermpd,
    }
    Int y3i {
        Vperm2f128, Vperm2i128,
    }
    Int insert {
        Vinsertf128, Vinserti128,
    }
    Int extract {
        Vextractf128, Vextracti128,
    }
    Half narrow_i {
        Vcvtps2ph,
    }
}

gprs! {
    /// Conversions from a general register of `bytes` bytes.
    from_gpr {
        Vcvtsi2ss 4 "vcvtsi2ss xmm0, xmm1, eax", Vcvtsi2ss 8 "vcvtsi2ss xmm0, xmm1, rax",
        Vcvtsi2sd 4 "vcvtsi2sd xmm0, xmm1, eax", Vcvtsi2sd 8 "vcvtsi2sd xmm0, xmm1, rax",
    }
    /// Conversions to a general register of `bytes` bytes.
    to_gpr {
        Vcvtss2si 4 "vcvtss2si eax, xmm1", Vcvtss2si 8 "vcvtss2si rax, xmm1",
        Vcvttss2si 4 "vcvttss2si eax, xmm1", Vcvttss2si 8 "vcvttss2si rax, xmm1",
        Vcvtsd2si 4 "vcvtsd2si eax, xmm1", Vcvtsd2si 8 "vcvtsd2si rax, xmm1",
        Vcvttsd2si 4 "vcvttsd2si eax, xmm1", Vcvttsd2si 8 "vcvttsd2si rax, xmm1",
    }
    /// Moves of a vector's sign bits to a general register. The vector has `bytes` bytes.
    signs {
        Vmovmskps 16 "vmovmskps eax, xmm1", Vmovmskps 32 "vmovmskps eax, ymm1",
        Vmovmskpd 16 "vmovmskpd eax, xmm1", Vmovmskpd 32 "vmovmskpd eax, ymm1",
        Vpmovmskb 16 "vpmovmskb eax, xmm1", Vpmovmskb 32 "vpmovmskb eax, ymm1",
    }
}
