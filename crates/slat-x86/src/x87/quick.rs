//! x87 instructions on their operands alone.
//!
//! In the usual state, all exceptions are masked and none is pending. The usual instruction finds its registers filled, or empty if it
//! pushes. Then the host CPU needs no more than the operands, the guest's control word and the instruction. What remains is simple,
//! and done here: TOP, the tags, and the sticky flags. Instructions that only move or free registers need no host at all.
//!
//! A handler that meets any other state leaves it to the one in the parent module, which is the reference: both leave the same state.
//!
//! The host's sticky flags stay in its status word, as in MXCSR (`simd::host`): to clear them costs more than most instructions. They
//! are cleared only when one is set that the guest has clear; then the instruction is executed once more, to see whether it was that
//! which set it. FLDCW is skipped if the guest's control word is the host's.

use super::{ERROR, Image, MODRM, NO_IP, NO_OPCODE, Run, Stub};
use crate::Cpu;
use crate::op::{Flow, Handler, Op};
use crate::state::flags::{AF, ARITHMETIC, CF, OF, PF, SF, ZF};
use crate::state::{F80, State};
use core::arch::asm;
use core::sync::atomic::{AtomicU16, Ordering::Relaxed};

/// The exception flags in the status word, and their masks in the control word.
const EXCEPTIONS: u16 = 0x3f;
/// The sticky flags in the status word: the exceptions and the stack fault.
const STICKY: u16 = 0x7f;
const BUSY: u16 = 1 << 15;
const TOP: u16 = 7 << 11;
/// One step of TOP.
const STEP: u16 = 1 << 11;

/// The condition codes, as the upper byte of the status word has them.
const CONDITIONS: u8 = 0x47;

/// What a handler has to know besides the operation, packed into `op.imm`. The low 16 bits are the instruction's own stub.
#[derive(Clone, Copy)]
pub(super) struct Plan {
    /// The stub to call: another form of the same instruction, if that leaves less on the host's stack.
    stub: Stub,
    /// The registers and flags that the instruction writes besides its result.
    touches: u8,
    /// The condition codes that it writes.
    conditions: u8,
    /// The second operand: ST(`other`).
    other: u8,
    /// The result goes to ST(`destination`).
    destination: u8,
    /// Registers that are popped after that.
    pops: u8,
}

/// Bits of [`Plan::touches`]: FIP, FDP, FOP; and OF, SF and AF, which comparisons clear on some CPUs.
const IP: u8 = 1 << 0;
const DP: u8 = 1 << 1;
const OPCODE: u8 = 1 << 2;
const OTHER_FLAGS: u8 = 1 << 3;

impl Plan {
    fn pack(self) -> u64 {
        u64::from(self.stub.0) << 16
            | u64::from(self.touches) << 32
            | u64::from(self.conditions) << 40
            | u64::from(self.other) << 48
            | u64::from(self.destination) << 51
            | u64::from(self.pops) << 54
    }

    #[inline(always)]
    fn of(op: &Op) -> Plan {
        Plan {
            stub: Stub((op.imm >> 16) as u16),
            touches: (op.imm >> 32) as u8,
            conditions: (op.imm >> 40) as u8,
            other: (op.imm >> 48) as u8 & 7,
            destination: (op.imm >> 51) as u8 & 7,
            pops: (op.imm >> 54) as u8 & 3,
        }
    }
}

/// Returns the handler that executes an instruction on its operands, if there is one; and puts its plan into `op`.
pub(super) fn lower(opcode: u8, modrm: u8, op: &mut Op) -> Option<Handler> {
    let (reg, i) = (modrm >> 3 & 7, modrm & 7);
    let own = super::own_stub(op);
    let stub = Stub::on_registers;
    let mut plan = Plan {
        stub: own,
        touches: 0,
        conditions: 0,
        other: i,
        destination: 0,
        pops: 0,
    };
    let handler: Handler = if own.is_on_memory() {
        match (opcode, reg) {
            (0xd8 | 0xda | 0xdc | 0xde, 2 | 3) => {
                // FCOM, FICOM
                plan.stub = Stub::on_memory(opcode, 2 << 3);
                plan.pops = reg & 1;
                examine_memory
            }
            (0xd8 | 0xda | 0xdc | 0xde, _) => calculate_memory,
            (0xd9 | 0xdb | 0xdd | 0xdf, 0) | (0xdf, 5) => load_memory,
            (0xd9 | 0xdb | 0xdd | 0xdf, 2) => {
                plan.stub = Stub::on_memory(opcode, 3 << 3);
                store_memory
            }
            (0xd9 | 0xdb | 0xdd | 0xdf, 3) | (0xdb | 0xdd | 0xdf, 1) | (0xdf, 7) => {
                plan.pops = 1;
                store_memory
            }
            (0xd9, 5) => load_control,
            (0xd9, 7) => store_control,
            (0xdb, 5) => load_extended,
            (0xdb, 7) => store_extended,
            (0xdd, 7) => store_status,
            _ => return None,
        }
    } else {
        match (opcode, reg, i) {
            (0xd8, 2 | 3, _) => {
                plan.stub = stub(0xde, 0xd9); // FCOMPP
                plan.pops = reg & 1;
                compare
            }
            (0xd8 | 0xdc | 0xde, 0 | 1 | 4.., _) => {
                // FADDP ST(1), ST(0) and the like: one register remains. The three opcodes agree in what they subtract from what.
                plan.stub = stub(0xde, 0xc1 | reg << 3);
                if opcode != 0xd8 {
                    plan.destination = i;
                }
                plan.pops = (opcode == 0xde).into();
                calculate
            }
            (0xd9, 0, _) => load_register,
            (0xd9, 1, _) => exchange,
            (0xd9, 2, 0) => nothing,
            (0xd9, 4, 0) => change_sign,
            (0xd9, 4, 1) => absolute,
            (0xd9, 4, 4 | 5) => examine, // FTST, FXAM
            (0xd9, 5, 0..=6) => load_constant,
            (0xd9, 6, 1 | 3) | (0xd9, 7, 1) => {
                // FYL2X, FPATAN, FYL2XP1
                (plan.other, plan.destination, plan.pops) = (1, 1, 1);
                calculate
            }
            (0xd9, 6, 5) | (0xd9, 7, 0 | 5) => {
                // FPREM1, FPREM, FSCALE
                plan.other = 1;
                reduce
            }
            (0xd9, 6, 6 | 7) => rotate,
            // F2XM1, FSQRT, FRNDINT, FSIN, FCOS
            (0xd9, 6, 0) | (0xd9, 7, 2 | 4 | 6 | 7) => calculate_alone,
            (0xda | 0xdb, 0..=3, _) => move_if,
            (0xda, 5, 1) | (0xde, 3, 1) => {
                // FUCOMPP, FCOMPP
                plan.pops = 2;
                compare
            }
            (0xdb, 4, 2) => clear_exceptions,
            (0xdb | 0xdf, 5 | 6, _) => {
                // FUCOMI, FCOMI
                plan.stub = stub(0xdf, 0xc1 | reg << 3);
                plan.pops = (opcode == 0xdf).into();
                compare_to_flags
            }
            (0xdd, 0, _) => free,
            (0xdd, 2 | 3, _) => {
                (plan.destination, plan.pops) = (i, reg & 1);
                store_register
            }
            (0xdd, 4 | 5, _) => {
                plan.stub = stub(0xda, 0xe9); // FUCOMPP
                plan.pops = reg & 1;
                compare
            }
            _ => return None,
        }
    };
    (plan.touches, plan.conditions) = touched(own);
    op.imm |= plan.pack();
    Some(handler)
}

/// Returns what [`probe`] finds for an instruction; it is asked once.
fn touched(stub: Stub) -> (u8, u8) {
    static FOUND: [AtomicU16; Stub::COUNT] = [const { AtomicU16::new(0) }; Stub::COUNT];
    /// Bit 15, which no condition code is: it was asked.
    const ASKED: u8 = 0x80;
    let found = &FOUND[usize::from(stub.0)];
    // Two threads may ask at once, and get the same answer.
    let known = match found.load(Relaxed) {
        0 => {
            let (touches, conditions) = probe(stub);
            let answer = u16::from_le_bytes([touches, conditions | ASKED]);
            found.store(answer, Relaxed);
            answer
        }
        known => known,
    };
    let [touches, conditions] = known.to_le_bytes();
    (touches, conditions & CONDITIONS)
}

/// Executes an instruction on a usual state, to find out which pointers, flags and condition codes it writes on this host. CPUs
/// differ: newer ones write FOP and FDP only when an exception is not masked; and what the manuals call undefined may be unchanged.
fn probe(stub: Stub) -> (u8, u8) {
    const ONE: [u8; 10] = [0, 0, 0, 0, 0, 0, 0, 0x80, 0xff, 0x3f];
    let mut st = [0; 80];
    for register in st.chunks_exact_mut(10) {
        register.copy_from_slice(&ONE);
    }
    let run = |conditions: u8, tags: u32| {
        let image = Image {
            fcw: 0x37f,
            fsw: u32::from(conditions) << 8,
            tags,
            ip: NO_IP,
            cs_and_opcode: NO_OPCODE,
            dp: 0,
            ds: 0,
            st,
        };
        let mut run = Run {
            image,
            memory: [0; 112],
            flags: ARITHMETIC | crate::state::flags::ALWAYS,
        };
        run.call(stub);
        run
    };
    // Pushes need an empty ST(7), others may need a full one.
    const STACK_FAULT: u32 = 1 << 6;
    let tags = match run(0, 0).image.fsw & STACK_FAULT {
        0 => 0,
        _ => 3 << 14,
    };
    let (run, other) = (run(0, tags), run(CONDITIONS, tags));
    let bit = |is_set, bit| if is_set { bit } else { 0 };
    let touches = bit(run.image.has_ip(), IP)
        | bit(run.image.has_dp(), DP)
        | bit(run.image.has_opcode(), OPCODE)
        | bit(run.flags & (OF | SF | AF) == 0, OTHER_FLAGS);
    let same = !(run.image.fsw ^ other.image.fsw) >> 8;
    (touches, same as u8 & CONDITIONS)
}

/// The operands of a call to the host.
struct Call<'s> {
    stub: usize,
    /// ST(0), ST(i), and where the result goes.
    a: *const F80,
    b: *const F80,
    to: *mut F80,
    /// The operand in memory.
    memory: &'s mut u64,
    fcw: &'s u16,
    /// The guest's sticky flags that are clear.
    clear: u32,
}

/// Defines functions that run a stub on the host: they push `load`, call the stub, run `then`, and end with `store`, which
/// empties the stack. They do it once more if a flag is set that the guest has not: it may have been in the status word before.
/// Each returns the status word and what `then` left in RDX.
macro_rules! calls {
    ($($name:ident: [$($load:literal),*] [$($then:literal),*] [$($store:literal),*];)*) => {$(
        #[inline(always)]
        fn $name(call: Call<'_>) -> (u16, u64) {
            let host = 0u16;
            let status: u32;
            let flags: u64;
            // SAFETY: the stub is one x87 instruction and a `ret`; its memory operand, if any, has at most 8 bytes and is at RDI.
            // The pointers are those of the guest's registers. All exceptions are masked. The x87 unit is left empty and with the
            // host's control word, as Rust code expects it; the stack is balanced.
            unsafe {
                asm!(
                    "/* {a} {b} {to} */",
                    "fnstcw [{host}]",
                    "movzx ecx, word ptr [{host}]",
                    "cmp cx, [{fcw}]",
                    "je 3f",
                    "2:",
                    "fldcw [{fcw}]",
                    "3:",
                    $(concat!("fld tbyte ptr [", $load, "]"),)*
                    "call {stub}",
                    $($then,)*
                    "fnstsw ax",
                    "test eax, r8d",
                    "jnz 5f",
                    $(concat!("fstp ", $store),)*
                    "cmp cx, [{fcw}]",
                    "je 4f",
                    "fldcw [{host}]",
                    "4:",
                    ".pushsection .text.unlikely, \"ax\", @progbits",
                    "5:",
                    "fninit",
                    "xor r8d, r8d",
                    "jmp 2b",
                    ".popsection",
                    stub = in(reg) call.stub,
                    a = in(reg) call.a,
                    b = in(reg) call.b,
                    to = in(reg) call.to,
                    fcw = in(reg) call.fcw,
                    host = in(reg) &raw const host,
                    in("rdi") call.memory,
                    out("eax") status,
                    out("ecx") _,
                    inout("r8d") call.clear => _,
                    inout("rdx") 0u64 => flags,
                    out("st(0)") _, out("st(1)") _, out("st(2)") _, out("st(3)") _,
                    out("st(4)") _, out("st(5)") _, out("st(6)") _, out("st(7)") _,
                );
            }
            (status as u16, flags)
        }
    )*};
}

calls! {
    none_to_one: [] [] ["tbyte ptr [{to}]"];
    one_to_none: ["{a}"] [] [];
    one_to_one: ["{a}"] [] ["tbyte ptr [{to}]"];
    one_kept: ["{a}"] [] ["st(0)"];
    two_to_none: ["{b}", "{a}"] [] [];
    two_to_one: ["{b}", "{a}"] [] ["tbyte ptr [{to}]"];
    two_to_one_and_other: ["{b}", "{a}"] [] ["tbyte ptr [{to}]", "st(0)"];
    two_to_flags: ["{b}", "{a}"] ["pushfq", "pop rdx"] ["st(0)"];
}

impl State {
    /// Whether no exception can end an instruction, none is pending, and the words are as the hardware has them.
    #[inline(always)]
    fn x87_is_usual(&self) -> bool {
        const RESERVED: u16 = 0xe0c0;
        const SET: u16 = 1 << 6;
        self.fcw & (EXCEPTIONS | RESERVED) == EXCEPTIONS | SET && self.fsw & (ERROR | BUSY) == 0
    }

    /// Returns ST(`i`), unless it is empty.
    #[inline(always)]
    fn full(&self, i: u8) -> Option<usize> {
        let n = self.physical(i.into());
        (self.ftw & 1 << n != 0).then_some(n)
    }

    /// Returns the register that a push fills, if it is empty.
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

    /// Copies a register as the stubs read and write it, in two parts: other accesses would have to wait for the parts.
    #[inline(always)]
    fn copy_register(&mut self, from: usize, to: usize) {
        let F80 { mantissa, exponent } = self.st[from];
        self.st[to] = F80 { mantissa, exponent };
    }

    /// Returns a call of `stub` with physical registers as operands.
    #[inline(always)]
    fn call<'s>(
        &'s mut self,
        stub: Stub,
        (a, b, to): (usize, usize, usize),
        memory: &'s mut u64,
    ) -> Call<'s> {
        let st = self.st.as_mut_ptr();
        Call {
            stub: stub.address(),
            a: st.wrapping_add(a & 7),
            b: st.wrapping_add(b & 7),
            to: st.wrapping_add(to & 7),
            memory,
            fcw: &self.fcw,
            clear: (!self.fsw & STICKY).into(),
        }
    }
}

/// Stores what an instruction leaves besides its result: flags, condition codes, pointers. Pops.
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
        let own = super::own_stub(op);
        cpu.state.fop = own.opcode() << 8 | u16::from(op.r[MODRM]);
    }
    cpu.state.pop(plan.pops);
}

/// Reads the operand in memory, of 2, 4 or 8 bytes, if the TLB has it.
#[inline(always)]
fn read(cpu: &mut Cpu, op: &Op) -> Option<u64> {
    let lin = cpu.lin(op, op.aux.into()).ok()?;
    match op.aux {
        2 => cpu.try_load::<u16>(lin).map(u64::from),
        4 => cpu.try_load::<u32>(lin).map(u64::from),
        _ => cpu.try_load::<u64>(lin),
    }
}

/// Writes the operand in memory, of 2, 4 or 8 bytes, if the TLB has it.
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
    /// Counts the operations that were left to the reference.
    pub(super) static LEFT: std::cell::Cell<u64> = const { std::cell::Cell::new(0) };
}

/// Defines handlers: each does its body if the x87 state is usual; the reference does what follows `else` if not, or if the body
/// returns `None`, having changed nothing.
macro_rules! handlers {
    ($($name:ident($cpu:ident, $op:ident, $plan:pat) else $reference:ident $body:block)*) => {$(
        fn $name(cpu: &mut Cpu, op: &Op) -> Flow {
            #[inline(always)]
            fn body($cpu: &mut Cpu, $op: &Op, $plan: Plan) -> Option<()> $body
            if cpu.state.x87_is_usual() && body(cpu, op, Plan::of(op)).is_some() {
                return Ok(());
            }
            #[cfg(test)]
            LEFT.set(LEFT.get() + 1);
            super::$reference(cpu, op)
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
        let call = Call { to: &mut result, ..state.call(plan.stub, (st0, st1, 0), &mut no_memory) };
        let (status, _) = two_to_one_and_other(call);
        // An operand without a remainder may leave the condition codes as they were.
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
        // SAFETY: as in `load_extended`. If the second part fails, the reference stores all again.
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
        // FCMOVcc is DA, FCMOVNcc is DB.
        let negated = super::own_stub(op) == Stub::on_registers(0xdb, modrm);
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
        // FDECSTP is F6, FINCSTP is F7.
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
        // Not one that leaves an exception pending, nor one with reserved bits.
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
