//! Linear addresses of memory operands and of the stack.
//!
//! In 64-bit code, and in flat 32-bit code, offsets in most segments are linear addresses. In other code, an access
//! uses the base and limit in the segment register, so a region's code is valid for any bases and limits. A path reads
//! base and limit only once. This suffices, because a handler that loads a segment register ends the block. Compiled
//! code leaves a few accesses to the interpreter, which also raises their faults: an operand that ends beyond the
//! limit, a segment that is unusable or expands down, and a stack pointer whose width is not the region's
//! (`Source::stack`). A segment is *plain* if it is usable and does not expand down.

use super::kept::PlainSegment;
use super::translate::Translator;
use crate::Cpu;
use crate::op::{NONE, Op};
use crate::sem::Bits;
use crate::state::Segment;
use cranelift_codegen::ir::condcodes::IntCC;
use cranelift_codegen::ir::types::{I32, I64};
use cranelift_codegen::ir::{InstBuilder, Value};
use std::mem::offset_of;

/// The number of segment register SS.
const SS: u8 = 2;
/// The bit D/B in [`Segment::rights`]. In SS, the bit means that the stack pointer has 32 bits.
const BIG: i64 = 1 << 14;

/// Returns the offset of a segment register in `Cpu`.
pub(super) fn segment_offset(segment: u8) -> usize {
    match segment {
        0 => offset_of!(Cpu, state.es),
        1 => offset_of!(Cpu, state.cs),
        SS => offset_of!(Cpu, state.ss),
        3 => offset_of!(Cpu, state.ds),
        4 => offset_of!(Cpu, state.fs),
        _ => offset_of!(Cpu, state.gs),
    }
}

impl Translator<'_> {
    /// Returns the offset of the memory operand in its segment.
    pub(super) fn offset(&mut self, op: &Op) -> Value {
        let mut sum = (op.base != NONE).then(|| self.get(op.base, 3));
        if op.index != NONE {
            let index = self.get(op.index, 3);
            let index = match op.scale {
                0 => index,
                scale => self.b.ins().ishl_imm(index, i64::from(scale)),
            };
            sum = Some(match sum {
                Some(base) => self.b.ins().iadd(base, index),
                None => index,
            });
        }
        let mask = match op.address_size {
            2 => 0xffff,
            4 => 0xffff_ffff,
            _ => -1,
        };
        // Add the displacement last, so that the host can use the whole sum as one address.
        match (sum, op.disp as i64) {
            (None, disp) if !self.is_relative => self.constant(disp & mask),
            (sum, disp) => {
                let sum = match sum {
                    Some(sum) => self.moved(sum, disp),
                    None => self.address(disp),
                };
                match mask {
                    -1 => sum,
                    mask => self.b.ins().band_imm(sum, mask),
                }
            }
        }
    }

    /// Emits the linear address of the memory operand.
    pub(super) fn lin(&mut self, op: &Op) -> Value {
        let offset = self.offset(op);
        self.segmented(op.seg, offset, self.operand_bytes)
    }

    /// Emits the linear address of `bytes` bytes at an offset in a segment. The code leaves the instruction to the
    /// interpreter if the segment is not plain, or if the bytes end beyond its limit.
    fn segmented(&mut self, segment: u8, offset: Value, bytes: i64) -> Value {
        if !self.has_segments && segment < 4 {
            return offset;
        }
        if self.is_64() {
            let base = self.field(I64, segment_offset(segment) + offset_of!(Segment, base));
            return self.b.ins().iadd(base, offset);
        }
        let PlainSegment { base, limit } = self.plain_segment(segment);
        let last = self.moved(offset, bytes - 1);
        let is_beyond = (self.b.ins()).icmp(IntCC::UnsignedGreaterThan, last, limit);
        self.interpret_if(is_beyond);
        let lin = self.b.ins().iadd(base, offset);
        self.b.ins().band_imm(lin, 0xffff_ffff)
    }

    /// Emits loads of a segment register's base and limit, outside 64-bit mode. The code leaves the instruction to the
    /// interpreter if the segment is not plain.
    fn plain_segment(&mut self, segment: u8) -> PlainSegment {
        if let Some(known) = self.now.segments[usize::from(segment)] {
            return known;
        }
        let at = segment_offset(segment);
        let rights = self.field(I32, at + offset_of!(Segment, rights));
        // This bit of the rights (the type's bit 2) is clear for a data segment that does not expand down, and for a
        // non-conforming code segment.
        let looked_at = i64::from(Segment::UNUSABLE) | 1 << 2;
        let (looked_at, wanted) = match segment {
            SS => (looked_at | BIG, if self.stack == 2 { BIG } else { 0 }),
            _ => (looked_at, 0),
        };
        let rights = self.b.ins().band_imm(rights, looked_at);
        let is_strange = self.b.ins().icmp_imm(IntCC::NotEqual, rights, wanted);
        self.interpret_if(is_strange);
        let base = self.field(I64, at + offset_of!(Segment, base));
        let limit = self.field(I32, at + offset_of!(Segment, limit));
        let limit = self.wide(limit);
        let found = PlainSegment { base, limit };
        self.now.segments[usize::from(segment)] = Some(found);
        found
    }

    /// Returns the offset, in the stack segment, of the stack pointer plus `by`.
    fn stack_offset(&mut self, by: i64) -> Value {
        let sp = self.get(4, self.stack);
        let sp = self.plus(sp, by);
        self.wide(sp)
    }

    /// Returns the linear address of `bytes` bytes on the stack, `by` bytes from the stack pointer.
    pub(super) fn stack_at(&mut self, by: i64, bytes: i64) -> Value {
        let offset = self.stack_offset(by);
        self.segmented(SS, offset, bytes)
    }

    /// Adds `by` to the stack pointer. Call after [`stack_at`](Self::stack_at), which checks that the stack pointer has
    /// the region's width.
    pub(super) fn move_stack(&mut self, by: i64) {
        let sp = self.stack_offset(by);
        self.set(4, self.stack, sp);
    }

    /// Translates LEAVE: reads the word to which the frame pointer points, and sets the stack pointer to the address
    /// after this word.
    pub(super) fn leave_frame(&mut self, size: u8) {
        let frame = self.get(5, self.stack);
        let frame = self.wide(frame);
        let lin = self.segmented(SS, frame, 1 << size);
        let value = self.load(lin, size);
        self.set(4, self.stack, frame);
        self.move_stack(1 << size);
        self.set(5, size, value);
    }

    /// Translates POP: returns the word to which the stack pointer points, and sets the stack pointer to the address
    /// after this word.
    pub(super) fn pop(&mut self, size: u8) -> Value {
        let bytes = 1 << size;
        let lin = self.stack_at(0, bytes);
        let value = self.load(lin, size);
        self.move_stack(bytes);
        value
    }

    pub(super) fn push(&mut self, size: u8, value: Value) {
        let bytes = 1 << size;
        let lin = self.stack_at(-bytes, bytes);
        self.store(lin, size, value);
        self.move_stack(-bytes);
    }

    /// Whether compiled code pushes and pops words of this operand size itself.
    pub(super) fn is_on_stack(&self, size: u8) -> bool {
        match self.is_64() {
            true => size == 3,
            false => matches!(size, 1 | 2),
        }
    }
}
