//! LD1 to LD4, ST1 to ST4, and LD1R to LD4R (C7.2).

use super::{base_of, plus, set_x_or_sp, shl, shr, x, x_or_sp};
use crate::bits::ones;
use crate::insn::{After, Base};
use crate::tier::{Access, Tier};

/// The greatest number of registers that one instruction accesses.
const MOST: usize = 4;

fn after<T: Tier>(t: &mut T, base: Base, bytes: u32) {
    let start = x_or_sp(t, base.rn);
    let value = match base.after {
        After::Nothing => return,
        After::Bytes => plus(t, start, bytes.into()),
        After::Register(rm) => {
            let more = x(t, rm);
            t.add(start, more)
        }
    };
    set_x_or_sp(t, base.rn, value);
}

/// Returns a lane of a vector.
fn lane_of<T: Tier>(t: &mut T, vector: T::Vector, size: u8, lane: u32) -> T::Value {
    let bit = lane << (3 + size);
    let half = if bit < 64 {
        t.low(vector)
    } else {
        t.high(vector)
    };
    let half = shr(t, half, bit % 64);
    if size == 3 {
        half
    } else {
        t.zero_extend(half, 8 << size)
    }
}

/// Replaces a lane of a vector.
fn with_lane<T: Tier>(
    t: &mut T,
    vector: T::Vector,
    size: u8,
    lane: u32,
    value: T::Value,
) -> T::Vector {
    let bit = lane << (3 + size);
    let (low, high) = (t.low(vector), t.high(vector));
    let mask = t.number(!(ones(8 << size) << (bit % 64)));
    let value = shl(t, value, bit % 64);
    let mut replaced = |half| {
        let kept = t.and(half, mask);
        t.or(kept, value)
    };
    match bit < 64 {
        true => {
            let low = replaced(low);
            t.vector(low, high)
        }
        false => {
            let high = replaced(high);
            t.vector(low, high)
        }
    }
}

fn number(rt: u8, more: u8) -> u8 {
    (rt + more) % 32
}

/// Loads or stores whole registers. LD2 to LD4 and ST2 to ST4 interleave their elements in memory.
pub(super) fn whole<T: Tier>(
    t: &mut T,
    loads: bool,
    size: u8,
    full: bool,
    [groups, elements]: [u8; 2],
    base: Base,
    rt: u8,
) -> Result<(), T::Stop> {
    let bytes = if full { 16u32 } else { 8 };
    let count = groups * elements;
    let total = bytes * u32::from(count);
    let start = base_of(t, base.rn)?;
    let access = Access {
        element: Some(size),
        ..Access::default()
    };
    if !loads {
        t.prepare_stores(start, total, access)?;
    }
    let whole_size = if full { 4 } else { 3 };
    let zero = t.number(0);
    let mut vectors = [t.vector(zero, zero); MOST];
    if elements == 1 {
        for n in 0..count {
            let at = plus(t, start, i64::from(bytes) * i64::from(n));
            if loads {
                vectors[usize::from(n)] = t.load_part(at, whole_size, access)?;
            } else {
                let value = t.v(number(rt, n));
                t.store_part(at, whole_size, value, access)?;
            }
        }
    } else {
        for lane in 0..bytes >> size {
            for n in 0..elements {
                let position = lane * u32::from(elements) + u32::from(n);
                let at = plus(t, start, i64::from(position << size));
                let vector = &mut vectors[usize::from(n)];
                if loads {
                    let value = t.load(at, size, Access::default())?;
                    *vector = with_lane(t, *vector, size, lane, value);
                } else {
                    let value = t.v(number(rt, n));
                    let value = lane_of(t, value, size, lane);
                    t.store(at, size, value, Access::default())?;
                }
            }
        }
    }
    after(t, base, total);
    if loads {
        for n in 0..count {
            t.set_v(number(rt, n), vectors[usize::from(n)]);
        }
    }
    Ok(())
}

/// Loads or stores the same lane of each register.
pub(super) fn lane<T: Tier>(
    t: &mut T,
    loads: bool,
    size: u8,
    lane: u8,
    elements: u8,
    base: Base,
    rt: u8,
) -> Result<(), T::Stop> {
    let total = u32::from(elements) << size;
    let start = base_of(t, base.rn)?;
    let access = Access {
        element: Some(size),
        ..Access::default()
    };
    if !loads {
        t.prepare_stores(start, total, access)?;
    }
    let mut values = [start; MOST];
    for n in 0..elements {
        let at = plus(t, start, i64::from(n) << size);
        if loads {
            values[usize::from(n)] = t.load(at, size, Access::default())?;
        } else {
            let value = t.v(number(rt, n));
            let value = lane_of(t, value, size, lane.into());
            t.store(at, size, value, Access::default())?;
        }
    }
    after(t, base, total);
    if loads {
        for n in 0..elements {
            let vector = t.v(number(rt, n));
            let value = values[usize::from(n)];
            let vector = with_lane(t, vector, size, lane.into(), value);
            t.set_v(number(rt, n), vector);
        }
    }
    Ok(())
}

/// Loads an element for each register, and copies it to all lanes.
pub(super) fn replicate<T: Tier>(
    t: &mut T,
    size: u8,
    full: bool,
    elements: u8,
    base: Base,
    rt: u8,
) -> Result<(), T::Stop> {
    let start = base_of(t, base.rn)?;
    let mut values = [start; MOST];
    for n in 0..elements {
        let at = plus(t, start, i64::from(n) << size);
        values[usize::from(n)] = t.load(at, size, Access::default())?;
    }
    after(t, base, u32::from(elements) << size);
    for n in 0..elements {
        let mut half = values[usize::from(n)];
        for bits in (3 + u32::from(size)..6).map(|log| 1 << log) {
            let more = shl(t, half, bits);
            half = t.or(half, more);
        }
        let high = if full { half } else { t.number(0) };
        let vector = t.vector(half, high);
        t.set_v(number(rt, n), vector);
    }
    Ok(())
}
