//! Cases that follow the sections of DDI 0487. Most are cases in which QEMU differs from the manual, or that random
//! tables do not reach.

use crate::guest::*;
use crate::machine::*;
use slat_a64::{Invalidation, Leave, Right};

/// The status of an alignment fault.
const ALIGNMENT: u64 = 0x21;

/// B2.5.2: accesses to Device memory are aligned to their elements.
#[test]
fn accesses_to_devices_are_aligned() {
    let mut guest = Guest::new();
    guest.map(1, 0x5000 | PAGE | DEVICE);
    guest.map(2, 0x6000 | PAGE);
    guest.map(3, 0x7000 | PAGE | UNCACHED);
    let cases = [
        (LDR, 4, 8, false),
        (STR, 4, 8, true),
        (LDR_Q, 8, 16, false),
        (LDP, 4, 8, false),
        (STP, 4, 8, true),
        (LD1_4S, 2, 4, false),
    ];
    for (word, offset, aligned, is_write) in cases {
        let write = if is_write { WNR } else { 0 };
        assert_eq!(
            guest.fails(word, [0, 0x1000 + offset]),
            [data_abort(ALIGNMENT | write), 0x1000 + offset],
            "{word:08x}"
        );
        guest.succeeds(word, [0, 0x1000 + aligned]);
        guest.succeeds(word, [0, 0x2000 + offset]);
        guest.succeeds(word, [0, 0x3000 + offset]);
    }
    // DC ZVA, whose faults have the operand as their address.
    assert_eq!(
        guest.fails(ZVA, [0, 0x1234]),
        [data_abort(ALIGNMENT | WNR), 0x1234]
    );
    guest.succeeds(ZVA, [0, 0x2234]);
    // Also an access that begins in Normal memory.
    assert_eq!(guest.fails(LDR, [0, 0x0ffc])[0], data_abort(7));
    guest.map(0, 0x4000 | PAGE);
    assert_eq!(
        guest.fails(LDR, [0, 0x0ffc]),
        [data_abort(ALIGNMENT), 0x0ffc]
    );
}

/// D8.2.9: without translation, data are of Device memory, and addresses have 48 bits.
#[test]
fn without_translation_data_are_devices() {
    let mut guest = Guest::new();
    guest.code = CODE;
    guest.cpu.set_system(SCTLR, SPAN);
    guest.succeeds(LDR, [0, 0x1000]);
    assert_eq!(
        guest.fails(LDR, [0, 0x1004]),
        [data_abort(ALIGNMENT), 0x1004]
    );
    assert_eq!(guest.fails(LDR, [0, 1 << 48]), [data_abort(0), 1 << 48]);
    // AT S1E1R: Device-nGnRnE, Outer Shareable.
    guest.succeeds(0xd508_7801, [0, 0x1234]);
    assert_eq!(
        guest.cpu.state.system(PAR),
        Some(1 << 11 | 1 << 9 | 2 << 7 | 0x1000)
    );
    guest.succeeds(0xd508_7801, [0, 1 << 50]);
    assert_eq!(guest.cpu.state.system(PAR), Some(1 << 11 | 1));
    // TBI holds, too.
    guest.cpu.set_system(TCR, TCR_USED | TBI0);
    guest.succeeds(LDR, [0, 0x12 << 56 | 0x1000]);
}

/// D1.3.11: SCTLR_EL1.A, SA and SA0.
#[test]
fn alignment_is_checked_where_sctlr_says_so() {
    let mut guest = Guest::new();
    guest.map(0, 0x4000 | PAGE | EL0);
    guest.map(1, 0x5000 | PAGE | EL0);
    for (word, offset) in [(LDR, 4), (LDR_Q, 8), (LDP, 4), (STR, 1), (LD1_4S, 2)] {
        guest.cpu.set_system(SCTLR, M | SPAN);
        guest.succeeds(word, [0, 0x1000 + offset]);
        guest.cpu.set_system(SCTLR, M | SPAN | A);
        let write = if word == STR { WNR } else { 0 };
        let address = 0x1000 + offset;
        assert_eq!(
            guest.fails(word, [0, address]),
            [data_abort(ALIGNMENT | write), address]
        );
    }
    // LDP of doublewords, and LD1 of words.
    guest.succeeds(LDP, [0, 0x1008]);
    guest.succeeds(LD1_4S, [0, 0x1004]);
    // LDR X0, [SP]; STR X0, [SP, #-16]!; LDXR X0, [SP]; LD1 {V0.4S}, [SP].
    for word in [0xf940_03e0, 0xf81f_0fe0, 0xc85f_7fe0, 0x4c40_7be0] {
        for (check, el1) in [(1 << 3, true), (1 << 4, false)] {
            for sctlr in [0, 1 << 3, 1 << 4] {
                guest.cpu.set_system(SCTLR, M | SPAN | sctlr);
                guest.execute_at(el1, &[0xd503_201f], [0, 0]);
                guest.cpu.state.sp = 0x1008;
                let sp = guest.cpu.state.sp;
                guest.execute_at(el1, &[word], [0, 0]);
                let class = guest.syndrome()[0] >> 26;
                assert_eq!(
                    class,
                    if sctlr == check { 0x26 } else { 0 },
                    "{word:08x} {sctlr:x} {el1}"
                );
                if class != 0 && el1 {
                    assert_eq!(guest.cpu.state.sp, sp);
                }
            }
        }
    }
}

#[test]
fn an_access_to_two_pages_has_both_or_nothing() {
    let mut guest = Guest::new();
    guest.map(1, 0x5000 | PAGE);
    guest.map(2, 0x9000 | PAGE | READ_ONLY);
    guest.ram.set(0x5ff8, 0x1122_3344_5566_7788);
    guest.ram.set(0x9000, 0x99aa_bbcc_ddee_ff00);
    assert_eq!(guest.succeeds(LDR, [0, 0x1ffc]), 0xddee_ff00_1122_3344);
    let before = guest.ram.written.clone();
    for word in [STR, STP] {
        assert_eq!(
            guest.fails(word, [7, 0x1ffc]),
            [data_abort(0xf | WNR), 0x2000]
        );
        let ignored = [CODE];
        let same =
            |(at, value): (&u64, &u64)| ignored.contains(at) || before.get(at) == Some(value);
        assert!(guest.ram.written.iter().all(same), "{word:08x}");
    }
    guest.map(2, 0x9000 | PAGE);
    guest.execute(&[0xd508_871f], [0, 0]);
    guest.succeeds(STR, [0x0102_0304_0506_0708, 0x1ffc]);
    assert_eq!(
        (guest.ram.word(0x5ff8), guest.ram.word(0x9000)),
        (0x0506_0708_5566_7788, 0x99aa_bbcc_0102_0304)
    );
}

/// D8.5.2: the access flag, and dirty state.
#[test]
fn hardware_sets_the_flags() {
    let mut guest = Guest::new();
    let old = 0x5000 | 3 | READ_ONLY | DBM;
    guest.map(1, old);
    let entry = |guest: &Guest| guest.ram.word(LEVEL_3 + 8);
    assert_eq!(guest.fails(LDR, [0, 0x1000])[0], data_abort(0xb));
    guest.cpu.set_system(TCR, TCR_USED | HA);
    guest.succeeds(LDR, [0, 0x1000]);
    assert_eq!(entry(&guest), old | 1 << 10);
    assert_eq!(guest.fails(STR, [0, 0x1000])[0], data_abort(0xf | WNR));
    // HD alone does nothing.
    guest.cpu.set_system(TCR, TCR_USED | HD);
    assert_eq!(guest.fails(STR, [0, 0x1000])[0], data_abort(0xf | WNR));
    guest.cpu.set_system(TCR, TCR_USED | HA | HD);
    // AT, cache maintenance, and loads leave the page clean; the load enters it into the TLB.
    for word in [0xd508_7821, 0xd508_7621, LDR] {
        guest.succeeds(word, [0, 0x1000]);
        assert_eq!(entry(&guest), old | 1 << 10, "{word:08x}");
    }
    guest.succeeds(STR, [0, 0x1000]);
    assert_eq!(entry(&guest), (old | 1 << 10) & !READ_ONLY);
    // The table must be writable for that: a stage 2 fault on the walk, which asks for a write.
    guest.map(1, old);
    guest.cpu.forget_pages();
    guest.ram.asked.clear();
    guest.succeeds(LDR, [0, 0x1000]);
    assert!(guest.ram.asked.contains(&(Right::Write, LEVEL_3 + 8)));
}

/// Executes a TLBI with an operand between two loads of a page whose descriptor changes. Returns whether the second
/// load uses the changed descriptor.
fn is_dropped(guest: &mut Guest, page: u64, [old, new]: [u64; 2], tlbi: u32, operand: u64) -> bool {
    guest.map(page, old);
    guest.execute(&[0xd508_871f], [0, 0]);
    assert_eq!(guest.succeeds(LDR, [0, page << 12]), 5);
    guest.map(page, new);
    assert_eq!(guest.succeeds(LDR, [0, page << 12]), 5, "no TLBI");
    // TLBI's register is X1.
    guest.execute(&[tlbi | 1], [0, operand]);
    guest.succeeds(LDR, [0, page << 12]) == 6
}

/// D8.14: TLBI of all kinds, local and shared.
#[test]
fn tlbi_drops_what_its_operand_says() {
    let mut guest = Guest::new();
    guest.ram.set(0x5000, 5);
    guest.ram.set(0x6000, 6);
    let asid = |asid: u64| asid << 48;
    for (shared, crm) in [(false, 7), (true, 3)] {
        let tlbi = |op2: u32| 0xd508_8000 | crm << 8 | op2 << 5;
        for (is_global, bits) in [(false, NOT_GLOBAL), (true, 0)] {
            let pages = [0x5000 | PAGE | bits, 0x6000 | PAGE | bits];
            let mut drops = |op2, operand| is_dropped(&mut guest, 3, pages, tlbi(op2), operand);
            assert!(drops(0, 0), "VMALLE1");
            for op2 in [1, 5] {
                assert!(drops(op2, asid(5) | 3), "VAE1, VALE1");
                assert!(!drops(op2, asid(5) | 4), "another page");
                assert_eq!(drops(op2, asid(6) | 3), is_global, "another ASID");
                assert_eq!(
                    drops(op2, asid(0x105) | 3),
                    is_global,
                    "another ASID of 16 bits"
                );
            }
            for op2 in [3, 7] {
                assert!(drops(op2, asid(6) | 3), "VAAE1, VAALE1");
                assert!(!drops(op2, asid(5) | 2));
            }
            assert_eq!(drops(2, asid(5)), !is_global, "ASIDE1");
            assert!(!drops(2, asid(6)), "ASIDE1 of another");
        }
        let leave = guest.execute(&[tlbi(1) | 1], [0, asid(9) | 3]);
        let page = Invalidation::Page {
            address: 0x3000,
            space: Some(9),
        };
        assert_eq!(
            leave,
            if shared {
                Leave::Invalidated(page)
            } else {
                Leave::Limit
            }
        );
    }
    // Any address of a block drops all of the block.
    guest.ram.set(LEVEL_2 + 8, 0x20_0000 | BLOCK);
    guest.ram.set(0x20_3000, 5);
    guest.ram.set(0x40_3000, 6);
    assert_eq!(guest.succeeds(LDR, [0, 0x20_3000]), 5);
    guest.ram.set(LEVEL_2 + 8, 0x40_0000 | BLOCK);
    assert_eq!(guest.succeeds(LDR, [0, 0x20_3000]), 5);
    guest.execute(&[0xd508_8721], [0, 5 << 48 | 0x3ff]);
    assert_eq!(guest.succeeds(LDR, [0, 0x20_3000]), 6);
    // The upper half: bit 55 of the address is copied.
    let leave = guest.execute(&[0xd508_8321], [0, 1 << 43]);
    let page = Invalidation::Page {
        address: !0 << 55,
        space: Some(0),
    };
    assert_eq!(leave, Leave::Invalidated(page));
}

/// D8.13: a change of the ASID keeps global translations alone.
#[test]
fn another_asid_has_other_translations() {
    let mut guest = Guest::new();
    guest.ram.set(0x5000, 5);
    guest.ram.set(0x6000, 6);
    // MSR TTBR0_EL1, X0.
    let switch =
        |guest: &mut Guest, asid: u64| guest.execute(&[0xd518_2000], [LEVEL_1 | asid << 48, 0]);
    guest.map(1, 0x5000 | PAGE | NOT_GLOBAL);
    guest.map(2, 0x5000 | PAGE);
    guest.execute(&[0xd508_871f], [0, 0]);
    for page in [1, 2] {
        assert_eq!(guest.succeeds(LDR, [0, page << 12]), 5);
        guest.map(page, 0x6000 | PAGE);
    }
    switch(&mut guest, 5);
    assert_eq!(guest.succeeds(LDR, [0, 0x1000]), 5, "the same ASID");
    switch(&mut guest, 0x105);
    assert_eq!(guest.succeeds(LDR, [0, 0x1000]), 6);
    assert_eq!(guest.succeeds(LDR, [0, 0x2000]), 5, "global");
}

/// B2.4.4: overwritten code needs IC IVAU, or IC IALLU.
#[test]
fn code_is_executed_as_it_was_until_it_is_invalidated() {
    let mut guest = Guest::new();
    // MOVZ X0, #1 and #2.
    let [old, new] = [0xd280_0020, 0xd280_0040];
    let at = CODE + 0x100;
    // IC IVAU, X1; IC IALLU.
    for invalidate in [0xd50b_7521, 0xd508_751f] {
        set_code(&mut guest.cpu, &mut guest.ram, at, &[old]);
        let run = |guest: &mut Guest| {
            guest.cpu.state.pc = guest.code + 0x100;
            assert_eq!(guest.cpu.run(&mut guest.ram, 1), Leave::Limit);
            guest.cpu.state.x[0]
        };
        // Compiled code is read when it is compiled, which may be the second time.
        assert_eq!([run(&mut guest), run(&mut guest)], [1, 1]);
        guest.ram.put_code(at, &[new]);
        assert_eq!(run(&mut guest), 1);
        let address = guest.code + 0x108;
        guest.execute(&[invalidate], [0, address]);
        assert_eq!(run(&mut guest), 2);
    }
    // IC IVAU is for all processors; at an address that is not mapped, it takes a fault of cache maintenance.
    let address = guest.code + 0x108;
    let leave = guest.execute(&[0xd50b_7521], [0, address]);
    assert!(matches!(
        leave,
        Leave::Invalidated(Invalidation::CodeLine(_))
    ));
    assert_eq!(
        guest.fails(0xd50b_7521, [0, 0x1234])[0],
        data_abort(1 << 8 | WNR | 7)
    );
}

/// D8.2.1: with TBI, a branch drops the tag (BranchAddr).
#[test]
fn branches_drop_tags() {
    let mut guest = Guest::new();
    let target = 0x34 << 56 | 0x1234_5678;
    // BR X1.
    guest.execute(&[0xd61f_0020], [0, target]);
    assert_eq!(guest.cpu.state.pc, target);
    guest.cpu.set_system(TCR, TCR_USED | TBI0);
    guest.execute(&[0xd61f_0020], [0, target]);
    assert_eq!(guest.cpu.state.pc, 0x1234_5678);
    // An upper address has no tag, because TBI1 is clear.
    guest.execute(&[0xd61f_0020], [0, 0x12ff << 48]);
    assert_eq!(guest.cpu.state.pc, 0x12ff << 48);
}

#[test]
fn memory_that_goes_away_is_asked_for_again() {
    let mut guest = Guest::new();
    guest.map(1, 0x5000 | PAGE);
    guest.succeeds(LDR, [0, 0x1000]);
    guest.ram.asked.clear();
    guest.succeeds(LDR, [0, 0x1000]);
    assert!(
        !guest.ram.asked.contains(&(Right::Read, 0x5000)),
        "the TLB has the page"
    );
    guest.ram.holes.push(5);
    guest.cpu.forget_pages();
    let Leave::Stage2 { fault, .. } = guest.execute(&[LDR], [0, 0x1008]) else {
        panic!("a hole is accessed");
    };
    assert_eq!(
        (fault.ipa, fault.is_walk, fault.right),
        (0x5008, false, Right::Read)
    );
}

/// D2.10: watchpoints report the first watched byte, and permit accesses to bytes that they do not watch.
#[test]
fn watchpoints_match_bytes_and_ranges() {
    let mut guest = Guest::new();
    guest.map(1, 0x5000 | PAGE);
    let name = |n, op2| slat_a64::SystemName::new(2, 0, 0, n, op2);
    // MSR OSLAR_EL1, XZR.
    guest.execute(&[0xd510_109f], [0, 0]);
    // MDE, KDE.
    guest.cpu.set_system(name(2, 2), 1 << 15 | 1 << 13);
    let run = |guest: &mut Guest, word: u32, address: u64| {
        set_code(&mut guest.cpu, &mut guest.ram, CODE, &[word]);
        let pstate = slat_a64::Pstate {
            el1: true,
            own_stack: true,
            ..Default::default()
        };
        guest.cpu.state.set_pstate(pstate);
        (guest.cpu.state.pc, guest.cpu.state.x[1]) = (guest.code, address);
        guest.cpu.set_system(ESR, 0);
        guest.cpu.run(&mut guest.ram, 1);
        guest.syndrome()
    };
    let watch = |is_write: u64| 0x35 << 26 | 1 << 25 | is_write << 6 | 0x22;
    // Bytes 5 and 6 of a doubleword, for stores.
    guest.cpu.set_system(name(1, 6), 0x1010);
    guest
        .cpu
        .set_system(name(1, 7), 1 | 1 << 1 | 2 << 3 | 0x60 << 5);
    assert_eq!(run(&mut guest, STR, 0x1010), [watch(1), 0x1015]);
    assert_eq!(run(&mut guest, STR, 0x100e), [watch(1), 0x1015]);
    assert_eq!(run(&mut guest, STP, 0x1008), [watch(1), 0x1015]);
    for (word, address) in [
        (STR, 0x100d),
        (STR, 0x1017),
        (LDR, 0x1010),
        (STP, 0x0ff8 + 0x10 - 0x8),
    ] {
        assert_eq!(
            run(&mut guest, word, address)[0],
            0,
            "{word:08x} {address:x}"
        );
    }
    assert_eq!(
        guest.ram.word(0x5010) >> 40 & 0xffff,
        0,
        "a store that was watched"
    );
    // A range, for loads.
    guest.cpu.set_system(name(1, 6), 0x1080);
    guest
        .cpu
        .set_system(name(1, 7), 1 | 1 << 1 | 1 << 3 | 0xff << 5 | 6 << 24);
    assert_eq!(run(&mut guest, LDR, 0x10bf), [watch(0), 0x10bf]);
    assert_eq!(run(&mut guest, LDR, 0x107c), [watch(0), 0x1080]);
    assert_eq!(run(&mut guest, LDR, 0x10c0)[0], 0);
    // LDADD reads and writes.
    assert_eq!(run(&mut guest, 0xf820_0020, 0x1080), [watch(0), 0x1080]);
}
