//! Loads and stores of one register or of two.

use super::arithmetic::offset as add_offset;
use super::{base_of, extended, plus, set, set_x_or_sp, x};
use crate::insn::{Address, Loaded, Order, Transfer};
use crate::tier::{Access, Kind, Tier};
use crate::width::Width;

/// The address of an access, and the base register that is written after the access with its value.
type Addressed<T> = (<T as Tier>::Value, Option<(u8, <T as Tier>::Value)>);

/// Returns the address of an access, and the base that is written after the access.
#[inline(always)]
fn address<T: Tier>(t: &mut T, address: Address) -> Result<Addressed<T>, T::Stop> {
    Ok(match address {
        Address::Offset { rn, offset } => {
            let base = base_of(t, rn)?;
            (add_offset(t, base, offset), None)
        }
        Address::Pre { rn, offset } => {
            let base = base_of(t, rn)?;
            let at = add_offset(t, base, offset);
            (at, Some((rn, at)))
        }
        Address::Post { rn, offset } => {
            let base = base_of(t, rn)?;
            (base, Some((rn, add_offset(t, base, offset))))
        }
        Address::Indexed { rn, rm, extend } => {
            let base = base_of(t, rn)?;
            let index = extended(t, rm, extend);
            (t.add(base, index), None)
        }
        Address::Literal { offset } => {
            let at = t.pc().wrapping_add(offset as u64);
            (t.number(at), None)
        }
    })
}

#[inline(always)]
fn write_back<T: Tier>(t: &mut T, base: Option<(u8, T::Value)>) {
    if let Some((rn, value)) = base {
        set_x_or_sp(t, rn, value);
    }
}

/// Extends a loaded value.
#[inline(always)]
fn loaded<T: Tier>(t: &mut T, value: T::Value, size: u8, loaded: Loaded) -> T::Value {
    match loaded {
        Loaded::ZeroExtended => value,
        Loaded::SignExtended(width) => {
            let value = t.sign_extend(value, 8 << size);
            match width {
                Width::W => t.zero_extend(value, 32),
                Width::X => value,
            }
        }
    }
}

/// Loads the low 1 << `size` bytes of a vector register. The other bytes become zero.
#[inline(always)]
pub(super) fn load_vector<T: Tier>(
    t: &mut T,
    at: T::Value,
    size: u8,
    access: Access,
) -> Result<T::Vector, T::Stop> {
    if size == 4 {
        return t.load_vector(at, access);
    }
    let low = t.load(at, size, access)?;
    let zero = t.number(0);
    Ok(t.vector(low, zero))
}

#[inline(always)]
pub(super) fn store_vector<T: Tier>(
    t: &mut T,
    at: T::Value,
    size: u8,
    value: T::Vector,
    access: Access,
) -> Result<(), T::Stop> {
    if size == 4 {
        return t.store_vector(at, value, access);
    }
    let low = t.low(value);
    t.store(at, size, low, access)
}

#[inline(always)]
pub(super) fn access<T: Tier>(
    t: &mut T,
    transfer: Transfer,
    size: u8,
    place: Address,
    rt: u8,
    unprivileged: bool,
) -> Result<(), T::Stop> {
    let access = Access {
        kind: match unprivileged {
            true => Kind::Unprivileged,
            false => Kind::Ordinary,
        },
        ..Access::default()
    };
    let (at, base) = address(t, place)?;
    match transfer {
        Transfer::Load(extension) => {
            let value = t.load(at, size, access)?;
            let value = loaded(t, value, size, extension);
            write_back(t, base);
            set(t, rt, value);
        }
        Transfer::Store => {
            let value = x(t, rt);
            t.store(at, size, value, access)?;
            write_back(t, base);
        }
        Transfer::LoadVector => {
            let value = load_vector(t, at, size, access)?;
            write_back(t, base);
            t.set_v(rt, value);
        }
        Transfer::StoreVector => {
            let value = t.v(rt);
            store_vector(t, at, size, value, access)?;
            write_back(t, base);
        }
    }
    Ok(())
}

#[inline(always)]
pub(super) fn pair<T: Tier>(
    t: &mut T,
    transfer: Transfer,
    size: u8,
    place: Address,
    [rt, rt2]: [u8; 2],
) -> Result<(), T::Stop> {
    let access = Access::default();
    let each = Access {
        element: Some(size),
        ..access
    };
    let (at, base) = address(t, place)?;
    let second = plus(t, at, 1 << size);
    match transfer {
        Transfer::Load(extension) => {
            let a = t.load(at, size, access)?;
            let b = t.load(second, size, access)?;
            let (a, b) = (loaded(t, a, size, extension), loaded(t, b, size, extension));
            write_back(t, base);
            set(t, rt, a);
            set(t, rt2, b);
        }
        Transfer::Store => {
            let (a, b) = (x(t, rt), x(t, rt2));
            t.prepare_stores(at, 2 << size, each)?;
            t.store(at, size, a, access)?;
            t.store(second, size, b, access)?;
            write_back(t, base);
        }
        Transfer::LoadVector => {
            let a = load_vector(t, at, size, access)?;
            let b = load_vector(t, second, size, access)?;
            write_back(t, base);
            t.set_v(rt, a);
            t.set_v(rt2, b);
        }
        Transfer::StoreVector => {
            let (a, b) = (t.v(rt), t.v(rt2));
            t.prepare_stores(at, 2 << size, each)?;
            store_vector(t, at, size, a, access)?;
            store_vector(t, second, size, b, access)?;
            write_back(t, base);
        }
    }
    Ok(())
}

/// Load-acquire and store-release.
pub(super) fn ordered<T: Tier>(
    t: &mut T,
    transfer: Transfer,
    size: u8,
    rn: u8,
    offset: i16,
    rt: u8,
) -> Result<(), T::Stop> {
    let base = base_of(t, rn)?;
    let at = plus(t, base, offset.into());
    let is_write = transfer == Transfer::Store;
    t.check_alignment(at, 1 << size, is_write)?;
    let order = Order {
        acquire: !is_write,
        release: is_write,
    };
    let access = Access {
        order,
        ..Access::default()
    };
    match transfer {
        Transfer::Load(extension) => {
            let value = t.load(at, size, access)?;
            let value = loaded(t, value, size, extension);
            set(t, rt, value);
            Ok(())
        }
        _ => {
            let value = x(t, rt);
            t.store(at, size, value, access)
        }
    }
}
