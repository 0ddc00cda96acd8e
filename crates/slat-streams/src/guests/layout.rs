//! The layout of a guest's physical memory: the address of each part, and the addresses that make accesses interesting.

use crate::memory::PAGE;
use slat_model::Rng;

/// A memslot of the guest: its number, address and size.
#[derive(Clone, Copy, Debug)]
pub struct Place {
    /// The memslot's number.
    pub slot: u32,
    /// The first guest-physical address.
    pub gpa: u64,
    /// The number of pages.
    pub pages: usize,
}

impl Place {
    /// Returns the size in bytes.
    pub const fn len(&self) -> usize {
        self.pages * PAGE
    }
}

/// The memslot with code, tables and stacks. The constants from `PML5` to `DATA` are addresses in this memslot.
pub const MAIN: Place = Place {
    slot: 0,
    gpa: 0,
    pages: 64,
};
/// A read-only memslot.
pub const ROM: Place = Place {
    slot: 1,
    gpa: 0x5_0000,
    pages: 4,
};
/// A memslot with dirty logging always on.
pub const LOGGED: Place = Place {
    slot: 2,
    gpa: 0x6_0000,
    pages: 8,
};
/// A memslot above 4 GiB, also with dirty logging always on.
pub const FAR: Place = Place {
    slot: 3,
    gpa: 1 << 32,
    pages: 4,
};
/// The memslot of system management mode, also with dirty logging on. It is in the second address space, at the value
/// that SMBASE has after RESET.
pub const SMRAM: Place = Place {
    slot: 1 << 16,
    gpa: 0x3_0000,
    pages: 16,
};
/// The offset of the SMI handler in [`SMRAM`].
pub const SMI_HANDLER: usize = 0x8000;
/// A memslot of one huge page.
pub const HUGE: Place = Place {
    slot: 4,
    gpa: 0x20_0000,
    pages: 512,
};

/// The address of the table of level 5, the root of 5-level paging. Each table has one page.
pub const PML5: u64 = 0x1000;
/// The address of the table of level 4, the root of 4-level paging.
pub const PML4: u64 = 0x2000;
/// The address of the table of level 3, the root of PAE paging.
pub const PDPT: u64 = 0x3000;
/// The address of the table of level 2, the root of 32-bit paging.
pub const PD: u64 = 0x4000;
/// The address of the table of level 1.
pub const PT: u64 = 0x8000;
/// The address of the GDT.
pub const GDT: u64 = 0x9000;
/// The address of the IDT.
pub const IDT: u64 = 0xa000;
/// The address of the task-state segment. The guest uses only its stack pointers, and some zeroes after it.
pub const TSS: u64 = 0xb000;
/// The address of the first vCPU's first instruction. Each vCPU has a page of code.
pub const CODE: u64 = 0xc000;
/// The address of the handlers to which gates point.
pub const HANDLERS: u64 = 0xf000;
/// The top of the first vCPU's stack. The top of the second vCPU's stack is a page higher.
pub const STACK: u64 = 0x1_2000;
/// The address of the guest's data.
pub const DATA: u64 = 0x1_4000;

/// The guest-physical pages that page tables can map: memory of every kind, an address without memory, and the tables
/// themselves.
const PHYSICAL: [u64; 20] = [
    0,
    PML4,
    PDPT,
    PD,
    PT,
    GDT,
    IDT,
    CODE,
    CODE + 0x1000,
    DATA,
    0x3_f000,
    ROM.gpa,
    LOGGED.gpa,
    LOGGED.gpa + 0x7000,
    HUGE.gpa,
    FAR.gpa,
    // An address without memory.
    0x4_0000,
    0x7_0000,
    0xfee0_0000,
    1 << 39,
];

/// Returns one of the guest-physical pages in `PHYSICAL`.
pub fn physical(rng: &mut Rng) -> u64 {
    rng.pick(&PHYSICAL)
}

/// Returns a linear address, often near the end of a page.
pub fn linear(rng: &mut Rng) -> u64 {
    let page = match rng.below(16) {
        // Some addresses are in the upper half, which entries of level 4 map a second time. Some are addresses of the
        // tables, which map themselves. Some are not canonical.
        0 => 0xffff_8000_0000_0000 + physical(rng),
        1 => 0xffff_ff80_0000_0000 + (rng.below(8) << 12),
        2 => 1 << 47,
        3 => 0xffff_f000,
        4 => !0xfff,
        _ => physical(rng),
    };
    let offset = match rng.below(4) {
        0 => 0x1000 - 1 - rng.below(16),
        1 => 0,
        _ => rng.below(0x1000),
    };
    page.wrapping_add(offset)
}
