//! Tests that functions which pack a value into a field of an entry refuse values that do not fit.
//! `crates/slat/tests/formats.rs` has the tests that all formats share.

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

fn refuses_what_an_entry_cannot_hold<F: Format>() {
    let last = F::take_frame(F::FRAME);
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
}

/// Checks that `pack` panics. Only a defect of the engine can pass a value that does not fit.
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

#[test]
fn every_format_refuses_what_an_entry_cannot_hold() {
    refuses_what_an_entry_cannot_hold::<Ept>();
    refuses_what_an_entry_cannot_hold::<Ept5>();
    refuses_what_an_entry_cannot_hold::<Npt>();
    refuses_what_an_entry_cannot_hold::<Npt5>();
    refuses_what_an_entry_cannot_hold::<X86<5>>();
    refuses_what_an_entry_cannot_hold::<Stage2<48>>();
    refuses_what_an_entry_cannot_hold::<Stage2<40>>();
    refuses_what_an_entry_cannot_hold::<Stage2<48, true>>();
    refuses_what_an_entry_cannot_hold::<Stage2<52>>();
    refuses_what_an_entry_cannot_hold::<Stage2<52, true>>();
    refuses_what_an_entry_cannot_hold::<Sv39x4>();
    refuses_what_an_entry_cannot_hold::<Sv48x4>();
    refuses_what_an_entry_cannot_hold::<Sv57x4>();
    refuses_what_an_entry_cannot_hold::<Stage2Kib16<48>>();
    refuses_what_an_entry_cannot_hold::<Stage2Kib16<48, true>>();
    refuses_what_an_entry_cannot_hold::<Stage2Kib16<52>>();
    refuses_what_an_entry_cannot_hold::<Stage2Kib64<48>>();
    refuses_what_an_entry_cannot_hold::<Stage2Kib64<52>>();
    refuses_what_an_entry_cannot_hold::<Stage2Kib64<52, true>>();
}
