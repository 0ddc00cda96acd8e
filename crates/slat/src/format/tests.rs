//! What every format promises.

use std::panic::{AssertUnwindSafe, catch_unwind};

use super::*;

pub(super) const LEAF: Leaf = Leaf {
    pfn: Pfn(0),
    write: true,
    execute: false,
    may_write: false,
    may_execute: false,
    accessed: false,
    dirty: false,
    memory: MemoryType::WriteBack,
    privilege: Privilege::USER,
};

const ACCESSES: [Access; 3] = [Access::Read, Access::Write, Access::Execute];

fn leaves<F: Format>(level: Level) -> impl Iterator<Item = Leaf> {
    (0..192u64).map(move |bits| Leaf {
        pfn: Pfn(F::GRANULE.pages(level) * 3),
        write: bits & 1 != 0,
        execute: bits & 2 != 0,
        may_write: bits & 4 != 0,
        may_execute: bits & 32 != 0,
        accessed: bits & 8 != 0,
        dirty: bits & 16 != 0,
        memory: match bits >> 6 {
            0 => MemoryType::WriteBack,
            1 => MemoryType::WriteCombining,
            _ => MemoryType::Device,
        },
        privilege: Privilege::USER,
    })
}

fn is_ready<F: Format>(bits: u64, access: Access) -> bool {
    let (set, clear) = F::ready(access);
    bits & (set | clear) == set
}

fn keeps_its_promises<F: Format>() {
    assert!(!F::SHADOWS || F::GRANULE == Granule::Kib4, "x86's tables");
    for level in [Level::PAGE, Level::MEGA, Level::GIGA] {
        for leaf in leaves::<F>(level) {
            let bits = F::leaf(leaf, level);
            assert_eq!(F::decode(bits, level), Entry::Leaf(leaf));
            assert_eq!(F::decode_leaf(bits), leaf);
            assert_eq!(F::next_table(bits, level), None);
            assert!(!F::is_absent(bits));
            assert_eq!(F::is_writable(bits), leaf.write);
            for access in ACCESSES {
                let marked = leaf.accessed && (leaf.dirty || access != Access::Write);
                let ready = leaf.allows(access) && marked;
                assert_eq!(is_ready::<F>(bits, access), ready);
                let broken = F::broken(bits);
                assert!(broken == bits || !is_ready::<F>(broken, access));
            }
            let written = is_ready::<F>(bits, Access::Write);
            assert_eq!(written, leaf.write && F::is_settled(bits));
            if leaf.write {
                let protected = Leaf {
                    write: false,
                    may_write: true,
                    ..leaf
                };
                let decoded = F::decode(F::write_protect(bits), level);
                assert_eq!(decoded, Entry::Leaf(protected), "{} {level:?}", F::NAME);
            }
            for write in [false, true] {
                let marked = Leaf {
                    accessed: true,
                    dirty: leaf.dirty || write,
                    ..leaf
                };
                assert_eq!(F::decode(F::mark(bits, write), level), Entry::Leaf(marked));
                let cleared = F::clear_dirty(F::clear_accessed(F::mark(bits, write)));
                let clear = Leaf {
                    accessed: false,
                    dirty: false,
                    ..leaf
                };
                assert_eq!(F::decode(cleared, level), Entry::Leaf(clear));
            }
            if F::BREAK_BEFORE_MAKE {
                assert_eq!(F::decode(F::broken(bits), level), Entry::Broken(leaf));
                assert_eq!(F::next_table(F::broken(bits), level), None);
                assert!(!F::is_absent(F::broken(bits)), "a zap must see it");
            }
        }
        assert_eq!(F::decode(0, level), Entry::Empty);
        assert!(F::is_absent(0) && F::is_absent(F::mmio(1, 0)));
        for access in ACCESSES {
            assert!(!is_ready::<F>(0, access));
        }
        let all = u64::MAX >> (64 - F::MMIO_GENERATION_BITS);
        let notes = (1u64 << F::MMIO_NOTE_BITS) - 1;
        for (generation, note) in [(0, 0), (1, notes), (all, 0), (all, notes), (5, notes & 6)] {
            let bits = F::mmio(generation, note);
            for access in ACCESSES {
                assert!(!is_ready::<F>(bits, access));
            }
            assert_eq!(F::next_table(bits, level), None);
            assert!(F::is_absent(bits));
            assert_eq!(F::decode(bits, level), Entry::Mmio { generation, note });
        }
        let wrapped = F::decode(F::mmio(all + 1, notes), level);
        let (generation, note) = (0, notes);
        assert_eq!(wrapped, Entry::Mmio { generation, note });
    }
    let last = F::take_frame(F::FRAME);
    assert!(F::holds(last) && !F::holds(last.add(1)));
    let bits_of_frames = (0..u64::BITS).map(|bit| Pfn(1 << bit));
    for pfn in bits_of_frames.filter(|pfn| F::holds(*pfn)).chain([last]) {
        assert_eq!(F::decode(F::table(pfn), Level(2)), Entry::Table(pfn));
        assert_eq!(F::next_table(F::table(pfn), Level(2)), Some(pfn));
        let leaf = Leaf { pfn, ..LEAF };
        let bits = F::leaf(leaf, Level::PAGE);
        assert_eq!(F::decode(bits, Level::PAGE), Entry::Leaf(leaf));
        assert_eq!(F::next_table(bits, Level(2)), None);
        if F::BREAK_BEFORE_MAKE {
            assert_eq!(F::decode(F::broken(bits), Level::PAGE), Entry::Broken(leaf));
        }
    }
    assert_refuses(|| F::table(last.add(1)));
    let beyond = last.add(1);
    assert_refuses(|| {
        F::leaf(
            Leaf {
                pfn: beyond,
                ..LEAF
            },
            Level::PAGE,
        )
    });
    if F::MMIO_NOTE_BITS > 0 {
        assert_refuses(|| F::mmio(0, 1 << F::MMIO_NOTE_BITS));
    }
    let table = F::table(Pfn(0x1234));
    assert_eq!(F::decode(table, Level::MEGA), Entry::Table(Pfn(0x1234)));
    assert_eq!(F::next_table(table, Level::MEGA), Some(Pfn(0x1234)));
    assert_eq!(F::next_table(0, Level::MEGA), None);
    assert!(!F::is_absent(table));
}

/// Checks that the packer of a field panics. It does so where nothing but a defect of the engine gives it such a value.
pub(crate) fn assert_refuses<R>(pack: impl FnOnce() -> R) {
    let refused = catch_unwind(AssertUnwindSafe(|| drop(pack()))).is_err();
    assert!(
        refused || !cfg!(debug_assertions),
        "it packs too large a value"
    );
}

#[test]
fn registers_and_privileges_hold_no_more_than_they_have_bits_for() {
    assert_eq!(Ept::eptp(Pfn((1 << 40) - 1)) >> 12, (1 << 40) - 1);
    assert_refuses(|| Ept::eptp(Pfn(1 << 40)));
    assert_eq!(
        <Stage2<48>>::vttbr(Pfn((1 << 36) - 1), 255),
        0x00ff_ffff_ffff_f000
    );
    assert_refuses(|| <Stage2<48>>::vttbr(Pfn(1 << 36), 0));
    assert_eq!(
        <Stage2<52>>::vttbr(Pfn((1 << 40) - 1), 255),
        0x00ff_ffff_ffff_f03c
    );
    assert_refuses(|| <Stage2<52>>::vttbr(Pfn(1 << 40), 0));
    assert_eq!(
        <Stage2Kib64<48>>::vttbr(Pfn((1 << 32) - 1), 255),
        0x00ff_ffff_ffff_0000
    );
    assert_refuses(|| <Stage2Kib64<48>>::vttbr(Pfn(1 << 32), 0));
    assert_refuses(|| <Stage2Kib16<52>>::vttbr(Pfn(1 << 38), 0));
    assert_eq!(
        Sv48x4::hgatp(Pfn((1 << 44) - 1), 0x3fff),
        0x93ff_ffff_ffff_ffff
    );
    assert_refuses(|| Sv48x4::hgatp(Pfn(1 << 44), 0));
    assert_refuses(|| Sv48x4::hgatp(Pfn(0), 1 << 14));
    assert_eq!(Privilege::new(true, 15).key(), 15);
    assert_refuses(|| Privilege::new(true, 16));
    let last = (1 << 53) - 1;
    assert_eq!(
        <Stage2<48>>::cleared_by(<Stage2<48>>::cleared(last)),
        Some(last)
    );
    assert_refuses(|| <Stage2<48>>::cleared(last + 1));
}

/// Leaves of x86 tables tell users and supervisors apart, and have protection keys.
#[test]
fn leaves_of_x86_tables_have_a_privilege_and_a_key() {
    for (user, key) in [(false, 0), (true, 15), (false, 9)] {
        for leaf in leaves::<X86<5>>(Level::MEGA).map(|leaf| Leaf {
            privilege: Privilege::new(user, key),
            ..leaf
        }) {
            let bits = X86::<5>::leaf(leaf, Level::MEGA);
            assert_eq!(X86::<5>::decode(bits, Level::MEGA), Entry::Leaf(leaf));
            assert_eq!(X86::<5>::next_table(bits, Level::MEGA), None);
        }
    }
}

#[test]
fn every_format_keeps_its_promises() {
    keeps_its_promises::<Ept>();
    keeps_its_promises::<Ept5>();
    keeps_its_promises::<Npt>();
    keeps_its_promises::<Npt5>();
    keeps_its_promises::<X86<5>>();
    keeps_its_promises::<Stage2<48>>();
    keeps_its_promises::<Stage2<40>>();
    keeps_its_promises::<Stage2<48, true>>();
    keeps_its_promises::<Stage2<52>>();
    keeps_its_promises::<Stage2<52, true>>();
    keeps_its_promises::<Stage2Kib16<48>>();
    keeps_its_promises::<Stage2Kib16<48, true>>();
    keeps_its_promises::<Stage2Kib16<52>>();
    keeps_its_promises::<Stage2Kib64<48>>();
    keeps_its_promises::<Stage2Kib64<52>>();
    keeps_its_promises::<Stage2Kib64<52, true>>();
    keeps_its_promises::<Sv39x4>();
    keeps_its_promises::<Sv48x4>();
    keeps_its_promises::<Sv57x4>();
}
