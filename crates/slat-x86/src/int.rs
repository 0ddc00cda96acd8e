//! The four operand sizes of integer instructions, as types.

use slat_guard::Word;

/// The general registers of a CPU: all that this module needs of a CPU.
pub(crate) trait Registers {
    fn gpr(&self) -> &[u64; 16];
    fn gpr_mut(&mut self) -> &mut [u64; 16];
}

/// An unsigned integer of one of the operand sizes.
pub(crate) trait Int: Word + Copy + Eq + std::fmt::Debug + 'static {
    /// The width in bits.
    const BITS: u32;
    /// The width in bytes.
    const BYTES: u64 = (Self::BITS / 8) as u64;
    /// The logarithm of the width in bytes: 0 for a byte, 3 for a quadword.
    const SIZE: u8;
    fn zx(self) -> u64;
    fn sx(self) -> i64;
    /// Truncates `v` to this width.
    fn of(v: u64) -> Self;
    /// Reads register `r`. For bytes, the numbers 16 to 19 are AH, CH, DH and BH.
    fn get(cpu: &impl Registers, r: u8) -> Self;
    /// Writes register `r`. Writing 32 bits clears the upper half of the register; writing 8 or 16 bits leaves the
    /// other bits of the register unchanged.
    fn set(cpu: &mut impl Registers, r: u8, v: Self);
    /// Returns whether the sign bit is set.
    #[inline(always)]
    fn top(self) -> bool {
        self.zx() >> (Self::BITS - 1) & 1 != 0
    }
}

macro_rules! int {
    ($ty:ty, $signed:ty, $size:literal, |$cpu:ident, $r:ident| $get:expr, |$c:ident, $d:ident, $v:ident| $set:expr) => {
        impl Int for $ty {
            const BITS: u32 = <$ty>::BITS;
            const SIZE: u8 = $size;
            #[inline(always)]
            fn zx(self) -> u64 {
                self as u64
            }
            #[inline(always)]
            fn sx(self) -> i64 {
                self as $signed as i64
            }
            #[inline(always)]
            fn of(v: u64) -> Self {
                v as $ty
            }
            #[inline(always)]
            fn get($cpu: &impl Registers, $r: u8) -> Self {
                $get
            }
            #[inline(always)]
            fn set($c: &mut impl Registers, $d: u8, $v: Self) {
                $set
            }
        }
    };
}

int!(
    u8,
    i8,
    0,
    |cpu, r| (cpu.gpr()[usize::from(r & 15)] >> ((r >> 4) * 8)) as u8,
    |cpu, r, v| {
        let shift = (r >> 4) * 8;
        let reg = &mut cpu.gpr_mut()[usize::from(r & 15)];
        *reg = *reg & !(0xff << shift) | u64::from(v) << shift;
    }
);
int!(
    u16,
    i16,
    1,
    |cpu, r| cpu.gpr()[usize::from(r & 15)] as u16,
    |cpu, r, v| {
        let reg = &mut cpu.gpr_mut()[usize::from(r & 15)];
        *reg = *reg & !0xffff | u64::from(v);
    }
);
int!(
    u32,
    i32,
    2,
    |cpu, r| cpu.gpr()[usize::from(r & 15)] as u32,
    |cpu, r, v| {
        cpu.gpr_mut()[usize::from(r & 15)] = u64::from(v);
    }
);
int!(
    u64,
    i64,
    3,
    |cpu, r| cpu.gpr()[usize::from(r & 15)],
    |cpu, r, v| {
        cpu.gpr_mut()[usize::from(r & 15)] = v;
    }
);

/// Calls a function that is generic over the operand size. `$size` is the logarithm of the size in bytes.
macro_rules! by_size {
    ($size:expr, $($f:ident)::+ $(, $more:ty)*) => {
        match $size {
            0 => $($f)::+::<u8 $(, $more)*>,
            1 => $($f)::+::<u16 $(, $more)*>,
            2 => $($f)::+::<u32 $(, $more)*>,
            _ => $($f)::+::<u64 $(, $more)*>,
        }
    };
}
pub(crate) use by_size;
