//! Executes cases with the interpreter.

use crate::qemu::{RIGHTS, Record, WINDOW, WORDS, border, code};
use slat_a64::{Access, Exception, Exit, Machine, Memory, State, Stop, run};

/// The memory of a case: its code, and its window on two pages.
struct Guest<'a> {
    code: u64,
    words: &'a [u32; WORDS],
    start: u64,
    bytes: [u8; WINDOW],
    rights: [[bool; 2]; 2],
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Fault {
    /// The page cannot be read or written.
    Page,
    /// The page may have memory, but the case has no memory there. So the case is not compared.
    Outside,
}

const PAGE: u64 = 4096;

impl Guest<'_> {
    /// Returns the offset of the bytes in the window, if the page permits the access.
    fn place(&self, address: u64, bytes: u64, is_write: bool) -> Result<usize, Fault> {
        // Linux lets programs have tags in the top byte of addresses.
        let address = address << 8 >> 8;
        let border = self.start + WINDOW as u64 / 2;
        for at in address..address.wrapping_add(bytes).max(address) {
            let page = match at {
                at if at >= border - PAGE && at < border => 0,
                at if at >= border && at < border + PAGE => 1,
                _ => return Err(Fault::Page),
            };
            if !self.rights[page][usize::from(is_write)] {
                return Err(Fault::Page);
            }
        }
        let at = address.wrapping_sub(self.start);
        let is_inside = at
            .checked_add(bytes)
            .is_some_and(|end| end <= WINDOW as u64);
        if is_inside {
            Ok(at as usize)
        } else {
            Err(Fault::Outside)
        }
    }
    fn read(&self, address: u64, bytes: u64) -> Result<u128, Fault> {
        let mut value = [0; 16];
        let length = bytes as usize;
        let at = address.wrapping_sub(self.code);
        if at
            .checked_add(bytes)
            .is_some_and(|end| end <= 4 * WORDS as u64)
        {
            let code: Vec<u8> = self
                .words
                .iter()
                .flat_map(|word| word.to_le_bytes())
                .collect();
            value[..length].copy_from_slice(&code[at as usize..][..length]);
        } else {
            let at = self.place(address, bytes, false)?;
            value[..length].copy_from_slice(&self.bytes[at..][..length]);
        }
        Ok(u128::from_le_bytes(value))
    }
    fn write(&mut self, address: u64, bytes: u64, value: u128) -> Result<(), Fault> {
        let at = self.place(address, bytes, true)?;
        let length = bytes as usize;
        self.bytes[at..][..length].copy_from_slice(&value.to_le_bytes()[..length]);
        Ok(())
    }
}

impl Memory for Guest<'_> {
    type Fault = Fault;

    fn fetch(&mut self, _: &State, address: u64) -> Result<u32, Fault> {
        let at = address.wrapping_sub(self.code) / 4;
        self.words.get(at as usize).copied().ok_or(Fault::Page)
    }
    fn load(&mut self, _: &State, address: u64, size: u8, _: Access) -> Result<u64, Fault> {
        Ok(self.read(address, 1 << size)? as u64)
    }
    fn store(
        &mut self,
        _: &State,
        address: u64,
        size: u8,
        value: u64,
        _: Access,
    ) -> Result<(), Fault> {
        self.write(address, 1 << size, value.into())
    }
    fn load_wide(&mut self, _: &State, address: u64, _: Access) -> Result<u128, Fault> {
        self.read(address, 16)
    }
    fn store_wide(&mut self, _: &State, address: u64, value: u128, _: Access) -> Result<(), Fault> {
        self.write(address, 16, value)
    }
    fn prepare_stores(
        &mut self,
        _: &State,
        address: u64,
        bytes: u32,
        _: Access,
    ) -> Result<(), Fault> {
        self.place(address, bytes.into(), true).map(|_| ())
    }
    fn compare_exchange(
        &mut self,
        _: &State,
        address: u64,
        size: u8,
        [expected, new]: [u128; 2],
        _: Access,
    ) -> Result<u128, Fault> {
        self.place(address, 1 << size, true)?;
        let found = self.read(address, 1 << size)?;
        if found == expected {
            self.write(address, 1 << size, new)?;
        }
        Ok(found)
    }
}

impl Machine for Guest<'_> {}

/// The greatest number of instructions that a case executes.
pub const LIMIT: u64 = 100_000;

/// Executes the case with index `case` of a batch, and writes the result into the record. Returns whether the result
/// can be compared.
pub fn execute(case: usize, record: &mut Record) -> bool {
    let before = &record.before;
    let mut state = State::default();
    state.x = before.x;
    state.sp = before.sp;
    state.pc = code(case) + 4 * u64::from(record.start);
    state.v = before
        .v
        .map(|[low, high]| u128::from(low) | u128::from(high) << 64);
    state.fpcr = before.fpcr;
    state.fpsr = before.fpsr;
    state.set_nzcv(before.pstate as u32);
    let words = record.code;
    let mut guest = Guest {
        code: code(case),
        words: &words,
        start: border(record.set) - WINDOW as u64 / 2,
        bytes: record.memory,
        rights: RIGHTS[record.set as usize],
    };
    let exit = run::run(&mut state, &mut guest, LIMIT);
    let after = &mut record.after;
    after.signal = match exit {
        Exit::Stop(Stop::Exception(Exception::Brk(_))) => libc::SIGTRAP,
        // qemu 7.2 does not check the alignment of all ordered accesses.
        Exit::Stop(Stop::Exception(Exception::Alignment { .. })) => return false,
        Exit::MisalignedFetch => libc::SIGBUS,
        Exit::Stop(Stop::Exception(
            Exception::Undefined | Exception::Hvc(_) | Exception::Smc(_),
        )) => libc::SIGILL,
        Exit::Stop(Stop::Memory(Fault::Page)) | Exit::Fetch(Fault::Page) => libc::SIGSEGV,
        _ => return false,
    } as u32;
    after.x = state.x;
    after.sp = state.sp;
    after.pc = state.pc;
    after.pstate = state.nzcv().into();
    after.fpcr = state.fpcr;
    after.fpsr = state.fpsr;
    after.v = state.v.map(|v| [v as u64, (v >> 64) as u64]);
    record.memory_after = guest.bytes;
    true
}
