//! Tests the guarantees of every format, and which formats and platforms `Vm` refuses.

use slat::Ept;
use slat::format::{Ept5, GStage, Npt, Npt5, Stage2, Stage2Kib16, Stage2Kib64, X86};
use slat_model::format_promises;

#[test]
fn every_format_keeps_its_promises() {
    format_promises::<Ept>();
    format_promises::<Ept5>();
    format_promises::<Npt>();
    format_promises::<Npt5>();
    format_promises::<X86<5>>();
    format_promises::<Stage2<48>>();
    format_promises::<Stage2<40>>();
    format_promises::<Stage2<48, true>>();
    format_promises::<Stage2<52>>();
    format_promises::<Stage2<52, true>>();
    format_promises::<Stage2Kib16<48>>();
    format_promises::<Stage2Kib16<48, true>>();
    format_promises::<Stage2Kib16<52>>();
    format_promises::<Stage2Kib64<48>>();
    format_promises::<Stage2Kib64<52>>();
    format_promises::<Stage2Kib64<52, true>>();
    format_promises::<GStage<3>>();
    format_promises::<GStage<4>>();
    format_promises::<GStage<5>>();
}
