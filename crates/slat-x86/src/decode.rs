//! Fetching code, decoding it, and comparing it with a decoded block.
//!
//! A second page is fetched only when the decoder needs more bytes than the first has: a fault of that fetch is the guest's.

use crate::block::{Block, Hosts, Key, LONGEST, MAX_BYTES};
use crate::heap::{self, OutOfMemory};
use crate::machine::{Access, Fault};
use crate::op::{Break, Op};
use crate::{Cpu, lower, vector};
use iced_x86::{Decoder, DecoderError, DecoderOptions, Mnemonic};
use std::ptr;
use std::sync::Once;

/// UD2 and "kvm": makes KVM emulate the next instruction.
const PREFIX: &[u8] = b"\x0f\x0bkvm";
/// Bytes of the longest instruction.
const INSTRUCTION: usize = 15;
/// More heap bytes than the decoder's tables use, once per process (checked by a test).
pub const DECODER_BYTES: usize = 512 << 10;

/// Has the decoder build its tables. It builds them at the first use in a process, and cannot report a failed allocation. So
/// this checks first that there is enough memory: other threads may still use it up meanwhile.
pub(crate) fn build_tables() -> Result<(), OutOfMemory> {
    static BUILT: Once = Once::new();
    if !BUILT.is_completed() {
        heap::probe(DECODER_BYTES)?;
        BUILT.call_once(|| {
            let _ = Decoder::new(64, &[], DecoderOptions::NONE);
        });
    }
    Ok(())
}

/// The result of decoding: the number of bytes, and why decoding stopped.
struct Decoded {
    bytes: usize,
    end: DecoderError,
}

impl Cpu {
    /// Returns the linear address of `rip` in the code segment.
    #[inline(always)]
    pub(crate) fn code_address(&self, rip: u64) -> u64 {
        if self.is_64() {
            rip
        } else {
            self.state.cs.base.wrapping_add(rip) & 0xffff_ffff
        }
    }

    /// Returns the first address of the page after that of `lin`.
    fn next_code_page(&self, lin: u64) -> u64 {
        let next = (lin | 0xfff).wrapping_add(1);
        if self.is_64() {
            next
        } else {
            next & 0xffff_ffff
        }
    }

    pub(crate) fn check_code_limit(&mut self, rip: u64) -> Result<(), Break> {
        let inside = if self.is_64() {
            self.canonical(rip)
        } else {
            rip <= u64::from(self.state.cs.limit)
        };
        if inside { Ok(()) } else { Err(self.gp()) }
    }

    /// Whether memory holds the bytes that `block` was decoded from; if so, updates its translations to this generation.
    /// `false` for a block that holds nothing.
    pub(crate) fn verify(&mut self, block: &mut Block) -> Result<bool, Break> {
        if block.ops.is_empty() {
            return Ok(false);
        }
        let lin = block.key.lin;
        if block.is_in_one_page() {
            block.hosts = Hosts {
                generation: self.generation,
                first: self.code_host(lin)?,
                second: ptr::null_mut(),
            };
            if block.is_fresh(self.generation) {
                return Ok(true);
            }
        }
        let (first, second) = block.parts();
        let hosts = loop {
            let current = block.hosts.generation == self.generation;
            let mut hosts = Hosts {
                generation: self.generation,
                first: match current {
                    true => block.hosts.first,
                    false => self.code_host(lin)?,
                },
                second: ptr::null_mut(),
            };
            match self.compare(lin, hosts.first, first)? {
                Some(true) => {}
                Some(false) => return Ok(false),
                None => continue,
            }
            // Only now is it certain that the instruction still crosses into the second page.
            if !second.is_empty() {
                let next = self.next_code_page(lin);
                hosts.second = match current {
                    true => block.hosts.second,
                    false => self.code_host(next)?,
                };
                match self.compare(next, hosts.second, second)? {
                    Some(true) => {}
                    Some(false) => return Ok(false),
                    None => continue,
                }
            }
            break hosts;
        };
        block.hosts = hosts;
        Ok(true)
    }

    /// Whether the code at `lin`, which is at `host`, is `bytes`. `None`: the memory is not accessible, translate again.
    fn compare(&mut self, lin: u64, host: *mut u8, bytes: &[u8]) -> Result<Option<bool>, Break> {
        // SAFETY: a translation looked up in this generation; the access is guarded.
        match unsafe { slat_guard::matches(host, bytes) } {
            Ok(same) => Ok(Some(same)),
            Err(_) => self.code_gone(lin, host).map(|()| None),
        }
    }

    /// Decodes the code at `key` into `block`, which has memory for `max_ops` operations. On failure the block holds nothing.
    pub(crate) fn decode(
        &mut self,
        block: &mut Block,
        key: Key,
        max_ops: usize,
    ) -> Result<(), Break> {
        self.counters.blocks_decoded += 1;
        block.clear(key);
        let in_page = 0x1000 - (key.lin & 0xfff) as usize;
        let mut buffer = [0; LONGEST];
        let mut len = in_page.min(buffer.len());
        let first = self.fetch(key.lin, &mut buffer[..len])?;
        let generation = self.generation;
        let mut second = ptr::null_mut();
        let mut decoded = self.decode_ops(key, &buffer[..len], max_ops, &mut block.ops);
        if block.ops.is_empty() && decoded.end == DecoderError::NoMoreBytes && len < INSTRUCTION {
            // The first instruction crosses into the next page.
            let next = self.next_code_page(key.lin);
            second = self.fetch(next, &mut buffer[len..INSTRUCTION])?;
            len = INSTRUCTION;
            decoded = self.decode_ops(key, &buffer[..len], 1, &mut block.ops);
        }
        if block.ops.is_empty() {
            // Not an instruction: #UD, or #GP if it is longer than 15 bytes. Each of the bytes may be the invalid one, so all
            // of them are compared.
            let mut op = lower::invalid();
            op.aux = u8::from(too_long(&buffer[..len]));
            if buffer.starts_with(PREFIX) {
                op.offset = PREFIX.len() as u8;
            }
            block.ops.push(op);
            decoded.bytes = len.min(INSTRUCTION);
        }
        let split = decoded.bytes.min(in_page);
        let hosts = Hosts {
            generation,
            first,
            second: match decoded.bytes > split {
                true => second,
                false => ptr::null_mut(),
            },
        };
        block.fill(&buffer[..decoded.bytes], split, hosts);
        Ok(())
    }

    fn decode_ops(&self, key: Key, bytes: &[u8], max_ops: usize, ops: &mut Vec<Op>) -> Decoded {
        let bits = 16 << (key.mode & crate::cpu::mode::BITS);
        let mut decoder = Decoder::with_ip(bits, bytes, key.rip, DecoderOptions::NONE);
        let mut decoded = Decoded {
            bytes: 0,
            end: DecoderError::None,
        };
        while ops.len() < max_ops && decoded.bytes < MAX_BYTES {
            let start = decoded.bytes;
            let mut prefix = 0;
            // The prefix that makes KVM emulate the next instruction: it starts a block of its own.
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
            let insn = decoder.decode();
            decoded.end = decoder.last_error();
            if decoded.end != DecoderError::None {
                // The end of the page or a bad instruction; the next block starts here and handles it.
                break;
            }
            decoded.bytes = decoder.position();
            // KVM has moved RIP past its prefix when the instruction faults.
            let first = start + prefix;
            let code = &bytes[first..decoded.bytes];
            let len = insn.len() as u8;
            if lower::lower(&insn, code, key.mode, first as u8, len, ops) {
                if insn.mnemonic() == Mnemonic::Ud2 {
                    // The next bytes decide whether this is a prefix.
                    decoded.bytes = (start + PREFIX.len()).min(bytes.len());
                }
                break;
            }
        }
        decoded
    }

    /// Reads the code at `lin`, which lies in one page. Returns its host address.
    fn fetch(&mut self, lin: u64, code: &mut [u8]) -> Result<*mut u8, Break> {
        loop {
            let host = self.code_host(lin)?;
            // SAFETY: a translation looked up just now; the access is guarded.
            match unsafe { slat_guard::copy_in(code, host) } {
                Ok(()) => return Ok(host),
                Err(_) => self.code_gone(lin, host)?,
            }
        }
    }

    /// Returns the host address from which the code at `lin` is fetched.
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
                self.tlb().note_size(lin, page.bits);
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

/// Whether the decoder consumes all of the first 15 bytes without reaching the end of the instruction.
fn too_long(bytes: &[u8]) -> bool {
    let prefix = |b: &u8| {
        matches!(
            b,
            0x66 | 0x67 | 0x26 | 0x2e | 0x36 | 0x3e | 0x64 | 0x65 | 0xf0 | 0xf2 | 0xf3
        )
    };
    bytes.len() >= INSTRUCTION && bytes[..INSTRUCTION].iter().all(prefix)
}
