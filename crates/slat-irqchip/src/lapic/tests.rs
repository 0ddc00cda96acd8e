//! Tests the local APIC register by register.

use super::*;
use crate::message::{DeliveryMode, Destination};

fn enabled() -> Lapic {
    let mut lapic = Lapic::new(1, false, 1_000_000);
    lapic.write(reg::SVR, 0x1ff, 0);
    lapic
}

#[test]
fn interrupts_come_by_priority_and_eoi_ends_them() {
    let mut lapic = enabled();
    lapic.request(0x31, false);
    lapic.request(0x62, false);
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
    assert_eq!(lapic.request(0x31, false), Request::Refused);
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

/// The limit is KVM's `min_timer_period_us`. Without the limit, a guest's timer could keep the host busy.
#[test]
fn a_period_is_at_least_200_us() {
    let mut lapic = enabled();
    lapic.write(reg::TIMER_DIVIDE, 0xb, 0);
    lapic.write(reg::LVT_TIMER, 0x40 | 1 << 17, 0);
    lapic.write(reg::TIMER_INITIAL, 1, 1000);
    assert_eq!(lapic.deadline(), Some(201_000));
    lapic.tick(201_500);
    assert_eq!(lapic.deadline(), Some(401_000));
    // The limit does not apply to a one-shot timer.
    lapic.write(reg::LVT_TIMER, 0x40, 500_000);
    lapic.write(reg::TIMER_INITIAL, 1, 500_000);
    assert_eq!(lapic.deadline(), Some(500_001));
    // The limit applies when the timer becomes periodic.
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

/// As in KVM, a restored timer has the saved rest of the count, limited to the initial count. A timer without an
/// initial count is off.
#[test]
fn a_restored_timer_goes_on() {
    let restored = |lvt: u32, initial: u32, current: u32| {
        let mut lapic = enabled();
        lapic.write(reg::TIMER_DIVIDE, 0xb, 0);
        lapic.write(reg::LVT_TIMER, lvt, 0);
        let mut state = lapic.save(0);
        state[(reg::TIMER_INITIAL >> 4) as usize] = initial;
        state[(reg::TIMER_CURRENT >> 4) as usize] = current;
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
    assert_eq!(lapic.write_msr(0x83f, 0x131, 0), Err(Refused));
    assert_eq!(lapic.set_base(base, true), Err(Refused));
    let Ok(Effect::Send(message)) = lapic.write_msr(0x830, 0x5_0000_4031, 0) else {
        panic!("no interrupt was sent");
    };
    let expected = Message {
        vector: 0x31,
        mode: DeliveryMode::Fixed,
        level: false,
        assert: true,
        destination: Destination::Physical(5),
    };
    assert_eq!(message, expected);
}

#[test]
fn the_address_follows_the_registers() {
    let mut lapic = enabled();
    let address = |lapic: &Lapic| lapic.address().map(|address| (address.id, address.logical));
    assert_eq!(address(&lapic), Some((1, Logical::Flat(0))));
    assert_eq!(lapic.write(reg::LDR, 0x0400_0000, 0), Effect::Address);
    assert_eq!(address(&lapic), Some((1, Logical::Flat(4))));
    assert_eq!(lapic.write(reg::DFR, 0x0fff_ffff, 0), Effect::Address);
    assert_eq!(address(&lapic), Some((1, Logical::Cluster(4))));
    assert_eq!(lapic.write(reg::ID, 0x0900_0000, 0), Effect::Address);
    assert_eq!(lapic.write(reg::SVR, 0xff, 0), Effect::Address);
    assert_eq!(address(&lapic), Some((9, Logical::None)));
    let base = lapic.base();
    lapic.set_base(base | BASE_X2APIC, true).unwrap();
    assert_eq!(address(&lapic), Some((1, Logical::X2apic)));
    lapic.set_base(base & !BASE_ENABLE, true).unwrap();
    assert_eq!(address(&lapic), None);
}

#[test]
fn a_second_request_of_a_pending_vector_merges_with_it() {
    let mut lapic = enabled();
    assert_eq!(lapic.request(0x31, false), Request::Pending);
    assert_eq!(lapic.request(0x31, false), Request::Merged);
    lapic.accept(0x31);
    assert_eq!(lapic.request(0x31, false), Request::Pending);
}

#[test]
fn the_8259_reaches_the_cpu_through_lint0_only() {
    let mut lapic = enabled();
    assert!(!lapic.accepts_external());
    lapic.write(reg::LVT_LINT0, LVT_EXTINT, 0);
    assert!(lapic.accepts_external());
    lapic.write(reg::LVT_LINT0, LVT_EXTINT | LVT_MASKED, 0);
    assert!(!lapic.accepts_external());
    lapic.set_base(DEFAULT_BASE, true).unwrap();
    assert!(lapic.accepts_external(), "without APIC, the line is INTR");
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

/// A guest that starts a new count as soon as the last one has ended gets an interrupt for each count.
#[test]
fn a_count_that_has_ended_is_an_interrupt_also_when_a_new_one_begins() {
    let ended = |again: fn(&mut Lapic)| {
        let mut lapic = enabled();
        lapic.write(reg::TIMER_DIVIDE, 0xb, 0);
        lapic.write(reg::LVT_TIMER, 0x40, 0);
        lapic.write(reg::TIMER_INITIAL, 100, 0);
        again(&mut lapic);
        lapic.pending()
    };
    assert_eq!(
        ended(|apic| _ = apic.write(reg::TIMER_INITIAL, 7, 99)),
        None
    );
    let over = Some(0x40);
    assert_eq!(
        ended(|apic| _ = apic.write(reg::TIMER_INITIAL, 7, 100)),
        over
    );
    assert_eq!(
        ended(|apic| _ = apic.write(reg::TIMER_INITIAL, 0, 100)),
        over
    );
    assert_eq!(
        ended(|apic| _ = apic.write(reg::TIMER_DIVIDE, 0, 100)),
        over
    );
    assert_eq!(
        ended(|apic| _ = apic.write(reg::LVT_TIMER, 0x1_0041, 100)),
        over
    );
    let mut lapic = enabled();
    lapic.write(reg::LVT_TIMER, 0x40 | 2 << 17, 0);
    lapic.set_tsc_deadline(3000, 1000, 50);
    lapic.set_tsc_deadline(9000, 3050, 2100);
    assert_eq!(lapic.pending(), over);
    lapic.accept(0x40);
    lapic.write(reg::EOI, 0, 0);
    assert_eq!(lapic.set_tsc_deadline(1, 3050, 2100), Effect::Timer);
    assert_eq!(
        lapic.pending(),
        over,
        "a deadline in the past is over at once"
    );
    assert_eq!((lapic.deadline(), lapic.tsc_deadline()), (None, 0));
}

/// In TSC-deadline mode, the divide register has no effect. The deadline is no register of the APIC page, so a restored
/// APIC keeps it.
#[test]
fn a_tsc_deadline_stays_until_another_one_or_another_mode() {
    let armed = || {
        let mut lapic = enabled();
        lapic.write(reg::LVT_TIMER, 0x40 | 2 << 17, 0);
        lapic.set_tsc_deadline(3000, 1000, 50);
        lapic
    };
    let mut lapic = armed();
    lapic.write(reg::TIMER_DIVIDE, 0xb, 60);
    assert_eq!((lapic.deadline(), lapic.tsc_deadline()), (Some(2050), 3000));
    lapic.restore(&lapic.save(70), 80);
    assert_eq!((lapic.deadline(), lapic.tsc_deadline()), (Some(2050), 3000));
    lapic.restore(&enabled().save(70), 80);
    assert_eq!((lapic.deadline(), lapic.tsc_deadline()), (None, 0));
    // A deadline that is set before the mode is restored has no effect.
    let mut other = enabled();
    other.restore(&armed().save(70), 80);
    assert_eq!((other.deadline(), other.tsc_deadline()), (None, 0));
}

#[test]
fn a_deadline_beyond_all_time_does_not_come() {
    let mut lapic = Lapic::new(0, true, 1000);
    lapic.write(reg::SVR, 0x1ff, 0);
    lapic.write(reg::LVT_TIMER, 0x40 | 2 << 17, 0);
    lapic.set_tsc_deadline(u64::MAX / 1000 + 2, 0, 50);
    assert_eq!(lapic.deadline(), Some(u64::MAX));
}

/// A guest in xAPIC mode may have given its APIC another id, and INIT keeps that id (SDM volume 3, 12.4.7.3).
#[test]
fn an_init_keeps_the_id() {
    let mut lapic = enabled();
    lapic.write(reg::ID, 0x0900_0000, 0);
    lapic.reset();
    assert_eq!(lapic.address().map(|address| address.id), Some(9));
}

#[test]
fn an_interrupt_that_ends_itself_holds_back_no_other() {
    let mut lapic = enabled();
    lapic.request(0x62, false);
    lapic.request(0x31, false);
    lapic.accept_ended(0x62);
    assert_eq!(lapic.pending(), Some(0x31));
    assert_eq!(lapic.write(reg::EOI, 0, 0), Effect::None);
}

#[test]
fn hyper_v_reaches_three_registers_in_any_mode() {
    let mut lapic = enabled();
    lapic.write_synthetic(reg::TPR, 0x30, 0).unwrap();
    assert_eq!(lapic.read_synthetic(reg::TPR, 0), Ok(0x30));
    assert_eq!(lapic.write_synthetic(reg::TPR, 1 << 32, 0), Err(Refused));
    let sent = lapic.write_synthetic(reg::ICR, 5 << 56 | 0x41, 0).unwrap();
    let Effect::Send(message) = sent else {
        panic!("{sent:?}")
    };
    assert_eq!(message.destination, Destination::Physical(5));
    assert_eq!(lapic.read_synthetic(reg::ICR, 0), Ok(5 << 56 | 0x41));
    lapic.request(0x62, false);
    lapic.accept(0x62);
    let ended = lapic.write_synthetic(reg::EOI, 7, 0);
    assert_eq!(ended, Ok(Effect::Eoi(0x62, false)), "whatever the value");
    assert_eq!(lapic.read_synthetic(reg::EOI, 0), Err(Refused));
    assert_eq!(lapic.write_synthetic(reg::SVR, 0, 0), Err(Refused));
    lapic.set_base(lapic.base() | BASE_X2APIC, true).unwrap();
    let sent = lapic.write_synthetic(reg::ICR, 5 << 32 | 0x41, 0).unwrap();
    let Effect::Send(message) = sent else {
        panic!("{sent:?}")
    };
    assert_eq!(message.destination, Destination::Physical(5));
}
