//! The physical memory of a guest: the address of each part, and the addresses at which accesses are interesting.

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

/// The memslot with code, tables and stacks. The constants below are addresses in this memslot.
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
/// A memslot that is always logged.
pub const LOGGED: Place = Place {
    slot: 2,
    gpa: 0x6_0000,
    pages: 8,
};
/// A memslot above 4 GiB, which is also logged.
pub const FAR: Place = Place {
    slot: 3,
    gpa: 1 << 32,
    pages: 4,
};
/// The memslot of system management mode, in the second address space, at the value of SMBASE after RESET. This memslot
/// is logged.
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

/// The addresses of the tables of five levels, one page each. The roots of other modes are further down.
pub const PML5: u64 = 0x1000;
/// The root of four levels.
pub const PML4: u64 = 0x2000;
/// The root of PAE paging, and the third level.
pub const PDPT: u64 = 0x3000;
/// The second level, and the root of 32-bit paging.
pub const PD: u64 = 0x4000;
/// The first level.
pub const PT: u64 = 0x8000;
/// The GDT.
pub const GDT: u64 = 0x9000;
/// The IDT.
pub const IDT: u64 = 0xa000;
/// The task-state segment. The guest uses only its stack pointers, and some zeroes after it.
pub const TSS: u64 = 0xb000;
/// The vCPUs' first instructions. Each vCPU has a page of code.
pub const CODE: u64 = 0xc000;
/// The handlers that gates point to.
pub const HANDLERS: u64 = 0xf000;
/// The top of the first vCPU's stack. The top of the second vCPU's stack is a page higher.
pub const STACK: u64 = 0x1_2000;
/// The guest's data.
pub const DATA: u64 = 0x1_4000;

/// The guest-physical pages to which tables point: every kind of memory, an address without memory, and the tables
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

/// Returns a guest-physical page.
pub fn physical(rng: &mut Rng) -> u64 {
    rng.pick(&PHYSICAL)
}

/// Returns a linear address, often near the end of a page.
pub fn linear(rng: &mut Rng) -> u64 {
    let page = match rng.below(16) {
        // Some addresses are in the upper half, which the fourth level maps a second time, some are in the tables,
        // which map themselves, and some are not canonical.
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
