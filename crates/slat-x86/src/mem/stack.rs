//! The stack pointer, and the words at the top of the stack.

use crate::Cpu;
use crate::flow::Break;
use crate::int::Int;

impl Cpu {
    /// Returns the mask of the stack pointer: 16, 32 or 64 bits, by the current mode.
    pub(crate) fn stack_mask(&self) -> u64 {
        if self.is_64() {
            u64::MAX
        } else if self.state.ss.big() {
            0xffff_ffff
        } else {
            0xffff
        }
    }

    /// Returns the linear address of the `bytes` bytes at an offset in the stack segment.
    #[inline(always)]
    pub(crate) fn stack_address(&mut self, offset: u64, bytes: u32) -> Result<u64, Break> {
        if self.is_64() {
            Ok(offset)
        } else {
            self.segmented(2, offset, bytes)
        }
    }

    /// Writes the stack pointer with its width in the current mode.
    #[inline(always)]
    pub(crate) fn set_rsp(&mut self, rsp: u64) {
        if self.is_64() {
            self.state.gpr[4] = rsp;
        } else {
            let mask = self.stack_mask();
            self.state.gpr[4] = self.state.gpr[4] & !mask | rsp & mask;
        }
    }

    /// Returns the stack pointer plus `by`, with its width in the current mode.
    #[inline(always)]
    pub(crate) fn rsp_plus(&self, by: u64) -> u64 {
        let rsp = self.state.gpr[4].wrapping_add(by);
        if self.is_64() {
            rsp
        } else {
            rsp & self.stack_mask()
        }
    }

    #[inline(always)]
    pub(crate) fn push<T: Int>(&mut self, v: T) -> Result<(), Break> {
        let rsp = self.rsp_plus(T::BYTES.wrapping_neg());
        let lin = self.stack_address(rsp, T::BYTES as u32)?;
        self.store::<T>(lin, v)?;
        self.set_rsp(rsp);
        Ok(())
    }

    /// Reads the word at the stack pointer plus `at`, without changing the stack pointer.
    #[inline(always)]
    pub(crate) fn peek<T: Int>(&mut self, at: u64) -> Result<T, Break> {
        let rsp = self.rsp_plus(at);
        let lin = self.stack_address(rsp, T::BYTES as u32)?;
        self.load::<T>(lin)
    }

    /// Pushes a word. `size` is the logarithm of its bytes.
    pub(crate) fn push_sized(&mut self, size: u8, v: u64) -> Result<(), Break> {
        match size {
            1 => self.push(v as u16),
            2 => self.push(v as u32),
            _ => self.push(v),
        }
    }

    /// Reads the word at the stack pointer plus `at`, without changing the stack pointer. `size` is the logarithm of
    /// its bytes.
    pub(crate) fn peek_sized(&mut self, size: u8, at: u64) -> Result<u64, Break> {
        match size {
            1 => self.peek::<u16>(at).map(Int::zx),
            2 => self.peek::<u32>(at).map(Int::zx),
            _ => self.peek::<u64>(at),
        }
    }
}
