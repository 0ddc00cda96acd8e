//! Exclusive accesses, and the atomic operations of LSE.

use super::{base_of, set, shl, shr, x};
use crate::insn::{AtomicOp, Order};
use crate::tier::{Access, Kind, Tier};

/// Joins two registers to the bytes of a pair in memory. Each register contributes 1 << `size` bytes.
fn joined<T: Tier>(t: &mut T, size: u8, a: T::Value, b: T::Value) -> T::Vector {
    if size == 3 {
        return t.vector(a, b);
    }
    let (a, b) = (t.zero_extend(a, 32), shl(t, b, 32));
    let low = t.or(a, b);
    let zero = t.number(0);
    t.vector(low, zero)
}

/// Splits the bytes of a pair in memory into two registers' values.
fn parted<T: Tier>(t: &mut T, size: u8, bytes: T::Vector) -> [T::Value; 2] {
    let low = t.low(bytes);
    match size {
        3 => [low, t.high(bytes)],
        _ => [t.zero_extend(low, 32), shr(t, low, 32)],
    }
}

/// Returns the low 1 << `size` bytes of a register as bytes of memory.
fn single<T: Tier>(t: &mut T, size: u8, value: T::Value) -> T::Vector {
    let value = match size {
        3 => value,
        _ => t.zero_extend(value, 8 << size),
    };
    let zero = t.number(0);
    t.vector(value, zero)
}

fn atomic_access(order: Order) -> Access {
    Access {
        order,
        kind: Kind::Atomic,
        element: None,
    }
}

/// LDXR, LDAXR, LDXP, LDAXP.
pub(super) fn load<T: Tier>(
    t: &mut T,
    size: u8,
    pair: bool,
    acquire: bool,
    rn: u8,
    [rt, rt2]: [u8; 2],
) -> Result<(), T::Stop> {
    let at = base_of(t, rn)?;
    let all = size + u8::from(pair);
    t.check_alignment(at, 1 << all, false)?;
    let order = Order {
        acquire,
        release: false,
    };
    let access = Access {
        order,
        ..Access::default()
    };
    if acquire && all == 4 {
        // A load-acquire must not overtake earlier store-releases (B2.3.11), but a load of 16 bytes acquires nothing
        // itself. So the load has a fence before it and one after it.
        t.fence();
    }
    let bytes = match all {
        // The two halves may be loaded at different times: LDXP is atomic only if the STXP succeeds (B2.2.1).
        4 => t.load_vector(at, access)?,
        _ => {
            let value = t.load(at, all, access)?;
            let zero = t.number(0);
            t.vector(value, zero)
        }
    };
    if acquire && all == 4 {
        t.fence();
    }
    t.mark_exclusive(at, all, bytes);
    if pair {
        let [a, b] = parted(t, size, bytes);
        set(t, rt, a);
        set(t, rt2, b);
    } else {
        let value = t.low(bytes);
        set(t, rt, value);
    }
    Ok(())
}

/// STXR, STLXR, STXP, STLXP.
pub(super) fn store<T: Tier>(
    t: &mut T,
    size: u8,
    pair: bool,
    release: bool,
    rn: u8,
    [rs, rt, rt2]: [u8; 3],
) -> Result<(), T::Stop> {
    let at = base_of(t, rn)?;
    let all = size + u8::from(pair);
    t.check_alignment(at, 1 << all, true)?;
    let (a, b) = (x(t, rt), x(t, rt2));
    let bytes = match pair {
        true => joined(t, size, a, b),
        false => single(t, size, a),
    };
    let order = Order {
        acquire: false,
        release,
    };
    let access = Access {
        order,
        ..Access::default()
    };
    let stored = t.store_exclusive(at, all, bytes, access)?;
    let failed = t.opposite(stored);
    let status = t.widened(failed);
    set(t, rs, status);
    Ok(())
}

/// LDADD and similar instructions, and SWP.
pub(super) fn atomic<T: Tier>(
    t: &mut T,
    op: AtomicOp,
    size: u8,
    mut order: Order,
    [rs, rn, rt]: [u8; 3],
) -> Result<(), T::Stop> {
    let at = base_of(t, rn)?;
    // Report a misaligned address as a read's fault: an atomic instruction reports a fault as a read's if a read would
    // have it, too.
    t.check_alignment(at, 1 << size, false)?;
    // If the old value goes to no register (STADD and similar instructions), the access does not acquire.
    if rt == 31 && op != AtomicOp::Swap {
        order.acquire = false;
    }
    let operand = x(t, rs);
    let operand = match size {
        3 => operand,
        _ => t.zero_extend(operand, 8 << size),
    };
    let old = t.atomic(op, at, size, operand, atomic_access(order))?;
    set(t, rt, old);
    Ok(())
}

/// CAS and CASP.
pub(super) fn compare_swap<T: Tier>(
    t: &mut T,
    size: u8,
    pair: bool,
    order: Order,
    [rs, rn, rt]: [u8; 3],
) -> Result<(), T::Stop> {
    let at = base_of(t, rn)?;
    let all = size + u8::from(pair);
    t.check_alignment(at, 1 << all, false)?;
    let mut bytes_of = |r: u8| {
        let a = x(t, r);
        if !pair {
            return single(t, size, a);
        }
        // The first register of a pair is even. If it is X30, the second register is number 31, the zero register.
        let b = x(t, r + 1);
        joined(t, size, a, b)
    };
    let (expected, new) = (bytes_of(rs), bytes_of(rt));
    let found = t.compare_exchange(at, all, [expected, new], atomic_access(order))?;
    if pair {
        let [a, b] = parted(t, size, found);
        set(t, rs, a);
        set(t, rs + 1, b);
    } else {
        let value = t.low(found);
        set(t, rs, value);
    }
    Ok(())
}
