//! Basic blocks: runs of decoded operations, found by address and verified against memory.
//!
//! A block is keyed by linear address, RIP and decoding mode. Entering one compares its bytes with guest
//! memory, so stores by anyone are seen; a store of this CPU to the page of the running block ends it
//! (`Cpu::wrote`). The host page behind a block is looked up again when the TLB was flushed since.
//!
//! Blocks never move and are freed only all at once, between blocks. Code that runs for the first time is
//! decoded into a block that the next such code reuses: much of what is executed once is not executed
//! again, and keeping it costs more than decoding it.

use crate::machine::{Access, Fault};
use crate::op::{Break, Op};
use crate::{Cpu, lower, vector};
use iced_x86::{Decoder, DecoderError, DecoderOptions, Mnemonic};
use std::collections::HashMap;
use std::ptr::{self, NonNull};

/// UD2 and "kvm": makes KVM emulate the instruction that follows.
const PREFIX: &[u8] = b"\x0f\x0bkvm";
/// Operations per block.
const MAX_OPS: usize = 48;
/// Bytes per block: offsets fit into a byte.
const MAX_BYTES: usize = 200;
/// Entries of the direct-mapped front table.
const FRONT: usize = 4096;
/// Blocks before all are thrown away.
const LIMIT: usize = 32768;
/// Bits of [`Seen`].
const SEEN: usize = 1 << 17;

/// One comparison of a block's bytes with memory.
struct Check {
    /// Relative to the block's first byte; eight bytes from there lie in its page.
    offset: i64,
    expected: u64,
    mask: u64,
}

/// Puts the comparisons for `bytes`, which stand at `at` in their page, in the place of what `checks` holds.
fn put_checks(checks: &mut Vec<Check>, bytes: &[u8], at: usize) {
    let len = bytes.len();
    checks.clear();
    if len >= 8 {
        // The last one overlaps the one before.
        let starts = (0..len - 8).step_by(8).chain([len - 8]);
        let word = |start: usize| {
            let mut word = [0; 8];
            word.copy_from_slice(&bytes[start..start + 8]);
            Check {
                offset: start as i64,
                expected: u64::from_le_bytes(word),
                mask: u64::MAX,
            }
        };
        checks.extend(starts.map(word));
        return;
    }
    let mut word = [0; 8];
    word[..len].copy_from_slice(bytes);
    let word = u64::from_le_bytes(word);
    let mask = (1 << (8 * len)) - 1;
    checks.push(if at + 8 <= 0x1000 {
        Check {
            offset: 0,
            expected: word,
            mask,
        }
    } else {
        // At the end of the page: with the bytes before it.
        let shift = 64 - 8 * len;
        Check {
            offset: len as i64 - 8,
            expected: word << shift,
            mask: mask << shift,
        }
    });
}

/// A decoded basic block.
pub(crate) struct Block {
    lin: u64,
    pub(crate) rip: u64,
    mode: u8,
    /// [`Cpu::generation`] when the host addresses were looked up.
    generation: u64,
    /// Host address of the first byte.
    host: *mut u8,
    /// Host address of the second page's bytes, for an instruction that crosses.
    host2: *mut u8,
    /// Bytes in the first page.
    split: usize,
    bytes: Vec<u8>,
    /// Of a block in one page.
    checks: Vec<Check>,
    pub(crate) ops: Vec<Op>,
    /// Instructions in `ops`.
    pub(crate) count: u64,
}

impl Block {
    /// The host page of the first byte.
    #[inline(always)]
    pub(crate) fn page(&self) -> usize {
        self.host as usize & !0xfff
    }

    /// Whether the memory holds the block's bytes. For blocks in one page.
    #[inline(always)]
    fn is_fresh(&self) -> bool {
        let mut differ = 0;
        for check in &self.checks {
            let at = self.host.wrapping_offset(check.offset as isize);
            // SAFETY: within the page of `host`, a translation that no flush has made void; the access is guarded.
            match unsafe { slat_guard::load(at.cast::<u64>()) } {
                Ok(word) => differ |= (word ^ check.expected) & check.mask,
                Err(_) => return false,
            }
        }
        differ == 0
    }

    fn new(lin: u64, rip: u64, mode: u8) -> Self {
        Self {
            lin,
            rip,
            mode,
            generation: 0,
            host: ptr::null_mut(),
            host2: ptr::null_mut(),
            split: 0,
            bytes: Vec::new(),
            checks: Vec::new(),
            ops: Vec::new(),
            count: 0,
        }
    }

    /// The bytes of `op`.
    pub(crate) fn op_bytes(&self, op: &Op) -> &[u8] {
        let at = usize::from(op.offset);
        self.bytes.get(at..at + usize::from(op.len)).unwrap_or(&[])
    }
}

/// Where code has run lately: a bit for each of a few addresses. One that is set for another address
/// makes a block be kept that need not be; so no two addresses keep each other from being kept.
#[derive(Default)]
struct Seen {
    bits: Vec<u64>,
    set: usize,
}

impl Seen {
    /// Whether `lin` was here before; from now on it was.
    fn note(&mut self, lin: u64) -> bool {
        if self.set >= SEEN / 4 {
            self.bits.clear();
            self.set = 0;
        }
        self.bits.resize(SEEN / 64, 0);
        // Neighbouring code, and code at one place of neighbouring pages, goes to different bits.
        let bit = lin.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> (64 - SEEN.ilog2());
        let word = &mut self.bits[bit as usize / 64];
        let seen = *word >> (bit % 64) & 1 != 0;
        *word |= 1 << (bit % 64);
        self.set += usize::from(!seen);
        seen
    }
}

/// All blocks of a CPU.
#[derive(Default)]
pub(crate) struct Blocks {
    front: Vec<Option<NonNull<Block>>>,
    all: HashMap<(u64, u64, u8), NonNull<Block>>,
    seen: Seen,
    /// The block that is not kept.
    once: Option<Box<Block>>,
    /// The block of a single-stepped instruction, kept apart.
    single: Option<Box<Block>>,
}

impl Blocks {
    fn clear(&mut self) {
        self.front.fill(None);
        for (_, block) in self.all.drain() {
            // SAFETY: made by `Box::into_raw`, removed from the map here, and no block is running: this
            // is called between blocks only.
            drop(unsafe { Box::from_raw(block.as_ptr()) });
        }
    }
}

impl Drop for Blocks {
    fn drop(&mut self) {
        self.clear();
    }
}

fn front_slot(lin: u64) -> usize {
    (lin ^ lin >> 12) as usize & (FRONT - 1)
}

impl Cpu {
    /// The block at RIP, verified. It stays valid until the next call.
    #[inline(always)]
    pub(crate) fn find_block(&mut self) -> Result<NonNull<Block>, Break> {
        let rip = self.state.rip;
        let lin = if self.is_64() {
            rip
        } else {
            self.code_address(rip)
        };
        if let Some(Some(found)) = self.blocks.front.get(front_slot(lin)) {
            // SAFETY: blocks in the table are alive until all are freed, between blocks.
            let block = unsafe { found.as_ref() };
            if block.lin == lin
                && block.rip == rip
                && block.mode == self.mode
                && block.generation == self.generation
                && block.host2.is_null()
                && block.is_fresh()
            {
                return Ok(*found);
            }
        }
        self.find_block_slow(lin, rip)
    }

    fn code_address(&self, rip: u64) -> u64 {
        if self.is_64() {
            rip
        } else {
            self.state.cs.base.wrapping_add(rip) & 0xffff_ffff
        }
    }

    #[cold]
    #[inline(never)]
    fn find_block_slow(&mut self, lin: u64, rip: u64) -> Result<NonNull<Block>, Break> {
        if self.blocks.all.len() >= LIMIT {
            self.blocks.clear();
        }
        if self.blocks.front.is_empty() {
            self.blocks.front = vec![None; FRONT];
        }
        let mode = self.mode;
        self.check_code_limit(rip)?;
        if !self.blocks.seen.note(lin) {
            return self.block_for_once(lin, rip);
        }
        let found = *self.blocks.all.entry((lin, rip, mode)).or_insert_with(|| {
            let block = Box::new(Block::new(lin, rip, mode));
            // SAFETY: a box is never null.
            unsafe { NonNull::new_unchecked(Box::into_raw(block)) }
        });
        self.blocks.front[front_slot(lin)] = Some(found);
        // SAFETY: alive as above; nothing else refers to it while no block is running.
        let block = unsafe { &mut *found.as_ptr() };
        self.verify_or_decode(block, MAX_OPS)?;
        Ok(found)
    }

    /// The block at RIP, where nothing has run lately.
    fn block_for_once(&mut self, lin: u64, rip: u64) -> Result<NonNull<Block>, Break> {
        let mut block = match self.blocks.once.take() {
            Some(block) => block,
            None => Box::new(Block::new(lin, rip, self.mode)),
        };
        (block.lin, block.rip, block.mode) = (lin, rip, self.mode);
        block.ops.clear();
        block.host2 = ptr::null_mut();
        let decoded = self.verify_or_decode(&mut block, MAX_OPS);
        let found = NonNull::from(&mut **self.blocks.once.insert(block));
        decoded.map(|()| found)
    }

    /// The one instruction at RIP as a block of its own.
    pub(crate) fn single_block(&mut self) -> Result<Box<Block>, Break> {
        let rip = self.state.rip;
        self.check_code_limit(rip)?;
        let lin = self.code_address(rip);
        let mut block = match self.blocks.single.take() {
            Some(block) if block.lin == lin && block.rip == rip && block.mode == self.mode => block,
            _ => Box::new(Block::new(lin, rip, self.mode)),
        };
        self.verify_or_decode(&mut block, 1)?;
        Ok(block)
    }

    pub(crate) fn keep_single(&mut self, block: Box<Block>) {
        self.blocks.single = Some(block);
    }

    fn check_code_limit(&mut self, rip: u64) -> Result<(), Break> {
        let inside = if self.is_64() {
            self.canonical(rip)
        } else {
            rip <= u64::from(self.state.cs.limit)
        };
        if inside { Ok(()) } else { Err(self.gp()) }
    }

    fn verify_or_decode(&mut self, block: &mut Block, max_ops: usize) -> Result<(), Break> {
        loop {
            if block.generation != self.generation || block.ops.is_empty() {
                let host = self.code_host(block.lin)?;
                let host2 = match block.host2.is_null() {
                    true => ptr::null_mut(),
                    false => self.code_host((block.lin | 0xfff).wrapping_add(1))?,
                };
                block.host = host;
                block.host2 = host2;
                block.generation = self.generation;
            }
            if !block.ops.is_empty() {
                let (first, second) = block.bytes.split_at(block.split);
                // SAFETY: translations looked up in this generation; the accesses are guarded.
                let same =
                    unsafe {
                        slat_guard::matches(block.host, first).and_then(|same| {
                            Ok(same
                                && (second.is_empty() || slat_guard::matches(block.host2, second)?))
                        })
                    };
                match same {
                    Ok(true) => return Ok(()),
                    Ok(false) => block.ops.clear(),
                    Err(_) => {
                        self.code_gone(block.lin, block.host)?;
                        continue;
                    }
                }
            }
            if self.decode(block, max_ops)? {
                return Ok(());
            }
        }
    }

    /// Decodes the block; `false`: memory went away meanwhile.
    fn decode(&mut self, block: &mut Block, max_ops: usize) -> Result<bool, Break> {
        let in_page = 0x1000 - (block.lin & 0xfff) as usize;
        let mut buffer = [0; MAX_BYTES + 16];
        let mut len = in_page.min(buffer.len());
        // SAFETY: a translation looked up in this generation; the access is guarded.
        if unsafe { slat_guard::copy_in(&mut buffer[..len], block.host) }.is_err() {
            self.code_gone(block.lin, block.host)?;
            return Ok(false);
        }
        let mut ops = std::mem::take(&mut block.ops);
        ops.clear();
        let mut used = self.decode_ops(block, &buffer[..len], max_ops, &mut ops);
        block.host2 = ptr::null_mut();
        if ops.is_empty() && in_page < 15 {
            // The first instruction crosses into the next page, or its bytes are bad already.
            let next = (block.lin | 0xfff).wrapping_add(1);
            let host2 = self.code_host(next)?;
            // SAFETY: as above.
            if unsafe { slat_guard::copy_in(&mut buffer[in_page..15], host2) }.is_err() {
                self.code_gone(next, host2)?;
                return Ok(false);
            }
            len = 15;
            used = self.decode_ops(block, &buffer[..len], 1, &mut ops);
            if ops.is_empty() || used > in_page {
                block.host2 = host2;
            }
        }
        if ops.is_empty() {
            // Not an instruction: #UD, unless it is longer than 15 bytes, which is #GP. Any of the
            // bytes may be what makes it none, so all are watched.
            let mut op = lower::invalid();
            op.aux = u8::from(self.too_long(&buffer[..len]));
            ops.push(op);
            used = len.min(15);
        }
        block.split = used.min(in_page);
        block.count = ops.iter().map(|op| u64::from(op.count)).sum();
        block.bytes.clear();
        block.bytes.extend_from_slice(&buffer[..used]);
        let at = (block.lin & 0xfff) as usize;
        put_checks(&mut block.checks, &buffer[..block.split], at);
        block.ops = ops;
        Ok(true)
    }

    fn decoder<'a>(&self, bytes: &'a [u8], rip: u64) -> Decoder<'a> {
        let bits = 16 << (self.mode & crate::cpu::mode::BITS);
        Decoder::with_ip(bits, bytes, rip, DecoderOptions::NONE)
    }

    /// Whether all of the first 15 bytes are consumed without an end of the instruction.
    fn too_long(&self, bytes: &[u8]) -> bool {
        let prefix = |b: &u8| {
            matches!(
                b,
                0x66 | 0x67 | 0x26 | 0x2e | 0x36 | 0x3e | 0x64 | 0x65 | 0xf0 | 0xf2 | 0xf3
            )
        };
        bytes.len() >= 15 && bytes[..15].iter().all(prefix)
    }

    fn decode_ops(&self, block: &Block, bytes: &[u8], max_ops: usize, ops: &mut Vec<Op>) -> usize {
        let mut decoder = self.decoder(bytes, block.rip);
        let mut used = 0;
        while ops.len() < max_ops && used < MAX_BYTES {
            // The prefix that makes KVM emulate the next instruction: there is nothing else here.
            if bytes[used..].starts_with(PREFIX) {
                if used != 0 {
                    break;
                }
                decoder.set_ip(block.rip.wrapping_add(5));
                if decoder.set_position(5).is_err() {
                    break;
                }
            }
            let insn = decoder.decode();
            if decoder.last_error() != DecoderError::None {
                // The end of the page or a bad instruction; the next block starts here and will see.
                break;
            }
            let start = used;
            used = decoder.position();
            let ends = lower::lower(&insn, self.mode, start as u8, (used - start) as u8, ops);
            if ends {
                if insn.mnemonic() == Mnemonic::Ud2 {
                    // What follows decides whether it is a prefix.
                    used = (start + PREFIX.len()).min(bytes.len());
                }
                break;
            }
        }
        used
    }

    /// The host address from which the code at `lin` is fetched.
    fn code_host(&mut self, lin: u64) -> Result<*mut u8, Break> {
        let user = self.cpl == 3;
        let at = (lin & 0xfff) as usize;
        if let Some(page) = self.tlb().code(user, lin) {
            return Ok(page.wrapping_add(at));
        }
        if !self.canonical(lin) {
            return Err(self.raise(vector::GP, Some(0)));
        }
        let mut paging = self.paging();
        paging.user = user;
        match self.machine().translate(lin, Access::Execute, &paging) {
            Ok(page) => {
                self.tlb().fill_code(user, lin, page.base.as_ptr());
                Ok(page.base.as_ptr().wrapping_add(at))
            }
            Err(Fault::Mmio { .. }) => Err(self.unimplemented("an instruction fetch from MMIO")),
            Err(fault) => Err(self.fault(lin, fault)),
        }
    }

    fn code_gone(&mut self, lin: u64, host: *mut u8) -> Result<(), Break> {
        self.generation += 1;
        self.gone(lin, host, Access::Execute)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn code_is_seen_from_its_second_run_on_until_much_other_code_has_run() {
        let mut seen = Seen::default();
        assert!(!seen.note(0x1000));
        assert!(seen.note(0x1000) && seen.note(0x1000));
        let new = (1..SEEN as u64 / 8).filter(|page| !seen.note(0x1000 + (page << 12)));
        assert!(new.count() > SEEN / 10, "addresses are told apart");
        assert!(seen.note(0x1000));
        for page in SEEN as u64 / 8..SEEN as u64 {
            seen.note(0x1000 + (page << 12));
        }
        assert!(seen.set <= SEEN / 4);
    }
}
