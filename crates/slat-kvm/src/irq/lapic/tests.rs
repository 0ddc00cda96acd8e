//! The local APIC, register by register.

use super::*;

fn enabled() -> Lapic {
    let mut lapic = Lapic::new(1, false, 1_000_000);
    lapic.write(reg::SVR, 0x1ff, 0);
    lapic
}

#[test]
fn interrupts_come_by_priority_and_eoi_ends_them() {
    let mut lapic = enabled();
    assert!(lapic.request(0x31, false));
    assert!(lapic.request(0x62, false));
    assert_eq!(lapic.pending(), Some(0x62));
    lapic.accept(0x62);
    assert_eq!(lapic.pending(), None, "the lower class waits");
    assert_eq!(lapic.write(reg::EOI, 0, 0), Effect::Eoi(0x62, false));
    assert_eq!(lapic.pending(), Some(0x31));
    lapic.write(reg::TPR, 0x30, 0);
    assert_eq!(lapic.pending(), None, "the task priority holds it back");
}

#[test]
fn a_disabled_apic_takes_nothing() {
    let mut lapic = Lapic::new(0, true, 1_000_000);
    assert!(!lapic.request(0x31, false));
    assert_eq!(lapic.pending(), None);
}

#[test]
fn the_timer_fires_once_or_periodically() {
    let mut lapic = enabled();
    lapic.write(reg::TIMER_DIVIDE, 0xb, 0);
    lapic.write(reg::LVT_TIMER, 0x40, 0);
    assert_eq!(lapic.write(reg::TIMER_INITIAL, 1000, 0), Effect::Timer);
    assert_eq!(lapic.read(reg::TIMER_CURRENT, 400), 600);
    lapic.tick(999);
    assert_eq!(lapic.pending(), None);
    lapic.tick(1000);
    assert_eq!(lapic.pending(), Some(0x40));
    assert_eq!(lapic.deadline(), None);

    lapic.write(reg::LVT_TIMER, 0x41 | 1 << 17, 0);
    lapic.write(reg::TIMER_INITIAL, 1000, 5000);
    lapic.tick(8500);
    assert_eq!(
        lapic.deadline(),
        Some(9000),
        "missed ticks are dropped, the phase is kept"
    );
}

#[test]
fn the_tsc_deadline_counts_in_cycles() {
    let mut lapic = enabled();
    lapic.write(reg::LVT_TIMER, 0x40 | 2 << 17, 0);
    assert_eq!(lapic.set_tsc_deadline(3000, 1000, 50), Effect::Timer);
    assert_eq!(lapic.deadline(), Some(50 + 2000));
    lapic.tick(2050);
    assert_eq!(lapic.pending(), Some(0x40));
    assert_eq!(lapic.tsc_deadline(), 0);
}

#[test]
fn x2apic_registers_are_msrs_only_in_x2apic_mode() {
    let mut lapic = enabled();
    assert_eq!(lapic.read_msr(0x802, 0), Err(Refused));
    let base = lapic.base();
    lapic.set_base(base | BASE_X2APIC, true).unwrap();
    assert_eq!(lapic.read_msr(0x802, 0), Ok(1));
    assert_eq!(lapic.page(), None);
    assert_eq!(
        lapic.read_msr(0x80d, 0),
        Ok(2),
        "the logical id follows from the id"
    );
    assert_eq!(lapic.write_msr(0x80b, 1, 0), Err(Refused));
    assert_eq!(lapic.set_base(base, true), Err(Refused));
    let Ok(Effect::Send(icr)) = lapic.write_msr(0x830, 0x5_0000_4031, 0) else {
        panic!("no interrupt was sent");
    };
    assert_eq!((icr.destination, icr.vector(), icr.mode()), (5, 0x31, 0));
}

#[test]
fn destinations_match_by_id_and_by_logical_set() {
    let mut lapic = enabled();
    assert!(lapic.matches(1, false, false));
    assert!(lapic.matches(0xff, false, false));
    assert!(!lapic.matches(2, false, false));
    lapic.write(reg::LDR, 0x0400_0000, 0);
    assert!(lapic.matches(0x06, true, false));
    assert!(!lapic.matches(0x02, true, false));
    lapic.write(reg::DFR, 0x0fff_ffff, 0);
    assert!(lapic.matches(0x04, true, false));
    assert!(!lapic.matches(0x14, true, false));
}

#[test]
fn saving_and_restoring_keeps_the_registers() {
    let mut lapic = enabled();
    lapic.request(0x55, false);
    let state = lapic.save(0);
    let mut other = Lapic::new(1, false, 1_000_000);
    other.restore(&state, 0);
    assert_eq!(other.pending(), Some(0x55));
}
