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
    lapic.write(reg::TIMER_INITIAL, 1_000_000, 5_000_000);
    lapic.tick(8_500_000);
    assert_eq!(
        lapic.deadline(),
        Some(9_000_000),
        "missed ticks are dropped, the phase is kept"
    );
}

/// KVM's `min_timer_period_us`: a guest must not keep the host busy with nothing but its timer.
#[test]
fn a_period_is_at_least_200_us() {
    let mut lapic = enabled();
    lapic.write(reg::TIMER_DIVIDE, 0xb, 0);
    lapic.write(reg::LVT_TIMER, 0x40 | 1 << 17, 0);
    lapic.write(reg::TIMER_INITIAL, 1, 1000);
    assert_eq!(lapic.deadline(), Some(201_000));
    lapic.tick(201_500);
    assert_eq!(lapic.deadline(), Some(401_000));
    // A timer that fires once may fire soon.
    lapic.write(reg::LVT_TIMER, 0x40, 500_000);
    lapic.write(reg::TIMER_INITIAL, 1, 500_000);
    assert_eq!(lapic.deadline(), Some(500_001));
    // When it becomes periodic, the limit holds.
    lapic.write(reg::LVT_TIMER, 0x40 | 1 << 17, 500_000);
    lapic.tick(500_001);
    assert_eq!(lapic.deadline(), Some(700_001));
}

#[test]
fn only_the_tsc_deadline_mode_stops_the_count() {
    let mut lapic = enabled();
    lapic.write(reg::TIMER_DIVIDE, 0xb, 0);
    lapic.write(reg::LVT_TIMER, 0x40, 0);
    lapic.write(reg::TIMER_INITIAL, 1_000_000, 0);
    lapic.write(reg::LVT_TIMER, 0x40 | 1 << 17, 10);
    assert_eq!(lapic.deadline(), Some(1_000_000));
    assert_eq!(lapic.read(reg::TIMER_INITIAL, 10), 1_000_000);
    lapic.write(reg::LVT_TIMER, 0x40 | 2 << 17, 20);
    assert_eq!(lapic.deadline(), None);
    assert_eq!(lapic.read(reg::TIMER_INITIAL, 20), 0);
}

/// As KVM restores it: the count that is left, never more than the initial one; a timer without an initial count is off.
#[test]
fn a_restored_timer_goes_on() {
    let restored = |lvt: u32, initial: u32, current: u32| {
        let mut lapic = enabled();
        lapic.write(reg::TIMER_DIVIDE, 0xb, 0);
        lapic.write(reg::LVT_TIMER, lvt, 0);
        let mut state = lapic.save(0);
        let mut put = |offset: u32, value: u32| {
            for (to, from) in state.regs[offset as usize..]
                .iter_mut()
                .zip(value.to_le_bytes())
            {
                *to = from as _;
            }
        };
        put(reg::TIMER_INITIAL, initial);
        put(reg::TIMER_CURRENT, current);
        let mut other = enabled();
        other.restore(&state, 5000);
        other.deadline()
    };
    const ONCE: u32 = 0x40;
    const PERIODIC: u32 = 0x40 | 1 << 17;
    assert_eq!(restored(ONCE, 1000, 400), Some(5400));
    assert_eq!(restored(ONCE, 1000, 0), Some(5000));
    assert_eq!(restored(ONCE, 1000, 3000), Some(6000));
    assert_eq!(restored(ONCE, 0, 3000), None);
    assert_eq!(restored(PERIODIC, 1_000_000, 0), Some(1_005_000));
    assert_eq!(restored(PERIODIC, 1_000_000, 700), Some(5700));
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
