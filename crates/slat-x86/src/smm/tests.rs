use super::*;
use crate::{CodePages, Events, Features};

/// Pseudo-random numbers: xorshift64*.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    fn segment(&mut self, wide: bool) -> Segment {
        let rights = self.next() as u32 & 0xf0ff;
        Segment {
            selector: self.next() as u16,
            base: if wide { self.next() } else { self.next() >> 32 },
            limit: self.next() as u32,
            // SMRAM stores an unusable segment as one that is not present, so it is loaded as unusable.
            rights: loaded_rights(rights),
        }
    }

    fn table(&mut self, wide: bool) -> Table {
        Table {
            base: if wide { self.next() } else { self.next() >> 32 },
            limit: self.next() as u16,
        }
    }

    /// Returns a random valid state outside SMM, in real mode or in one of the paging modes.
    fn state(&mut self, map: SmramMap) -> State {
        let wide = map == SmramMap::Bits64;
        let mut word = || if wide { self.next() } else { self.next() >> 32 };
        let mut state = State::reset();
        let used = if wide { 16 } else { 8 };
        for value in &mut state.gpr[..used] {
            *value = word();
        }
        state.rip = word();
        state.cr2 = word();
        for segment in state.es_to_gs_mut() {
            *segment = self.segment(wide);
        }
        state.ldtr = self.segment(wide);
        state.tr = self.segment(wide);
        state.gdtr = self.table(wide);
        state.idtr = self.table(wide);
        state.rflags = self.next() & RFLAGS | flags::ALWAYS;
        state.smbase = self.next() >> 32;
        state.dr6 = self.next() & 0xe00f | DR6_ONES;
        state.dr7 = self.next() >> 32 & !0xd800 | 0x400;
        state.cr3 = self.next() >> 32 & !0xfff;
        state.cr4 = self.next() & Features::all().cr4 & !CR4_PCIDE;
        let caches = [0, CR0_CD, CR0_CD | CR0_NW][self.next() as usize % 3];
        let others = self.next() & (CR0_MP | CR0_EM | CR0_TS | CR0_NE | CR0_WP | CR0_AM);
        state.cr0 = CR0_ET | caches | others;
        let kinds = if wide { 5 } else { 4 };
        match self.next() % kinds {
            0 => {}
            1 => state.cr0 |= CR0_PE,
            2 => {
                state.cr0 |= CR0_PE | CR0_PG;
                state.cr4 &= !CR4_PAE;
            }
            3 => {
                state.cr0 |= CR0_PE | CR0_PG;
                state.cr4 |= CR4_PAE;
                state.pdptes = [0x1001, 0, 0x3001, 0x4001];
            }
            _ => {
                state.cr0 |= CR0_PE | CR0_PG;
                state.cr4 |= CR4_PAE | self.next() & CR4_PCIDE;
                state.cr3 |= self.next() & 0xfff & if state.cr4 & CR4_PCIDE != 0 { !0 } else { 0 };
                state.efer = EFER_LME | EFER_LMA | self.next() & (EFER_NXE | EFER_SCE);
            }
        }
        let bits = self.next();
        state.events.sti_shadow = bits & 1 != 0;
        state.events.mov_ss_shadow = bits & 2 != 0;
        state.events.nmi_blocked = bits & 4 != 0;
        state
    }
}

fn cpu(state: &State) -> Cpu {
    let mut cpu = Cpu::try_new(CodePages::try_new().unwrap()).unwrap();
    cpu.state = state.clone();
    cpu
}

/// An SMI followed by RSM changes nothing, in random states. RSM undoes the handler's changes of registers that were
/// saved, and keeps its changes of other registers.
#[test]
fn rsm_restores_what_an_smi_saved() {
    let mut random = Random(0x5a5a_1234);
    for round in 0..2000 {
        for map in [SmramMap::Bits32, SmramMap::Bits64] {
            let before = random.state(map);
            let mut cpu = cpu(&before);
            let smram = cpu.state.smram(map);
            cpu.inject_smi();
            cpu.enter_smm();
            let mut handler = random.state(map);
            (handler.cr2, handler.cr8) = (7, 9);
            handler.events = cpu.state.events;
            let kept = if map == SmramMap::Bits32 { 8 } else { 16 };
            handler.gpr[kept..].copy_from_slice(&before.gpr[kept..]);
            cpu.state = handler;
            let pdptes = before.pdptes;
            let read = |cr3| {
                assert_eq!(cr3, before.cr3);
                Some(pdptes)
            };
            cpu.leave_smm(map, &smram, read).unwrap();
            let expected = State {
                cr2: 7,
                cr8: 9,
                // PDPTEs are saved only with PAE paging.
                pdptes: match before.pae_paging() {
                    true => pdptes,
                    false => cpu.state.pdptes,
                },
                ..before
            };
            assert_eq!(cpu.state, expected, "round {round}, {map:?}");
        }
    }
}

/// Registers are saved at the addresses that AMD64 volume 2, table 10-1, and the manual of Intel's P6 give, from SMBASE
/// + 0xfe00 on.
#[test]
fn registers_are_where_the_manuals_have_them() {
    let mut state = State::reset();
    for (i, value) in state.gpr.iter_mut().enumerate() {
        *value = 0x1111 * (i as u64 + 1);
    }
    (state.rip, state.rflags, state.smbase) = (0xaaaa_bbbb, 0x246, 0x7ffe_0000);
    (state.cr0, state.cr3, state.cr4) = (0x8000_0031, 0x12_3000, 0x20);
    (state.efer, state.dr6, state.dr7) = (0x500, 0xffff_0ff1, 0x401);
    state.fs = Segment {
        selector: 0x2b,
        base: 0x1234_5000,
        limit: 0xfffff,
        rights: 0xc0f3,
    };
    state.idtr = Table {
        base: 0x9000,
        limit: 0xfff,
    };
    let image = Image(state.smram(SmramMap::Bits64));
    let at = |address: usize| image.get64(address - 0xfe00);
    assert_eq!(at(0xfff8), state.gpr[0]);
    assert_eq!(at(0xff80), state.gpr[15]);
    assert_eq!(at(0xff78), state.rip);
    assert_eq!(at(0xff70), state.rflags);
    assert_eq!(at(0xff68), state.dr6);
    assert_eq!(at(0xff60), state.dr7);
    assert_eq!(at(0xff58), state.cr0);
    assert_eq!(at(0xff50), state.cr3);
    assert_eq!(at(0xff48), state.cr4);
    assert_eq!(at(0xff00) as u32, 0x7ffe_0000);
    assert_eq!((at(0xfef8) >> 32) as u32, 0x2_0064);
    assert_eq!(at(0xfed0), state.efer);
    // FS: its selector, attributes (without the bits of the limit), limit and base.
    assert_eq!(at(0xfe40), 0xf_ffff_c0f3_002b);
    assert_eq!(at(0xfe48), 0x1234_5000);
    assert_eq!((at(0xfe80) >> 32) as u16, 0xfff);
    assert_eq!(at(0xfe88), 0x9000);

    let image = Image(state.smram(SmramMap::Bits32));
    let at = |address: usize| image.get32(address - 0xfe00);
    assert_eq!(at(0xfffc), state.cr0);
    assert_eq!(at(0xfff8), state.cr3);
    assert_eq!(at(0xfff4), state.rflags);
    assert_eq!(at(0xfff0), state.rip);
    assert_eq!(at(0xffec), state.gpr[7]);
    assert_eq!(at(0xffd0), state.gpr[0]);
    assert_eq!(at(0xffcc), state.dr6);
    assert_eq!(at(0xffc8), state.dr7);
    assert_eq!(at(0xffb8), 0x2b);
    assert_eq!((at(0xff38), at(0xff3c)), (0xc0_f300, 0xf_ffff));
    assert_eq!(at(0xff40), 0x1234_5000);
    assert_eq!((at(0xff54), at(0xff58)), (0xfff, 0x9000));
    assert_eq!(at(0xff14), state.cr4);
    assert_eq!((at(0xfefc), at(0xfef8)), (0x2_0000, 0x7ffe_0000));
}

#[test]
fn an_smi_leaves_the_cpu_in_real_mode_with_large_segments() {
    let before = Random(3).state(SmramMap::Bits64);
    let mut cpu = cpu(&State {
        cr0: CR0_PE | CR0_PG | CR0_WP | CR0_EM | CR0_TS | CR0_NE | CR0_ET,
        smbase: 0x7fc1_2000,
        ..before.clone()
    });
    cpu.inject_smi();
    cpu.enter_smm();
    let state = &cpu.state;
    assert_eq!(state.cr0, CR0_WP | CR0_NE | CR0_ET);
    assert_eq!((state.cr4, state.efer), (0, 0));
    assert_eq!((state.rip, state.rflags), (0x8000, 2));
    assert_eq!((state.cs.selector, state.cs.base), (0x1200, 0x7fc1_2000));
    for segment in state.es_to_gs() {
        assert_eq!((segment.limit, segment.rights), (u32::MAX, 0x8093));
    }
    assert_eq!((state.ss.selector, state.ss.base), (0, 0));
    assert_eq!(state.idtr, Table::default());
    assert_eq!((state.gdtr, state.dr7), (before.gdtr, 0x400));
    assert_eq!(state.gpr, before.gpr);
    assert!(state.events.smm && !state.events.smi && state.events.nmi_blocked);
    assert!(!state.events.sti_shadow && !state.events.mov_ss_shadow);
}

/// NMIs are blocked in the handler. After RSM they are blocked only if they were blocked before the SMI.
#[test]
fn rsm_unblocks_nmis_unless_an_nmi_was_interrupted() {
    for nmi_blocked in [false, true] {
        let mut cpu = cpu(&State::reset());
        cpu.state.events.nmi_blocked = nmi_blocked;
        let smram = cpu.state.smram(SmramMap::Bits64);
        cpu.enter_smm();
        assert!(cpu.state.events.nmi_blocked);
        assert_eq!(cpu.state.events.smm_inside_nmi, nmi_blocked);
        cpu.leave_smm(SmramMap::Bits64, &smram, |_| None).unwrap();
        let expected = Events {
            nmi_blocked,
            ..Events::default()
        };
        assert_eq!(cpu.state.events, expected);
    }
}

#[test]
fn rsm_moves_smbase() {
    for (map, at) in [
        (SmramMap::Bits64, at64::SMBASE),
        (SmramMap::Bits32, at32::SMBASE),
    ] {
        let mut cpu = cpu(&State::reset());
        assert_eq!(cpu.state.smbase, 0x3_0000);
        let mut smram = cpu.state.smram(map);
        cpu.enter_smm();
        smram[at..at + 4].copy_from_slice(&0x7ff7_8000u32.to_le_bytes());
        cpu.leave_smm(map, &smram, |_| None).unwrap();
        assert_eq!(cpu.state.smbase, 0x7ff7_8000);
    }
}

/// RSM refuses registers that no CPU can have. Each step makes one register invalid. The CPU then does not change, and
/// is still in SMM.
#[test]
fn rsm_refuses_impossible_registers() {
    let mut state = State::reset();
    state.cr0 = CR0_PE | CR0_PG | CR0_ET;
    state.cr4 = CR4_PAE;
    state.efer = EFER_LME | EFER_LMA;
    let good = state.smram(SmramMap::Bits64);
    let bad: [(usize, u64); 12] = [
        (at64::CR0, 1 << 32 | state.cr0),
        (at64::CR0, CR0_PG | CR0_ET),
        (at64::CR0, state.cr0 | CR0_NW),
        (at64::CR3, 1 << 50),
        (at64::CR4, 1 << 13 | CR4_PAE),
        (at64::CR4, 0),
        (at64::EFER, EFER_LME | 1 << 13),
        (at64::EFER, 1 << 1),
        (at64::DR6, 1 << 32),
        (at64::DR7, 1 << 40),
        (at64::CR4, CR4_PAE | 1 << 63),
        // Without EFER.LME, this is PAE paging, and the PDPTEs cannot be read.
        (at64::EFER, 0),
    ];
    for (at, value) in bad {
        let mut cpu = cpu(&state);
        cpu.enter_smm();
        let before = cpu.state.clone();
        let mut smram = good;
        smram[at..at + 8].copy_from_slice(&value.to_le_bytes());
        let result = cpu.leave_smm(SmramMap::Bits64, &smram, |_| None);
        assert_eq!(result, Err(BadSmram), "{value:#x} at {at:#x}");
        assert_eq!(cpu.state, before);
        cpu.leave_smm(SmramMap::Bits64, &good, |_| None).unwrap();
    }
    // First, PAE paging with CR4.PCIDE set, which needs long mode. Second, PAE paging with a PDPTE that has a reserved
    // bit set.
    state.efer = 0;
    state.cr4 = CR4_PAE | CR4_PCIDE;
    let smram = state.smram(SmramMap::Bits64);
    let mut cpu = cpu(&state);
    cpu.enter_smm();
    let pcids = cpu.leave_smm(SmramMap::Bits64, &smram, |_| Some([0; 4]));
    assert_eq!(pcids, Err(BadSmram));
    state.cr4 = CR4_PAE;
    let smram = state.smram(SmramMap::Bits64);
    let reserved = cpu.leave_smm(SmramMap::Bits64, &smram, |_| Some([3, 0, 0, 0]));
    assert_eq!(reserved, Err(BadSmram));
    cpu.leave_smm(SmramMap::Bits64, &smram, |_| Some([1, 2, 0, 0]))
        .unwrap();
    assert_eq!(cpu.state.pdptes, [1, 2, 0, 0]);
}

/// Each segment register, table and shadow is saved at the offset that the manuals give, where a handler looks for it.
#[test]
fn each_segment_is_where_the_manuals_have_it() {
    let mut state = State::reset();
    let segment = |number: u16| Segment {
        selector: 0x100 * number,
        base: 0x1000 * u64::from(number),
        limit: 0x10 * u32::from(number),
        rights: 0x93 + (u32::from(number) << 12),
    };
    for (number, to) in (1..).zip(state.es_to_gs_mut()) {
        *to = segment(number);
    }
    (state.ldtr, state.tr) = (segment(7), segment(8));
    (state.gdtr, state.idtr) = (
        Table {
            base: 0x9000,
            limit: 0x90,
        },
        Table {
            base: 0xa000,
            limit: 0xa0,
        },
    );
    state.events.sti_shadow = true;
    // The segments are ES, CS, SS, DS, FS, GS, LDTR and TR. The tables are GDTR and IDTR.
    let at = [0, 0x10, 0x20, 0x30, 0x40, 0x50, 0x70, 0x90];
    let image = Image(state.smram(SmramMap::Bits64));
    for (number, at) in (1..).zip(at) {
        let segment = segment(number);
        assert_eq!(image.get16(at), segment.selector, "{number}");
        assert_eq!(u32::from(image.get16(at + 2)), segment.rights, "{number}");
        assert_eq!(image.get32(at + 4), segment.limit.into(), "{number}");
        assert_eq!(image.get64(at + 8), segment.base, "{number}");
    }
    assert_eq!((image.get16(0x64), image.get64(0x68)), (0x90, 0x9000));
    assert_eq!((image.get16(0x84), image.get64(0x88)), (0xa0, 0xa000));
    // In KVM's byte for the interrupt shadow, bit 0 is MOV SS and bit 1 is STI.
    assert_eq!(image.0[0xcb], 2);

    let at = [0x184, 0x190, 0x19c, 0x12c, 0x138, 0x144, 0x178, 0x15c];
    let selectors = [0x1a8, 0x1ac, 0x1b0, 0x1b4, 0x1b8, 0x1bc, 0x1c0, 0x1c4];
    let image = Image(state.smram(SmramMap::Bits32));
    for (number, (at, selector)) in (1..).zip(at.into_iter().zip(selectors)) {
        let segment = segment(number);
        assert_eq!(image.get16(selector), segment.selector, "{number}");
        assert_eq!(image.get32(at) >> 8, segment.rights.into(), "{number}");
        assert_eq!(image.get32(at + 4), segment.limit.into(), "{number}");
        assert_eq!(image.get32(at + 8), segment.base, "{number}");
    }
    assert_eq!((image.get16(0x170), image.get32(0x174)), (0x90, 0x9000));
    assert_eq!((image.get16(0x154), image.get32(0x158)), (0xa0, 0xa000));
    assert_eq!(image.0[0x11a], 2);
}

/// A segment that was unusable before the SMI is unusable after RSM, even if its rights say that it is present.
#[test]
fn rsm_restores_an_unusable_segment() {
    for map in [SmramMap::Bits32, SmramMap::Bits64] {
        let mut before = State::reset();
        before.fs.rights |= Segment::UNUSABLE;
        before.ldtr.rights |= Segment::UNUSABLE;
        let mut cpu = cpu(&before);
        let smram = cpu.state.smram(map);
        cpu.enter_smm();
        cpu.leave_smm(map, &smram, |_| None).unwrap();
        assert!(!cpu.state.fs.usable() && !cpu.state.ldtr.usable());
        assert!(cpu.state.gs.usable() && cpu.state.tr.usable());
    }
}

/// RSM loads only bits that exist, even if the handler sets other bits in the saved flags and debug registers.
#[test]
fn rsm_sets_fixed_bits() {
    for (map, at, bytes) in [
        (
            SmramMap::Bits64,
            [at64::RFLAGS, at64::DR6, at64::DR7],
            // RSM refuses DR6 and DR7 if an upper half is not 0.
            [8, 4, 4],
        ),
        (
            SmramMap::Bits32,
            [at32::EFLAGS, at32::DR6, at32::DR7],
            [4, 4, 4],
        ),
    ] {
        for (byte, expected) in [
            (0xff, (0x3f_7fd7, 0xffff_efff, 0xffff_27ff)),
            (0, (2, 0xffff_0ff0, 0x400)),
        ] {
            let mut cpu = cpu(&State::reset());
            let mut smram = cpu.state.smram(map);
            cpu.enter_smm();
            for (at, bytes) in at.into_iter().zip(bytes) {
                smram[at..at + bytes].fill(byte);
            }
            cpu.leave_smm(map, &smram, |_| None).unwrap();
            let State {
                rflags, dr6, dr7, ..
            } = cpu.state;
            assert_eq!((rflags, dr6, dr7), expected, "{map:?}");
        }
    }
}
