//! Tests each mode, page size, right, reserved bit and flag, against numbers from the SDM.

use std::collections::BTreeMap;
use std::vec::Vec;

use super::error_code as code;
use super::*;

const P: u64 = 1;
const W: u64 = 1 << 1;
const U: u64 = 1 << 2;
const A: u64 = 1 << 5;
const D: u64 = 1 << 6;
const PS: u64 = 1 << 7;
const NX: u64 = 1 << 63;
/// The rights that tables grant in tests that are not about rights.
const ALL: u64 = P | W | U;

/// Guest memory that contains the table entries `entries`, by address. All other memory is 0.
#[derive(Default)]
struct Memory {
    entries: BTreeMap<u64, u64>,
    reads: Vec<(u64, usize)>,
    /// `(n, address, value)`: just before compare-exchange number `n`, the entry at `address` is set to `value`, as if
    /// by another CPU.
    interference: Option<(usize, u64, u64)>,
    exchanges: usize,
    /// The address of an entry that cannot be read.
    unreachable: Option<u64>,
}

impl GuestTables for Memory {
    type Error = u64;

    fn read(&mut self, gpa: Gpa, size: usize) -> Result<u64, u64> {
        assert_eq!(gpa.0 % size as u64, 0);
        if self.unreachable == Some(gpa.0) {
            return Err(gpa.0);
        }
        self.reads.push((gpa.0, size));
        Ok(self.entries.get(&gpa.0).copied().unwrap_or(0))
    }

    fn compare_exchange(&mut self, gpa: Gpa, _: usize, old: u64, new: u64) -> Result<bool, u64> {
        if let Some((n, at, value)) = self.interference
            && n == self.exchanges
        {
            self.entries.insert(at, value);
        }
        self.exchanges += 1;
        let entry = self.entries.get_mut(&gpa.0).unwrap();
        let equal = *entry == old;
        if equal {
            *entry = new;
        }
        Ok(equal)
    }
}

fn paging(mode: Mode) -> GuestPaging {
    GuestPaging {
        cr3: 0x1000,
        mode,
        user: false,
        write_protect: true,
        no_execute: true,
        smep: false,
        smap: false,
        pkru: 0,
        pdptes: None,
        physical_bits: 46,
        reserves_table_global: false,
    }
}

const PSE: Mode = Mode::Bits32 { pse: true };
const NO_PSE: Mode = Mode::Bits32 { pse: false };

/// Returns the lowest address bit of the index at each level of a mode.
fn shifts(mode: Mode) -> &'static [u32] {
    match mode {
        Mode::Bits32 { .. } => &[12, 22],
        Mode::Pae => &[12, 21, 30],
        Mode::Level4 => &[12, 21, 30, 39],
        Mode::Level5 => &[12, 21, 30, 39, 48],
    }
}

/// An address that has a different index at each level.
const GVA: u64 = 0x00ab_4d32_c765_4321;

/// Returns `GVA`, limited to the address bits that `mode` translates.
fn gva(mode: Mode) -> u64 {
    match mode {
        Mode::Bits32 { .. } | Mode::Pae => GVA & 0xffff_ffff,
        Mode::Level4 => GVA & 0xffff_ffff_ffff,
        Mode::Level5 => GVA,
    }
}

/// Builds tables at 0x1000, 0x2000, … in which the walk for `GVA` ends at `leaf`, at `leaf_level`. Also returns the
/// addresses of the entries on the path, from the leaf up.
fn build(mode: Mode, leaf_level: usize, leaf: u64, tables: u64) -> (Memory, Vec<u64>) {
    let shifts = shifts(mode);
    let (size, bits) = match mode {
        Mode::Bits32 { .. } => (4, 10),
        _ => (8, 9),
    };
    let mut memory = Memory::default();
    let mut addresses = Vec::new();
    for (depth, level) in (leaf_level..=shifts.len()).rev().enumerate() {
        let table = (depth as u64 + 1) << 12;
        let index = gva(mode) >> shifts[level - 1] & ((1 << bits) - 1);
        let pointer = mode == Mode::Pae && level == 3;
        let entry = match level == leaf_level {
            true => leaf,
            // Page-directory-pointer entries of PAE have no rights.
            false if pointer => (table + 0x1000) | P,
            false => (table + 0x1000) | tables,
        };
        memory.entries.insert(table + index * size, entry);
        addresses.insert(0, table + index * size);
    }
    (memory, addresses)
}

fn page(gpa: u64, bits: u32) -> GuestPage {
    GuestPage {
        bits,
        gpa: Gpa(gpa),
        read: true,
        write: true,
        execute: true,
        global: false,
    }
}

fn fault<T>(code: u32) -> Result<T, WalkError<u64>> {
    Err(WalkError::PageFault { code })
}

const MODES: [(Mode, usize); 8] = [
    (NO_PSE, 1),
    (PSE, 1),
    (PSE, 2),
    (Mode::Pae, 1),
    (Mode::Pae, 2),
    (Mode::Level4, 1),
    (Mode::Level4, 3),
    (Mode::Level5, 2),
];

#[test]
fn every_mode_and_size_maps_the_right_page() {
    let more = [(Mode::Level4, 2), (Mode::Level5, 1), (Mode::Level5, 3)];
    for (mode, level) in MODES.into_iter().chain(more) {
        let offset = (1u64 << shifts(mode)[level - 1]) - 1;
        let frame = 0xc000_0000 & !offset;
        let size_bit = if level > 1 { PS } else { 0 };
        let (mut memory, _) = build(mode, level, frame | ALL | size_bit, ALL);
        let expected = page(
            (frame | gva(mode) & offset) & !0xfff,
            shifts(mode)[level - 1],
        );
        let result = walk(&mut memory, &paging(mode), gva(mode), Access::Write);
        assert_eq!(result, Ok(expected), "{mode:?} level {level}");
        assert_eq!(memory.reads.len(), shifts(mode).len() - level + 1);
    }
}

#[test]
fn without_pse_the_size_bit_of_a_directory_entry_is_ignored() {
    let (mut memory, at) = build(NO_PSE, 1, 0x5000 | ALL, ALL);
    *memory.entries.get_mut(&at[1]).unwrap() |= PS;
    let result = walk(&mut memory, &paging(NO_PSE), gva(NO_PSE), Access::Read);
    assert_eq!(result.unwrap().gpa, Gpa(0x5000));
}

#[test]
fn a_4_mib_page_may_be_above_4_gib() {
    // Bits 20:13 of the leaf are bits 39:32 of the page's address.
    let leaf = 0x0040_0000 | 0x12 << 13 | PS | ALL;
    let (mut memory, _) = build(PSE, 2, leaf, ALL);
    let result = walk(&mut memory, &paging(PSE), gva(PSE), Access::Read);
    assert_eq!(
        result.unwrap().gpa,
        Gpa(0x12_0040_0000 | gva(PSE) & 0x3f_f000)
    );
}

#[test]
fn low_bits_of_cr3_that_are_no_address_bits_are_ignored() {
    for (mode, level) in MODES {
        let size_bit = if level > 1 { PS } else { 0 };
        let (mut memory, _) = build(mode, level, ALL | size_bit, ALL);
        let mut paging = paging(mode);
        // The low bits of CR3 are ignored: 5 bits with PAE, whose pointer table is aligned to 32 bytes, otherwise 12
        // bits.
        paging.cr3 |= if mode == Mode::Pae { 0x1f } else { 0xfff };
        assert!(walk(&mut memory, &paging, gva(mode), Access::Read).is_ok());
    }
}

#[test]
fn an_entry_that_is_not_present_faults_with_the_code_of_the_access() {
    for (mode, level) in MODES {
        for missing in 0..=shifts(mode).len() - level {
            for user in [false, true] {
                let (mut memory, at) = build(mode, level, ALL | PS, ALL);
                memory.entries.insert(at[missing], !P & !NX);
                let paging = GuestPaging {
                    user,
                    ..paging(mode)
                };
                let who = if user { code::USER } else { 0 };
                let nx = shifts(mode).len() > 2;
                let fetch = if nx { code::FETCH } else { 0 };
                for (access, what) in [
                    (Access::Read, 0),
                    (Access::Write, code::WRITE),
                    (Access::Execute, fetch),
                ] {
                    let result = walk(&mut memory, &paging, gva(mode), access);
                    assert_eq!(result, fault(who | what), "{mode:?} {access:?}");
                }
                // A walk that faults sets no flags.
                assert_eq!(memory.exchanges, 0);
            }
        }
    }
}

#[test]
fn the_fetch_bit_of_the_code_needs_nx_or_smep() {
    let fetch = |mode, no_execute, smep| {
        let paging = GuestPaging {
            no_execute,
            smep,
            ..paging(mode)
        };
        walk(&mut Memory::default(), &paging, 0, Access::Execute)
    };
    for (mode, nx) in [(NO_PSE, false), (Mode::Pae, true), (Mode::Level4, true)] {
        assert_eq!(fetch(mode, false, false), fault(0));
        assert_eq!(
            fetch(mode, true, false),
            fault(if nx { code::FETCH } else { 0 })
        );
        assert_eq!(fetch(mode, false, true), fault(code::FETCH));
    }
}

#[test]
fn every_level_must_grant_a_right() {
    for (mode, level) in MODES {
        let size_bit = if level > 1 { PS } else { 0 };
        for restricted in 0..=shifts(mode).len() - level {
            if mode == Mode::Pae && restricted + level == 3 {
                continue;
            }
            let with = |clear: u64, set: u64| {
                let (mut memory, at) = build(mode, level, ALL | size_bit, ALL);
                let entry = memory.entries.get_mut(&at[restricted]).unwrap();
                *entry = *entry & !clear | set;
                memory
            };
            let user = GuestPaging {
                user: true,
                ..paging(mode)
            };
            let result = |memory: &mut Memory, access| walk(memory, &user, gva(mode), access);
            let denied = code::PRESENT | code::USER;
            assert_eq!(result(&mut with(U, 0), Access::Read), fault(denied));
            let read_only = &mut with(W, 0);
            assert_eq!(
                result(read_only, Access::Write),
                fault(denied | code::WRITE)
            );
            let page = result(read_only, Access::Read).unwrap();
            assert!(page.read && !page.write && page.execute);
            if shifts(mode).len() > 2 {
                let no_execute = &mut with(0, NX);
                let refused = result(no_execute, Access::Execute);
                assert_eq!(refused, fault(denied | code::FETCH));
                assert!(!result(no_execute, Access::Write).unwrap().execute);
            }
        }
    }
}

#[test]
fn supervisor_rights_follow_wp_smep_and_smap() {
    let ask = |leaf: u64, wp, smep, smap, access| {
        let (mut memory, _) = build(Mode::Level4, 1, 0x5000 | leaf, ALL);
        let paging = GuestPaging {
            write_protect: wp,
            smep,
            smap,
            ..paging(Mode::Level4)
        };
        walk(&mut memory, &paging, gva(Mode::Level4), access)
    };
    let write = code::PRESENT | code::WRITE;
    // WP: whether a supervisor's writes to read-only pages fault.
    assert_eq!(ask(P, true, false, false, Access::Write), fault(write));
    assert!(ask(P, false, false, false, Access::Write).unwrap().write);
    assert!(!ask(P, true, false, false, Access::Read).unwrap().write);
    // SMEP: forbids fetches from user pages, but no data accesses.
    let fetch = ask(P | U, true, true, false, Access::Execute);
    assert_eq!(fetch, fault(code::PRESENT | code::FETCH));
    assert!(ask(P | U, true, true, false, Access::Read).is_ok());
    assert!(ask(P, true, true, false, Access::Execute).is_ok());
    assert!(ask(P | U, true, false, false, Access::Execute).is_ok());
    // SMAP: forbids data accesses to user pages, but no fetches.
    assert_eq!(
        ask(P | U, true, false, true, Access::Read),
        fault(code::PRESENT)
    );
    assert_eq!(
        ask(P | U | W, true, false, true, Access::Write),
        fault(write)
    );
    assert!(ask(P | U, true, false, true, Access::Execute).is_ok());
    assert!(ask(P | W, true, false, true, Access::Write).is_ok());
}

#[test]
fn reserved_bits_fault_at_every_level_before_rights_are_checked() {
    // Each case: the mode, the leaf's level, which entry to test (0 is the leaf, 1 the entry above it, …), and its
    // reserved bits by SDM 3A, if physical addresses have 46 bits.
    let above: u64 = 0x3f << 46;
    let pae_high = above | 0x7ff << 52;
    let cases = [
        (PSE, 2, 0, 1 << 21),
        (Mode::Pae, 1, 0, pae_high),
        (Mode::Pae, 1, 1, pae_high),
        (Mode::Pae, 2, 0, pae_high | 0xff << 13),
        (Mode::Pae, 1, 2, pae_high | NX | 0x1e6),
        (Mode::Level4, 1, 0, above),
        (Mode::Level4, 2, 0, above | 0xff << 13),
        (Mode::Level4, 3, 0, above | 0x1_ffff << 13),
        (Mode::Level4, 1, 3, above | PS),
        (Mode::Level5, 1, 4, above | PS),
        (Mode::Level5, 1, 3, above | PS),
    ];
    for (mode, level, entry, reserved) in cases {
        let size_bit = if level > 1 { PS } else { 0 };
        for bit in (0..64).map(|i| 1u64 << i).filter(|bit| reserved & bit != 0) {
            // The page is a supervisor's, and the access a user's. Nevertheless the fault must report the reserved bit.
            let (mut memory, at) = build(mode, level, P | size_bit, ALL);
            *memory.entries.get_mut(&at[entry]).unwrap() |= bit;
            let paging = GuestPaging {
                user: true,
                ..paging(mode)
            };
            let result = walk(&mut memory, &paging, gva(mode), Access::Write);
            let code = code::PRESENT | code::RESERVED | code::USER | code::WRITE;
            assert_eq!(result, fault(code), "{mode:?} entry {entry} bit {bit:#x}");
        }
    }
    // These bits are not reserved: bits that the CPU ignores, and PAT in the entry of a large page.
    for (level, ignored) in [(1, 0x7ff << 52 | 0xe00 | PS), (2, 0x7ff << 52 | 1 << 12)] {
        let size_bit = if level > 1 { PS } else { 0 };
        let (mut memory, _) = build(Mode::Level4, level, ALL | size_bit | ignored, ALL);
        let result = walk(
            &mut memory,
            &paging(Mode::Level4),
            gva(Mode::Level4),
            Access::Read,
        );
        assert!(result.is_ok(), "level {level}: {result:?}");
    }
}

#[test]
fn amd_reserves_bit_8_of_entries_above_level_2_that_refer_to_tables() {
    for (mode, level, entry, faults) in [
        (Mode::Level4, 1, 0, false),
        (Mode::Level4, 1, 1, false),
        (Mode::Level4, 1, 2, true),
        (Mode::Level4, 1, 3, true),
        (Mode::Level4, 3, 0, false),
        (Mode::Level5, 1, 4, true),
    ] {
        for reserves_table_global in [false, true] {
            let size_bit = if level > 1 { PS } else { 0 };
            let (mut memory, at) = build(mode, level, ALL | size_bit, ALL);
            *memory.entries.get_mut(&at[entry]).unwrap() |= 1 << 8;
            let paging = GuestPaging {
                reserves_table_global,
                ..paging(mode)
            };
            let result = walk(&mut memory, &paging, gva(mode), Access::Read);
            match faults && reserves_table_global {
                true => assert_eq!(result, fault(code::PRESENT | code::RESERVED)),
                false => assert!(result.is_ok(), "{mode:?} entry {entry}: {result:?}"),
            }
        }
    }
}

#[test]
fn nx_is_a_reserved_bit_where_it_is_not_enabled() {
    let (mut memory, _) = build(Mode::Level4, 1, ALL | NX, ALL);
    let off = GuestPaging {
        no_execute: false,
        ..paging(Mode::Level4)
    };
    let result = walk(&mut memory, &off, gva(Mode::Level4), Access::Read);
    assert_eq!(result, fault(code::PRESENT | code::RESERVED));
}

#[test]
fn a_narrow_machine_reserves_the_upper_bits_of_a_4_mib_page() {
    for (width, reserved) in [
        (32, 0x1ff << 13),
        (36, 0x1f << 17),
        (40, 1 << 21),
        (52, 1 << 21),
    ] {
        for bit in 13..22 {
            let (mut memory, _) = build(PSE, 2, ALL | PS | 1 << bit, ALL);
            let paging = GuestPaging {
                physical_bits: width,
                ..paging(PSE)
            };
            let result = walk(&mut memory, &paging, gva(PSE), Access::Read);
            assert_eq!(
                result.is_err(),
                reserved >> bit & 1 != 0,
                "{width} bits, bit {bit}"
            );
        }
    }
}

#[test]
fn accessed_is_set_on_the_path_and_dirty_on_the_leaf_of_a_write() {
    for (mode, level) in MODES {
        let size_bit = if level > 1 { PS } else { 0 };
        let (mut memory, at) = build(mode, level, ALL | size_bit, ALL);
        let before = memory.entries.clone();
        let read = walk(&mut memory, &paging(mode), gva(mode), Access::Read).unwrap();
        assert!(
            !read.write,
            "a clean page must be walked again before it is written"
        );
        let marks = |memory: &Memory| -> Vec<u64> {
            at.iter()
                .map(|at| memory.entries[at] ^ before[at])
                .collect()
        };
        let pointer = |i: usize| mode == Mode::Pae && i + level == 3;
        let expected = |leaf: u64| -> Vec<u64> {
            let mark = |i| match i {
                0 => leaf,
                i if pointer(i) => 0,
                _ => A,
            };
            (0..at.len()).map(mark).collect()
        };
        assert_eq!(marks(&memory), expected(A), "{mode:?} level {level}");
        assert!(
            walk(&mut memory, &paging(mode), gva(mode), Access::Write)
                .unwrap()
                .write
        );
        assert_eq!(marks(&memory), expected(A | D));
        // All flags are set now, so the next walk writes no entry.
        let exchanges = memory.exchanges;
        assert!(
            walk(&mut memory, &paging(mode), gva(mode), Access::Read)
                .unwrap()
                .write
        );
        assert_eq!(memory.exchanges, exchanges);
    }
}

#[test]
fn the_walk_starts_again_if_an_entry_changes_before_its_flags_are_set() {
    for n in 0..4 {
        let (mut memory, at) = build(Mode::Level4, 1, 0x5000 | ALL, ALL);
        // Before the walk sets the flags of entry `n` of the path, another CPU changes the leaf so that it maps another
        // page.
        memory.interference = Some((n, at[0], 0x7000 | ALL));
        let result = walk(
            &mut memory,
            &paging(Mode::Level4),
            gva(Mode::Level4),
            Access::Write,
        );
        assert_eq!(result.unwrap().gpa, Gpa(0x7000), "interference at {n}");
        assert_eq!(memory.entries[&at[0]], 0x7000 | ALL | A | D);
        // Before the walk sets the flags of an entry, another CPU clears an entry that refers to a table.
        let (mut memory, at) = build(Mode::Level4, 1, 0x5000 | ALL, ALL);
        memory.interference = Some((n.min(2), at[1], 0));
        let result = walk(
            &mut memory,
            &paging(Mode::Level4),
            gva(Mode::Level4),
            Access::Write,
        );
        assert_eq!(result, fault(code::WRITE));
    }
}

#[test]
fn the_walk_ends_with_the_error_of_tables_that_cannot_be_read() {
    let (mut memory, at) = build(Mode::Level4, 1, ALL, ALL);
    memory.unreachable = Some(at[1]);
    let result = walk(
        &mut memory,
        &paging(Mode::Level4),
        gva(Mode::Level4),
        Access::Read,
    );
    assert_eq!(result, Err(WalkError::Memory(at[1])));
}

#[test]
fn a_protection_key_forbids_data_accesses_to_user_pages() {
    let key = 5u64;
    let (no_access, no_write) = (1u32 << (2 * key), 2u32 << (2 * key));
    let ask = |leaf: u64, pkru, user, wp, access| {
        let (mut memory, _) = build(Mode::Level4, 1, 0x5000 | leaf | key << 59, ALL);
        let paging = GuestPaging {
            user,
            write_protect: wp,
            pkru,
            ..paging(Mode::Level4)
        };
        walk(&mut memory, &paging, gva(Mode::Level4), access)
    };
    let key_code = code::PRESENT | code::PROTECTION_KEY;
    let by_user = key_code | code::USER;
    // The bit "access disabled" forbids reads and writes, but not fetches. It applies to a supervisor, too, whether
    // CR0.WP is set or clear.
    assert_eq!(
        ask(ALL, no_access, true, true, Access::Read),
        fault(by_user)
    );
    assert_eq!(
        ask(ALL, no_access, true, true, Access::Write),
        fault(by_user | code::WRITE)
    );
    assert!(ask(ALL, no_access, true, true, Access::Execute).is_ok());
    assert_eq!(
        ask(ALL, no_access, false, false, Access::Read),
        fault(key_code)
    );
    // The bit "write disabled" forbids a user's writes, and a supervisor's if CR0.WP is set. A walk for a read must
    // return a page that is not writable.
    assert!(
        !ask(ALL | D, no_write, true, true, Access::Read)
            .unwrap()
            .write
    );
    assert_eq!(
        ask(ALL, no_write, true, true, Access::Write),
        fault(by_user | code::WRITE)
    );
    assert_eq!(
        ask(ALL, no_write, false, true, Access::Write),
        fault(key_code | code::WRITE)
    );
    assert!(
        ask(ALL, no_write, false, false, Access::Write)
            .unwrap()
            .write
    );
    // Key 0 is disabled: this affects neither supervisor pages nor pages with other keys. Here all keys but 0 are
    // disabled in the second check.
    assert!(ask(P | W, no_access, false, true, Access::Write).is_ok());
    assert!(ask(ALL, !(no_access | no_write), true, true, Access::Write).is_ok());
    // The error code's protection-key bit is set even if another right is missing as well. It is clear if the page is
    // not present.
    assert_eq!(
        ask(P | U, no_access, true, true, Access::Write),
        fault(by_user | code::WRITE)
    );
    assert_eq!(
        ask(0, no_access, true, true, Access::Read),
        fault(code::USER)
    );
}

#[test]
fn pointer_entries_in_registers_are_not_read_from_memory() {
    let (mut memory, at) = build(Mode::Pae, 1, 0x5000 | ALL, ALL);
    let index = (gva(Mode::Pae) >> 30) as usize;
    let mut pdptes = [0; 4];
    pdptes[index] = memory.entries.remove(&at[2]).unwrap();
    let loaded = GuestPaging {
        pdptes: Some(pdptes),
        ..paging(Mode::Pae)
    };
    let result = walk(&mut memory, &loaded, gva(Mode::Pae), Access::Read);
    assert_eq!(result.unwrap().gpa, Gpa(0x5000));
    assert_eq!(memory.reads.len(), 2);
    let none = GuestPaging {
        pdptes: Some([0; 4]),
        ..loaded
    };
    assert_eq!(
        walk(&mut memory, &none, gva(Mode::Pae), Access::Read),
        fault(0)
    );
}
