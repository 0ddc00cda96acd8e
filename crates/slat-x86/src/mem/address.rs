//! The addresses of memory operands: offsets in segments, and linear addresses, with the checks of segments.

use crate::op::{Break, Op, form};
use crate::{Cpu, vector};

impl Cpu {
    /// Returns the linear address of the operation's memory operand, which has `bytes` bytes.
    #[inline(always)]
    pub(crate) fn lin(&mut self, op: &Op, bytes: u32) -> Result<u64, Break> {
        match op.form {
            form::BASE => Ok(self.ea::<{ form::BASE }>(op)),
            form::INDEX => Ok(self.ea::<{ form::INDEX }>(op)),
            form::DISP => Ok(op.disp),
            _ => self.lin_full(op, bytes),
        }
    }

    /// Returns the linear address of an operand with one of the flat 64-bit forms.
    #[inline(always)]
    pub(crate) fn ea<const FORM: u8>(&self, op: &Op) -> u64 {
        let reg = |r: u8| self.state.gpr[usize::from(r & 15)];
        match FORM {
            form::BASE => reg(op.base).wrapping_add(op.disp),
            form::INDEX => reg(op.base)
                .wrapping_add(reg(op.index) << (op.scale & 3))
                .wrapping_add(op.disp),
            _ => op.disp,
        }
    }

    /// Returns the offset of an operand of any form in its segment.
    pub(crate) fn offset(&self, op: &Op) -> u64 {
        let reg = |r: u8| {
            if r < 16 {
                self.state.gpr[usize::from(r)]
            } else {
                0
            }
        };
        let offset = reg(op.base)
            .wrapping_add(reg(op.index) << (op.scale & 3))
            .wrapping_add(op.disp);
        match op.address_size {
            2 => offset & 0xffff,
            4 => offset & 0xffff_ffff,
            _ => offset,
        }
    }

    #[inline(never)]
    fn lin_full(&mut self, op: &Op, bytes: u32) -> Result<u64, Break> {
        let offset = self.offset(op);
        self.segmented(op.seg, offset, bytes)
    }

    /// Returns the linear address of `bytes` bytes at `offset` in a segment, after the checks of the current mode.
    pub(crate) fn segmented(&mut self, seg: u8, offset: u64, bytes: u32) -> Result<u64, Break> {
        match self.linear(seg, offset, bytes.into()) {
            Some(lin) => Ok(lin),
            None => {
                let vector = if seg == 2 { vector::SS } else { vector::GP };
                Err(self.raise(vector, Some(0)))
            }
        }
    }

    /// Returns the linear address of `offset` in a segment. `None`: outside 64-bit mode, the segment is unusable or
    /// does not contain all of the `bytes` bytes at `offset`.
    #[inline]
    pub(crate) fn linear(&mut self, seg: u8, offset: u64, bytes: u64) -> Option<u64> {
        let segment = *self.segment(seg);
        if self.is_64() {
            return Some(if seg >= 4 {
                segment.base.wrapping_add(offset)
            } else {
                offset
            });
        }
        let last = offset + bytes - 1;
        let limit = u64::from(segment.limit);
        let expand_down = segment.rights & 0x1c == 0x14;
        let inside = match expand_down {
            false => last <= limit,
            true => offset > limit && last <= if segment.big() { 0xffff_ffff } else { 0xffff },
        };
        let is_unusable = self.state.cr0 & 1 != 0 && segment.rights & crate::Segment::UNUSABLE != 0;
        (inside && !is_unusable).then(|| segment.base.wrapping_add(offset) & 0xffff_ffff)
    }

    /// Returns the first address of the page after the page of `lin`.
    pub(crate) fn next_page(&self, lin: u64) -> u64 {
        let next = (lin | 0xfff).wrapping_add(1);
        if self.is_64() {
            next
        } else {
            next & 0xffff_ffff
        }
    }
}
