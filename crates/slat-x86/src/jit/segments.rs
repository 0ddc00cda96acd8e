//! Translates moves from segment registers, and loads of ES, DS, FS and GS in real mode and virtual-8086 mode, where
//! the base is 16 times the selector. Such a load needs only two stores. The interpreter executes all other loads of
//! segment registers.

use super::address::segment_offset;
use super::translate::Translator;
use crate::mode;
use crate::op::{MEM, Op};
use crate::state::Segment;
use cranelift_codegen::ir::types::I16;
use cranelift_codegen::ir::{InstBuilder, Value};
use iced_x86::{Instruction, Mnemonic};
use std::mem::offset_of;

/// The number of segment register CS. The next constant is the number of SS.
const CS: u8 = 1;
const SS: u8 = 2;

impl Translator<'_> {
    /// Translates a move from or to a segment register. Returns `None` without effect if there is no translation.
    pub(super) fn segment_instruction(&mut self, insn: &Instruction, op: &Op) -> Option<()> {
        use Mnemonic::*;
        let size = op.size;
        match insn.mnemonic() {
            Mov if insn.op1_register().is_segment_register() => {
                let selector = self.selector(op.r[1]);
                if op.r[0] == MEM {
                    let lin = self.lin(op);
                    self.store(lin, 1, selector);
                } else {
                    let selector = self.extended(selector, size);
                    self.set(op.r[0], size, selector);
                }
            }
            Mov if self.loads(op.r[0]) => {
                let selector = self.operand(op, 1, 1);
                self.load_paragraph(op.r[0], selector);
            }
            Push if self.is_on_stack(size) => {
                let selector = self.selector(op.r[0]);
                let selector = self.extended(selector, size);
                self.push(size, selector);
            }
            Pop if self.loads(op.r[0]) && self.is_on_stack(size) => {
                let value = self.pop(size);
                let selector = self.extended(value, 1);
                self.load_paragraph(op.r[0], selector);
            }
            Lds | Les | Lfs | Lgs if self.loads(op.aux) => {
                let lin = self.lin(op);
                let value = self.load(lin, size);
                let after = self.moved(lin, 1 << size);
                let selector = self.load(after, 1);
                self.set(op.r[0], size, value);
                self.load_paragraph(op.aux, selector);
            }
            _ => return None,
        }
        Some(())
    }

    /// Whether loads of segment register `segment` are translated.
    fn loads(&self, segment: u8) -> bool {
        mode::has_paragraphs(self.mode) && ![CS, SS].contains(&segment)
    }

    fn selector(&mut self, segment: u8) -> Value {
        self.field(I16, segment_offset(segment) + offset_of!(Segment, selector))
    }

    /// Returns a value, zero-extended or truncated to another size.
    fn extended(&mut self, value: Value, size: u8) -> Value {
        let value = self.wide(value);
        self.narrow(value, size)
    }

    /// Loads a segment register as in real mode: the base becomes 16 times the selector; limit and rights stay. Call as
    /// the last step of an instruction.
    fn load_paragraph(&mut self, segment: u8, selector: Value) {
        let at = segment_offset(segment);
        self.set_field(at + offset_of!(Segment, selector), selector);
        let base = self.wide(selector);
        let base = self.b.ins().ishl_imm(base, 4);
        self.set_field(at + offset_of!(Segment, base), base);
        self.now.has_changed = true;
        if let Some(known) = &mut self.now.segments[usize::from(segment)] {
            known.base = base;
        }
    }
}
