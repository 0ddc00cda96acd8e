//! x87 instructions.
//!
//! The host's CPU executes each of them on the guest's own x87 state: FRSTOR, the instruction, FNSAVE. So the hardware
//! itself determines stack faults, condition codes, rounding, and the effects of unusual encodings. An unmasked
//! exception does no harm on the host: the hardware delivers it only at the *next* x87 instruction that waits for
//! exceptions, and FNSAVE, which does not wait, clears it before that.
//!
//! This takes 170 ns. Module `quick` executes frequent instructions in frequent states faster, without the whole state.

mod quick;

use crate::Cpu;
use crate::op::{Flow, Handler, MEM, Op};
use crate::state::{F80, State, flags};
use crate::vector;
use core::arch::{asm, naked_asm};
use iced_x86::{Instruction, Mnemonic as M};

/// The error summary bit in the status word: an unmasked exception is pending.
const ERROR: u16 = 1 << 7;

/// The element of `op.r` in which x87 operations store the ModR/M byte. (They have no fourth operand.)
const MODRM: usize = 3;

/// The x87 state in the format that FNSAVE writes in 64-bit mode.
#[repr(C)]
#[derive(Clone, PartialEq, Eq)]
struct Image {
    fcw: u32,
    fsw: u32,
    tags: u32,
    ip: u32,
    cs_and_opcode: u32,
    dp: u32,
    ds: u32,
    st: [u8; 80],
}

impl Image {
    fn has_ip(&self) -> bool {
        self.ip != NO_IP
    }

    fn has_dp(&self) -> bool {
        self.dp != 0
    }

    fn has_opcode(&self) -> bool {
        self.cs_and_opcode & NO_OPCODE != NO_OPCODE
    }

    /// Whether the instruction pointer and the opcode are plausible after `stub` has run: each has either the value
    /// that [`Run::new`] has loaded, or the value that `stub` sets.
    fn has_pointers_of(&self, stub: Stub) -> bool {
        let opcode = u32::from(stub.fop()) << 16;
        (!self.has_ip() || self.ip == stub.address() as u32)
            && (!self.has_opcode() || self.cs_and_opcode & NO_OPCODE == opcode)
    }
}

/// The stubs of all x87 instructions, four bytes apart. First come the instructions on registers: eight opcodes (D8 to
/// DF) with 64 ModR/M bytes (C0 to FF) each. Then follow the instructions on memory at RDI: eight opcodes with eight
/// ModR/M bytes each, and all of these again with an operand-size prefix. (The prefix only affects instructions that
/// load or store the environment.)
#[unsafe(naked)]
unsafe extern "C" fn stubs() {
    naked_asm!(
        ".set slat_x87, 0",
        ".rept 512",
        ".byte 0xd8 + (slat_x87 >> 6), 0xc0 + (slat_x87 & 63), 0xc3, 0x90",
        ".set slat_x87, slat_x87 + 1",
        ".endr",
        ".set slat_x87, 0",
        ".rept 64",
        ".byte 0xd8 + (slat_x87 >> 3), ((slat_x87 & 7) << 3) + 7, 0xc3, 0x90",
        ".set slat_x87, slat_x87 + 1",
        ".endr",
        ".set slat_x87, 0",
        ".rept 64",
        ".byte 0x66, 0xd8 + (slat_x87 >> 3), ((slat_x87 & 7) << 3) + 7, 0xc3",
        ".set slat_x87, slat_x87 + 1",
        ".endr",
    )
}

/// The index of a stub in [`stubs`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Stub(u16);

impl Stub {
    /// The number of stubs: for instructions on registers, for instructions on memory, and for instructions on memory
    /// with an operand-size prefix.
    const COUNT: usize = 512 + 64 + 64;

    fn on_registers(opcode: u8, modrm: u8) -> Stub {
        Stub(u16::from(opcode & 7) * 64 + u16::from(modrm & 63))
    }

    fn on_memory(opcode: u8, modrm: u8) -> Stub {
        Stub(512 + u16::from(opcode & 7) * 8 + u16::from(modrm >> 3 & 7))
    }

    /// Returns the stub of an instruction with a memory operand and an operand-size prefix; [`Self::on_memory`] is for
    /// instructions without the prefix.
    fn on_memory_16(opcode: u8, modrm: u8) -> Stub {
        Stub(Stub::on_memory(opcode, modrm).0 + 64)
    }

    fn is_on_memory(self) -> bool {
        self.0 >= 512
    }

    /// Returns the low three bits of the opcode.
    fn opcode(self) -> u16 {
        match self.is_on_memory() {
            true => self.0 >> 3 & 7,
            false => self.0 >> 6,
        }
    }

    /// Returns the value of FOP that the stub sets.
    fn fop(self) -> u16 {
        let modrm = match self.is_on_memory() {
            true => (self.0 & 7) << 3 | 7,
            false => 0xc0 | self.0 & 63,
        };
        self.opcode() << 8 | modrm
    }

    #[inline(always)]
    fn address(self) -> usize {
        stubs as *const () as usize + 4 * usize::from(self.0)
    }
}

/// Returns the [`Stub`] of the instruction itself, from the low bits of `op.imm`. The upper bits may be a `Plan` of
/// module `quick`.
fn own_stub(op: &Op) -> Stub {
    Stub(op.imm as u16)
}

/// Chooses the handler of the x87 instruction whose bytes are `code`. `None`: this CPU does not have the instruction.
pub(crate) fn lower(insn: &Instruction, code: &[u8], op: &mut Op) -> Option<Handler> {
    if insn.mnemonic() == M::Wait {
        return Some(fwait);
    }
    let (opcode, modrm) = opcode_and_modrm(code)?;
    let reference = lower_reference(insn, opcode, modrm, op);
    Some(quick::lower(opcode, modrm, op).unwrap_or(reference))
}

/// Chooses the reference handler, which executes the instruction on the whole x87 state.
fn lower_reference(insn: &Instruction, opcode: u8, modrm: u8, op: &mut Op) -> Handler {
    op.aux = 0;
    let in_memory = op.r.contains(&MEM);
    op.r[MODRM] = modrm;
    if in_memory {
        let (size, env16) = match insn.memory_size().size() {
            14 => (14, true),
            94 => (94, true),
            size => (size, false),
        };
        let stub = match env16 {
            true => Stub::on_memory_16(opcode, modrm),
            false => Stub::on_memory(opcode, modrm),
        };
        op.imm = stub.0.into();
        op.aux = size as u8;
        return match insn.mnemonic() {
            M::Fst | M::Fstp | M::Fist | M::Fistp | M::Fisttp | M::Fbstp => store,
            M::Fnstcw | M::Fnstsw | M::Fnstenv | M::Fnsave => store_environment,
            M::Fldcw => load,
            M::Fldenv | M::Frstor => load_environment,
            _ => load,
        };
    }
    op.imm = Stub::on_registers(opcode, modrm).0.into();
    match insn.mnemonic() {
        M::Fninit | M::Fnclex | M::Fneni | M::Fndisi | M::Fnsetpm => control_only,
        M::Fnstsw => status_to_ax,
        M::Fcomi | M::Fcomip | M::Fucomi | M::Fucomip => compare_to_flags,
        _ => registers,
    }
}

/// Returns the first two bytes after the prefixes, if they can be an x87 instruction.
fn opcode_and_modrm(code: &[u8]) -> Option<(u8, u8)> {
    let is_prefix = |byte: &u8| matches!(byte, 0x26 | 0x2e | 0x36 | 0x3e | 0x64..=0x67 | 0x40..=0x4f | 0xf0 | 0xf2 | 0xf3);
    let at = code.iter().position(|byte| !is_prefix(byte))?;
    match code[at..] {
        [opcode @ 0xd8..=0xdf, modrm, ..] => Some((opcode, modrm)),
        _ => None,
    }
}

/// Raises the pending x87 exception, if there is one, as every x87 and MMX instruction does that waits for exceptions.
/// It is #MF even if CR0.NE is clear: KVM runs guests with CR0.NE set, and there is no FERR# pin.
pub(crate) fn check_pending(cpu: &mut Cpu) -> Flow {
    if cpu.state.fsw & ERROR == 0 {
        return Ok(());
    }
    Err(cpu.raise(vector::MF, None))
}

fn fwait(cpu: &mut Cpu, _op: &Op) -> Flow {
    check_pending(cpu)
}

#[inline(never)]
fn registers(cpu: &mut Cpu, op: &Op) -> Flow {
    check_pending(cpu)?;
    let mut run = Run::new(cpu);
    run.call(own_stub(op));
    run.commit(cpu, op);
    Ok(())
}

#[inline(never)]
fn compare_to_flags(cpu: &mut Cpu, op: &Op) -> Flow {
    check_pending(cpu)?;
    let mut run = Run::new(cpu);
    run.call(own_stub(op));
    run.commit(cpu, op);
    cpu.set_flags(flags::ARITHMETIC, run.flags & flags::ARITHMETIC);
    Ok(())
}

#[inline(never)]
fn control_only(cpu: &mut Cpu, op: &Op) -> Flow {
    let mut run = Run::with_pointers(cpu);
    run.call_with_pointers(own_stub(op));
    run.commit_all(&mut cpu.state);
    Ok(())
}

fn status_to_ax(cpu: &mut Cpu, _op: &Op) -> Flow {
    cpu.state.gpr[0] = cpu.state.gpr[0] & !0xffff | u64::from(cpu.state.fsw);
    Ok(())
}

/// Returns the alignment that an operand of `bytes` bytes must have if alignment is checked: 8 for an 80-bit number,
/// else that of the operand's largest part.
fn alignment(bytes: u8) -> usize {
    match bytes {
        10 => 8,
        bytes => 1 << bytes.trailing_zeros(),
    }
}

/// Why the run ends at a load from MMIO. No device has floating-point registers. KVM's emulator does not support such a
/// load either, and its clients rely on that.
const MMIO: &str = "an x87 load from MMIO";

#[inline(never)]
fn load(cpu: &mut Cpu, op: &Op) -> Flow {
    check_pending(cpu)?;
    let lin = cpu.lin(op, op.aux.into())?;
    let mut run = Run::new(cpu);
    cpu.check_alignment(lin, alignment(op.aux))?;
    cpu.load_memory(lin, &mut run.memory[..usize::from(op.aux)], MMIO)?;
    run.call(own_stub(op));
    run.commit(cpu, op);
    Ok(())
}

#[inline(never)]
fn store(cpu: &mut Cpu, op: &Op) -> Flow {
    const PRECISION: u16 = 1 << 5;
    check_pending(cpu)?;
    let lin = cpu.lin(op, op.aux.into())?;
    let mut run = Run::new(cpu);
    run.call(own_stub(op));
    let status = run.image.fsw as u16;
    // If an unmasked exception stops the instruction, nothing is stored. An unmasked precision exception does not stop
    // it.
    let unmasked = status & !(run.image.fcw as u16) & 0x3f;
    if status & ERROR == 0 || unmasked & !PRECISION == 0 {
        cpu.check_alignment(lin, alignment(op.aux))?;
        cpu.store_bytes(lin, &run.memory[..usize::from(op.aux)])?;
    }
    run.commit(cpu, op);
    Ok(())
}

/// Executes FLDENV or FRSTOR, which also load the pointers (FIP, FDP, FOP).
fn load_environment(cpu: &mut Cpu, op: &Op) -> Flow {
    check_pending(cpu)?;
    let lin = cpu.lin(op, op.aux.into())?;
    let mut run = Run::with_pointers(cpu);
    cpu.check_alignment(lin, alignment(op.aux))?;
    cpu.load_memory(lin, &mut run.memory[..usize::from(op.aux)], MMIO)?;
    run.call_with_pointers(own_stub(op));
    run.commit_all(&mut cpu.state);
    Ok(())
}

/// Executes a store instruction that does not wait for exceptions.
#[inline(never)]
fn store_environment(cpu: &mut Cpu, op: &Op) -> Flow {
    let lin = cpu.lin(op, op.aux.into())?;
    let mut run = Run::with_pointers(cpu);
    run.call_with_pointers(own_stub(op));
    cpu.check_alignment(lin, alignment(op.aux))?;
    cpu.store_bytes(lin, &run.memory[..usize::from(op.aux)])?;
    run.commit_all(&mut cpu.state);
    Ok(())
}

/// One execution of an instruction on the host: the x87 state, memory operand and flags, before and after it.
#[derive(Clone, PartialEq, Eq)]
struct Run {
    image: Image,
    /// The memory operand. FNSAVE has the largest one.
    memory: [u8; 112],
    flags: u64,
}

/// An opcode and an instruction pointer that no stub sets. The host's x87 unit gets them instead of the guest's
/// pointers before an instruction that may set the pointers.
const NO_OPCODE: u32 = 0x7ff << 16;
const NO_IP: u32 = 1;

impl Run {
    /// Makes a run whose pointers have values that no stub sets. So the result shows whether the instruction has set
    /// them.
    fn new(cpu: &mut Cpu) -> Run {
        let mut run = Run::with_pointers(cpu);
        (run.image.ip, run.image.cs_and_opcode, run.image.dp) = (NO_IP, NO_OPCODE, 0);
        run
    }

    /// Makes a run with the guest's pointers, for instructions that store, load or clear them.
    fn with_pointers(cpu: &mut Cpu) -> Run {
        let flags = cpu.flags() & flags::ARITHMETIC | flags::ALWAYS;
        let state = &cpu.state;
        let mut tags = 0;
        let mut st = [0; 80];
        for n in 0..8 {
            if state.ftw & 1 << n == 0 {
                tags |= 3 << (2 * n);
            }
        }
        for (i, bytes) in st.chunks_exact_mut(10).enumerate() {
            let F80 { mantissa, exponent } = state.st[(usize::from(state.fsw >> 11) + i) & 7];
            bytes[..8].copy_from_slice(&mantissa.to_le_bytes());
            bytes[8..].copy_from_slice(&exponent.to_le_bytes());
        }
        let image = Image {
            fcw: state.fcw.into(),
            fsw: state.fsw.into(),
            tags,
            ip: state.fip as u32,
            cs_and_opcode: u32::from(state.fop) << 16,
            dp: state.fdp as u32,
            ds: 0,
            st,
        };
        Run {
            image,
            memory: [0; 112],
            flags,
        }
    }

    /// Executes the instruction with this stub.
    ///
    /// If no exception is pending, AMD's CPUs do not save the pointers when the host's kernel switches threads (AMD64
    /// manual, FXSAVE). So a thread switch between FRSTOR and FNSAVE loses the pointers. If the result shows that, the
    /// instruction is executed again.
    fn call(&mut self, stub: Stub) {
        self.repeat(stub, |run, _| run.image.has_pointers_of(stub));
    }

    /// Calls a stub like [`Self::call`], but for an instruction that stores, loads or clears the guest's x87 pointers
    /// (the addresses of the last instruction and its operand). Executes the instruction twice: if a thread switch has
    /// lost the pointers, the two results differ.
    fn call_with_pointers(&mut self, stub: Stub) {
        self.repeat(stub, |run, before| {
            let mut again = before.clone();
            again.execute(stub);
            again == *run
        });
    }

    /// Executes the instruction, again and again from the same state, until `is_whole` accepts the result. The
    /// arguments of `is_whole` are the result and the state before. The fourth result is accepted without a check: this
    /// host does not behave as `is_whole` expects.
    fn repeat(&mut self, stub: Stub, is_whole: impl Fn(&Run, &Run) -> bool) {
        let before = self.clone();
        self.execute(stub);
        for _ in 0..3 {
            if is_whole(self, &before) {
                break;
            }
            *self = before.clone();
            self.execute(stub);
        }
    }

    fn execute(&mut self, stub: Stub) {
        let host_fcw = 0u16;
        // SAFETY: each stub is one x87 instruction and a `ret`. If it has a memory operand, the operand is at RDI and
        // fits into `memory`. Afterwards the x87 unit is empty and has the host's control word, as Rust code expects,
        // and the stack is balanced.
        unsafe {
            asm!(
                "fnstcw [{host_fcw}]",
                "frstor [{image}]",
                "push {flags}",
                "popfq",
                "call {stub}",
                "pushfq",
                "pop {flags}",
                "fnsave [{image}]",
                "fldcw [{host_fcw}]",
                stub = in(reg) stub.address(),
                image = in(reg) &raw mut self.image,
                host_fcw = in(reg) &raw const host_fcw,
                flags = inout(reg) self.flags,
                in("rdi") self.memory.as_mut_ptr(),
                out("rax") _,
                out("st(0)") _, out("st(1)") _, out("st(2)") _, out("st(3)") _,
                out("st(4)") _, out("st(5)") _, out("st(6)") _, out("st(7)") _,
            );
        }
    }

    /// Stores the result in the guest's state. If the instruction has set pointers, sets them as the guest's
    /// instruction would, with its own address and operand.
    fn commit(&self, cpu: &mut Cpu, op: &Op) {
        let (rip, operand) = (cpu.rip_of(op), cpu.offset(op));
        let state = &mut cpu.state;
        self.commit_registers(state);
        if self.image.has_ip() {
            state.fip = rip;
        }
        if self.image.has_dp() {
            state.fdp = operand;
        }
        if self.image.has_opcode() {
            // The stub of an instruction on memory has its operand at RDI, so its ModR/M byte is not the guest's.
            state.fop = (self.image.cs_and_opcode >> 16) as u16 & 0x700 | u16::from(op.r[MODRM]);
        }
    }

    /// Stores the result, including the pointers, in the guest's state.
    fn commit_all(&self, state: &mut State) {
        self.commit_registers(state);
        // If the lower half of a pointer has not changed, its upper half in the guest's state stays.
        if self.image.ip != state.fip as u32 {
            state.fip = self.image.ip.into();
        }
        if self.image.dp != state.fdp as u32 {
            state.fdp = self.image.dp.into();
        }
        state.fop = (self.image.cs_and_opcode >> 16) as u16 & 0x7ff;
    }

    fn commit_registers(&self, state: &mut State) {
        state.fcw = self.image.fcw as u16;
        state.fsw = self.image.fsw as u16;
        state.ftw = (0..8).fold(0, |tags, n| {
            tags | u8::from(self.image.tags >> (2 * n) & 3 != 3) << n
        });
        for (i, bytes) in self.image.st.chunks_exact(10).enumerate() {
            let (mantissa, exponent) = bytes.split_at(8);
            state.st[(usize::from(state.fsw >> 11) + i) & 7] = F80 {
                mantissa: u64::from_le_bytes(mantissa.try_into().unwrap_or_default()),
                exponent: u16::from_le_bytes(exponent.try_into().unwrap_or_default()),
            };
        }
    }
}

#[cfg(test)]
mod tests;
