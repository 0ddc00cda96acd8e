//! The functions that compiled code calls for everything that it does not do itself. These helpers call the
//! interpreter's functions.
//!
//! A helper that has failed has changed nothing. Compiled code then leaves to the interpreter, which executes the
//! instruction again and meets the same failure.

use super::frame::Frame;
use crate::crc;
use crate::hypervisor::Hypervisor;
use crate::insn::{AtomicOp, Order, SystemName};
use crate::mmu::Mmu;
use crate::now::Now;
use crate::simd::Function;
use crate::tier::{Access, Kind, Tier};

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

/// The constant arguments of a helper: the kind of access and its size, the atomic operation, and a number of bytes.
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

    /// Packs the request into a number, which compiled code passes to a helper.
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

/// The table of helpers. The first argument of each is the frame. Helpers that can fail return 1 for failure, and leave
/// their results in the frame.
#[repr(C)]
pub(super) struct Helpers {
    pub(super) load: slat_jit::helper!(fn(&mut Frame, u64, u64) -> u64),
    pub(super) store: slat_jit::helper!(fn(&mut Frame, u64, u64, u64) -> u64),
    pub(super) load_vector: slat_jit::helper!(fn(&mut Frame, u64, u64) -> u64),
    /// The helper takes the value to store from the frame.
    pub(super) store_vector: slat_jit::helper!(fn(&mut Frame, u64, u64) -> u64),
    pub(super) prepare_stores: slat_jit::helper!(fn(&mut Frame, u64, u64) -> u64),
    pub(super) zero_block: slat_jit::helper!(fn(&mut Frame, u64) -> u64),
    pub(super) check_zero_block: slat_jit::helper!(fn(&mut Frame, u64, u64) -> u64),
    pub(super) atomic: slat_jit::helper!(fn(&mut Frame, u64, u64, u64) -> u64),
    /// The expected value, the new value and the result are in the frame.
    pub(super) compare_exchange: slat_jit::helper!(fn(&mut Frame, u64, u64) -> u64),
    /// The helper takes the value to store from the frame.
    pub(super) store_exclusive: slat_jit::helper!(fn(&mut Frame, u64, u64) -> u64),
    pub(super) read_system: slat_jit::helper!(fn(&mut Frame, u64, u64) -> u64),
    pub(super) mark_exclusive: slat_jit::helper!(fn(&mut Frame, u64, u64)),
    pub(super) clear_exclusive: slat_jit::helper!(fn(&mut Frame)),
    pub(super) compute: slat_jit::helper!(fn(&mut Frame, &Function)),
    pub(super) crc: slat_jit::helper!(fn(&mut Frame, u64, u64, u64) -> u64),
    pub(super) branch_target: slat_jit::helper!(fn(&mut Frame, u64) -> u64),
    pub(super) begin_floats: slat_jit::helper!(fn(&mut Frame)),
}

/// Returns the offset of a helper in [`Helpers`].
macro_rules! helper {
    ($name:ident) => {
        std::mem::offset_of!($crate::jit::helpers::Helpers, $name)
    };
}
pub(super) use helper;

/// Calls `then` with the interpreter's tier for the processor that executes compiled code. Restores the host's
/// floating-point unit meanwhile, because `then` may run code of the embedder's.
fn outside<H: Hypervisor, R>(
    frame: &mut Frame,
    then: impl FnOnce(&mut Now<'_, Mmu<'_, H>>) -> R,
) -> R {
    let had_floats = frame.end_floats();
    let result = then(&mut now::<H>(frame));
    if had_floats {
        frame.begin_floats();
    }
    result
}

/// Returns the interpreter's tier for the processor that executes compiled code.
fn now<'a, H: Hypervisor>(frame: &'a mut Frame) -> Now<'a, Mmu<'a, H>> {
    // SAFETY: both pointers were made of exclusive references before compiled code was entered, and nothing uses these
    // references until compiled code is left. The machine has this type, because the frame's helpers were made for `H`.
    unsafe {
        Now {
            state: &mut *frame.state,
            machine: &mut *frame.machine.cast(),
            // No helper uses the program counter.
            pc: 0,
        }
    }
}

impl Helpers {
    /// Returns the helpers for a machine of type `H`.
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
            begin_floats,
        }
    }
}

slat_jit::helper! {
    fn load<H: Hypervisor>(frame: &mut Frame, address: u64, request: u64) -> u64 {
        let Request { access, size, .. } = Request::of(request);
        let loaded = outside::<H, _>(frame, |now| now.load(address, size, access));
        give(frame, loaded.map(u128::from))
    }
}

slat_jit::helper! {
    fn store<H: Hypervisor>(
        frame: &mut Frame,
        address: u64,
        value: u64,
        request: u64,
    ) -> u64 {
        let Request { access, size, .. } = Request::of(request);
        outside::<H, _>(frame, |now| now.store(address, size, value, access).is_err().into())
    }
}

slat_jit::helper! {
    fn load_vector<H: Hypervisor>(frame: &mut Frame, address: u64, request: u64) -> u64 {
        let Request { access, .. } = Request::of(request);
        let loaded = outside::<H, _>(frame, |now| now.load_vector(address, access));
        give(frame, loaded)
    }
}

/// Stores a result in the frame, for compiled code. Returns 1 if the result is an error.
fn give<E>(frame: &mut Frame, result: Result<u128, E>) -> u64 {
    match result {
        Ok(result) => {
            frame.result = result;
            0
        }
        Err(_) => 1,
    }
}

slat_jit::helper! {
    fn store_vector<H: Hypervisor>(frame: &mut Frame, address: u64, request: u64) -> u64 {
        let value = frame.operands[0];
        let Request { access, .. } = Request::of(request);
        outside::<H, _>(frame, |now| now.store_vector(address, value, access).is_err().into())
    }
}

slat_jit::helper! {
    fn prepare_stores<H: Hypervisor>(frame: &mut Frame, address: u64, request: u64) -> u64 {
        let Request { access, bytes, .. } = Request::of(request);
        outside::<H, _>(frame, |now| now.prepare_stores(address, bytes, access).is_err().into())
    }
}

slat_jit::helper! {
    fn zero_block<H: Hypervisor>(frame: &mut Frame, address: u64) -> u64 {
        outside::<H, _>(frame, |now| now.zero_block(address).is_err().into())
    }
}

slat_jit::helper! {
    fn check_zero_block<H: Hypervisor>(frame: &mut Frame, name: u64, rt: u64) -> u64 {
        let checked = now::<H>(frame).check_zero_block(SystemName(name as u16), rt as u8);
        checked.is_err().into()
    }
}

slat_jit::helper! {
    fn atomic<H: Hypervisor>(
        frame: &mut Frame,
        address: u64,
        operand: u64,
        request: u64,
    ) -> u64 {
        let Request {
            access, size, op, ..
        } = Request::of(request);
        let old = outside::<H, _>(frame, |now| now.atomic(op, address, size, operand, access));
        give(frame, old.map(u128::from))
    }
}

slat_jit::helper! {
    fn compare_exchange<H: Hypervisor>(
        frame: &mut Frame,
        address: u64,
        request: u64,
    ) -> u64 {
        let Request { access, size, .. } = Request::of(request);
        let [old, new, _] = frame.operands;
        let found = outside::<H, _>(frame, |now| now.compare_exchange(address, size, [old, new], access));
        give(frame, found)
    }
}

slat_jit::helper! {
    fn store_exclusive<H: Hypervisor>(
        frame: &mut Frame,
        address: u64,
        request: u64,
    ) -> u64 {
        let Request { access, size, .. } = Request::of(request);
        let value = frame.operands[0];
        let stored = outside::<H, _>(frame, |now| now.store_exclusive(address, size, value, access));
        give(frame, stored.map(u128::from))
    }
}

slat_jit::helper! {
    fn read_system<H: Hypervisor>(frame: &mut Frame, name: u64, rt: u64) -> u64 {
        let name = SystemName(name as u16);
        let value = outside::<H, _>(frame, |now| now.read_system(name, rt as u8));
        give(frame, value.map(u128::from))
    }
}

slat_jit::helper! {
    fn mark_exclusive<H: Hypervisor>(frame: &mut Frame, address: u64, size: u64) {
        let value = frame.operands[0];
        now::<H>(frame).mark_exclusive(address, size as u8, value);
    }
}

slat_jit::helper! {
    fn clear_exclusive<H: Hypervisor>(frame: &mut Frame) {
        now::<H>(frame).clear_exclusive();
    }
}

slat_jit::helper! {
    fn compute<H: Hypervisor>(frame: &mut Frame, function: &Function) {
        let operands = frame.operands;
        frame.result = now::<H>(frame).compute(*function, operands);
    }
}

slat_jit::helper! {
    /// `kind`: the number of bits, plus 1 << 8 for CRC32C.
    fn crc(_: &mut Frame, old: u64, value: u64, kind: u64) -> u64 {
        crc::crc(old as u32, value, kind as u32 & 0xff, kind >> 8 != 0).into()
    }
}

slat_jit::helper! {
    fn branch_target(frame: &mut Frame, target: u64) -> u64 {
        // SAFETY: as in `now`.
        unsafe { (*frame.state).branch_target(target) }
    }
}

slat_jit::helper! {
    fn begin_floats(frame: &mut Frame) {
        frame.begin_floats();
    }
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
