//! Tests the 8254: modes and commands of the data sheet, ticks and reinjection.

use super::{ChannelState, HPET_LEGACY, Pit, PitState, SPEAKER_DATA_ON};
use crate::random::Random;
use std::vec::Vec;

/// The time at which tests begin. It is not a round number.
const BEGIN: u64 = 1_000_000_007;
const CONTROL: u16 = 0x43;
const MS: u64 = 1_000_000;

/// Returns the time in nanoseconds after which `ticks` of the clock (105 ticks in 88 us) are complete.
fn ns(ticks: u64) -> u64 {
    (ticks * 88_000).div_ceil(105)
}

fn pit() -> Pit {
    Pit::new(true, BEGIN)
}

/// Programs a counter: its mode, and an initial count in two bytes.
fn program(pit: &mut Pit, counter: u16, mode: u8, count: u16, now: u64) {
    pit.write(CONTROL, (counter as u8) << 6 | 0x30 | mode << 1, now);
    load(pit, counter, count, now);
}

fn load(pit: &mut Pit, counter: u16, count: u16, now: u64) {
    for byte in count.to_le_bytes() {
        pit.write(0x40 + counter, byte, now);
    }
}

/// Latches a count and reads its two bytes.
fn count(pit: &mut Pit, counter: u16, now: u64) -> u16 {
    pit.write(CONTROL, (counter as u8) << 6, now);
    u16::from_le_bytes([pit.read(0x40 + counter, now), pit.read(0x40 + counter, now)])
}

fn status(pit: &mut Pit, counter: u16, now: u64) -> u8 {
    pit.write(CONTROL, 0xe0 | 2 << counter, now);
    pit.read(0x40 + counter, now)
}

fn out(pit: &mut Pit, counter: u16, now: u64) -> bool {
    status(pit, counter, now) & 0x80 != 0
}

fn set_gate(pit: &mut Pit, high: bool, now: u64) {
    pit.write(0x61, u8::from(high), now);
}

/// Opens the gate of counter 2, and programs it.
fn counter_2(mode: u8, count: u16) -> Pit {
    let mut pit = pit();
    set_gate(&mut pit, true, BEGIN);
    program(&mut pit, 2, mode, count, BEGIN);
    pit
}

/// Returns the level of counter 2's OUT at each of the first ticks of its count.
fn wave(pit: &mut Pit, begin: u64, ticks: u64) -> Vec<u8> {
    (0..ticks)
        .map(|tick| u8::from(out(pit, 2, begin + ns(tick))))
        .collect()
}

fn counts(pit: &mut Pit, begin: u64, ticks: u64) -> Vec<u16> {
    (0..ticks)
        .map(|tick| count(pit, 2, begin + ns(tick)))
        .collect()
}

#[test]
fn out_in_all_modes() {
    for (mode, expected) in [
        (0, [0, 0, 0, 0, 1, 1, 1, 1, 1]),
        (2, [1, 1, 1, 0, 1, 1, 1, 0, 1]),
        (3, [1, 1, 0, 0, 1, 1, 0, 0, 1]),
        (4, [1, 1, 1, 1, 0, 1, 1, 1, 1]),
    ] {
        let mut pit = counter_2(mode, 4);
        assert_eq!(wave(&mut pit, BEGIN, 9), expected, "mode {mode}");
    }
    for (mode, expected) in [(1, [0, 0, 0, 0, 1, 1, 1]), (5, [1, 1, 1, 1, 0, 1, 1])] {
        let mut pit = counter_2(mode, 4);
        assert_eq!(wave(&mut pit, BEGIN, 7), [1; 7], "mode {mode}: no trigger");
        // The trigger begins the count, and a second trigger begins it again.
        let mut begin = BEGIN + MS;
        for _ in 0..2 {
            set_gate(&mut pit, false, begin);
            set_gate(&mut pit, true, begin);
            assert_eq!(wave(&mut pit, begin, 3), expected[..3], "mode {mode}");
            begin += ns(3);
        }
        let begin = begin - ns(3);
        assert_eq!(wave(&mut pit, begin, 7), expected, "mode {mode}");
    }
    let mut odd = counter_2(3, 5);
    assert_eq!(wave(&mut odd, BEGIN, 10), [1, 1, 1, 0, 0, 1, 1, 1, 0, 0]);
}

#[test]
fn counts_in_all_modes() {
    for (mode, initial, expected) in [
        (0, 3, [3, 2, 1, 0, 0xffff, 0xfffe]),
        (2, 3, [3, 2, 1, 3, 2, 1]),
        (3, 4, [4, 2, 4, 2, 4, 2]),
        (3, 5, [4, 2, 0, 4, 2, 4]),
        (4, 3, [3, 2, 1, 0, 0xffff, 0xfffe]),
        (0, 0, [0, 0xffff, 0xfffe, 0xfffd, 0xfffc, 0xfffb]),
        (2, 0, [0, 0xffff, 0xfffe, 0xfffd, 0xfffc, 0xfffb]),
    ] {
        let mut pit = counter_2(mode, initial);
        assert_eq!(counts(&mut pit, BEGIN, 6), expected, "mode {mode}");
    }
    for mode in [1, 5] {
        let mut pit = counter_2(mode, 3);
        set_gate(&mut pit, false, BEGIN);
        set_gate(&mut pit, true, BEGIN);
        // A new initial count waits for the next trigger.
        load(&mut pit, 2, 9, BEGIN);
        assert_eq!(counts(&mut pit, BEGIN, 5), [3, 2, 1, 0, 0xffff]);
        set_gate(&mut pit, false, BEGIN + MS);
        set_gate(&mut pit, true, BEGIN + MS);
        assert_eq!(counts(&mut pit, BEGIN + MS, 3), [9, 8, 7]);
    }
}

#[test]
fn decimal_counts() {
    let mut pit = pit();
    set_gate(&mut pit, true, BEGIN);
    pit.write(CONTROL, 0xb1, BEGIN);
    load(&mut pit, 2, 0x1000, BEGIN);
    assert_eq!(counts(&mut pit, BEGIN, 3), [0x1000, 0x0999, 0x0998]);
    assert_eq!(count(&mut pit, 2, BEGIN + ns(1001)), 0x9999);
    assert!(out(&mut pit, 2, BEGIN + ns(1000)));
    assert_eq!(status(&mut pit, 2, BEGIN) & 0x3f, 0x31);
    // A count of 0 means the greatest count. Decimal counts with digits other than 0 to 9 do no harm.
    pit.write(CONTROL, 0x35, BEGIN);
    load(&mut pit, 0, 0, BEGIN);
    assert_eq!(pit.next_deadline(), Some(BEGIN + ns(10_000)));
    load(&mut pit, 0, 0xffff, BEGIN);
    assert_eq!(pit.next_deadline(), Some(BEGIN + ns(16_665)));
    count(&mut pit, 0, BEGIN + MS);
}

#[test]
fn a_low_gate_stops_the_count() {
    for mode in [0, 4] {
        let mut pit = counter_2(mode, 100);
        set_gate(&mut pit, false, BEGIN + ns(40));
        assert_eq!(count(&mut pit, 2, BEGIN + ns(1000)), 60);
        let again = BEGIN + ns(1000);
        set_gate(&mut pit, true, again);
        assert_eq!(count(&mut pit, 2, again + ns(10)), 50);
        assert_eq!(out(&mut pit, 2, again + ns(60)), mode == 0);
    }
    for mode in [2, 3] {
        let mut pit = counter_2(mode, 100);
        set_gate(&mut pit, false, BEGIN + ns(90));
        assert!(out(&mut pit, 2, BEGIN + ns(199)), "mode {mode}");
        let frozen = count(&mut pit, 2, BEGIN + ns(90));
        assert_eq!(count(&mut pit, 2, BEGIN + ns(123)), frozen);
        // The rising gate begins the count again.
        let again = BEGIN + ns(300);
        set_gate(&mut pit, true, again);
        assert_eq!(count(&mut pit, 2, again), 100);
        assert!(out(&mut pit, 2, again + ns(20)));
        assert!(!out(&mut pit, 2, again + ns(99)));
    }
    // A count that is written while the gate is low waits.
    let mut pit = counter_2(0, 100);
    set_gate(&mut pit, false, BEGIN);
    program(&mut pit, 2, 0, 50, BEGIN);
    assert_eq!(count(&mut pit, 2, BEGIN + MS), 50);
}

#[test]
fn bytes_of_a_count() {
    let mut pit = pit();
    // Only the low byte is written; the high byte is 0.
    pit.write(CONTROL, 0x14, BEGIN);
    pit.write(0x40, 0xf0, BEGIN);
    assert_eq!(pit.read(0x40, BEGIN), 0xf0);
    assert_eq!(pit.read(0x40, BEGIN + ns(1)), 0xef);
    // Only the high byte is written.
    pit.write(CONTROL, 0x24, BEGIN);
    pit.write(0x40, 0x12, BEGIN);
    assert_eq!(pit.save().channels[0].count, 0x1200);
    assert_eq!(pit.read(0x40, BEGIN + ns(1)), 0x11);
    assert_eq!(pit.read(0x40, BEGIN + ns(1)), 0x11);
    // In mode "both" without a latch, each of the two reads returns a byte of the count at the moment of that read.
    program(&mut pit, 0, 2, 0x1200, BEGIN);
    assert_eq!(pit.read(0x40, BEGIN), 0x00);
    assert_eq!(pit.read(0x40, BEGIN + ns(1)), 0x11);
    assert_eq!(pit.read(0x40, BEGIN + ns(1)), 0xff);
    // With a latch, both bytes are of the same time. A second latch before the read has no effect.
    pit.write(CONTROL, 0x00, BEGIN + ns(2));
    pit.write(CONTROL, 0x00, BEGIN + ns(3));
    assert_eq!(pit.read(0x40, BEGIN + ns(9)), 0xfe);
    assert_eq!(pit.read(0x40, BEGIN + ns(9)), 0x11);
    // A control word drops the latched count.
    pit.write(CONTROL, 0x00, BEGIN);
    program(&mut pit, 0, 2, 0x3456, BEGIN);
    assert_eq!(pit.read(0x40, BEGIN), 0x56);
    // The control word cannot be read.
    assert_eq!(pit.read(CONTROL, BEGIN), 0);
}

#[test]
fn read_back() {
    let mut pit = pit();
    program(&mut pit, 0, 2, 1000, BEGIN);
    // Reads the status first, then the count, of counters 0 and 2.
    pit.write(CONTROL, 0xc0 | 2 | 8, BEGIN + ns(10));
    assert_eq!(pit.read(0x40, BEGIN + ns(50)), 0xb4);
    assert_eq!(pit.read(0x40, BEGIN + ns(50)), 990u16.to_le_bytes()[0]);
    assert_eq!(pit.read(0x40, BEGIN + ns(50)), 990u16.to_le_bytes()[1]);
    assert_ne!(pit.save().channels[2].status_latched, 0);
    assert_eq!(pit.save().channels[1].status_latched, 0);
    // A control word sets the null count flag until a count is loaded.
    pit.write(CONTROL, 0x34, BEGIN);
    assert_eq!(status(&mut pit, 0, BEGIN), 0xf4);
    load(&mut pit, 0, 7, BEGIN);
    assert_eq!(status(&mut pit, 0, BEGIN), 0xb4);
    // Modes 6 and 7 mean modes 2 and 3.
    for (control, mode) in [(0x3c, 2), (0x3e, 3)] {
        pit.write(CONTROL, control, BEGIN);
        assert_eq!(pit.save().channels[0].mode, mode);
    }
}

#[test]
fn the_speaker_port() {
    let mut pit = counter_2(3, 100);
    pit.write(0x61, 0xff, BEGIN);
    assert_eq!(pit.save().flags, SPEAKER_DATA_ON);
    assert_eq!(pit.read(0x61, BEGIN) & !0x10, 0x23);
    assert_eq!(pit.read(0x61, BEGIN + ns(60)) & !0x10, 0x03);
    pit.write(0x61, 0, BEGIN);
    assert_eq!(pit.read(0x61, BEGIN + ns(60)) & !0x10, 0x20);
    assert_eq!(pit.save().flags, 0);
    let refresh = |pit: &mut Pit, now| pit.read(0x61, now) & 0x10;
    assert_ne!(
        refresh(&mut pit, BEGIN),
        refresh(&mut pit, BEGIN + (1 << 14))
    );
    assert!(pit.answers(0x61));
    let mut without = Pit::new(false, BEGIN);
    assert!(!without.answers(0x61));
    without.write(0x61, 3, BEGIN);
    assert_eq!(without.save().channels[2].gate, 0);
}

#[test]
fn ticks_of_all_modes() {
    for (mode, ticks) in [(0, 1), (1, 0), (2, 1000), (3, 1000), (4, 1), (5, 0)] {
        let mut pit = pit();
        pit.set_reinject(false);
        program(&mut pit, 0, mode, 1193, BEGIN);
        let mut pulses = 0;
        let mut now = BEGIN;
        while let Some(deadline) = pit.next_deadline().filter(|_| pulses < 1000) {
            assert!(deadline > now);
            assert!(!pit.expire(deadline - 1), "too early");
            now = deadline;
            assert!(pit.expire(now));
            pulses += 1;
            assert_eq!(now, BEGIN + ns(1193 * pulses), "no rounding adds up");
            if mode == 2 {
                assert_eq!(count(&mut pit, 0, now), 1193);
            }
        }
        assert_eq!(pulses, ticks, "mode {mode}");
    }
}

#[test]
fn nothing_ticks_until_programmed() {
    let mut pit = pit();
    assert_eq!(pit.next_deadline(), None);
    assert!(!pit.expire(u64::MAX));
    program(&mut pit, 2, 2, 10, BEGIN);
    program(&mut pit, 1, 2, 10, BEGIN);
    assert_eq!(pit.next_deadline(), None);
    program(&mut pit, 0, 2, 1000, BEGIN);
    assert!(pit.next_deadline().is_some());
    // A control word alone stops the count. Only in mode 0 the first byte of a count stops it, too.
    pit.write(CONTROL, 0x34, BEGIN);
    assert_eq!(pit.next_deadline(), None);
    for (mode, stops) in [(0, true), (2, false), (4, false)] {
        program(&mut pit, 0, mode, 1000, BEGIN);
        pit.write(0x40, 1, BEGIN);
        assert_eq!(pit.next_deadline().is_none(), stops, "mode {mode}");
        pit.write(0x40, 1, BEGIN);
        assert_eq!(pit.next_deadline(), Some(BEGIN + ns(0x101)));
    }
}

#[test]
fn a_period_is_at_least_200_us() {
    let mut pit = pit();
    pit.set_reinject(false);
    program(&mut pit, 0, 2, 2, BEGIN);
    let first = BEGIN + ns(2);
    assert_eq!(pit.next_deadline(), Some(first));
    assert!(pit.expire(first));
    assert_eq!(pit.next_deadline(), Some(first + 200_000));
    // The guest nevertheless sees the count that it wrote.
    assert_eq!(pit.save().channels[0].count, 2);
    // This call returns quickly, however late the caller is.
    assert!(pit.expire(u64::MAX - 1));
    assert!(!pit.expire(u64::MAX - 1));
}

#[test]
fn reinjected_ticks_wait_for_the_acknowledgement() {
    let mut pit = pit();
    program(&mut pit, 0, 2, 11_932, BEGIN);
    let tick = |n: u64| BEGIN + ns(11_932 * n);
    assert!(pit.expire(tick(1)));
    assert!(!pit.acknowledged());
    // Ticks 2 to 5 come before the guest's next acknowledgement. The guest gets their interrupts one after the other.
    assert!(pit.expire(tick(3)));
    assert!(!pit.expire(tick(5)));
    assert_eq!(pit.next_deadline(), Some(tick(6)));
    for _ in 0..3 {
        assert!(pit.acknowledged());
    }
    assert!(!pit.acknowledged());
    assert!(!pit.acknowledged(), "one too many is nothing");
    assert!(pit.expire(tick(6)));
    // After the guest has unmasked IRQ 0, no tick waits, because the interrupt may have been lost.
    assert!(!pit.expire(tick(9)));
    pit.reset_reinjection();
    assert!(!pit.acknowledged());
    assert!(pit.expire(tick(10)));
    // A new count also drops the waiting ticks.
    assert!(!pit.expire(tick(20)));
    load(&mut pit, 0, 11_932, tick(20));
    assert!(!pit.acknowledged());
    assert!(pit.expire(tick(30)));
}

#[test]
fn without_reinjection_late_ticks_are_one() {
    let mut pit = pit();
    assert!(pit.reinject());
    program(&mut pit, 0, 2, 11_932, BEGIN);
    let tick = |n: u64| BEGIN + ns(11_932 * n);
    assert!(pit.expire(tick(4)));
    pit.set_reinject(false);
    assert!(!pit.reinject());
    assert!(!pit.acknowledged(), "those that waited are dropped");
    assert!(pit.expire(tick(9)));
    assert!(!pit.acknowledged());
    assert!(pit.expire(tick(10)));
    assert!(pit.expire(tick(11)));
    pit.set_reinject(true);
    assert!(pit.expire(tick(12)));
    assert!(!pit.expire(tick(13)));
    pit.set_reinject(true);
    assert!(pit.acknowledged(), "no change");
}

#[test]
fn saving_and_restoring() {
    let mut pit = counter_2(3, 500);
    program(&mut pit, 0, 2, 11_932, BEGIN);
    let state = pit.save();
    assert_eq!(state.channels[0].count, 11_932);
    assert_eq!(state.channels[0].count_load_time, BEGIN as i64);

    let mut other = Pit::new(true, 5);
    assert_eq!(other.save().channels[1].mode, 0xff);
    assert_eq!(other.save().channels[1].count, 0x1_0000);
    other.restore(&state, 77);
    assert_eq!(other.next_deadline(), Some(77 + ns(11_932)));
    assert!(out(&mut other, 2, 77 + ns(249)) && !out(&mut other, 2, 77 + ns(250)));
    let mut saved = other.save();
    for (saved, state) in saved.channels.iter_mut().zip(&state.channels) {
        assert_eq!(saved.count_load_time, 77);
        saved.count_load_time = state.count_load_time;
        (saved.status, saved.status_latched) = (state.status, state.status_latched);
    }
    assert_eq!(saved, state);
    // A count of 0 means the greatest count.
    let mut zero = state;
    zero.channels[0].count = 0;
    other.restore(&zero, 77);
    assert_eq!(other.next_deadline(), Some(77 + ns(0x1_0000)));
}

#[test]
fn an_hpet_takes_irq_0_over() {
    let mut pit = pit();
    program(&mut pit, 0, 2, 11_932, BEGIN);
    let mut state = pit.save();
    state.flags = HPET_LEGACY;
    pit.restore(&state, BEGIN);
    assert_eq!(pit.next_deadline(), None);
    program(&mut pit, 0, 2, 5_000, BEGIN);
    assert_eq!(pit.next_deadline(), None);
    assert!(!pit.expire(BEGIN + 1000 * MS));
    assert_eq!(count(&mut pit, 0, BEGIN + ns(1)), 4_999);
    state = pit.save();
    state.flags = 0;
    pit.restore(&state, BEGIN);
    assert_eq!(pit.next_deadline(), Some(BEGIN + ns(5_000)));
}

#[test]
fn any_state_is_survived_and_kept() {
    let mut random = Random(5);
    for _ in 0..20_000 {
        let mut channel = || ChannelState {
            count: random.next() as u32,
            latched_count: random.next() as u16,
            count_latched: random.next() as u8,
            status_latched: random.next() as u8,
            status: random.next() as u8,
            read_state: random.next() as u8,
            write_state: random.next() as u8,
            write_latch: random.next() as u8,
            rw_mode: random.next() as u8,
            mode: random.next() as u8 & if random.bool() { 7 } else { 0xff },
            bcd: random.next() as u8,
            gate: random.next() as u8,
            count_load_time: random.next() as i64,
        };
        let state = PitState {
            channels: [channel(), channel(), channel()],
            flags: random.next() as u32,
        };
        let mut pit = pit();
        let mut now = random.next();
        pit.restore(&state, now);
        let mut saved = pit.save();
        for (saved, state) in saved.channels.iter_mut().zip(&state.channels) {
            saved.count_load_time = state.count_load_time;
        }
        assert_eq!(saved, state);
        for _ in 0..20 {
            // Time may even go back. Such a mistake of a caller must do no harm.
            now = match random.below(4) {
                0 => random.next(),
                _ => now.wrapping_add(random.below(1 << 30)),
            };
            let port = [0x40, 0x41, 0x42, 0x43, 0x61, 0x44, 0][random.below(7) as usize];
            match random.below(4) {
                0 => _ = pit.read(port, now),
                1 => pit.write(port, random.next() as u8, now),
                2 => _ = pit.expire(pit.next_deadline().unwrap_or(now)),
                _ => _ = pit.acknowledged(),
            }
        }
    }
}

/// The caller is late by random times, and the guest acknowledges late. With reinjection, the guest nevertheless gets
/// exactly as many interrupts as there are ticks.
#[test]
fn with_reinjection_no_tick_is_lost() {
    let mut random = Random(6);
    let mut pit = pit();
    let period = 5_000;
    program(&mut pit, 0, 3, period as u16, BEGIN);
    let mut now = BEGIN;
    let (mut interrupts, mut waiting) = (0, false);
    for _ in 0..100_000 {
        now += random.below(8 * MS);
        let pulse = match random.bool() {
            true => pit.expire(now),
            false if waiting => {
                waiting = false;
                pit.acknowledged()
            }
            false => false,
        };
        if pulse {
            assert!(!waiting, "one at a time");
            waiting = true;
            interrupts += 1;
        }
    }
    while waiting {
        waiting = pit.acknowledged();
        interrupts += u64::from(waiting);
    }
    let last = pit.next_deadline().unwrap();
    assert_eq!(BEGIN + ns(period * (interrupts + 1)), last);
    assert!(interrupts > 10_000);
}
