//! The physical memory of a guest: what lies where, and which addresses are worth an access.

use crate::memory::PAGE;
use slat_model::Rng;

/// A memslot.
#[derive(Clone, Copy, Debug)]
pub struct Place {
    /// Its number.
    pub slot: u32,
    /// Its first guest-physical address.
    pub gpa: u64,
    /// Its pages.
    pub pages: usize,
}

impl Place {
    /// Its size.
    pub const fn len(&self) -> usize {
        self.pages * PAGE
    }
}

/// Code, tables, stacks: everything below.
pub const MAIN: Place = Place {
    slot: 0,
    gpa: 0,
    pages: 64,
};
/// Read-only.
pub const ROM: Place = Place {
    slot: 1,
    gpa: 0x5_0000,
    pages: 4,
};
/// Logged in any case.
pub const LOGGED: Place = Place {
    slot: 2,
    gpa: 0x6_0000,
    pages: 8,
};
/// Beyond 32 bits. Logged, too.
pub const FAR: Place = Place {
    slot: 3,
    gpa: 1 << 32,
    pages: 4,
};
/// One huge page.
pub const HUGE: Place = Place {
    slot: 4,
    gpa: 0x20_0000,
    pages: 512,
};

/// The tables of five levels, one page each; those of other modes begin further down.
pub const PML5: u64 = 0x1000;
/// Four levels.
pub const PML4: u64 = 0x2000;
/// PAE, and the third level.
pub const PDPT: u64 = 0x3000;
/// The second level, and 32-bit paging.
pub const PD: u64 = 0x4000;
/// The first.
pub const PT: u64 = 0x8000;
/// Descriptors.
pub const GDT: u64 = 0x9000;
/// Gates.
pub const IDT: u64 = 0xa000;
/// The task-state segment, of which the guest uses only the stack pointers, and some zeroes after it.
pub const TSS: u64 = 0xb000;
/// Where vCPUs begin, a page each.
pub const CODE: u64 = 0xc000;
/// What gates lead to.
pub const HANDLERS: u64 = 0xf000;
/// The top of the first vCPU's stack; the second's is a page higher.
pub const STACK: u64 = 0x1_2000;
/// Data.
pub const DATA: u64 = 0x1_4000;

/// Guest-physical pages that tables should point to: every kind of memory, none, and the tables themselves.
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
    // No memory.
    0x4_0000,
    0x7_0000,
    0xfee0_0000,
    1 << 39,
];

/// A guest-physical page.
pub fn physical(rng: &mut Rng) -> u64 {
    rng.pick(&PHYSICAL)
}

/// A linear address, often near the end of a page.
pub fn linear(rng: &mut Rng) -> u64 {
    let page = match rng.below(16) {
        // The upper half, which the fourth level maps again; the tables, through themselves; nothing canonical.
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
