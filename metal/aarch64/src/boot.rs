//! The code from the first instruction to Rust (`boot.S`), and the page table of the monitor itself.

use core::arch::global_asm;

global_asm!(
    include_str!("boot.S"),
    mair = const MAIR,
    tcr = const TCR,
    sctlr = const SCTLR,
    hcr_rw = const 1u64 << 31,
    identity = sym IDENTITY,
);

/// MAIR_EL2. Attribute 0 is normal memory, write-back; attribute 1 is Device-nGnRE.
const MAIR: u64 = 0x04ff;

/// TCR_EL2: 39 bits of address, in 4 KiB granules; inner shareable and write-back walks; 40 physical bits.
const TCR: u64 = {
    const RES1: u64 = 1 << 31 | 1 << 23;
    RES1 | 0b010 << 16 | 0b11 << 12 | 0b01 << 10 | 0b01 << 8 | 25
};

/// SCTLR_EL2: the MMU and the caches are on, and stack alignment is checked.
const SCTLR: u64 = {
    const RES1: u64 = 0x30c5_0830;
    RES1 | 1 << 12 | 1 << 3 | 1 << 2 | 1
};

#[repr(C, align(4096))]
struct Table([u64; 512]);

/// The monitor's page table, which maps addresses to themselves: devices in the first GiB, memory in the next three.
static IDENTITY: Table = {
    const BLOCK: u64 = 0b01;
    const ACCESSED: u64 = 1 << 10;
    const INNER_SHAREABLE: u64 = 0b11 << 8;
    const AP_RES1: u64 = 1 << 6;
    const DEVICE: u64 = 1 << 2;
    const NO_EXECUTE: u64 = 1 << 54;
    const MEMORY: u64 = BLOCK | ACCESSED | AP_RES1 | INNER_SHAREABLE;
    let mut table = [0; 512];
    table[0] = BLOCK | ACCESSED | AP_RES1 | DEVICE | NO_EXECUTE;
    table[1] = 1 << 30 | MEMORY;
    table[2] = 2 << 30 | MEMORY;
    table[3] = 3 << 30 | MEMORY;
    Table(table)
};
