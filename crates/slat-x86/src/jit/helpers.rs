//! The functions that compiled code calls: for accesses that miss the TLB, and for the interpreter's handlers.
//!
//! The first argument of a helper is the CPU that runs the region. No other reference to this CPU exists while the
//! helper runs.

use super::Step;
use crate::Cpu;
use crate::compiled::SETS_BYTES;
use crate::flags;
use crate::op::Break;
use crate::sem::{Compute, Now};
use crate::tlb::Tlb;

/// The result of a helper, or of a whole region. A region that continues at RIP returns the offset of a set of targets
/// instead (`dispatch`), which is less than each of these numbers except [`Continue`](Self::Continue).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u64)]
pub(crate) enum Status {
    /// Nothing is left to do. Execution continues at RIP.
    Continue = 0,
    /// The instruction ended with the [`Break`] in `compiled.why`.
    Broke = SETS_BYTES,
    /// The instruction has had no effect. The interpreter has to execute it.
    Interpret,
    /// The instruction is done, but the CPU has to handle events or changes before the next instruction.
    After,
}

impl Status {
    pub(crate) fn of(number: u64) -> Option<Self> {
        let all = [
            Status::Continue,
            Status::Broke,
            Status::Interpret,
            Status::After,
        ];
        all.into_iter().find(|status| *status as u64 == number)
    }
}

fn failed(cpu: &mut Cpu, why: Break) -> u64 {
    cpu.compiled.why = why;
    Status::Broke as u64
}

/// The result of a function that `or_stop` wraps: a value and 0, or 0 and 1. In the second case, the region stops.
#[repr(C)]
struct Found {
    value: u64,
    stops: u64,
}

impl Found {
    /// Converts a helper's result. If `value` is `None`, the region stops, and the interpreter continues at `step`.
    fn new(cpu: &mut Cpu, value: Option<u64>, step: *const Step) -> Self {
        if value.is_none() {
            cpu.compiled.step = step.cast();
        }
        Self {
            value: value.unwrap_or(0),
            stops: value.is_none().into(),
        }
    }
}

/// A helper that returns a result to compiled code. If there is no result, the helper returns from the whole region
/// instead, and the interpreter continues. For this, RBP must point to the region's frame. So compiled code needs no
/// check after the call.
#[derive(Clone, Copy)]
pub(super) struct OrStop {
    /// The helper with System V's calling convention.
    pub(super) plain: unsafe extern "C" fn(),
    /// The helper with Windows' calling convention, which preserves more registers, so that a path's values can stay in
    /// registers. (The register allocator does not know that the call is rare.)
    pub(super) keeping: unsafe extern "C" fn(),
}

/// Defines an [`OrStop`].
macro_rules! or_stop {
    ($(#[$doc:meta])* $name:ident = $find:ident) => {
        $(#[$doc])*
        pub(super) const $name: OrStop = {
            #[unsafe(naked)]
            unsafe extern "C" fn plain() {
                std::arch::naked_asm!(
                    "sub rsp, 8",
                    "call {find}",
                    "add rsp, 8",
                    "test rdx, rdx",
                    "jnz {stop}",
                    "ret",
                    find = sym $find,
                    stop = sym stop,
                )
            }
            #[unsafe(naked)]
            unsafe extern "C" fn keeping() {
                std::arch::naked_asm!(
                    "push rsi",
                    "push rdi",
                    "sub rsp, 168",
                    "movaps [rsp], xmm6",
                    "movaps [rsp + 16], xmm7",
                    "movaps [rsp + 32], xmm8",
                    "movaps [rsp + 48], xmm9",
                    "movaps [rsp + 64], xmm10",
                    "movaps [rsp + 80], xmm11",
                    "movaps [rsp + 96], xmm12",
                    "movaps [rsp + 112], xmm13",
                    "movaps [rsp + 128], xmm14",
                    "movaps [rsp + 144], xmm15",
                    "mov rdi, rcx",
                    "mov rsi, rdx",
                    "mov rdx, r8",
                    "mov rcx, r9",
                    "call {find}",
                    "movaps xmm6, [rsp]",
                    "movaps xmm7, [rsp + 16]",
                    "movaps xmm8, [rsp + 32]",
                    "movaps xmm9, [rsp + 48]",
                    "movaps xmm10, [rsp + 64]",
                    "movaps xmm11, [rsp + 80]",
                    "movaps xmm12, [rsp + 96]",
                    "movaps xmm13, [rsp + 112]",
                    "movaps xmm14, [rsp + 128]",
                    "movaps xmm15, [rsp + 144]",
                    "add rsp, 168",
                    "pop rdi",
                    "pop rsi",
                    "test rdx, rdx",
                    "jnz {stop}",
                    "ret",
                    find = sym $find,
                    stop = sym stop,
                )
            }
            OrStop { plain, keeping }
        };
    };
}

/// Returns from the whole region, so that the interpreter continues.
#[unsafe(naked)]
unsafe extern "C" fn stop() {
    std::arch::naked_asm!(
        "mov eax, {interpret}",
        "mov rsp, rbp",
        "pop rbp",
        "ret",
        interpret = const Status::Interpret as u64,
    )
}

/// Finds the host address of an access. Looks in the TLB first, because compiled code may not have done so, and then
/// calls `find`. Leaves the access to the interpreter if it ends beyond 4 GiB outside 64-bit mode, or fails. (The
/// interpreter repeats an access that fails, and raises its fault.)
fn access(
    cpu: &mut Cpu,
    lin: u64,
    bytes: u64,
    step: *const Step,
    look_up: impl FnOnce(&Tlb, usize) -> Option<*mut u8>,
    find: impl FnOnce(&mut Cpu) -> Result<Option<*mut u8>, Break>,
) -> Found {
    let table = cpu.table;
    let found = match look_up(cpu.tlb(), table) {
        _ if !cpu.is_64() && lin + bytes > 1 << 32 => None,
        Some(host) => Some(host),
        None => cpu.outside_floats(find).ok().flatten(),
    };
    Found::new(cpu, found.map(|host| host as u64), step)
}

extern "C" fn find_load(cpu: &mut Cpu, lin: u64, bytes: u64, step: *const Step) -> Found {
    let look_up = |tlb: &Tlb, table| tlb.read(table, lin, bytes);
    let find = |cpu: &mut Cpu| cpu.place_to_load(lin, bytes as usize);
    access(cpu, lin, bytes, step, look_up, find)
}

extern "C" fn find_store(cpu: &mut Cpu, lin: u64, bytes: u64, step: *const Step) -> Found {
    let look_up = |tlb: &Tlb, table| tlb.write(table, lin, bytes);
    let find = |cpu: &mut Cpu| cpu.place_to_store(lin, bytes as usize);
    access(cpu, lin, bytes, step, look_up, find)
}

extern "C" fn settle(cpu: &mut Cpu) -> Found {
    cpu.flags();
    Found { value: 0, stops: 0 }
}

extern "C" fn find_floats(cpu: &mut Cpu, step: *const Step) -> Found {
    let found = cpu.begin_floats().then_some(0);
    Found::new(cpu, found, step)
}

or_stop! {
    /// Returns the host address from which to load `bytes` bytes: in guest memory, or in a copy if the bytes are in two
    /// pages. Leaves MMIO to the interpreter, because a region may repeat reads.
    PLACE_TO_LOAD = find_load
}

or_stop! {
    /// Returns the host address to which to store `bytes` bytes. Leaves the store to the interpreter if the bytes are
    /// not in one page, or the page has decoded code or is tracked or watched.
    PLACE_TO_STORE = find_store
}

or_stop! {
    /// Sets the host's MXCSR to the guest's value: see `float`.
    BEGIN_FLOATS = find_floats
}

or_stop! {
    /// Writes the recorded flags to RFLAGS. Never stops the region.
    SETTLE = settle
}

/// Calls the interpreter's handler of the instruction `step`.
pub(super) extern "C" fn handler(cpu: &mut Cpu, step: &Step) -> u64 {
    let rip = cpu.state.rip;
    let moved;
    let op = match step.moves_displacement {
        true => {
            moved = step.at(rip);
            &moved.op
        }
        false => &step.op,
    };
    cpu.code.rip = step.rip_at(rip);
    cpu.stop = false;
    match cpu.outside_floats(|cpu| (op.handler)(cpu, op)) {
        Ok(()) if cpu.stop || cpu.slow => Status::After as u64,
        Ok(()) => 0,
        Err(why) => {
            let why = cpu.outside_floats(|cpu| cpu.finish_fetched(op, why));
            // While a region runs, `state.rip` must be in its page, so store the new RIP elsewhere.
            cpu.compiled.rip = std::mem::replace(&mut cpu.state.rip, rip);
            failed(cpu, why)
        }
    }
}

/// Returns 1 if a condition holds for the recorded flags, else 0. `condition` is the low four bits of Jcc's opcode.
pub(super) extern "C" fn condition(cpu: &mut Cpu, condition: u64) -> u64 {
    let holds: fn(&Cpu) -> bool = flags::by_condition!(condition, Cpu::condition);
    holds(cpu).into()
}

/// A quotient and a remainder.
#[repr(C)]
pub(super) struct Divided {
    quotient: u64,
    remainder: u64,
}

/// Divides a 128-bit number, whose upper half is less than the divisor.
pub(super) extern "C" fn divide(_: &mut Cpu, low: u64, high: u64, divisor: u64) -> Divided {
    let (quotient, remainder) = Now::new().quotient((low, high), divisor);
    Divided {
        quotient,
        remainder,
    }
}
