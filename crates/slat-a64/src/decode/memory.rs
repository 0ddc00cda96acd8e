//! Loads and stores (C4.1.96).

use super::register::extend;
use crate::bits::{field, flag, register, signed_field};
use crate::insn::{Address, After, AtomicOp, Base, Insn, Loaded, Order, Transfer};
use crate::width::Width;

pub(super) fn decode(word: u32) -> Option<Insn> {
    let vector = flag(word, 26);
    match (field(word, 29, 28), flag(word, 24)) {
        (0b00, false) if vector => structures(word),
        (0b00, true) if vector => lane(word),
        (0b00, false) => exclusive(word),
        (0b01, false) => literal(word),
        (0b01, true) if !vector => ordered_offset(word),
        (0b10, _) => pair(word),
        (0b11, true) => {
            let (transfer, size) = transfer(word)?;
            let offset = (field(word, 21, 10) << size) as i32;
            let address = Address::Offset {
                rn: register(word, 5),
                offset,
            };
            Some(access(word, transfer, size, address))
        }
        (0b11, false) => register_access(word),
        _ => None,
    }
}

/// Returns the kind of transfer of a load or store of one register, and the size. For PRFM, the kind is `None`.
fn transfer(word: u32) -> Option<(Option<Transfer>, u8)> {
    let (size, opc) = (field(word, 31, 30) as u8, field(word, 23, 22));
    if flag(word, 26) {
        let transfer = match opc & 1 {
            0 => Transfer::StoreVector,
            _ => Transfer::LoadVector,
        };
        return match (opc & 2, size) {
            (0, _) => Some((Some(transfer), size)),
            (_, 0) => Some((Some(transfer), 4)),
            _ => None,
        };
    }
    let transfer = match (opc, size) {
        (0, _) => Some(Transfer::Store),
        (1, _) => Some(Transfer::Load(Loaded::ZeroExtended)),
        (2, 3) => None,
        (2, _) => Some(Transfer::Load(Loaded::SignExtended(Width::X))),
        (_, 0 | 1) => Some(Transfer::Load(Loaded::SignExtended(Width::W))),
        _ => return None,
    };
    Some((transfer, size))
}

fn access(word: u32, transfer: Option<Transfer>, size: u8, address: Address) -> Insn {
    let rt = register(word, 0);
    match transfer {
        Some(transfer) => Insn::Access {
            transfer,
            size,
            address,
            rt,
            unprivileged: false,
        },
        None => Insn::Prefetch,
    }
}

/// Decodes accesses to one register, except those with an unsigned offset: words of the form size 111 V 00 opc.
fn register_access(word: u32) -> Option<Insn> {
    let rn = register(word, 5);
    let offset = signed_field(word, 20, 12);
    if flag(word, 21) {
        return match field(word, 11, 10) {
            0b00 if !flag(word, 26) => atomic(word),
            0b10 => indexed(word),
            // Loads with pointer authentication, which this CPU does not have: UNDEFINED.
            _ => None,
        };
    }
    let (transfer, size) = transfer(word)?;
    let address = match field(word, 11, 10) {
        0b01 => Address::Post { rn, offset },
        0b11 => Address::Pre { rn, offset },
        _ => Address::Offset { rn, offset },
    };
    match field(word, 11, 10) {
        0b00 => Some(access(word, transfer, size, address)),
        0b10 => {
            let transfer = transfer.filter(|_| !flag(word, 26))?;
            let rt = register(word, 0);
            Some(Insn::Access {
                transfer,
                size,
                address,
                rt,
                unprivileged: true,
            })
        }
        _ => Some(access(word, Some(transfer?), size, address)),
    }
}

fn indexed(word: u32) -> Option<Insn> {
    let (transfer, size) = transfer(word)?;
    let option = field(word, 15, 13);
    if option & 2 == 0 {
        return None;
    }
    let shift = if flag(word, 12) { size.into() } else { 0 };
    let address = Address::Indexed {
        rn: register(word, 5),
        rm: register(word, 16),
        extend: extend(option, shift),
    };
    Some(access(word, transfer, size, address))
}

fn atomic(word: u32) -> Option<Insn> {
    let size = field(word, 31, 30) as u8;
    let (rs, rn, rt) = (register(word, 16), register(word, 5), register(word, 0));
    let order = Order {
        acquire: flag(word, 23),
        release: flag(word, 22),
    };
    let op = match (flag(word, 15), field(word, 14, 12)) {
        (false, 0) => AtomicOp::Add,
        (false, 1) => AtomicOp::Clear,
        (false, 2) => AtomicOp::Xor,
        (false, 3) => AtomicOp::Set,
        (false, 4) => AtomicOp::SignedMax,
        (false, 5) => AtomicOp::SignedMin,
        (false, 6) => AtomicOp::UnsignedMax,
        (false, 7) => AtomicOp::UnsignedMin,
        (true, 0) => AtomicOp::Swap,
        (true, 4) if order.acquire && !order.release && rs == 31 => {
            let transfer = Transfer::Load(Loaded::ZeroExtended);
            return Some(Insn::Ordered {
                transfer,
                size,
                rn,
                offset: 0,
                rt,
            });
        }
        _ => return None,
    };
    Some(Insn::Atomic {
        op,
        size,
        order,
        rs,
        rn,
        rt,
    })
}

/// Decodes exclusive and ordered accesses, and compare and swap: words of the form size 001000 o2 L o1 Rs o0 Rt2 Rn Rt.
fn exclusive(word: u32) -> Option<Insn> {
    let size = field(word, 31, 30) as u8;
    let (loads, o0) = (flag(word, 22), flag(word, 15));
    let (rs, rt2) = (register(word, 16), register(word, 10));
    let (rn, rt) = (register(word, 5), register(word, 0));
    let order = Order {
        acquire: loads,
        release: o0,
    };
    match (flag(word, 23), flag(word, 21)) {
        (false, pair) if !pair || flag(word, 31) => Some(match loads {
            true => Insn::LoadExclusive {
                size,
                pair,
                acquire: o0,
                rn,
                rt,
                rt2,
            },
            false => Insn::StoreExclusive {
                size,
                pair,
                release: o0,
                rn,
                rs,
                rt,
                rt2,
            },
        }),
        (false, _) => {
            let size = 2 + (size & 1);
            let is_casp = rt2 == 31 && (rs | rt) & 1 == 0;
            is_casp.then_some(Insn::CompareSwap {
                size,
                pair: true,
                order,
                rs,
                rn,
                rt,
            })
        }
        (true, false) => {
            let transfer = match loads {
                true => Transfer::Load(Loaded::ZeroExtended),
                false => Transfer::Store,
            };
            Some(Insn::Ordered {
                transfer,
                size,
                rn,
                offset: 0,
                rt,
            })
        }
        (true, true) => (rt2 == 31).then_some(Insn::CompareSwap {
            size,
            pair: false,
            order,
            rs,
            rn,
            rt,
        }),
    }
}

/// Decodes LDAPUR and STLUR.
fn ordered_offset(word: u32) -> Option<Insn> {
    if flag(word, 21) || field(word, 11, 10) != 0 {
        return None;
    }
    let (transfer, size) = transfer(word)?;
    Some(Insn::Ordered {
        transfer: transfer?,
        size,
        rn: register(word, 5),
        offset: signed_field(word, 20, 12) as i16,
        rt: register(word, 0),
    })
}

fn literal(word: u32) -> Option<Insn> {
    let opc = field(word, 31, 30) as u8;
    let (transfer, size) = match (flag(word, 26), opc) {
        (true, 0..=2) => (Some(Transfer::LoadVector), 2 + opc),
        (false, 0 | 1) => (Some(Transfer::Load(Loaded::ZeroExtended)), 2 + opc),
        (false, 2) => (Some(Transfer::Load(Loaded::SignExtended(Width::X))), 2),
        (false, 3) => (None, 0),
        _ => return None,
    };
    let offset = signed_field(word, 23, 5) << 2;
    Some(access(word, transfer, size, Address::Literal { offset }))
}

fn pair(word: u32) -> Option<Insn> {
    let opc = field(word, 31, 30) as u8;
    let mode = field(word, 24, 23);
    let (transfer, size) = match (flag(word, 26), opc, flag(word, 22)) {
        (true, 0..=2, true) => (Transfer::LoadVector, 2 + opc),
        (true, 0..=2, false) => (Transfer::StoreVector, 2 + opc),
        (false, 0 | 2, true) => (Transfer::Load(Loaded::ZeroExtended), 2 + opc / 2),
        (false, 0 | 2, false) => (Transfer::Store, 2 + opc / 2),
        (false, 1, true) if mode != 0 => (Transfer::Load(Loaded::SignExtended(Width::X)), 2),
        _ => return None,
    };
    let (rn, offset) = (register(word, 5), signed_field(word, 21, 15) << size);
    let address = match mode {
        1 => Address::Post { rn, offset },
        3 => Address::Pre { rn, offset },
        _ => Address::Offset { rn, offset },
    };
    let (rt, rt2) = (register(word, 0), register(word, 10));
    Some(Insn::Pair {
        transfer,
        size,
        address,
        rt,
        rt2,
    })
}

/// Decodes the base of a structure access. Without post-index (bit 23), Rm must be 0.
fn base(word: u32) -> Option<Base> {
    let rm = register(word, 16);
    let after = match (flag(word, 23), rm) {
        (false, 0) => After::Nothing,
        (false, _) => return None,
        (true, 31) => After::Bytes,
        (true, rm) => After::Register(rm),
    };
    Some(Base {
        rn: register(word, 5),
        after,
    })
}

fn structures(word: u32) -> Option<Insn> {
    let (groups, elements) = match field(word, 15, 12) {
        0b0000 => (1, 4),
        0b0010 => (4, 1),
        0b0100 => (1, 3),
        0b0110 => (3, 1),
        0b0111 => (1, 1),
        0b1000 => (1, 2),
        0b1010 => (2, 1),
        _ => return None,
    };
    let (full, size) = (flag(word, 30), field(word, 11, 10) as u8);
    if flag(word, 31) || flag(word, 21) || (size == 3 && !full && elements != 1) {
        return None;
    }
    let (loads, base, rt) = (flag(word, 22), base(word)?, register(word, 0));
    Some(Insn::Structures {
        loads,
        size,
        full,
        groups,
        elements,
        base,
        rt,
    })
}

fn lane(word: u32) -> Option<Insn> {
    let full = flag(word, 30);
    let elements = (field(word, 13, 13) << 1 | field(word, 21, 21)) as u8 + 1;
    let (loads, rt) = (flag(word, 22), register(word, 0));
    let base = base(word)?;
    // Q, S and size together give the lane. For elements larger than a byte, the lowest bits of the three must be 0.
    let position = (field(word, 30, 30) << 3 | field(word, 12, 10)) as u8;
    let (size, lane) = match field(word, 15, 14) {
        _ if flag(word, 31) => return None,
        0 => (0, position),
        1 if position & 1 == 0 => (1, position >> 1),
        2 if position & 3 == 0 => (2, position >> 2),
        2 if position & 7 == 1 => (3, position >> 3),
        3 if loads && !flag(word, 12) => {
            let size = field(word, 11, 10) as u8;
            return Some(Insn::Replicate {
                size,
                full,
                elements,
                base,
                rt,
            });
        }
        _ => return None,
    };
    Some(Insn::Lane {
        loads,
        size,
        lane,
        elements,
        base,
        rt,
    })
}
