//! Long mode for a guest without firmware: page tables that map guest-virtual to guest-physical, and the
//! registers that use them.

use kvm_bindings::{kvm_segment, kvm_sregs};

/// The flags of an entry that is present and writable.
pub const PRESENT_WRITABLE: u64 = 0b11;
/// The flag of an entry that maps a large page.
const HUGE: u64 = 1 << 7;

/// Writes tables of 4 levels that map the first `gib` GiB one to one, in pages of 2 MiB, by entries with `flags`, into
/// memory at guest-physical 0. There are `gib` page directories.
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

/// Returns the registers of long mode with paging on, at privilege level 0, on the tables at `cr3`.
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
