//! Encodes the instructions of the host that the baseline tier uses.
//!
//! Nearly all of them have the same form: an opcode, a register, and a register or memory.

use super::Reg;

/// A label: stands for a position in the code that may become known only after branches to it were encoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Label(u32);

const UNKNOWN: u32 = u32::MAX;

/// An operand of an instruction: a register or memory.
#[derive(Clone, Copy, Debug)]
pub(super) enum Place {
    Register(Reg),
    /// Memory at the address in a register, plus a displacement in bytes.
    Memory(Reg, i32),
    /// Memory at the sum of two registers, plus a displacement in bytes. The second register must not be RSP.
    Sum(Reg, Reg, i32),
}

/// Operations with two operands and the same encoding, in which the values are the numbers of the operations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Alu {
    Add = 0,
    Or = 1,
    And = 4,
    Sub = 5,
    Xor = 6,
    Cmp = 7,
}

/// Shifts and rotations. The values are their numbers in the instruction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Shift {
    Rol = 0,
    Ror = 1,
    Shl = 4,
    Shr = 5,
    Sar = 7,
}

/// Operations with one operand. The values are their numbers in the instruction. The last three also use RDX:RAX
/// implicitly.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Unary {
    Not = 2,
    Neg = 3,
    Mul = 4,
    Imul = 5,
    Div = 6,
}

/// Counts of bits. The values are the instructions' opcodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Count {
    Ones = 0xb8,
    TrailingZeros = 0xbc,
    LeadingZeros = 0xbd,
}

/// The width of an instruction's [`Place`] operand, as far as it matters for the encoding. In a byte instruction
/// without a prefix, the register numbers 4 to 7 would mean AH, CH, DH and BH.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Width {
    Sized,
    Byte,
}

/// Code that is being assembled. Sizes are logarithms of bytes: 0 to 3 for 1, 2, 4 and 8 bytes.
#[derive(Default)]
pub(super) struct Assembler {
    pub(super) code: Vec<u8>,
    labels: Vec<u32>,
    /// The positions of the four-byte offsets in branches, with the labels to which the branches jump. An offset is
    /// relative to its own end.
    uses: Vec<(u32, Label)>,
}

impl Assembler {
    pub(super) fn clear(&mut self) {
        self.code.clear();
        self.labels.clear();
        self.uses.clear();
    }

    pub(super) fn at(&self) -> u32 {
        self.code.len() as u32
    }

    pub(super) fn label(&mut self) -> Label {
        self.labels.push(UNKNOWN);
        Label(self.labels.len() as u32 - 1)
    }

    /// Gives a label the current position in the code.
    pub(super) fn place(&mut self, label: Label) {
        self.labels[label.0 as usize] = self.at();
    }

    /// Whether a label has a position already.
    pub(super) fn is_placed(&self, label: Label) -> bool {
        self.offset_of(label) != UNKNOWN
    }

    fn use_of(&mut self, label: Label) {
        self.uses.push((self.at(), label));
        self.code.extend([0; 4]);
    }

    /// Returns the offset in the code at which the label was bound.
    pub(super) fn offset_of(&self, label: Label) -> u32 {
        self.labels[label.0 as usize]
    }

    /// Fills in the offsets of all branches. Call when all labels with branches have positions.
    pub(super) fn link(&mut self) {
        for (at, label) in self.uses.drain(..) {
            let to = self.labels[label.0 as usize];
            debug_assert!(to != UNKNOWN);
            let distance = to.wrapping_sub(at + 4);
            let at = at as usize;
            self.code[at..at + 4].copy_from_slice(&distance.to_le_bytes());
        }
    }

    fn bytes(&mut self, bytes: &[u8]) {
        self.code.extend_from_slice(bytes);
    }

    /// Encodes an instruction. `prefix` 0 means no prefix. An `opcode` above 0xff is encoded after the byte 0x0f. `reg`
    /// is a register, or a part of the opcode.
    fn instruction(
        &mut self,
        size: u8,
        width: Width,
        prefix: u8,
        opcode: u16,
        reg: u8,
        place: Place,
    ) {
        let (rm, index) = match place {
            Place::Register(rm) | Place::Memory(rm, _) => (rm.0, None),
            Place::Sum(rm, index, _) => (rm.0, Some(index.0)),
        };
        if size == 1 {
            self.code.push(0x66);
        }
        if prefix != 0 {
            self.code.push(prefix);
        }
        let mut rex = u8::from(size == 3) << 3 | reg >> 3 << 2 | rm >> 3;
        rex |= index.map_or(0, |index| index >> 3 << 1);
        if width == Width::Byte && (reg > 3 || matches!(place, Place::Register(_)) && rm > 3) {
            rex |= 0x40;
        }
        if rex != 0 {
            self.code.push(0x40 | rex);
        }
        if opcode > 0xff {
            self.code.push(0x0f);
        }
        self.code.push(opcode as u8);
        let (reg, low) = (reg & 7, rm & 7);
        let (form, sib) = match index {
            Some(index) => (reg << 3 | 4, Some((index & 7) << 3 | low)),
            None => (reg << 3 | low, (low == 4).then_some(0x24)),
        };
        match place {
            Place::Register(_) => self.code.push(0xc0 | form),
            Place::Memory(_, disp) | Place::Sum(_, _, disp) => {
                let short = i8::try_from(disp);
                // With base RBP or R13, a displacement is needed, even if it is 0.
                self.code.push(match (disp, short) {
                    (0, _) if low != 5 => form,
                    (_, Ok(_)) => 0x40 | form,
                    _ => 0x80 | form,
                });
                self.code.extend(sib);
                match (disp, short) {
                    (0, _) if low != 5 => {}
                    (_, Ok(short)) => self.code.push(short as u8),
                    _ => self.bytes(&disp.to_le_bytes()),
                }
            }
        }
    }

    /// Encodes an instruction whose opcode depends on the size: `opcode` for bytes, `opcode + 1` for larger sizes.
    fn sized(&mut self, size: u8, opcode: u16, reg: u8, place: Place) {
        let width = if size == 0 { Width::Byte } else { Width::Sized };
        self.instruction(size, width, 0, opcode | u16::from(size != 0), reg, place);
    }

    fn immediate(&mut self, size: u8, value: i32) {
        match size {
            0 => self.code.push(value as u8),
            1 => self.bytes(&(value as i16).to_le_bytes()),
            _ => self.bytes(&value.to_le_bytes()),
        }
    }

    pub(super) fn alu(&mut self, alu: Alu, size: u8, to: Reg, from: Reg) {
        self.sized(size, (alu as u16) << 3, from.0, Place::Register(to));
    }

    pub(super) fn alu_immediate(&mut self, alu: Alu, size: u8, to: Reg, value: i32) {
        self.alu_immediate_at(alu, size, Place::Register(to), value);
    }

    fn alu_immediate_at(&mut self, alu: Alu, size: u8, place: Place, value: i32) {
        match i8::try_from(value) {
            Ok(value) if size != 0 => {
                self.instruction(size, Width::Sized, 0, 0x83, alu as u8, place);
                self.code.push(value as u8);
            }
            _ => {
                self.sized(size, 0x80, alu as u8, place);
                self.immediate(size, value);
            }
        }
    }

    /// Compares a register with 0 (TEST).
    pub(super) fn test(&mut self, size: u8, register: Reg) {
        self.sized(size, 0x84, register.0, Place::Register(register));
    }

    pub(super) fn unary(&mut self, unary: Unary, size: u8, register: Reg) {
        self.sized(size, 0xf6, unary as u8, Place::Register(register));
    }

    pub(super) fn shift(&mut self, shift: Shift, size: u8, register: Reg, by: u8) {
        self.sized(size, 0xc0, shift as u8, Place::Register(register));
        self.code.push(by);
    }

    pub(super) fn shift_by_cl(&mut self, shift: Shift, size: u8, register: Reg) {
        self.sized(size, 0xd2, shift as u8, Place::Register(register));
    }

    /// Multiplies registers of 2, 4 or 8 bytes.
    pub(super) fn imul(&mut self, size: u8, to: Reg, from: Reg) {
        self.instruction(size, Width::Sized, 0, 0x1af, to.0, Place::Register(from));
    }

    /// Copies all 64 bits of a register.
    pub(super) fn mov(&mut self, to: Reg, from: Reg) {
        self.sized(3, 0x88, from.0, Place::Register(to));
    }

    pub(super) fn exchange(&mut self, a: Reg, b: Reg) {
        self.sized(3, 0x86, a.0, Place::Register(b));
    }

    /// Loads a constant into a register, without changing the flags.
    pub(super) fn constant(&mut self, to: Reg, value: i64) {
        if u32::try_from(value).is_ok() {
            if to.0 > 7 {
                self.code.push(0x41);
            }
            self.code.push(0xb8 | to.0 & 7);
            self.bytes(&(value as u32).to_le_bytes());
        } else if let Ok(value) = i32::try_from(value) {
            self.sized(3, 0xc6, 0, Place::Register(to));
            self.bytes(&value.to_le_bytes());
        } else {
            self.bytes(&[0x48 | to.0 >> 3, 0xb8 | to.0 & 7]);
            self.bytes(&value.to_le_bytes());
        }
    }

    /// Loads a register or memory, zero-extended to 64 bits.
    pub(super) fn zero_extend(&mut self, size: u8, to: Reg, from: Place) {
        match size {
            0 => self.instruction(2, Width::Byte, 0, 0x1b6, to.0, from),
            1 => self.instruction(2, Width::Sized, 0, 0x1b7, to.0, from),
            size => self.instruction(size, Width::Sized, 0, 0x8b, to.0, from),
        }
    }

    /// Copies a register, sign-extended to 64 bits.
    pub(super) fn sign_extend(&mut self, size: u8, to: Reg, from: Reg) {
        let from = Place::Register(from);
        match size {
            0 => self.instruction(3, Width::Byte, 0, 0x1be, to.0, from),
            1 => self.instruction(3, Width::Sized, 0, 0x1bf, to.0, from),
            2 => self.instruction(3, Width::Sized, 0, 0x63, to.0, from),
            _ => self.instruction(3, Width::Sized, 0, 0x8b, to.0, from),
        }
    }

    pub(super) fn store(&mut self, size: u8, place: Place, from: Reg) {
        self.sized(size, 0x88, from.0, place);
    }

    pub(super) fn store_immediate(&mut self, size: u8, place: Place, value: i32) {
        self.sized(size, 0xc6, 0, place);
        self.immediate(size, value);
    }

    /// Computes `to` = `to` op `from`.
    pub(super) fn alu_with(&mut self, alu: Alu, size: u8, to: Reg, from: Place) {
        self.sized(size, (alu as u16) << 3 | 2, to.0, from);
    }

    pub(super) fn add_to_memory(&mut self, size: u8, base: Reg, disp: i32, value: i32) {
        self.alu_immediate_at(Alu::Add, size, Place::Memory(base, disp), value);
    }

    pub(super) fn push(&mut self, register: Reg) {
        self.instruction(2, Width::Sized, 0, 0xff, 6, Place::Register(register));
    }

    pub(super) fn push_memory(&mut self, place: Place) {
        self.instruction(2, Width::Sized, 0, 0xff, 6, place);
    }

    pub(super) fn pop_memory(&mut self, place: Place) {
        self.instruction(2, Width::Sized, 0, 0x8f, 0, place);
    }

    /// Loads the address of a memory operand into a register, without changing the flags.
    pub(super) fn address(&mut self, to: Reg, place: Place) {
        self.instruction(3, Width::Sized, 0, 0x8d, to.0, place);
    }

    /// Sets a byte register to 1 if `condition` (0 to 15) holds, else to 0.
    pub(super) fn set(&mut self, condition: u8, to: Reg) {
        let opcode = 0x190 | u16::from(condition);
        self.instruction(2, Width::Byte, 0, opcode, 0, Place::Register(to));
    }

    /// Copies 4 or 8 bytes if a condition holds (CMOVcc).
    pub(super) fn mov_if(&mut self, condition: u8, size: u8, to: Reg, from: Reg) {
        let opcode = 0x140 | u16::from(condition);
        self.instruction(size, Width::Sized, 0, opcode, to.0, Place::Register(from));
    }

    pub(super) fn count(&mut self, count: Count, size: u8, to: Reg, from: Reg) {
        let opcode = 0x100 | count as u16;
        self.instruction(
            size,
            Width::Sized,
            0xf3,
            opcode,
            to.0,
            Place::Register(from),
        );
    }

    /// Reverses the order of 4 or 8 bytes in a register.
    pub(super) fn swap_bytes(&mut self, size: u8, register: Reg) {
        let rex = u8::from(size == 3) << 3 | register.0 >> 3;
        if rex != 0 {
            self.code.push(0x40 | rex);
        }
        self.bytes(&[0x0f, 0xc8 | register.0 & 7]);
    }

    /// Compares memory with RAX, and stores `new` in memory if they are equal, atomically. Afterwards RAX is the old
    /// content of memory.
    pub(super) fn compare_exchange(&mut self, size: u8, address: Reg, new: Reg) {
        self.code.push(0xf0);
        self.sized(size, 0x1b0, new.0, Place::Memory(address, 0));
    }

    pub(super) fn call(&mut self, register: Reg) {
        self.instruction(2, Width::Sized, 0, 0xff, 2, Place::Register(register));
    }

    pub(super) fn jump(&mut self, label: Label) {
        self.code.push(0xe9);
        self.use_of(label);
    }

    pub(super) fn jump_if(&mut self, condition: u8, label: Label) {
        self.bytes(&[0x0f, 0x80 | condition]);
        self.use_of(label);
    }

    /// Restores the stack pointer and the frame pointer, and returns from the compiled function.
    pub(super) fn leave(&mut self) {
        // The instructions are `mov rsp,rbp`, `pop rbp` and `ret`.
        self.bytes(&[0x48, 0x89, 0xec, 0x5d, 0xc3]);
    }
}

#[cfg(test)]
mod tests;
