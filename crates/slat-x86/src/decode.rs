//! Fetching code, decoding it, and comparing it with a decoded block.
//!
//! A second page is fetched only when the decoder needs more bytes than the first has: a fault of that fetch is the guest's.

use crate::block::{Block, Found, Key, LONGEST, MAX_BYTES};
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

    /// Whether `block` may be executed: memory holds the bytes that it was decoded from. `false` for a block that holds nothing.
    ///
    /// Looks the host pages up again after a flush, and compares the bytes if the block was not compared since its pages were
    /// trusted and last changed, and instructions last serialised.
    pub(crate) fn verify(&mut self, block: &mut Block) -> Result<bool, Break> {
        if block.ops.is_empty() {
            return Ok(false);
        }
        let found = &block.found;
        if found.generation == self.generation
            && found.epoch == self.epoch
            && found.version.is_some()
            && found.version == Some(self.version_of(found))
        {
            block.stamp = self.stamp;
            return Ok(true);
        }
        self.counters.blocks_verified += 1;
        let (first, second) = block.parts();
        let lin = block.key.lin;
        let found = loop {
            let mut found = self.find_code(lin, &block.found)?;
            match self.compare(lin, found.first, first)? {
                Some(true) => {}
                Some(false) => return Ok(false),
                None => continue,
            }
            // Only now is it certain that the instruction still crosses into the second page.
            if !second.is_empty() {
                let next = self.next_code_page(lin);
                self.find_second(next, &block.found, &mut found)?;
                match self.compare(next, found.second, second)? {
                    Some(true) => {}
                    Some(false) => return Ok(false),
                    None => continue,
                }
            }
            break found;
        };
        block.found = found;
        block.stamp = self.stamp_of(&found);
        self.verify_region(block);
        Ok(true)
    }

    /// Drops the compiled code of a block that was just compared with memory if memory does not hold the rest of it any more.
    fn verify_region(&self, block: &mut Block) {
        #[cfg(feature = "jit")]
        if let Some(entrance) = &block.entrance {
            let page = block.page();
            let same = entrance.region.parts().all(|(rip, bytes)| {
                let host = (page | rip as usize & 0xfff) as *const u8;
                // SAFETY: all of the region lies in the page of the block's first byte, whose translation is current.
                let held = unsafe { slat_guard::matches(host, bytes) };
                held == Ok(true)
            });
            if !same {
                block.cool();
            }
        }
        #[cfg(not(feature = "jit"))]
        let _ = block;
    }

    /// Returns the version of the pages of a block.
    fn version_of(&self, found: &Found) -> u64 {
        let pages = self.code.pages();
        let first = pages.version_of(found.first as usize);
        match found.second.is_null() {
            true => first,
            false => first.max(pages.version_of(found.second as usize)),
        }
    }

    /// Returns the stamp of a block whose code was just found: 0, which is no CPU's, if the next entry has to look again.
    fn stamp_of(&self, found: &Found) -> u64 {
        match found.version {
            Some(_) if found.generation == self.generation => self.stamp,
            _ => 0,
        }
    }

    /// Finds the host page of the code at `lin`, which was `before`, and marks it. The caller compares or reads the code then.
    fn find_code(&mut self, lin: u64, before: &Found) -> Result<Found, Break> {
        let first = match before.generation == self.generation {
            true => before.first,
            false => self.code_host(lin)?,
        };
        Ok(Found {
            generation: self.generation,
            first,
            second: ptr::null_mut(),
            version: self.mark_code(first),
            epoch: self.epoch,
        })
    }

    /// Does [`find_code`](Self::find_code) for the second page of a block, whose first byte is at `lin`.
    fn find_second(&mut self, lin: u64, before: &Found, found: &mut Found) -> Result<(), Break> {
        found.second = match before.generation == self.generation && !before.second.is_null() {
            true => before.second,
            false => self.code_host(lin)?,
        };
        let version = self.mark_code(found.second);
        found.version = found
            .version
            .zip(version)
            .map(|(first, second)| first.max(second));
        Ok(())
    }

    /// Marks the page of `host` as one with decoded code. Returns its version if it is trusted.
    fn mark_code(&mut self, host: *mut u8) -> Option<u64> {
        let page = host as usize & !0xfff;
        let tlb = &mut self.fixed.tlb;
        self.code
            .mark(page, || tlb.look_at_writes(|host| host == page))
    }

    /// Heeds what other CPUs have done with code.
    #[cold]
    #[inline(never)]
    pub(crate) fn heed_code(&mut self) {
        let tlb = &mut self.fixed.tlb;
        self.code
            .heed(|pages| tlb.look_at_writes(|host| pages.version_of(host) != 0));
        self.stamp += 1;
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
        let mut found = loop {
            let found = self.find_code(key.lin, &Found::NOWHERE)?;
            if self.fetch(key.lin, found.first, &mut buffer[..len])? {
                break found;
            }
        };
        let mut decoded = self.decode_ops(key, &buffer[..len], max_ops, &mut block.ops);
        let mut crossing = found;
        if block.ops.is_empty() && decoded.end == DecoderError::NoMoreBytes && len < INSTRUCTION {
            // The first instruction crosses into the next page.
            let next = self.next_code_page(key.lin);
            loop {
                self.find_second(next, &Found::NOWHERE, &mut crossing)?;
                if self.fetch(next, crossing.second, &mut buffer[len..INSTRUCTION])? {
                    break;
                }
            }
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
        if decoded.bytes > split {
            found = crossing;
        }
        block.fill(&buffer[..decoded.bytes], split, found);
        block.stamp = self.stamp_of(&found);
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

    /// Reads the code at `lin`, which lies in one page, at `host`. `false`: the memory is not accessible, translate again.
    fn fetch(&mut self, lin: u64, host: *mut u8, code: &mut [u8]) -> Result<bool, Break> {
        // SAFETY: a translation of guest memory; the access is guarded.
        match unsafe { slat_guard::copy_in(code, host) } {
            Ok(()) => Ok(true),
            Err(_) => self.code_gone(lin, host).map(|()| false),
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
        self.outdate_blocks();
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
