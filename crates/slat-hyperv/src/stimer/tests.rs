//! Tests the synthetic timers by single register writes.

use super::*;
use std::vec::Vec;

const CONFIG: u32 = STIMER0_CONFIG;
const COUNT: u32 = STIMER0_CONFIG + 1;
const ALL: Rights = Rights {
    has_synic: true,
    direct_mode: true,
};
/// A timer that sends messages to source 2.
const TO_2: u64 = 2 << 16;

fn at(reference: u64) -> Moment {
    Moment {
        reference,
        host: 1_000_000 + reference * 100,
    }
}

fn write(timers: &mut Timers, index: u32, value: u64) {
    timers.write(index, value, Writer::Guest, ALL).unwrap();
}

/// Lets the timers expire whose time is not after `reference`, a time of the reference clock. Returns the notices that
/// the timers deliver. The result of each delivery is `delivery`.
fn run(timers: &mut Timers, reference: u64, delivery: Delivery) -> Vec<Notice> {
    let mut notices = Vec::new();
    timers.tick(at(reference).host);
    timers.run(at(reference), |notice| {
        notices.push(notice);
        delivery
    });
    notices
}

fn message(expiration: u64, may_be_dropped: bool) -> Notice {
    Notice::Message {
        sint: 2,
        timer: 0,
        expiration,
        may_be_dropped,
    }
}

#[test]
fn a_one_shot_timer_expires_once() {
    let mut timers = Timers::default();
    write(&mut timers, COUNT, 500);
    write(&mut timers, CONFIG, TO_2 | ENABLED);
    assert!(timers.is_any_due());
    assert_eq!(run(&mut timers, 100, Delivery::Done), []);
    assert_eq!(timers.deadline(), Some(at(500).host));
    assert_eq!(run(&mut timers, 499, Delivery::Done), []);
    let notices = run(&mut timers, 510, Delivery::Done);
    assert_eq!(notices, [message(500, false)]);
    assert_eq!(timers.read(CONFIG), TO_2, "it is disabled");
    assert_eq!((timers.deadline(), timers.is_any_due()), (None, false));
}

#[test]
fn a_moment_in_the_past_expires_at_once() {
    let mut timers = Timers::default();
    write(&mut timers, COUNT, 500);
    write(&mut timers, CONFIG, DIRECT | 0x41 << 4 | ENABLED);
    let notices = run(&mut timers, 900, Delivery::Done);
    assert_eq!(notices, [Notice::Interrupt(0x41)]);
    assert!(!timers.is_any_due());
}

#[test]
fn a_periodic_timer_keeps_its_phase_and_skips_what_it_missed() {
    let mut timers = Timers::default();
    write(&mut timers, COUNT, 100);
    write(&mut timers, CONFIG, TO_2 | PERIODIC | ENABLED);
    run(&mut timers, 50, Delivery::Done);
    assert_eq!(timers.deadline(), Some(at(150).host));
    assert_eq!(
        run(&mut timers, 470, Delivery::Done),
        [message(150, true)],
        "one message for four ticks"
    );
    assert_eq!(timers.deadline(), Some(at(550).host));
}

#[test]
fn a_message_without_a_free_slot_waits_for_it() {
    let mut timers = Timers::default();
    write(&mut timers, COUNT, 500);
    write(&mut timers, CONFIG, TO_2 | ENABLED);
    run(&mut timers, 0, Delivery::Done);
    assert_eq!(run(&mut timers, 500, Delivery::Failed).len(), 1);
    assert_eq!(timers.deadline(), None);
    assert_eq!(run(&mut timers, 600, Delivery::Done), []);
    timers.acknowledged(3);
    assert!(!timers.is_any_due(), "another source");
    timers.acknowledged(2);
    assert_eq!(run(&mut timers, 700, Delivery::Done), [message(500, false)]);
    assert_eq!(timers.read(CONFIG) & ENABLED, 0);
}

#[test]
fn an_interrupted_delivery_is_repeated() {
    let mut timers = Timers::default();
    write(&mut timers, COUNT, 500);
    write(&mut timers, CONFIG, TO_2 | ENABLED);
    run(&mut timers, 0, Delivery::Done);
    assert_eq!(run(&mut timers, 500, Delivery::Interrupted).len(), 1);
    assert!(timers.is_any_due());
    assert_eq!(run(&mut timers, 501, Delivery::Done).len(), 1);
}

#[test]
fn a_count_enables_a_timer_that_wants_it() {
    let mut timers = Timers::default();
    write(&mut timers, CONFIG, TO_2 | AUTO_ENABLE);
    assert!(!timers.is_any_due());
    write(&mut timers, COUNT, 500);
    assert_eq!(timers.read(CONFIG), TO_2 | AUTO_ENABLE | ENABLED);
    write(&mut timers, COUNT, 0);
    assert_eq!(timers.read(CONFIG), TO_2 | AUTO_ENABLE);
    // A write by the host restores a state, so it does not enable the timer automatically, as a write by the guest
    // does.
    timers.write(COUNT, 500, Writer::Host, ALL).unwrap();
    assert_eq!(timers.read(CONFIG), TO_2 | AUTO_ENABLE);
}

/// Configuration and count keep the values that the host restores, in any order of the two writes.
#[test]
fn the_host_restores_configuration_and_count_as_they_were() {
    for config in [
        TO_2,
        TO_2 | ENABLED,
        TO_2 | PERIODIC | AUTO_ENABLE | ENABLED,
    ] {
        for count in [0, 500] {
            let both = [(CONFIG, config), (COUNT, count)];
            for order in [both, [both[1], both[0]]] {
                let mut timers = Timers::default();
                for (index, value) in order {
                    timers.write(index, value, Writer::Host, ALL).unwrap();
                }
                let restored = [CONFIG, COUNT].map(|index| timers.read(index));
                assert_eq!(restored, [config, count]);
                run(&mut timers, 0, Delivery::Done);
                let counts = config & ENABLED != 0 && count != 0;
                assert_eq!(timers.deadline().is_some(), counts);
                assert_eq!(timers.read(CONFIG), config, "a start changes nothing");
            }
        }
    }
}

#[test]
fn a_write_stops_the_timer() {
    let mut timers = Timers::default();
    write(&mut timers, COUNT, 500);
    write(&mut timers, CONFIG, TO_2 | ENABLED);
    run(&mut timers, 0, Delivery::Done);
    write(&mut timers, COUNT, 800);
    assert_eq!(timers.deadline(), None);
    run(&mut timers, 0, Delivery::Done);
    assert_eq!(timers.deadline(), Some(at(800).host));
    write(&mut timers, CONFIG, ENABLED);
    assert_eq!(timers.read(CONFIG), 0, "source 0 disables an enabled timer");
    write(&mut timers, CONFIG, ENABLED);
    assert_eq!(timers.read(CONFIG), ENABLED, "but not a disabled one");
    run(&mut timers, 0, Delivery::Done);
    assert_eq!(timers.deadline(), Some(at(800).host));
}

#[test]
fn rights_are_checked() {
    let mut timers = Timers::default();
    let without_synic = Rights {
        has_synic: false,
        ..ALL
    };
    let mut write = |value, by, rights| timers.write(CONFIG, value, by, rights);
    assert_eq!(write(0, Writer::Guest, without_synic), Err(Refused));
    assert_eq!(write(0, Writer::Host, without_synic), Ok(()));
    assert_eq!(write(1, Writer::Host, without_synic), Err(Refused));
    let indirect = Rights {
        direct_mode: false,
        ..ALL
    };
    assert_eq!(write(DIRECT, Writer::Guest, indirect), Err(Refused));
    assert_eq!(write(DIRECT, Writer::Host, indirect), Ok(()));
}

#[test]
fn a_moment_that_never_comes_has_an_alarm_that_never_goes_off() {
    let mut timers = Timers::default();
    write(&mut timers, COUNT, u64::MAX);
    write(&mut timers, CONFIG, TO_2 | ENABLED);
    run(&mut timers, 5, Delivery::Done);
    assert_eq!(timers.deadline(), Some(u64::MAX));
}
