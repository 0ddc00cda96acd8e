//! Long mode for a guest without firmware: page tables that map guest-virtual addresses to equal guest-physical ones,
//! and the registers that use these tables.

use kvm_bindings::{kvm_segment, kvm_sregs};

/// The flags of an entry that is present and writable.
pub const PRESENT_WRITABLE: u64 = 0b11;
/// The flag of an entry that maps a large page.
const HUGE: u64 = 1 << 7;

/// Writes 4-level page tables into memory at guest-physical address 0. They map the first `gib` GiB one to one, in
/// pages of 2 MiB, by entries with the flags `flags`. There are `gib` page directories.
pub fn identity_map(
    memory: &mut [u8],
    flags: u64,
    pml4: u64,
    pdpt: u64,
    page_directories: u64,
    gib: u64,
) {
    let mut put = |at: u64, entry: u64| {
        memory[at as usize..][..8].copy_from_slice(&(entry | flags).to_le_bytes());
    };
    put(pml4, pdpt);
    for gib in 0..gib {
        let directory = page_directories + gib * 4096;
        put(pdpt + gib * 8, directory);
        for entry in 0..512 {
            put(directory + entry * 8, (gib << 30) | (entry << 21) | HUGE);
        }
    }
}

/// Returns the special registers for long mode at privilege level 0, with paging by the tables at `cr3`.
pub fn registers(from_reset: kvm_sregs, cr3: u64) -> kvm_sregs {
    const CR0_PE_ET_NE_WP_PG: u64 = 1 | 1 << 4 | 1 << 5 | 1 << 16 | 1 << 31;
    const CR4_PAE_OSFXSR: u64 = 1 << 5 | 1 << 9;
    const EFER_LME_LMA: u64 = 1 << 8 | 1 << 10;
    let flat = kvm_segment {
        limit: 0xffff_ffff,
        selector: 0x10,
        type_: 3, // data, read and write
        present: 1,
        db: 1,
        s: 1,
        g: 1,
        ..Default::default()
    };
    kvm_sregs {
        cs: kvm_segment {
            selector: 0x8,
            type_: 11, // code, execute and read
            l: 1,
            db: 0,
            ..flat
        },
        ds: flat,
        es: flat,
        fs: flat,
        gs: flat,
        ss: flat,
        cr0: CR0_PE_ET_NE_WP_PG,
        cr3,
        cr4: CR4_PAE_OSFXSR,
        efer: EFER_LME_LMA,
        ..from_reset
    }
}
