//! Logical operations, moves of immediates, bit fields, and instructions that compute flags from bits.

use super::{cut, get, operand, plus, set, set_x_or_sp, shl, shr, sign_and_zero, x};
use crate::bits::ones;
use crate::insn::{Bitfield, Logic, MoveWide, OneSource, Operand};
use crate::tier::Tier;
use crate::width::Width;

#[inline(always)]
pub(super) fn logic<T: Tier>(
    t: &mut T,
    width: Width,
    op: Logic,
    [inverts, sets, sp]: [bool; 3],
    [rd, rn]: [u8; 2],
    second: Operand,
) {
    let a = get(t, width, rn);
    let mut b = operand(t, width, second);
    if inverts {
        b = t.not(b);
        b = cut(t, width, b);
    }
    let result = match op {
        Logic::And => t.and(a, b),
        Logic::Orr => t.or(a, b),
        Logic::Eor => t.xor(a, b),
    };
    if sets {
        let [n, z] = sign_and_zero(t, width, result);
        let no = t.truth(false);
        t.set_flags([n, z, no, no]);
    }
    if sp {
        set_x_or_sp(t, rd, result);
    } else {
        set(t, rd, result);
    }
}

pub(super) fn move_wide<T: Tier>(t: &mut T, width: Width, kind: MoveWide, rd: u8, value: u64) {
    let mut result = t.number(value);
    if let MoveWide::Keep { shift } = kind {
        let kept = get(t, width, rd);
        let kept = without(t, kept, 0xffff << shift);
        result = t.or(result, kept);
    }
    set(t, rd, result);
}

/// Clears the bits of `value` that are set in `mask`.
fn without<T: Tier>(t: &mut T, value: T::Value, mask: u64) -> T::Value {
    let mask = t.number(!mask);
    t.and(value, mask)
}

fn only<T: Tier>(t: &mut T, value: T::Value, mask: u64) -> T::Value {
    let mask = t.number(mask);
    t.and(value, mask)
}

/// SBFM, BFM, UBFM: moves `bits` bits from bit `from` to bit `to`. One of these two positions is 0.
pub(super) fn bitfield<T: Tier>(
    t: &mut T,
    width: Width,
    kind: Bitfield,
    [rd, rn]: [u8; 2],
    [immr, imms]: [u32; 2],
) {
    let (from, to, bits) = match imms >= immr {
        true => (immr, 0, imms - immr + 1),
        false => (0, width.bits() - immr, imms + 1),
    };
    let value = get(t, width, rn);
    let value = shr(t, value, from);
    let result = match kind {
        Bitfield::Signed => {
            let value = t.sign_extend(value, bits);
            shl(t, value, to)
        }
        Bitfield::Unsigned => {
            let value = t.zero_extend(value, bits);
            shl(t, value, to)
        }
        Bitfield::Insert => {
            let value = t.zero_extend(value, bits);
            let value = shl(t, value, to);
            let kept = get(t, width, rd);
            let kept = without(t, kept, ones(bits) << to);
            t.or(value, kept)
        }
    };
    let result = cut(t, width, result);
    set(t, rd, result);
}

pub(super) fn extract<T: Tier>(t: &mut T, width: Width, [rd, rn, rm]: [u8; 3], lsb: u8) {
    let lsb = u32::from(lsb);
    let mut result = get(t, width, rm);
    if lsb != 0 {
        result = shr(t, result, lsb);
        let high = get(t, width, rn);
        let high = shl(t, high, width.bits() - lsb);
        result = t.or(result, high);
        result = cut(t, width, result);
    }
    set(t, rd, result);
}

pub(super) fn one_source<T: Tier>(t: &mut T, width: Width, op: OneSource, rd: u8, rn: u8) {
    let a = get(t, width, rn);
    let unused = 64 - width.bits();
    let result = match op {
        OneSource::Rbit => {
            let reversed = t.reverse_bits(a);
            shr(t, reversed, unused)
        }
        OneSource::Rev { bits: 16 } => {
            const LOW: u64 = 0x00ff_00ff_00ff_00ff;
            let low = only(t, a, LOW);
            let low = shl(t, low, 8);
            let high = shr(t, a, 8);
            let high = only(t, high, LOW);
            t.or(low, high)
        }
        OneSource::Rev { bits } => {
            let swapped = t.swap_bytes(a);
            match (bits, width) {
                (32, Width::X) => {
                    let count = t.number(32);
                    t.ror(swapped, count)
                }
                _ => shr(t, swapped, unused),
            }
        }
        OneSource::Clz => {
            let zeros = t.leading_zeros(a);
            plus(t, zeros, -i64::from(unused))
        }
        OneSource::Cls => {
            // XOR with the sign: the bits that equal the sign become leading zeros.
            let a = t.sign_extend(a, width.bits());
            let last = t.number(63);
            let sign = t.sar(a, last);
            let differing = t.xor(a, sign);
            let zeros = t.leading_zeros(differing);
            plus(t, zeros, -i64::from(unused) - 1)
        }
    };
    set(t, rd, result);
}

pub(super) fn rotate_into_flags<T: Tier>(t: &mut T, rn: u8, amount: u8, mask: u8) {
    let value = x(t, rn);
    let count = t.number(amount.into());
    let value = t.ror(value, count);
    let mut flags = t.flags();
    for (i, flag) in flags.iter_mut().enumerate() {
        let bit = 3 - i as u32;
        if mask >> bit & 1 != 0 {
            *flag = t.bit(value, bit);
        }
    }
    t.set_flags(flags);
}

/// SETF8, SETF16: sets the flags like an addition of 8-bit or 16-bit integers, but keeps C.
pub(super) fn set_flags<T: Tier>(t: &mut T, rn: u8, bits: u32) {
    let value = x(t, rn);
    let [_, _, carry, _] = t.flags();
    let n = t.bit(value, bits - 1);
    let result = t.zero_extend(value, bits);
    let z = t.is_zero(result);
    let above = t.bit(value, bits);
    let v = t.differ(n, above);
    t.set_flags([n, z, carry, v]);
}

/// XAFLAG and AXFLAG: convert the flags of a floating-point comparison between Arm's form and the form of other
/// processors.
pub(super) fn convert_flags<T: Tier>(t: &mut T, to_arm: bool) {
    let [_, z, c, v] = t.flags();
    let no = t.truth(false);
    let (not_z, not_c, not_v) = (t.opposite(z), t.opposite(c), t.opposite(v));
    let flags = match to_arm {
        true => [
            t.both(not_c, not_z),
            t.both(z, c),
            t.either(c, z),
            t.both(not_c, z),
        ],
        false => [no, t.either(z, v), t.both(c, not_v), no],
    };
    t.set_flags(flags);
}
