//! Tests the I/O APIC: its registers as a guest sees them, and random operations against simple rules.

use super::{DEFAULT_BASE, EntryWrite, IoApic, IoApicState, PINS, SUCCESSIVE};
use crate::line::Outcome;
use crate::message::{DeliveryMode, Destination, Message};
use crate::random::Random;
use std::vec::Vec;

const MASKED: u64 = 1 << 16;
const LEVEL: u64 = 1 << 15;
const REMOTE_IRR: u64 = 1 << 14;
/// The irq source id of resample irqfds.
const RESAMPLE: u8 = 1;

/// An I/O APIC, and the messages that it has sent to local APICs that accept all of them.
#[derive(Default)]
struct Machine {
    ioapic: IoApic,
    sent: Vec<Message>,
    /// The pins that were acknowledged.
    acknowledged: Vec<usize>,
    /// The sources, by bit, that hold a line only until its EOI, as resample irqfds do.
    resampled: u64,
}

impl Machine {
    fn set(&mut self, pin: usize, source: u8, level: bool) -> Outcome {
        self.ioapic.set_line(pin, source, level, &mut |message| {
            self.sent.push(message);
            1
        })
    }

    fn pulse(&mut self, pin: usize) -> Outcome {
        let outcome = self.set(pin, 0, true);
        assert_eq!(self.set(pin, 0, false), Outcome::Lowered);
        outcome
    }

    fn write(&mut self, offset: u64, data: &[u8]) -> Option<EntryWrite> {
        self.ioapic.write(
            offset,
            data,
            &mut |pin| {
                self.acknowledged.push(pin);
                self.resampled
            },
            &mut |message| {
                self.sent.push(message);
                1
            },
        )
    }

    fn write_register(&mut self, register: u8, value: u32) -> Option<EntryWrite> {
        assert_eq!(self.write(0x00, &[register]), None);
        self.write(0x10, &value.to_le_bytes())
    }

    fn read_register(&mut self, register: u8) -> u32 {
        self.write(0x00, &[register]);
        let mut value = [0xaa; 4];
        self.ioapic.read(0x10, &mut value);
        u32::from_le_bytes(value)
    }

    /// Writes the two halves of an entry, the low half last.
    fn program(&mut self, pin: usize, entry: u64) {
        let register = 0x10 + 2 * pin as u8;
        self.write_register(register + 1, (entry >> 32) as u32);
        self.write_register(register, entry as u32);
    }

    fn entry(&self, pin: usize) -> u64 {
        self.ioapic.save().redirtbl[pin]
    }

    fn eoi(&mut self, vector: u8, level: bool) -> u32 {
        self.ioapic.end_of_interrupt(
            vector,
            level,
            &mut |pin| {
                self.acknowledged.push(pin);
                self.resampled
            },
            &mut |message| {
                self.sent.push(message);
                1
            },
        )
    }

    fn vectors(&mut self) -> Vec<u8> {
        self.sent.drain(..).map(|message| message.vector).collect()
    }
}

#[test]
fn registers() {
    let mut machine = Machine::default();
    assert_eq!(machine.read_register(1), 0x0017_0011);
    machine.write_register(1, 0xffff_ffff);
    assert_eq!(machine.read_register(1), 0x0017_0011);
    machine.write_register(0, 0xff00_1234);
    assert_eq!(machine.read_register(0), 0x0f00_0000);
    assert_eq!(machine.read_register(2), 0x0f00_0000);
    assert_eq!(machine.read_register(0x10), MASKED as u32);
    assert_eq!(machine.read_register(0x3f), 0);
    for none in [3, 0x0f, 0x40, 0xff] {
        assert_eq!(machine.write_register(none, 0x1234), None);
        assert_eq!(machine.read_register(none), u32::MAX);
    }
    // Remote IRR and delivery status are read-only.
    machine.program(23, u64::MAX);
    assert_eq!(machine.entry(23), !(REMOTE_IRR | 1 << 12));
    // The I/O APIC has no EOI register at offset 0x40.
    assert_eq!(machine.write(0x40, &[0xff; 4]), None);
    assert!(machine.ioapic.contains(DEFAULT_BASE + 0xff));
    assert!(!machine.ioapic.contains(DEFAULT_BASE + 0x100));
    assert!(!machine.ioapic.contains(DEFAULT_BASE - 1));
}

#[test]
fn accesses_of_any_width() {
    let mut machine = Machine::default();
    machine.write(0x00, &[0x12, 0xff]);
    assert_eq!(machine.ioapic.save().ioregsel, 0x12);
    machine.write(0x10, &[1, 2, 3, 4, 5, 6, 7, 8]);
    assert_eq!(machine.entry(1), 0x0403_0201);
    machine.write(0x10, &[7]);
    assert_eq!(machine.entry(1), 7);
    for length in [0, 3, 5, 9, 64] {
        assert_eq!(machine.write(0x10, &std::vec![9; length]), None);
        assert_eq!(machine.entry(1), 7);
    }
    let mut wide = [0xaa; 8];
    machine.ioapic.read(0x10, &mut wide);
    assert_eq!(wide, [7, 0, 0, 0, 0, 0, 0, 0]);
    let mut none = [0xaa; 3];
    machine.ioapic.read(0x11, &mut none);
    assert_eq!(none, [0; 3]);
}

#[test]
fn entries_make_messages() {
    let mut machine = Machine::default();
    machine.program(2, 0x0900_0000_0000_0031);
    machine.program(3, 0x8100_0000_0000_0900 | LEVEL | 0x32);
    machine.program(4, 0xff00_0000_0000_0700 | 0x33);
    for pin in [2, 3, 4] {
        assert_eq!(machine.set(pin, 0, true), Outcome::Delivered(1));
    }
    let message = |vector, mode, level, destination| Message {
        vector,
        mode,
        level,
        assert: true,
        destination,
    };
    assert_eq!(
        machine.sent,
        [
            message(0x31, DeliveryMode::Fixed, false, Destination::Physical(9)),
            message(
                0x32,
                DeliveryMode::LowestPriority,
                true,
                Destination::Logical(0x81)
            ),
            message(0x33, DeliveryMode::ExtInt, false, Destination::All),
        ]
    );
}

#[test]
fn the_outcome_says_how_many_accepted() {
    let mut ioapic = Machine::default();
    ioapic.program(1, 0x31);
    ioapic.program(2, LEVEL | 0x32);
    let mut ioapic = ioapic.ioapic;
    assert_eq!(
        ioapic.set_line(1, 0, true, &mut |_| 3),
        Outcome::Delivered(3)
    );
    // If no APIC accepted the message, no APIC will report an EOI, so the pin does not wait for one.
    for _ in 0..2 {
        let outcome = ioapic.set_line(2, 0, true, &mut |_| 0);
        assert_eq!(outcome.status(), 0);
        assert_eq!(ioapic.save().redirtbl[2] & REMOTE_IRR, 0);
    }
    assert_eq!(
        ioapic.set_line(2, 0, true, &mut |_| 1),
        Outcome::Delivered(1)
    );
    for pin in [PINS, usize::MAX] {
        assert_eq!(
            ioapic.set_line(pin, 0, true, &mut |_| 1).status(),
            -1,
            "no such pin"
        );
    }
}

#[test]
fn edges() {
    let mut machine = Machine::default();
    // An edge at a masked pin is lost: no interrupt follows when the pin is unmasked.
    assert_eq!(machine.set(5, 0, true), Outcome::Ignored);
    assert_eq!(machine.set(5, 0, true), Outcome::Coalesced);
    machine.program(5, 0x35);
    assert_eq!(machine.vectors(), []);
    assert_eq!(machine.set(5, 0, false), Outcome::Lowered);
    assert_eq!(machine.set(5, 0, true), Outcome::Delivered(1));
    assert_eq!(machine.set(5, 9, true), Outcome::Coalesced);
    assert_eq!(machine.set(5, 0, false), Outcome::Coalesced);
    assert_eq!(machine.set(5, 9, false), Outcome::Lowered);
    assert_eq!(machine.vectors(), [0x35]);
    assert_eq!(machine.eoi(0x35, false), 0);
    assert_eq!(machine.acknowledged, [5]);
    assert_eq!(machine.vectors(), []);
}

#[test]
fn levels() {
    let mut machine = Machine::default();
    machine.program(9, LEVEL | 0x39);
    assert_eq!(machine.set(9, 0, true), Outcome::Delivered(1));
    assert_eq!(machine.entry(9), LEVEL | REMOTE_IRR | 0x39);
    assert_eq!(machine.set(9, 2, true), Outcome::Ignored);
    assert_eq!(machine.vectors(), [0x39]);
    machine.set(9, 0, false);
    machine.eoi(0x39, true);
    assert_eq!(machine.vectors(), [0x39], "source 2 holds it");
    machine.set(9, 2, false);
    machine.eoi(0x39, true);
    assert_eq!(machine.vectors(), []);
    assert_eq!(machine.entry(9), LEVEL | 0x39);
    // A level does not end with the EOI of another vector, nor with an EOI that the local APIC reports as that of an
    // edge.
    machine.set(9, 0, true);
    machine.eoi(0x38, true);
    machine.eoi(0x39, false);
    assert_eq!(machine.entry(9), LEVEL | REMOTE_IRR | 0x39);
}

#[test]
fn a_level_waits_for_the_unmasking() {
    let mut machine = Machine::default();
    machine.program(9, LEVEL | MASKED | 0x39);
    assert_eq!(machine.set(9, 0, true), Outcome::Ignored);
    let written = machine.write_register(0x10 + 18, (LEVEL | 0x39) as u32);
    let unmasked = EntryWrite {
        pin: 9,
        unmasked: true,
    };
    assert_eq!(written, Some(unmasked));
    assert_eq!(machine.vectors(), [0x39]);
    // The interrupt is in service, so masking and unmasking its pin delivers nothing.
    machine.program(9, LEVEL | MASKED | 0x39);
    machine.program(9, LEVEL | 0x39);
    assert_eq!(machine.vectors(), []);
    // If a level-triggered interrupt ends while its pin is masked and its line is high, the next interrupt waits until
    // the pin is unmasked.
    machine.program(9, LEVEL | MASKED | 0x39);
    machine.eoi(0x39, true);
    assert_eq!(machine.vectors(), []);
    machine.program(9, LEVEL | 0x39);
    assert_eq!(machine.vectors(), [0x39]);
}

#[test]
fn switching_to_edges_and_back_ends_a_level() {
    let mut machine = Machine::default();
    machine.program(9, LEVEL | 0x39);
    machine.set(9, 0, true);
    machine.program(9, MASKED | 0x39);
    assert_eq!(machine.entry(9), MASKED | 0x39);
    assert_eq!(machine.ioapic.save().irr, 0, "no edge waits");
    machine.program(9, LEVEL | MASKED | 0x39);
    assert_eq!(machine.ioapic.save().irr, 1 << 9, "a level does");
    machine.program(9, LEVEL | 0x39);
    assert_eq!(machine.vectors(), [0x39, 0x39]);
}

#[test]
fn resampled_lines_fall_at_their_acknowledgement() {
    let mut machine = Machine {
        resampled: 1 << RESAMPLE,
        ..Machine::default()
    };
    machine.program(9, LEVEL | 0x39);
    machine.set(9, RESAMPLE, true);
    machine.eoi(0x39, true);
    assert_eq!(
        (machine.vectors(), &machine.acknowledged[..]),
        (std::vec![0x39], &[9][..])
    );
    // The same device asks again before the guest has ended the interrupt, and so does another device.
    machine.set(9, RESAMPLE, true);
    machine.set(9, 0, true);
    machine.eoi(0x39, true);
    assert_eq!(machine.vectors(), [0x39, 0x39]);
    machine.set(9, 0, false);
    machine.eoi(0x39, true);
    assert_eq!(machine.vectors(), []);
    // A level that waits when the pin is unmasked may be out of date.
    machine.program(9, LEVEL | MASKED | 0x39);
    machine.set(9, RESAMPLE, true);
    machine.acknowledged.clear();
    machine.program(9, LEVEL | 0x39);
    assert_eq!(
        (machine.vectors(), &machine.acknowledged[..]),
        (std::vec![], &[9][..])
    );
}

#[test]
fn pins_can_share_a_vector() {
    let mut machine = Machine::default();
    for pin in [3, 7] {
        machine.program(pin, LEVEL | 0x40);
        machine.set(pin, 0, true);
    }
    machine.set(7, 0, false);
    machine.sent.clear();
    machine.eoi(0x40, true);
    assert_eq!(machine.acknowledged, [3, 7]);
    assert_eq!(machine.vectors(), [0x40]);
    assert_eq!(machine.entry(7), LEVEL | 0x40);
    assert!(machine.ioapic.handles(0x40) && machine.ioapic.handles(0));
    assert!(!machine.ioapic.handles(0x41));
    machine.program(0, 0xff);
    assert_eq!(machine.ioapic.vectors(), [1, 1, 0, 1 << 63]);
}

#[test]
fn a_storm_is_postponed() {
    let mut machine = Machine::default();
    machine.program(9, LEVEL | 0x39);
    machine.set(9, 0, true);
    for _ in 0..2 {
        machine.sent.clear();
        for _ in 1..SUCCESSIVE {
            assert_eq!(machine.eoi(0x39, true), 0);
        }
        assert_eq!(machine.vectors().len() as u32, SUCCESSIVE - 1);
        assert_eq!(machine.eoi(0x39, true), 1 << 9);
        assert_eq!(machine.vectors(), []);
        machine.ioapic.deliver_pending(&mut |message| {
            machine.sent.push(message);
            1
        });
        assert_eq!(machine.vectors(), [0x39]);
    }
    // If the line falls in between, repeated deliveries do not count as a storm.
    for _ in 0..3 {
        for _ in 1..SUCCESSIVE {
            assert_eq!(machine.eoi(0x39, true), 0);
        }
        machine.set(9, 0, false);
        assert_eq!(machine.eoi(0x39, true), 0);
        machine.set(9, 0, true);
    }
}

#[test]
fn a_restored_state_delivers_what_waited() {
    let mut machine = Machine::default();
    machine.program(3, 0x33);
    machine.program(4, LEVEL | 0x34);
    machine.program(5, LEVEL | MASKED | 0x35);
    for pin in [3, 4, 5] {
        machine.set(pin, 0, true);
    }
    let state = machine.ioapic.save();
    assert_eq!(state.irr, 1 << 4 | 1 << 5, "the edge is delivered");

    // An edge that was coalesced into a pending one is not delivered later.
    machine.set(3, 1, true);
    assert_eq!(machine.ioapic.save().irr, 1 << 3 | state.irr);

    let mut other = Machine::default();
    other.ioapic.restore(&state, &mut |_| unreachable!());
    assert_eq!(other.ioapic.save(), state);
    other.eoi(0x34, true);
    other.program(5, LEVEL | 0x35);
    assert_eq!(other.vectors(), [0x34, 0x35]);

    // As in KVM, requests that a VMM has set in the state are delivered.
    let state = IoApicState {
        irr: 1 << 3 | 0xff << 24,
        ..state
    };
    let mut sent = 0;
    other.ioapic.restore(&state, &mut |message| {
        assert_eq!(message.vector, 0x33);
        sent += 1;
        1
    });
    assert_eq!((sent, other.ioapic.save().irr), (1, 0));
}

/// After a restore the sources that hold the line of a level-triggered pin are unknown. An irqfd that has not raised
/// the line since the restore does not hold the line. So the level stays until the line is lowered.
#[test]
fn a_restored_level_does_not_end_with_its_interrupt() {
    let mut machine = Machine {
        resampled: 1 << RESAMPLE,
        ..Machine::default()
    };
    let mut state = machine.ioapic.save();
    (state.irr, state.redirtbl[4]) = (1 << 4, LEVEL | REMOTE_IRR | 0x34);
    machine.ioapic.restore(&state, &mut |_| unreachable!());
    for _ in 0..2 {
        machine.eoi(0x34, true);
        assert_eq!(machine.vectors(), [0x34]);
    }
    machine.set(4, 0, false);
    machine.eoi(0x34, true);
    assert_eq!(machine.vectors(), []);
}

#[test]
fn any_state_is_survived_and_kept() {
    let mut random = Random(1);
    for _ in 0..5_000 {
        let state = IoApicState {
            base_address: random.next(),
            ioregsel: random.next() as u32 >> (random.next() & 31),
            id: random.next() as u32,
            irr: random.next() as u32,
            pad: random.next() as u32,
            redirtbl: core::array::from_fn(|_| random.next()),
        };
        let mut machine = Machine::default();
        machine.ioapic.restore(&state, &mut |_| 0);
        let saved = machine.ioapic.save();
        let expected = IoApicState {
            irr: saved.irr,
            ..state
        };
        assert_eq!(saved, expected);
        assert!(machine.ioapic.contains(state.base_address));
        for _ in 0..20 {
            let mut data = [0; 12];
            let length = random.below(13) as usize;
            let offset = [0, 0x10, 0x40, u64::MAX][random.below(4) as usize];
            machine.ioapic.read(offset, &mut data[..length]);
            data.fill_with(|| random.next() as u8);
            machine.resampled = random.next();
            machine.write(offset, &data[..length]);
            machine.set(
                random.below(26) as usize,
                random.next() as u8,
                random.bool(),
            );
            machine.eoi(random.next() as u8, random.bool());
        }
    }
}

/// Compares the I/O APIC with the rules, for edges and levels at random pins, and masks and EOIs in any order.
#[test]
fn every_interrupt_is_delivered_coalesced_or_ignored() {
    let mut random = Random(4);
    let mut machine = Machine::default();
    let is_odd = |pin: usize| pin & 1 != 0;
    let entry = |pin: usize| 0x40 + pin as u64 + if is_odd(pin) { LEVEL } else { 0 };
    for pin in 0..PINS {
        machine.program(pin, entry(pin) | MASKED);
    }
    // The state on which the rules depend: masked pins, held levels, and levels that were sent and not ended.
    let (mut masked, mut held, mut in_service) = ([true; PINS], [false; PINS], [false; PINS]);
    let (mut injected, mut delivered, mut lost) = (0, 0, 0);
    for round in 0..300_000 {
        let pin = random.below(PINS as u64) as usize;
        let is_level = is_odd(pin);
        machine.sent.clear();
        let expected;
        match random.below(4) {
            0 if !is_level => {
                injected += 1;
                let outcome = machine.pulse(pin);
                expected = usize::from(!masked[pin]);
                let rule = match masked[pin] {
                    true => Outcome::Ignored,
                    false => Outcome::Delivered(1),
                };
                assert_eq!(outcome, rule);
                delivered += expected;
                lost += 1 - expected;
            }
            0 => {
                let raise = random.bool();
                let outcome = machine.set(pin, 0, raise);
                expected = usize::from(raise && !masked[pin] && !in_service[pin]);
                let rule = match (raise, expected) {
                    (false, _) => Outcome::Lowered,
                    (true, 0) => Outcome::Ignored,
                    (true, _) => Outcome::Delivered(1),
                };
                assert_eq!(outcome, rule);
                held[pin] = raise;
            }
            1 => {
                masked[pin] = random.below(4) == 0 && round < 299_000;
                machine.program(pin, entry(pin) | if masked[pin] { MASKED } else { 0 });
                expected = usize::from(is_level && held[pin] && !masked[pin] && !in_service[pin]);
            }
            _ => {
                machine.eoi(entry(pin) as u8, is_level);
                expected = usize::from(is_level && held[pin] && !masked[pin]);
                in_service[pin] = false;
            }
        }
        assert_eq!(machine.sent.len(), expected, "round {round}, pin {pin}");
        for message in &machine.sent {
            assert_eq!(u64::from(message.vector), entry(pin) & 0xff);
            in_service[pin] |= is_level;
        }
        let remote_irr = machine.entry(pin) & REMOTE_IRR != 0;
        assert_eq!(remote_irr, in_service[pin]);
    }
    assert_eq!(delivered + lost, injected);
    assert!(delivered > 0 && lost > 0);
    // No level is lost: each held level was delivered, or is delivered when it ends.
    for pin in (1..PINS).step_by(2).filter(|&pin| held[pin]) {
        machine.program(pin, entry(pin));
        assert_ne!(machine.entry(pin) & REMOTE_IRR, 0);
    }
}

/// A guest that ends each interrupt before the next edge gets exactly as many interrupts as were injected.
#[test]
fn with_an_end_between_none_is_lost() {
    let mut machine = Machine::default();
    machine.program(6, 0x46);
    machine.program(7, LEVEL | 0x47);
    for _ in 0..1_000 {
        assert_eq!(machine.pulse(6), Outcome::Delivered(1));
        machine.eoi(0x46, false);
        assert_eq!(machine.set(7, 0, true), Outcome::Delivered(1));
        machine.set(7, 0, false);
        machine.eoi(0x47, true);
    }
    assert_eq!(machine.sent.len(), 2_000);
}
