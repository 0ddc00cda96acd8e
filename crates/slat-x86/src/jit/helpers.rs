//! What compiled code calls: accesses that the TLB does not have, and the interpreter's handlers.
//!
//! A helper gets the CPU that runs the region: nothing else refers to it meanwhile.

use super::Step;
use crate::Cpu;
use crate::flags;
use crate::int::{Int, by_size};
use crate::op::Break;
use crate::state::flags::CF;

/// How a helper, or a whole region, ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u64)]
pub(super) enum Status {
    /// All is done. A region: continue at RIP.
    Continue = 0,
    /// The instruction ended with the [`Break`] in `compiled.why`.
    Broke = 1,
    /// Nothing has happened: the interpreter has to execute this instruction.
    Interpret = 2,
    /// The instruction is done, but the CPU has to look around before the next one.
    After = 3,
}

impl Status {
    pub(super) fn of(number: u64) -> Option<Self> {
        Some(match number {
            0 => Status::Continue,
            1 => Status::Broke,
            2 => Status::Interpret,
            3 => Status::After,
            _ => return None,
        })
    }
}

/// A value and a [`Status`].
#[repr(C)]
pub(super) struct Loaded {
    value: u64,
    status: u64,
}

fn failed(cpu: &mut Cpu, why: Break) -> u64 {
    cpu.compiled.why = why;
    Status::Broke as u64
}

impl Loaded {
    /// `None`: the instruction is the interpreter's.
    fn new(cpu: &mut Cpu, value: Result<Option<u64>, Break>) -> Self {
        let (value, status) = match value {
            Ok(Some(value)) => (value, 0),
            Ok(None) => (0, Status::Interpret as u64),
            Err(why) => (0, failed(cpu, why)),
        };
        Self { value, status }
    }
}

/// Makes an access. One outside 64-bit mode that ends beyond 4 GiB is the interpreter's.
fn access<T>(
    cpu: &mut Cpu,
    lin: u64,
    bytes: u64,
    access: impl FnOnce(&mut Cpu) -> Result<Option<T>, Break>,
) -> Result<Option<T>, Break> {
    if !cpu.is_64() && lin + bytes > 1 << 32 {
        return Ok(None);
    }
    cpu.outside_floats(access)
}

/// Loads from memory. MMIO is the interpreter's: what was read before may be read again.
extern "C" fn load<T: Int>(cpu: &mut Cpu, lin: u64) -> Loaded {
    let value = access(cpu, lin, T::BYTES, |cpu| cpu.load_unless_mmio::<T>(lin));
    Loaded::new(cpu, value.map(|value| value.map(Int::zx)))
}

/// Returns the host address to load `bytes` bytes from, if they are memory and in one page. Otherwise the instruction is the interpreter's.
pub(super) extern "C" fn place_to_load(cpu: &mut Cpu, lin: u64, bytes: u64) -> Loaded {
    let place = access(cpu, lin, bytes, |cpu| {
        cpu.place_to_load(lin, bytes as usize)
    });
    Loaded::new(cpu, place.map(|place| place.map(|host| host as u64)))
}

/// Returns the host address to store `bytes` bytes at, if that is a store to a page without decoded code, in one page, that nobody wants to
/// know of. Otherwise the instruction is the interpreter's.
pub(super) extern "C" fn place_to_store(cpu: &mut Cpu, lin: u64, bytes: u64) -> Loaded {
    let place = access(cpu, lin, bytes, |cpu| {
        cpu.place_to_store(lin, bytes as usize)
    });
    Loaded::new(cpu, place.map(|place| place.map(|host| host as u64)))
}

/// Returns the address of the helper that loads in an operand size.
pub(super) fn load_of(size: u8) -> usize {
    let helper: extern "C" fn(&mut Cpu, u64) -> Loaded = by_size!(size, load);
    helper as usize
}

/// Has the interpreter execute `step`.
pub(super) extern "C" fn handler(cpu: &mut Cpu, step: &Step) -> u64 {
    let op = &step.op;
    cpu.block_rip = step.rip;
    cpu.stop = false;
    match cpu.outside_floats(|cpu| (op.handler)(cpu, op)) {
        Ok(()) if cpu.stop || cpu.slow => Status::After as u64,
        Ok(()) => 0,
        Err(why) => {
            cpu.compiled.rip = cpu.state.rip;
            failed(cpu, why)
        }
    }
}

/// Begins floats: see `float`.
pub(super) extern "C" fn begin_floats(cpu: &mut Cpu) -> u64 {
    match cpu.begin_floats() {
        true => Status::Continue as u64,
        false => Status::Interpret as u64,
    }
}

/// Returns whether a condition (the low four bits of Jcc's opcode) of the record of the flags holds.
pub(super) extern "C" fn condition(cpu: &mut Cpu, condition: u64) -> u64 {
    let holds: fn(&Cpu) -> bool = flags::by_condition!(condition, Cpu::condition);
    holds(cpu).into()
}

/// Sets CF and OF.
pub(super) extern "C" fn rotated(cpu: &mut Cpu, carry: u64, overflow: u64) {
    cpu.rotate_flags(carry != 0, overflow != 0);
}

/// Sets CF.
pub(super) extern "C" fn carried(cpu: &mut Cpu, carry: u64) {
    cpu.set_flags(CF, if carry != 0 { CF } else { 0 });
}

/// A quotient and a remainder.
#[repr(C)]
pub(super) struct Divided {
    quotient: u64,
    remainder: u64,
}

/// Divides a number of 128 bits, whose upper half is below the divisor.
pub(super) extern "C" fn divide(_: &mut Cpu, low: u64, high: u64, divisor: u64) -> Divided {
    let (dividend, divisor) = (
        u128::from(high) << 64 | u128::from(low),
        u128::from(divisor),
    );
    Divided {
        quotient: (dividend / divisor) as u64,
        remainder: (dividend % divisor) as u64,
    }
}
