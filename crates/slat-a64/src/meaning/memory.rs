//! Loads and stores of one or two registers.

use super::arithmetic::offset as add_offset;
use super::{base_of, extended, plus, set, set_x_or_sp, x};
use crate::insn::{Address, Loaded, Order, Transfer};
use crate::tier::{Access, Kind, Tier};
use crate::width::Width;

/// The address of an access. For an access with writeback, also the base register and the value that it gets.
type Addressed<T> = (<T as Tier>::Value, Option<(u8, <T as Tier>::Value)>);

/// Returns the address of an access, and the writeback to make after the access.
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

/// Extends a loaded value to fill its register.
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
            let value = t.load_part(at, size, access)?;
            write_back(t, base);
            t.set_v(rt, value);
        }
        Transfer::StoreVector => {
            let value = t.v(rt);
            t.store_part(at, size, value, access)?;
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
    let (at, base) = address(t, place)?;
    match transfer {
        Transfer::Load(extension) => {
            let [a, b] = t.load_pair(at, size, access)?;
            let (a, b) = (loaded(t, a, size, extension), loaded(t, b, size, extension));
            write_back(t, base);
            set(t, rt, a);
            set(t, rt2, b);
        }
        Transfer::Store => {
            let pair = [x(t, rt), x(t, rt2)];
            t.store_pair(at, size, pair, access)?;
            write_back(t, base);
        }
        Transfer::LoadVector => {
            let [a, b] = t.load_vector_pair(at, size, access)?;
            write_back(t, base);
            t.set_v(rt, a);
            t.set_v(rt2, b);
        }
        Transfer::StoreVector => {
            let pair = [t.v(rt), t.v(rt2)];
            t.store_vector_pair(at, size, pair, access)?;
            write_back(t, base);
        }
    }
    Ok(())
}

/// Executes load-acquire and store-release.
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
