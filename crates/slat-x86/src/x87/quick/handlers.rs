//! The quick handlers: they execute x87 instructions in the usual state.

use super::host::*;
use super::plan::{DP, IP, OPCODE, OTHER_FLAGS, Plan};
use crate::Cpu;
use crate::op::{Flow, Op};
use crate::state::flags::{ARITHMETIC, CF, PF, ZF};
use crate::state::{F80, State};
use crate::x87::{self, ERROR, MODRM, Stub, own_stub};

/// The exception flags in the status word. The same bits of the control word mask these exceptions.
const EXCEPTIONS: u16 = 0x3f;
const BUSY: u16 = 1 << 15;
const TOP: u16 = 7 << 11;
/// The value in the status word by which a push or pop changes TOP.
const STEP: u16 = 1 << 11;

impl State {
    /// Whether the x87 state is usual: all exceptions are masked, none is pending, and the control and status words
    /// have no reserved bits set.
    #[inline(always)]
    fn x87_is_usual(&self) -> bool {
        const RESERVED: u16 = 0xe0c0;
        const SET: u16 = 1 << 6;
        self.fcw & (EXCEPTIONS | RESERVED) == EXCEPTIONS | SET && self.fsw & (ERROR | BUSY) == 0
    }

    /// Returns the index of ST(`i`) in the guest's registers. `None`: the register is empty.
    #[inline(always)]
    fn full(&self, i: u8) -> Option<usize> {
        let n = self.physical(i.into());
        (self.ftw & 1 << n != 0).then_some(n)
    }

    /// Returns the index of the register that a push fills. `None`: the register is full.
    #[inline(always)]
    fn pushed(&self) -> Option<usize> {
        let n = self.physical(7);
        (self.ftw & 1 << n == 0).then_some(n)
    }

    #[inline(always)]
    fn rotate(&mut self, by: u16) {
        self.fsw = self.fsw & !TOP | self.fsw.wrapping_add(by) & TOP;
    }

    #[inline(always)]
    fn push(&mut self) {
        self.rotate(STEP.wrapping_neg());
        self.ftw |= 1 << self.physical(0);
    }

    #[inline(always)]
    fn pop(&mut self, times: u8) {
        for _ in 0..times {
            self.ftw &= !(1 << self.physical(0));
            self.rotate(STEP);
        }
    }

    /// Copies a register in two parts, because stubs read and write it in the same two parts. An access of another size
    /// would have to wait until the stores of both parts are done.
    #[inline(always)]
    fn copy_register(&mut self, from: usize, to: usize) {
        let F80 { mantissa, exponent } = self.st[from];
        self.st[to] = F80 { mantissa, exponent };
    }
}

/// Applies the effects of an instruction other than its result: flags, condition codes and pointers. Pops registers.
#[inline(always)]
fn finish(cpu: &mut Cpu, op: &Op, plan: Plan, status: u16) {
    let conditions = u16::from(plan.conditions) << 8;
    let fsw = &mut cpu.state.fsw;
    *fsw = *fsw & !conditions | status & (conditions | EXCEPTIONS);
    if plan.touches & IP != 0 {
        cpu.state.fip = cpu.rip_of(op);
    }
    if plan.touches & DP != 0 {
        cpu.state.fdp = cpu.offset(op);
    }
    if plan.touches & OPCODE != 0 {
        let own = own_stub(op);
        cpu.state.fop = own.opcode() << 8 | u16::from(op.r[MODRM]);
    }
    cpu.state.pop(plan.pops);
}

/// Reads the memory operand of 2, 4 or 8 bytes. `None`: the fast path of the TLB cannot read it.
#[inline(always)]
fn read(cpu: &mut Cpu, op: &Op) -> Option<u64> {
    let lin = cpu.lin(op, op.aux.into()).ok()?;
    match op.aux {
        2 => cpu.try_load::<u16>(lin).map(u64::from),
        4 => cpu.try_load::<u32>(lin).map(u64::from),
        _ => cpu.try_load::<u64>(lin),
    }
}

/// Writes the memory operand of 2, 4 or 8 bytes. `None`: the fast path of the TLB cannot write it; nothing was written.
#[inline(always)]
fn write(cpu: &mut Cpu, op: &Op, value: u64) -> Option<()> {
    let lin = cpu.lin(op, op.aux.into()).ok()?;
    let done = match op.aux {
        2 => cpu.try_store(lin, value as u16),
        4 => cpu.try_store(lin, value as u32),
        _ => cpu.try_store(lin, value),
    };
    done.then_some(())
}

#[cfg(test)]
thread_local! {
    /// The number of operations that quick handlers have left to the reference. For tests.
    pub(in crate::x87) static LEFT: std::cell::Cell<u64> = const { std::cell::Cell::new(0) };
}

/// Defines quick handlers. If the x87 state is usual, a handler runs its body. If the state is not usual, or the body
/// returns `None`, the handler calls the reference, which is the function after `else`. A body that returns `None` must
/// have changed nothing.
macro_rules! handlers {
    ($($name:ident($cpu:ident, $op:ident, $plan:pat) else $reference:ident $body:block)*) => {$(
        pub(super) fn $name(cpu: &mut Cpu, op: &Op) -> Flow {
            #[inline(always)]
            fn body($cpu: &mut Cpu, $op: &Op, $plan: Plan) -> Option<()> $body
            if cpu.state.x87_is_usual() && body(cpu, op, Plan::of(op)).is_some() {
                return Ok(());
            }
            #[cfg(test)]
            LEFT.set(LEFT.get() + 1);
            x87::$reference(cpu, op)
        }
    )*};
}

handlers! {
    calculate(cpu, op, plan) else registers {
        let state = &mut cpu.state;
        let operands = (state.full(0)?, state.full(plan.other)?, state.physical(plan.destination.into()));
        let (status, _) = two_to_one(state.call(plan.stub, operands, &mut 0));
        finish(cpu, op, plan, status);
        Some(())
    }

    reduce(cpu, op, plan) else registers {
        let state = &mut cpu.state;
        let (st0, st1) = (state.full(0)?, state.full(plan.other)?);
        let (mut result, mut no_memory) = (F80::default(), 0);
        let mut call = state.call(plan.stub, (st0, st1, 0), &mut no_memory);
        call.to = &mut result;
        let (status, _) = two_to_one_and_other(call);
        // If the result is a NaN or infinity, there is no remainder, and the host may leave the condition codes
        // unchanged: leave the instruction to the reference.
        if result.exponent & 0x7fff == 0x7fff {
            return None;
        }
        let F80 { mantissa, exponent } = result;
        cpu.state.st[st0] = F80 { mantissa, exponent };
        finish(cpu, op, plan, status);
        Some(())
    }

    calculate_alone(cpu, op, plan) else registers {
        let st0 = cpu.state.full(0)?;
        let (status, _) = one_to_one(cpu.state.call(plan.stub, (st0, 0, st0), &mut 0));
        finish(cpu, op, plan, status);
        Some(())
    }

    calculate_memory(cpu, op, plan) else load {
        let st0 = cpu.state.full(0)?;
        let mut value = read(cpu, op)?;
        let (status, _) = one_to_one(cpu.state.call(plan.stub, (st0, 0, st0), &mut value));
        finish(cpu, op, plan, status);
        Some(())
    }

    examine(cpu, op, plan) else registers {
        let st0 = cpu.state.full(0)?;
        let (status, _) = one_kept(cpu.state.call(plan.stub, (st0, 0, 0), &mut 0));
        finish(cpu, op, plan, status);
        Some(())
    }

    examine_memory(cpu, op, plan) else load {
        let st0 = cpu.state.full(0)?;
        let mut value = read(cpu, op)?;
        let (status, _) = one_kept(cpu.state.call(plan.stub, (st0, 0, 0), &mut value));
        finish(cpu, op, plan, status);
        Some(())
    }

    compare(cpu, op, plan) else registers {
        let operands = (cpu.state.full(0)?, cpu.state.full(plan.other)?, 0);
        let (status, _) = two_to_none(cpu.state.call(plan.stub, operands, &mut 0));
        finish(cpu, op, plan, status);
        Some(())
    }

    compare_to_flags(cpu, op, plan) else compare_to_flags {
        let operands = (cpu.state.full(0)?, cpu.state.full(plan.other)?, 0);
        let (status, flags) = two_to_flags(cpu.state.call(plan.stub, operands, &mut 0));
        finish(cpu, op, plan, status);
        match plan.touches & OTHER_FLAGS != 0 {
            true => cpu.set_flags(ARITHMETIC, flags & (ZF | PF | CF)),
            false => cpu.set_flags(ZF | PF | CF, flags),
        }
        Some(())
    }

    load_constant(cpu, op, plan) else registers {
        let to = cpu.state.pushed()?;
        let (status, _) = none_to_one(cpu.state.call(plan.stub, (0, 0, to), &mut 0));
        finish(cpu, op, plan, status);
        cpu.state.push();
        Some(())
    }

    load_memory(cpu, op, plan) else load {
        let to = cpu.state.pushed()?;
        let mut value = read(cpu, op)?;
        let (status, _) = none_to_one(cpu.state.call(plan.stub, (0, 0, to), &mut value));
        finish(cpu, op, plan, status);
        cpu.state.push();
        Some(())
    }

    store_memory(cpu, op, plan) else store {
        let st0 = cpu.state.full(0)?;
        let mut value = 0;
        let (status, _) = one_to_none(cpu.state.call(plan.stub, (st0, 0, 0), &mut value));
        write(cpu, op, value)?;
        finish(cpu, op, plan, status);
        Some(())
    }

    load_extended(cpu, op, plan) else load {
        let to = cpu.state.pushed()?;
        let lin = cpu.lin(op, 10).ok()?;
        let table = cpu.table;
        let host = cpu.tlb().read(table, lin, 10)?;
        // SAFETY: the software TLB holds guest memory only, to which every access is guarded.
        let (mantissa, exponent) = unsafe {
            (slat_guard::load(host.cast()).ok()?, slat_guard::load(host.wrapping_add(8).cast()).ok()?)
        };
        cpu.state.st[to] = F80 { mantissa, exponent };
        finish(cpu, op, plan, 0);
        cpu.state.push();
        Some(())
    }

    store_extended(cpu, op, plan) else store {
        let F80 { mantissa, exponent } = cpu.state.st[cpu.state.full(0)?];
        let lin = cpu.lin(op, 10).ok()?;
        let table = cpu.table;
        let host = cpu.tlb().write(table, lin, 10)?;
        // SAFETY: the software TLB holds guest memory only, to which every access is guarded. If the second store
        // fails, the reference handler stores both parts again.
        unsafe {
            slat_guard::store(host.cast(), mantissa).ok()?;
            slat_guard::store(host.wrapping_add(8).cast(), exponent).ok()?;
        }
        finish(cpu, op, Plan { pops: 1, ..plan }, 0);
        Some(())
    }

    load_register(cpu, op, plan) else registers {
        let (from, to) = (cpu.state.full(plan.other)?, cpu.state.pushed()?);
        cpu.state.copy_register(from, to);
        finish(cpu, op, plan, 0);
        cpu.state.push();
        Some(())
    }

    store_register(cpu, op, plan) else registers {
        let (from, to) = (cpu.state.full(0)?, cpu.state.physical(plan.destination.into()));
        cpu.state.copy_register(from, to);
        cpu.state.ftw |= 1 << to;
        finish(cpu, op, plan, 0);
        Some(())
    }

    exchange(cpu, op, plan) else registers {
        let (a, b) = (cpu.state.full(0)?, cpu.state.full(plan.other)?);
        let F80 { mantissa, exponent } = cpu.state.st[a];
        cpu.state.copy_register(b, a);
        cpu.state.st[b] = F80 { mantissa, exponent };
        finish(cpu, op, plan, 0);
        Some(())
    }

    move_if(cpu, op, plan) else registers {
        let (to, from) = (cpu.state.full(0)?, cpu.state.full(plan.other)?);
        let modrm = op.r[MODRM];
        let flags = [CF, ZF, CF | ZF, PF][usize::from(modrm >> 3 & 3)];
        // FCMOVcc has the opcode DA, and FCMOVNcc has the opcode DB.
        let negated = own_stub(op) == Stub::on_registers(0xdb, modrm);
        if (cpu.flags() & flags != 0) != negated {
            cpu.state.copy_register(from, to);
        }
        finish(cpu, op, plan, 0);
        Some(())
    }

    change_sign(cpu, op, plan) else registers {
        let st0 = cpu.state.full(0)?;
        cpu.state.st[st0].exponent ^= 0x8000;
        finish(cpu, op, plan, 0);
        Some(())
    }

    absolute(cpu, op, plan) else registers {
        let st0 = cpu.state.full(0)?;
        cpu.state.st[st0].exponent &= 0x7fff;
        finish(cpu, op, plan, 0);
        Some(())
    }

    free(cpu, op, plan) else registers {
        cpu.state.ftw &= !(1 << cpu.state.physical(plan.other.into()));
        finish(cpu, op, plan, 0);
        Some(())
    }

    nothing(cpu, op, plan) else registers {
        finish(cpu, op, plan, 0);
        Some(())
    }

    rotate(cpu, op, plan) else registers {
        // The ModR/M byte is F6 for FDECSTP, and F7 for FINCSTP.
        let by = if op.r[MODRM] & 1 == 0 { STEP.wrapping_neg() } else { STEP };
        cpu.state.rotate(by);
        finish(cpu, op, plan, 0);
        Some(())
    }

    clear_exceptions(cpu, _op, _) else control_only {
        cpu.state.fsw &= !STICKY;
        Some(())
    }

    load_control(cpu, op, plan) else load {
        let fcw = read(cpu, op)? as u16;
        let old = std::mem::replace(&mut cpu.state.fcw, fcw);
        // Leave a control word to the reference if it makes an exception pending or has reserved bits set.
        if !cpu.state.x87_is_usual() {
            cpu.state.fcw = old;
            return None;
        }
        finish(cpu, op, plan, 0);
        Some(())
    }

    store_control(cpu, op, _) else store_environment {
        write(cpu, op, cpu.state.fcw.into())
    }

    store_status(cpu, op, _) else store_environment {
        write(cpu, op, cpu.state.fsw.into())
    }
}
