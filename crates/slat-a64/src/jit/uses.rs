//! The tier that computes nothing, but records what an instruction does. The instruction's meaning itself then tells
//! which registers it reads and writes, whether it may end early, and where execution continues.

use super::context::Context;
use crate::insn::{AtomicOp, Hint, Insn, SystemName};
use crate::meaning::execute;
use crate::simd::Function;
use crate::tier::{Access, Exception, Next, Tier};

/// The link register.
const LINK: u32 = 30;
/// Bit numbers in a set of registers, after those of X0 to X30: the stack pointer, and the flags.
pub(super) const SP: u32 = 31;
pub(super) const FLAGS: u32 = 32;

/// The effects of an instruction that matter for the plan of a block.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Uses {
    /// The registers that the instruction reads: one bit for each register.
    pub(super) reads: u64,
    /// The registers that the instruction writes: one bit for each register.
    pub(super) writes: u64,
    /// Whether the instruction may end early. The interpreter then executes it again.
    pub(super) stops: bool,
    /// Whether the instruction changes memory, or state other than the registers in `writes`. If so, the interpreter
    /// cannot restart at an earlier instruction after it.
    pub(super) changes: bool,
    /// Whether the instruction needs a [checkpoint](super::plan) of its own, because it needs all registers in the
    /// state, or because it may end early after it has changed memory. The interpreter then restarts no earlier than at
    /// this instruction.
    pub(super) is_alone: bool,
    /// Whether the instruction reads registers of the state that are not in `reads`.
    pub(super) reads_state: bool,
    /// Whether the host's floating-point unit may compute for the instruction.
    pub(super) computes_floats: bool,
}

impl Uses {
    /// If an instruction calls a function, returns the address to which the function returns.
    pub(super) fn returns_to(&self, flow: Flow, pc: u64) -> Option<u64> {
        let links = self.writes >> LINK & 1 != 0;
        let jumps = matches!(flow, Flow::Jump(_) | Flow::Indirect);
        (links && jumps).then(|| pc.wrapping_add(4))
    }
}

/// Where execution continues after an instruction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Flow {
    Following,
    Jump(u64),
    JumpIf(u64),
    Indirect,
    /// Compiled code ends before the instruction, and the interpreter executes the instruction.
    Interpret,
}

/// Returns the effects of an instruction, and where execution continues after it.
pub(super) fn uses(insn: Option<&Insn>, pc: u64, context: Context) -> (Uses, Flow) {
    let mut noting = Noting {
        pc,
        context,
        uses: Uses::default(),
        stores: 0,
    };
    let flow = match insn.map(|insn| execute(&mut noting, insn)) {
        Some(Ok(Next::Following)) => Flow::Following,
        Some(Ok(Next::Jump(target))) => Flow::Jump(target),
        Some(Ok(Next::JumpIf((), target))) => Flow::JumpIf(target),
        Some(Ok(Next::Indirect(()))) => Flow::Indirect,
        Some(Ok(Next::Hint(_) | Next::Synchronize) | Err(Interpret)) | None => Flow::Interpret,
    };
    (noting.uses, flow)
}

/// The result of an instruction that is not compiled: the interpreter executes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Interpret;

struct Noting {
    pc: u64,
    context: Context,
    uses: Uses,
    stores: u32,
}

impl Noting {
    fn read(&mut self, register: u32) {
        self.uses.reads |= 1 << register;
    }
    fn write(&mut self, register: u32) {
        self.uses.writes |= 1 << register;
    }
    /// Records a store, or the check before several stores.
    fn store(&mut self) {
        self.uses.stops = true;
        self.uses.changes = true;
        self.stores += 1;
        self.uses.is_alone |= self.stores > 1;
    }
}

/// Defines functions that have no effect to record.
macro_rules! nothing {
    ($($name:ident($($type:ty),*) -> $result:ty;)*) => {
        $(
            fn $name(&mut self, $(_: $type),*) -> $result {
                Default::default()
            }
        )*
    };
}

/// Defines functions of loads and checks, which may end the instruction early.
macro_rules! stops {
    ($($name:ident($($type:ty),*);)*) => {
        $(
            fn $name(&mut self, $(_: $type),*) -> Result<(), Interpret> {
                self.uses.stops = true;
                Ok(())
            }
        )*
    };
}

/// Defines functions of instructions that change memory.
macro_rules! stores {
    ($($name:ident($($type:ty),*);)*) => {
        $(
            fn $name(&mut self, $(_: $type),*) -> Result<(), Interpret> {
                self.store();
                Ok(())
            }
        )*
    };
}

/// Defines the functions of instructions that only the interpreter executes.
macro_rules! interpreted {
    ($($name:ident($($type:ty),*);)*) => {
        $(
            fn $name(&mut self, $(_: $type),*) -> Result<(), Interpret> {
                Err(Interpret)
            }
        )*
    };
}

impl Tier for Noting {
    type Value = ();
    type Bool = ();
    type Vector = ();
    type Stop = Interpret;

    fn pc(&self) -> u64 {
        self.pc
    }
    fn x(&mut self, r: u8) {
        self.read(r.into());
    }
    fn set_x(&mut self, r: u8, (): ()) {
        self.write(r.into());
    }
    fn sp(&mut self) {
        self.read(SP);
    }
    fn set_sp(&mut self, (): ()) {
        self.write(SP);
    }
    fn flags(&mut self) -> [(); 4] {
        self.read(FLAGS);
        [(); 4]
    }
    fn set_flags(&mut self, _: [(); 4]) {
        self.write(FLAGS);
    }
    fn set_v(&mut self, _: u8, (): ()) {
        self.uses.changes = true;
    }

    nothing! {
        v(u8) -> ();
        number(u64) -> ();
        truth(bool) -> ();
        add((), ()) -> ();
        sub((), ()) -> ();
        mul((), ()) -> ();
        mul_high((), (), bool) -> ();
        div((), (), bool) -> ();
        and((), ()) -> ();
        or((), ()) -> ();
        xor((), ()) -> ();
        not(()) -> ();
        shl((), ()) -> ();
        shr((), ()) -> ();
        sar((), ()) -> ();
        ror((), ()) -> ();
        zero_extend((), u32) -> ();
        sign_extend((), u32) -> ();
        leading_zeros(()) -> ();
        reverse_bits(()) -> ();
        swap_bytes(()) -> ();
        crc((), (), u32, bool) -> ();
        is_zero(()) -> ();
        is_less((), ()) -> ();
        bit((), u32) -> ();
        both((), ()) -> ();
        either((), ()) -> ();
        differ((), ()) -> ();
        opposite(()) -> ();
        widened(()) -> ();
        select((), (), ()) -> ();
        select_bool((), (), ()) -> ();
        vector((), ()) -> ();
        low(()) -> ();
        high(()) -> ();
        mark_exclusive((), u8, ()) -> ();
        clear_exclusive() -> ();
        fence() -> ();
    }

    stops! {
        load((), u8, Access);
        load_vector((), Access);
        check_alignment((), u32, bool);
        check_zero_block(SystemName, u8);
    }

    stores! {
        store((), u8, (), Access);
        store_vector((), (), Access);
        prepare_stores((), u32, Access);
        atomic(AtomicOp, (), u8, (), Access);
        compare_exchange((), u8, [(); 2], Access);
        store_exclusive((), u8, (), Access);
    }

    interpreted! {
        check_hint(Hint);
        write_system(SystemName, u8, ());
        set_pstate(u8, u8, u8);
        system_instruction(SystemName, u8, bool, ());
        exception_return();
    }

    fn compute(&mut self, function: Function, _: [(); 3]) {
        if function.is_float() {
            // The function may set exception flags in FPSR.
            self.uses.changes = true;
            self.uses.computes_floats = self.context.has_usual_floats;
        }
    }
    fn zero_block(&mut self, (): ()) -> Result<(), Interpret> {
        // DC ZVA stores several times, and a store may fail after others have succeeded.
        self.store();
        self.uses.is_alone = true;
        Ok(())
    }
    fn check_stack(&mut self) -> Result<(), Interpret> {
        self.read(SP);
        self.uses.stops |= self.context.checks_stack;
        Ok(())
    }
    fn raise(&mut self, _: Exception) -> Interpret {
        Interpret
    }
    fn check_vectors(&mut self) -> Result<(), Interpret> {
        match self.context.traps_vectors {
            true => Err(Interpret),
            false => Ok(()),
        }
    }
    fn read_system(&mut self, _: SystemName, _: u8) -> Result<(), Interpret> {
        // The system register may be one that compiled code holds in values, such as NZCV, and reading it may change a
        // device.
        self.uses.stops = true;
        self.uses.changes = true;
        self.uses.is_alone = true;
        self.uses.reads_state = true;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::decode::decode;
    use crate::stage1::Accessor;

    fn of(word: u32) -> (Uses, Flow) {
        let context = Context {
            accessor: Accessor::El1,
            checks_stack: true,
            traps_vectors: false,
            has_usual_floats: true,
            is_direct: true,
        };
        uses(decode(word).as_ref(), 0x1000, context)
    }

    #[test]
    fn the_meaning_tells_what_an_instruction_uses() {
        // ADDS X2, X3, X4.
        let (uses, flow) = of(0xab04_0062);
        assert_eq!((uses.reads, uses.writes), (0x18, 1 << 2 | 1 << FLAGS));
        assert!(!uses.stops && !uses.changes && flow == Flow::Following);
        // LDR X1, [SP, #8]!
        let (uses, _) = of(0xf840_8fe1);
        assert_eq!((uses.reads, uses.writes), (1 << SP, 1 << 1 | 1 << SP));
        assert!(uses.stops && !uses.changes);
        // STR X1, [X2]; STP X1, X2, [X3].
        let [one, two] = [0xf900_0041, 0xa900_0861].map(|word| of(word).0);
        assert!(one.stops && one.changes && !one.is_alone);
        assert!(two.stops && two.changes && two.is_alone);
        // FCMP D1, D2; ADD V1.2D, V2.2D, V3.2D.
        let [float, integer] = [0x1e62_2020, 0x4ee3_8441].map(|word| of(word).0);
        assert!(float.computes_floats && float.changes && float.writes == 1 << FLAGS);
        assert!(!integer.computes_floats && integer.changes);
        // B.EQ +8; BL +8; RET; SVC; MSR DAIFSET; UDF.
        assert_eq!(of(0x5400_0040).1, Flow::JumpIf(0x1008));
        assert_eq!(of(0x9400_0002).1, Flow::Jump(0x1008));
        assert_eq!(of(0xd65f_03c0).1, Flow::Indirect);
        for word in [0xd400_0001, 0xd503_42df, 0] {
            assert_eq!(of(word).1, Flow::Interpret, "{word:08x}");
        }
    }
}
