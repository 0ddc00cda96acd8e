//! Decoding blocks, from memory or from the copies of the guest's code (`snapshot`).
//!
//! If a block may reach into a second page, that page is fetched only when the decoder needs its bytes: a fault of the
//! fetch is delivered to the guest.

use crate::block::{Block, LONGEST, MAX_BYTES};
use crate::key::Key;
use crate::op::{Break, LONGEST_INSTRUCTION as INSTRUCTION, Op};
use crate::pool::List;
use crate::snapshot::Snapshot;
use crate::{Cpu, lower};
use iced_x86::{Decoder, DecoderError, DecoderOptions, Instruction, Mnemonic, Register};
use std::ptr::NonNull;

/// UD2 and the bytes "kvm": a prefix that makes KVM emulate the instruction after it.
const PREFIX: &[u8] = b"\x0f\x0bkvm";

/// The result of decoding: the number of bytes, and why the decoder stopped.
struct Decoded {
    bytes: usize,
    end: DecoderError,
}

impl Cpu {
    /// Returns the first of the two instructions that were fused into `op`. `code` are the bytes of `op`.
    pub(crate) fn first_of_fused(&self, op: &Op, code: &[u8]) -> Op {
        let bits = crate::mode::width(self.mode);
        let mut decoder = Decoder::with_ip(bits, code, self.rip_of(op), DecoderOptions::NONE);
        let insn = decoder.decode();
        lower::alone(&insn, code, self.mode, op.offset, insn.len() as u8).0
    }

    pub(crate) fn check_code_limit(&mut self, rip: u64) -> Result<(), Break> {
        let inside = if self.is_64() {
            self.canonical(rip)
        } else {
            rip <= u64::from(self.state.cs.limit)
        };
        if inside { Ok(()) } else { Err(self.gp()) }
    }

    /// Decodes the code at `key` into `block`, which has memory for `max_ops` operations. If `may_keep`, the block may
    /// later be kept, so a snapshot of its code's page is made. On failure the block is empty.
    pub(crate) fn decode(
        &mut self,
        block: &mut Block,
        key: Key,
        max_ops: usize,
        may_keep: bool,
    ) -> Result<(), Break> {
        self.counters.blocks_decoded += 1;
        block.clear(key);
        let (at, in_page) = Snapshot::split(key.lin);
        let mut len = in_page.min(LONGEST);
        let mut buffer = [0; LONGEST];
        let first = self.read_code(key.lin, &mut buffer[..len], may_keep)?;
        let mut decoded = self.decode_ops(key, &buffer[..len], max_ops, &mut block.ops);
        let mut second = None;
        if block.ops.is_empty() && decoded.end == DecoderError::NoMoreBytes && len < INSTRUCTION {
            // The first instruction crosses into the next page.
            let lin = self.next_page(key.lin);
            second = self.read_code(lin, &mut buffer[len..INSTRUCTION], may_keep)?;
            len = INSTRUCTION;
            decoded = self.decode_ops(key, &buffer[..len], 1, &mut block.ops);
        }
        if block.ops.is_empty() && decoded.end == DecoderError::None {
            // The first instruction ends beyond the code segment's limit. The block is not kept, because its key does
            // not contain the limit.
            return Err(self.gp());
        }
        if block.ops.is_empty() {
            // The bytes are no valid instruction, and raise #UD, or #GP if the instruction is longer than 15 bytes. The
            // block contains all bytes that may make the instruction invalid, so that all of them are compared with
            // memory.
            let mut op = lower::invalid();
            op.aux = u8::from(too_long(&buffer[..len]));
            if buffer.starts_with(PREFIX) {
                op.offset = PREFIX.len() as u8;
            }
            block.ops.push(op);
            decoded.bytes = len.min(INSTRUCTION);
        }
        let split = decoded.bytes.min(in_page);
        let rest = decoded.bytes - split;
        block.fill(&buffer[..decoded.bytes], split);
        block.first = first.map(|page| Snapshot::keep(page, at, split));
        if rest != 0 {
            block.second = second.map(|page| Snapshot::keep(page, 0, rest));
            // A block in two pages can be compared with memory later only if both pages have snapshots.
            block.first = block.first.filter(|_| second.is_some());
        }
        Ok(())
    }

    /// Reads the code at `lin` into `code`; all of it is in one page. Returns the page's snapshot, which then contains
    /// this code, too. `None`: the code need not be kept, or there is no memory for a snapshot.
    fn read_code(
        &mut self,
        lin: u64,
        code: &mut [u8],
        may_keep: bool,
    ) -> Result<Option<NonNull<Snapshot>>, Break> {
        let page = match may_keep {
            true => self.snapshot(lin),
            false => None,
        };
        match page {
            Some(mut page) => {
                // SAFETY: snapshots live until `Snapshots::clear`, and nothing else refers to one while
                // no block is running.
                let page = unsafe { page.as_mut() };
                self.fetch(page, lin, code.len())?;
                code.copy_from_slice(page.code(lin, code.len()));
            }
            None => self.copy_code(lin, code)?,
        }
        Ok(page)
    }

    fn decode_ops(&self, key: Key, bytes: &[u8], max_ops: usize, ops: &mut List<Op>) -> Decoded {
        let bits = crate::mode::width(key.mode);
        let mut decoder = Decoder::with_ip(bits, bytes, key.rip, DecoderOptions::NONE);
        let mut decoded = Decoded {
            bytes: 0,
            end: DecoderError::None,
        };
        // In a segment with a limit of 4 GiB, the first byte follows the last byte. So no instruction ends beyond such
        // a segment.
        let end = match self.state.cs.limit {
            limit if limit != u32::MAX && !self.is_64() => u64::from(limit) + 1,
            _ => u64::MAX,
        };
        let blank = lower::blank(key.mode);
        // Decode into the same memory each time: copying a new `Instruction` would take longer than decoding it.
        let mut insn = Instruction::default();
        while ops.len() < max_ops && decoded.bytes < MAX_BYTES {
            let start = decoded.bytes;
            let mut prefix = 0;
            // KVM's prefix must be at the start of a block.
            if bytes[start..].starts_with(PREFIX) {
                if start != 0 {
                    break;
                }
                decoder.set_ip(key.rip.wrapping_add(PREFIX.len() as u64));
                if decoder.set_position(PREFIX.len()).is_err() {
                    break;
                }
                prefix = PREFIX.len();
            }
            decoder.decode_out(&mut insn);
            decoded.end = decoder.last_error();
            if decoded.end == DecoderError::InvalidInstruction
                && self.features.cr8_legacy
                && let Some(cr8) = lock_mov_cr0(bits, &bytes[start + prefix..], insn.ip())
                && decoder.set_position(start + prefix + cr8.len()).is_ok()
            {
                decoder.set_ip(cr8.next_ip());
                (insn, decoded.end) = (cr8, DecoderError::None);
            }
            if decoded.end != DecoderError::None {
                // The page ends before the end of this instruction, or the instruction is invalid. The next block
                // starts with this instruction and handles both cases.
                break;
            }
            if insn.next_ip() > end {
                // The instruction ends beyond the code segment's limit. The next block starts with this instruction and
                // raises the fault.
                break;
            }
            decoded.bytes = decoder.position();
            // As in KVM, if the instruction after the prefix faults, RIP is after the prefix.
            let first = start + prefix;
            let code = &bytes[first..decoded.bytes];
            let len = insn.len() as u8;
            if lower::lower(&insn, code, key.mode, &blank, first as u8, len, ops) {
                if insn.mnemonic() == Mnemonic::Ud2 {
                    // The bytes after UD2 decide whether UD2 is part of KVM's prefix, so these bytes belong to the
                    // block.
                    decoded.bytes = (start + PREFIX.len()).min(bytes.len());
                }
                break;
            }
        }
        decoded
    }
}

/// Decodes LOCK MOV CR0, which means MOV CR8 on AMD's CPUs. `None`: the bytes are another instruction. Only this
/// function sets the decoder's AMD option, because the option also changes the meaning of other instructions.
#[cold]
fn lock_mov_cr0(bits: u32, bytes: &[u8], ip: u64) -> Option<Instruction> {
    let insn = Decoder::with_ip(bits, bytes, ip, DecoderOptions::AMD).decode();
    let is_cr8 = (0..insn.op_count()).any(|k| insn.op_register(k) == Register::CR8);
    is_cr8.then_some(insn)
}

/// Whether the instruction is longer than 15 bytes: all of the first 15 bytes are prefixes.
fn too_long(bytes: &[u8]) -> bool {
    let prefix = |b: &u8| {
        matches!(
            b,
            0x66 | 0x67 | 0x26 | 0x2e | 0x36 | 0x3e | 0x64 | 0x65 | 0xf0 | 0xf2 | 0xf3
        )
    };
    bytes.len() >= INSTRUCTION && bytes[..INSTRUCTION].iter().all(prefix)
}
