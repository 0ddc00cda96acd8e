//! The tables that a guest's CPU reads: page tables, descriptor tables, gates. Except for a few random entries, they
//! are valid.

use super::code::End;
use super::layout::*;
use crate::memory::Guarded;
use slat_model::Rng;

/// The mode in which a guest runs. It determines how the guest's addresses are translated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// Real mode.
    Real,
    /// Protected mode without paging.
    Flat,
    /// Protected mode with 32-bit paging: two levels, with pages of 4 MiB.
    Bits32,
    /// Protected mode with PAE paging: three levels.
    Pae,
    /// Long mode (64-bit mode).
    Long,
    /// Compatibility mode: long mode in a 32-bit code segment.
    Compatibility,
    /// Long mode with 5-level paging.
    Level5,
}

impl Mode {
    /// All modes. Long mode occurs more often than the others.
    pub const ALL: [Mode; 8] = [
        Mode::Long,
        Mode::Real,
        Mode::Flat,
        Mode::Bits32,
        Mode::Pae,
        Mode::Compatibility,
        Mode::Level5,
        Mode::Long,
    ];

    /// Whether EFER.LMA is set in this mode.
    pub fn is_long(self) -> bool {
        matches!(self, Mode::Long | Mode::Compatibility | Mode::Level5)
    }

    /// Returns the value of CR3.
    pub fn root(self) -> u64 {
        match self {
            Mode::Real | Mode::Flat => 0,
            Mode::Bits32 => PD,
            Mode::Pae => PDPT,
            Mode::Long | Mode::Compatibility => PML4,
            Mode::Level5 => PML5,
        }
    }
}

/// The flags of an entry: present, writable, user; not accessed yet.
const ENTRY: u64 = 7;
/// The flag in an entry above level 1 that makes the entry map a page.
const PAGE_SIZE: u64 = 0x80;

struct Entries<'a> {
    memory: &'a Guarded,
    size: usize,
}

impl Entries<'_> {
    fn set(&self, table: u64, index: u64, value: u64) {
        let offset = table as usize + index as usize * self.size;
        self.memory.write(offset, &value.to_le_bytes()[..self.size]);
    }
}

/// Writes the page tables of a mode. They map all memory one to one, except for a few random entries.
pub fn page_tables(rng: &mut Rng, mode: Mode, memory: &Guarded) {
    let size = if mode == Mode::Bits32 { 4 } else { 8 };
    let tables = Entries { memory, size };
    let per_table = 0x1000 / size as u64;
    for index in 0..per_table {
        tables.set(PT, index, index << 12 | ENTRY);
    }
    tables.set(PD, 0, PT | ENTRY);
    tables.set(PD, 1, per_table << 12 | PAGE_SIZE | ENTRY);
    if size == 8 {
        // In PAE mode, the entries of the top level have no rights, and most of their bits are reserved.
        let entry = if mode == Mode::Pae { 1 } else { ENTRY };
        tables.set(PDPT, 0, PD | entry);
        tables.set(PDPT, 3, PD | entry);
        if mode != Mode::Pae {
            tables.set(PDPT, 4, FAR.gpa | PAGE_SIZE | ENTRY);
        }
        for index in [0, 256] {
            tables.set(PML4, index, PDPT | ENTRY);
        }
        tables.set(PML4, 511, PML4 | ENTRY);
        for index in [0, 511] {
            tables.set(PML5, index, PML4 | ENTRY);
        }
    }
    for _ in 0..rng.below(6) {
        let table = rng.pick(&[PT, PT, PT, PD, PD, PDPT, PML4, PML5]);
        let index = match rng.below(3) {
            0 => rng.below(4),
            1 => {
                rng.pick(&[FAR.gpa, ROM.gpa, LOGGED.gpa, CODE, DATA, STACK]) >> 12 & (per_table - 1)
            }
            _ => rng.below(per_table),
        };
        let mut entry = physical(rng) | rng.below(0x1000);
        if !rng.one_in(4) {
            entry |= 1;
        }
        if rng.one_in(4) {
            // Sets one bit from 40 up: a reserved bit, an ignored bit, a bit of the protection key, or no-execute.
            entry |= 1 << (40 + rng.below(24));
        }
        tables.set(table, index, entry);
    }
}

/// The selectors of the segments that [`descriptors`] writes.
pub mod selector {
    pub const CODE64: u16 = 0x08;
    pub const DATA: u16 = 0x10;
    pub const CODE32: u16 = 0x18;
    pub const CODE16: u16 = 0x20;
    pub const USER_DATA: u16 = 0x2b;
    pub const USER_CODE64: u16 = 0x33;
    pub const USER_CODE32: u16 = 0x3b;
    pub const TSS: u16 = 0x40;
}

/// The size of the GDT in bytes.
pub const GDT_LEN: usize = 16 * 8;

/// Writes the GDT: flat segments of all kinds, a task-state segment, an LDT, gates. A few entries are random.
pub fn descriptors(rng: &mut Rng, memory: &Guarded) {
    let system = |kind: u64, base: u64, limit: u64| {
        limit | (base & 0xff_ffff) << 16 | kind << 40 | (base >> 24 & 0xff) << 56
    };
    let gate = |kind: u64, selector: u64, offset: u64| {
        offset & 0xffff | selector << 16 | kind << 40 | offset >> 16 << 48
    };
    let mut entries = [
        0,
        0x00af_9b00_0000_ffff,
        0x00cf_9300_0000_ffff,
        0x00cf_9b00_0000_ffff,
        0x000f_9b00_0000_ffff,
        0x00cf_f300_0000_ffff,
        0x00af_fb00_0000_ffff,
        0x00cf_fb00_0000_ffff,
        system(0x89, TSS, 0x67),
        0,
        system(0x82, GDT, GDT_LEN as u64 - 1),
        0,
        gate(0xec, 0x08, HANDLERS),
        0,
        gate(0xe5, 0x40, 0),
        // A conforming code segment.
        0x00cf_9f00_0000_ffff,
    ];
    for _ in 0..rng.below(3) {
        let index = rng.below(entries.len() as u64) as usize;
        entries[index] ^= 1 << rng.below(64);
    }
    for (index, entry) in entries.iter().enumerate() {
        memory.write(GDT as usize + index * 8, &entry.to_le_bytes());
    }
}

/// The exceptions that push an error code, one bit for each vector.
const WITH_ERROR: u32 = 1 << 8 | 0x1f << 10 | 1 << 17 | 1 << 21;

/// Writes the IDT of a mode, or the interrupt vectors of real mode. Also writes the handlers, and the stack pointers of
/// the task. If the code [counts](End::Counts), most handlers skip the byte at which the fault occurred, and return.
pub fn gates(rng: &mut Rng, mode: Mode, memory: &Guarded, end: End) {
    const STEP: usize = 16;
    let returns: [&[u8]; 6] = [
        &[0x48, 0xcf],
        &[0xcf],
        &[0xf4, 0xeb, 0xfd],
        // Skips the byte at which the fault occurred. The next variant first removes the error code.
        &[0x48, 0xff, 0x04, 0x24, 0x48, 0xcf],
        &[0x48, 0x83, 0xc4, 0x08, 0x48, 0xff, 0x04, 0x24, 0x48, 0xcf],
        &[0xff, 0x04, 0x24, 0xcf],
    ];
    for vector in 0..32 {
        let handler = match end == End::Counts && !rng.one_in(6) {
            true if WITH_ERROR >> vector & 1 != 0 => returns[4],
            true => returns[3],
            false => rng.pick(&returns),
        };
        memory.write(HANDLERS as usize + vector * STEP, handler);
    }
    let kinds: &[u64] = match end {
        End::Repeats => &[0x8e, 0x8e, 0x8f, 0xee, 0x86, 0x85],
        // In code that counts, gates have only the types of long mode.
        End::Counts => &[0x8e, 0x8f, 0xee],
    };
    let kind = rng.pick(kinds);
    let code = if mode.is_long() {
        selector::CODE64
    } else {
        selector::CODE32
    };
    for vector in 0..256usize {
        let handler = HANDLERS + (vector % 32 * STEP) as u64;
        match mode {
            Mode::Real => {
                memory.write(vector * 4, &(handler as u16).to_le_bytes());
                memory.write(vector * 4 + 2, &[0, 0]);
            }
            _ => {
                let gate =
                    handler & 0xffff | u64::from(code) << 16 | kind << 40 | handler >> 16 << 48;
                let size = if mode.is_long() { 16 } else { 8 };
                memory.write(IDT as usize + vector * size, &gate.to_le_bytes());
            }
        }
    }
    for _ in 0..rng.below(3) {
        let at = IDT as usize + rng.below(0x200) as usize;
        memory.write(at, &[rng.below(256) as u8]);
    }
    // Sets the stack pointers from RSP0 to IST7. They overlap those of a 32-bit task.
    for at in (4..0x60).step_by(8) {
        memory.write(TSS as usize + at, &(STACK - 0x800).to_le_bytes());
    }
}
