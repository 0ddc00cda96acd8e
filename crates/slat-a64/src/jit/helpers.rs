//! The functions that compiled code calls: the interpreter's, for everything that is not emitted.
//!
//! A helper that has failed has changed nothing. Compiled code then leaves to the interpreter, which executes the
//! instruction again and finds the same failure.

use super::frame::Frame;
use crate::crc;
use crate::hypervisor::Hypervisor;
use crate::insn::{AtomicOp, Order, SystemName};
use crate::mmu::Mmu;
use crate::now::Now;
use crate::simd::Function;
use crate::tier::{Access, Kind, Tier};

/// A value and 0, or 0 and 1 if the helper has failed.
#[repr(C)]
pub(super) struct Found {
    value: u64,
    failed: u64,
}

impl Found {
    fn new<E>(result: Result<u64, E>) -> Self {
        match result {
            Ok(value) => Found { value, failed: 0 },
            Err(_) => Found {
                value: 0,
                failed: 1,
            },
        }
    }
}

const OPS: [AtomicOp; 9] = [
    AtomicOp::Add,
    AtomicOp::Clear,
    AtomicOp::Xor,
    AtomicOp::Set,
    AtomicOp::SignedMax,
    AtomicOp::SignedMin,
    AtomicOp::UnsignedMax,
    AtomicOp::UnsignedMin,
    AtomicOp::Swap,
];

/// What a helper does, besides its operands: an access and its size, an operation, and a number of bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Request {
    pub(super) access: Access,
    pub(super) size: u8,
    pub(super) op: AtomicOp,
    pub(super) bytes: u32,
}

impl Request {
    pub(super) fn new(access: Access, size: u8) -> Self {
        Self {
            access,
            size,
            op: AtomicOp::Add,
            bytes: 1 << size,
        }
    }

    /// Returns the request as a number.
    pub(super) fn bits(self) -> i64 {
        let Access {
            order,
            kind,
            element,
        } = self.access;
        let kind = match kind {
            Kind::Ordinary => 0,
            Kind::Unprivileged => 1,
            Kind::Atomic => 2,
            Kind::ZeroBlock(_) => unreachable!("DC ZVA has a helper of its own"),
        };
        i64::from(self.size)
            | i64::from(order.acquire) << 3
            | i64::from(order.release) << 4
            | kind << 5
            | element.map_or(0, |size| i64::from(size) + 1) << 8
            | (self.op as i64) << 12
            | i64::from(self.bytes) << 16
    }

    fn of(bits: u64) -> Self {
        Self {
            access: Access {
                order: Order {
                    acquire: bits >> 3 & 1 != 0,
                    release: bits >> 4 & 1 != 0,
                },
                kind: match bits >> 5 & 3 {
                    0 => Kind::Ordinary,
                    1 => Kind::Unprivileged,
                    _ => Kind::Atomic,
                },
                element: (bits >> 8 & 15).checked_sub(1).map(|size| size as u8),
            },
            size: (bits & 7) as u8,
            op: OPS[(bits >> 12 & 15) as usize],
            bytes: (bits >> 16) as u32,
        }
    }
}

/// The helpers for a machine. Each gets the frame first.
#[repr(C)]
pub(super) struct Helpers {
    pub(super) load: extern "C" fn(&mut Frame, u64, u64) -> Found,
    pub(super) store: extern "C" fn(&mut Frame, u64, u64, u64) -> u64,
    /// The result is in the frame.
    pub(super) load_vector: extern "C" fn(&mut Frame, u64, u64) -> u64,
    /// The value is in the frame.
    pub(super) store_vector: extern "C" fn(&mut Frame, u64, u64) -> u64,
    pub(super) prepare_stores: extern "C" fn(&mut Frame, u64, u64) -> u64,
    pub(super) zero_block: extern "C" fn(&mut Frame, u64) -> u64,
    pub(super) check_zero_block: extern "C" fn(&mut Frame, u64, u64) -> u64,
    pub(super) atomic: extern "C" fn(&mut Frame, u64, u64, u64) -> Found,
    /// The two values, and the result, are in the frame.
    pub(super) compare_exchange: extern "C" fn(&mut Frame, u64, u64) -> u64,
    /// The value is in the frame.
    pub(super) store_exclusive: extern "C" fn(&mut Frame, u64, u64) -> Found,
    pub(super) read_system: extern "C" fn(&mut Frame, u64, u64) -> Found,
    pub(super) mark_exclusive: extern "C" fn(&mut Frame, u64, u64),
    pub(super) clear_exclusive: extern "C" fn(&mut Frame),
    pub(super) compute: extern "C" fn(&mut Frame, &Function),
    pub(super) crc: extern "C" fn(&mut Frame, u64, u64, u64) -> u64,
    pub(super) branch_target: extern "C" fn(&mut Frame, u64) -> u64,
}

/// The offset of a helper in the table.
macro_rules! helper {
    ($name:ident) => {
        std::mem::offset_of!($crate::jit::helpers::Helpers, $name)
    };
}
pub(super) use helper;

/// Returns the interpreter's tier for the processor that executes compiled code.
fn now<'a, H: Hypervisor>(frame: &'a mut Frame) -> Now<'a, Mmu<'a, H>> {
    // SAFETY: both pointers were made of exclusive references before compiled code was entered, and nothing uses these
    // references until it is left. The machine has this type, because the frame's helpers were made for `H`.
    unsafe {
        Now {
            state: &mut *frame.state,
            machine: &mut *frame.machine.cast(),
            // No helper depends on it.
            pc: 0,
        }
    }
}

impl Helpers {
    /// The helpers for a machine.
    pub(super) const fn of<H: Hypervisor>() -> Self {
        Self {
            load: load::<H>,
            store: store::<H>,
            load_vector: load_vector::<H>,
            store_vector: store_vector::<H>,
            prepare_stores: prepare_stores::<H>,
            zero_block: zero_block::<H>,
            check_zero_block: check_zero_block::<H>,
            atomic: atomic::<H>,
            compare_exchange: compare_exchange::<H>,
            store_exclusive: store_exclusive::<H>,
            read_system: read_system::<H>,
            mark_exclusive: mark_exclusive::<H>,
            clear_exclusive: clear_exclusive::<H>,
            compute: compute::<H>,
            crc,
            branch_target,
        }
    }
}

extern "C" fn load<H: Hypervisor>(frame: &mut Frame, address: u64, request: u64) -> Found {
    let Request { access, size, .. } = Request::of(request);
    Found::new(now::<H>(frame).load(address, size, access))
}

extern "C" fn store<H: Hypervisor>(
    frame: &mut Frame,
    address: u64,
    value: u64,
    request: u64,
) -> u64 {
    let Request { access, size, .. } = Request::of(request);
    let stored = now::<H>(frame).store(address, size, value, access);
    stored.is_err().into()
}

extern "C" fn load_vector<H: Hypervisor>(frame: &mut Frame, address: u64, request: u64) -> u64 {
    let loaded = now::<H>(frame).load_vector(address, Request::of(request).access);
    give(frame, loaded)
}

/// Gives compiled code a vector. Returns whether there is none.
fn give<E>(frame: &mut Frame, vector: Result<u128, E>) -> u64 {
    match vector {
        Ok(vector) => {
            frame.result = vector;
            0
        }
        Err(_) => 1,
    }
}

extern "C" fn store_vector<H: Hypervisor>(frame: &mut Frame, address: u64, request: u64) -> u64 {
    let value = frame.operands[0];
    let stored = now::<H>(frame).store_vector(address, value, Request::of(request).access);
    stored.is_err().into()
}

extern "C" fn prepare_stores<H: Hypervisor>(frame: &mut Frame, address: u64, request: u64) -> u64 {
    let Request { access, bytes, .. } = Request::of(request);
    let prepared = now::<H>(frame).prepare_stores(address, bytes, access);
    prepared.is_err().into()
}

extern "C" fn zero_block<H: Hypervisor>(frame: &mut Frame, address: u64) -> u64 {
    now::<H>(frame).zero_block(address).is_err().into()
}

extern "C" fn check_zero_block<H: Hypervisor>(frame: &mut Frame, name: u64, rt: u64) -> u64 {
    let checked = now::<H>(frame).check_zero_block(SystemName(name as u16), rt as u8);
    checked.is_err().into()
}

extern "C" fn atomic<H: Hypervisor>(
    frame: &mut Frame,
    address: u64,
    operand: u64,
    request: u64,
) -> Found {
    let Request {
        access, size, op, ..
    } = Request::of(request);
    Found::new(now::<H>(frame).atomic(op, address, size, operand, access))
}

extern "C" fn compare_exchange<H: Hypervisor>(
    frame: &mut Frame,
    address: u64,
    request: u64,
) -> u64 {
    let Request { access, size, .. } = Request::of(request);
    let [old, new, _] = frame.operands;
    let found = now::<H>(frame).compare_exchange(address, size, [old, new], access);
    give(frame, found)
}

extern "C" fn store_exclusive<H: Hypervisor>(
    frame: &mut Frame,
    address: u64,
    request: u64,
) -> Found {
    let Request { access, size, .. } = Request::of(request);
    let value = frame.operands[0];
    let stored = now::<H>(frame).store_exclusive(address, size, value, access);
    Found::new(stored.map(u64::from))
}

extern "C" fn read_system<H: Hypervisor>(frame: &mut Frame, name: u64, rt: u64) -> Found {
    Found::new(now::<H>(frame).read_system(SystemName(name as u16), rt as u8))
}

extern "C" fn mark_exclusive<H: Hypervisor>(frame: &mut Frame, address: u64, size: u64) {
    let value = frame.operands[0];
    now::<H>(frame).mark_exclusive(address, size as u8, value);
}

extern "C" fn clear_exclusive<H: Hypervisor>(frame: &mut Frame) {
    now::<H>(frame).clear_exclusive();
}

extern "C" fn compute<H: Hypervisor>(frame: &mut Frame, function: &Function) {
    let operands = frame.operands;
    frame.result = now::<H>(frame).compute(*function, operands);
}

/// `kind`: the number of bits, and 1 << 8 for CRC32C.
extern "C" fn crc(_: &mut Frame, old: u64, value: u64, kind: u64) -> u64 {
    crc::crc(old as u32, value, kind as u32 & 0xff, kind >> 8 != 0).into()
}

extern "C" fn branch_target(frame: &mut Frame, target: u64) -> u64 {
    // SAFETY: as in `now`.
    unsafe { (*frame.state).branch_target(target) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_numbers() {
        for op in OPS {
            for (n, kind) in [Kind::Ordinary, Kind::Unprivileged, Kind::Atomic]
                .into_iter()
                .enumerate()
            {
                let request = Request {
                    access: Access {
                        order: Order {
                            acquire: n % 2 == 0,
                            release: n % 2 == 1,
                        },
                        kind,
                        element: (n > 0).then_some(n as u8),
                    },
                    size: n as u8 + 2,
                    op,
                    bytes: 64,
                };
                assert_eq!(Request::of(request.bits() as u64), request);
            }
        }
    }
}
