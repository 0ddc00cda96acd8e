//! Tests the pair of 8259A: each command of the data sheet, and random operations against simple rules.

use super::{Chip, LINES, PicState, Pics};
use crate::line::Outcome;
use crate::random::Random;

const SLAVE_BASE: u8 = 0x70;
const EOI: u8 = 0x20;

/// Returns a pair as a BIOS initializes it, with `icw4` for both chips.
fn initialized(icw4: u8) -> Pics {
    let mut pics = Pics::new();
    for (port, base, wiring) in [(0x20, 8, 4), (0xa0, SLAVE_BASE, 2)] {
        pics.write(port, 0x11);
        for word in [base, wiring, icw4] {
            pics.write(port + 1, word);
        }
    }
    pics
}

fn pics() -> Pics {
    initialized(1)
}

fn pulse(pics: &mut Pics, irq: usize) -> Outcome {
    let outcome = pics.set_line(irq, 0, true);
    pics.set_line(irq, 0, false);
    outcome
}

fn vector(irq: usize) -> u8 {
    match irq {
        0..8 => 8 + irq as u8,
        _ => SLAVE_BASE + irq as u8 - 8,
    }
}

/// Acknowledges an interrupt, and checks that it is the interrupt of `irq`.
#[track_caller]
fn expect(pics: &mut Pics, irq: usize) {
    assert!(pics.output());
    assert_eq!(pics.acknowledge().vector, vector(irq));
}

#[test]
fn edges_are_latched_and_coalesced() {
    let mut pics = pics();
    assert_eq!(pics.set_line(4, 0, true), Outcome::Delivered(1));
    assert_eq!(pics.set_line(4, 0, true), Outcome::Coalesced);
    assert_eq!(pics.set_line(4, 0, false), Outcome::Lowered);
    assert_eq!(pics.set_line(4, 0, true), Outcome::Coalesced);
    expect(&mut pics, 4);
    assert!(!pics.output());
    // A line that stays high causes no second interrupt.
    assert_eq!(pics.write(0x20, EOI).ended, 1 << 4);
    assert!(!pics.output());
    assert_eq!(pics.set_line(4, 0, true), Outcome::Coalesced);
    assert!(!pics.output());
}

#[test]
fn levels_come_again_until_they_fall() {
    let mut pics = pics();
    pics.write(0x4d0, 1 << 5);
    assert_eq!(pics.set_line(5, 0, true), Outcome::Delivered(1));
    for _ in 0..3 {
        expect(&mut pics, 5);
        assert!(!pics.output());
        assert_eq!(pics.write(0x20, EOI).ended, 1 << 5);
    }
    assert_eq!(pics.set_line(5, 0, false), Outcome::Lowered);
    assert!(!pics.output());
}

#[test]
fn sources_share_a_line() {
    let mut pics = pics();
    pics.write(0x4d1, 1 << 2);
    pics.set_line(10, 0, true);
    pics.set_line(10, 63, true);
    pics.set_line(10, 0, false);
    expect(&mut pics, 10);
    assert_eq!(pics.write(0xa0, EOI).ended, 1 << 10);
    assert_eq!(pics.write(0x20, EOI).ended, 1 << 2);
    expect(&mut pics, 10);
    pics.set_line(10, 63, false);
    pics.write(0xa0, EOI);
    pics.write(0x20, EOI);
    // The slave's request was withdrawn, but the master had latched it. So the CPU gets the slave's spurious interrupt,
    // and no other.
    while pics.output() {
        assert_eq!(pics.acknowledge().vector, SLAVE_BASE + 7);
        pics.write(0x20, EOI);
    }
}

#[test]
fn edge_level_registers_keep_the_fixed_lines() {
    let mut pics = Pics::new();
    pics.write(0x4d0, 0xff);
    pics.write(0x4d1, 0xff);
    assert_eq!((pics.read(0x4d0).0, pics.read(0x4d1).0), (0xf8, 0xde));
}

#[test]
fn masked_lines_wait() {
    let mut pics = pics();
    pics.write(0x21, 0xff);
    assert_eq!(pics.read(0x21).0, 0xff);
    assert_eq!(pulse(&mut pics, 3), Outcome::Ignored);
    assert!(!pics.output());
    assert_eq!(pics.write(0x21, 0xf6).unmasked, 0b1001);
    expect(&mut pics, 3);
}

#[test]
fn higher_priorities_nest() {
    let mut pics = pics();
    pulse(&mut pics, 4);
    expect(&mut pics, 4);
    pulse(&mut pics, 6);
    assert!(!pics.output());
    pulse(&mut pics, 9);
    expect(&mut pics, 9);
    pulse(&mut pics, 1);
    expect(&mut pics, 1);
    assert_eq!(pics.write(0x20, EOI).ended, 1 << 1);
    assert!(!pics.output());
    assert_eq!(pics.write(0xa0, EOI).ended, 1 << 9);
    assert_eq!(pics.write(0x20, EOI).ended, 1 << 2);
    assert!(!pics.output());
    assert_eq!(pics.write(0x20, EOI).ended, 1 << 4);
    expect(&mut pics, 6);
    // If nothing is in service, an EOI ends nothing.
    assert_eq!(pics.write(0x20, EOI).ended, 1 << 6);
    assert_eq!(pics.write(0x20, EOI).ended, 0);
}

#[test]
fn what_is_withdrawn_is_spurious() {
    let mut pics = pics();
    pics.write(0x4d0, 1 << 5);
    pics.set_line(5, 0, true);
    assert!(pics.output());
    pics.set_line(5, 0, false);
    assert!(!pics.output());
    assert_eq!(pics.acknowledge().vector, 8 + 7);
    pics.write(0x20, 0x0b);
    assert_eq!(pics.read(0x20).0, 0, "nothing is in service");

    pulse(&mut pics, 9);
    pics.write(0xa1, 0xff);
    assert!(pics.output());
    assert_eq!(pics.acknowledge().vector, SLAVE_BASE + 7);
    assert_eq!(pics.read(0x20).0, 1 << 2, "the master knows no better");
    pics.write(0xa0, 0x0b);
    assert_eq!(pics.read(0xa0).0, 0);
}

#[test]
fn specific_ends_and_set_priority() {
    let mut pics = pics();
    pulse(&mut pics, 4);
    expect(&mut pics, 4);
    pulse(&mut pics, 1);
    expect(&mut pics, 1);
    assert_eq!(pics.write(0x20, 0x60 | 4).ended, 1 << 4);
    assert_eq!(pics.write(0x20, 0x60 | 4).ended, 0);
    assert_eq!(pics.write(0x20, 0x60 | 1).ended, 1 << 1);
    // Line 5 gets the lowest priority: 6 is highest, then 7 and 0.
    assert_eq!(pics.write(0x20, 0xc0 | 5).ended, 0);
    for irq in [0, 5, 6, 7] {
        pulse(&mut pics, irq);
    }
    for irq in [6, 7, 0, 5] {
        expect(&mut pics, irq);
        assert_eq!(pics.write(0x20, EOI).ended, 1 << irq);
    }
    // The OCW2 command 0b010 is "no operation".
    let before = pics.save(Chip::Master);
    pics.write(0x20, 0x40 | 3);
    assert_eq!(pics.save(Chip::Master), before);
}

#[test]
fn priorities_rotate() {
    let mut pics = pics();
    pulse(&mut pics, 3);
    expect(&mut pics, 3);
    assert_eq!(pics.write(0x20, 0xa0).ended, 1 << 3);
    pulse(&mut pics, 0);
    pulse(&mut pics, 3);
    pulse(&mut pics, 4);
    expect(&mut pics, 4);
    // A rotating specific EOI: line 0 would be next, but line 0 has the lowest priority now.
    assert_eq!(pics.write(0x20, 0xe0 | 4).ended, 1 << 4);
    assert_eq!(pics.save(Chip::Master).priority_add, 5);
    expect(&mut pics, 0);
}

#[test]
fn automatic_ends() {
    let mut pics = initialized(3);
    pulse(&mut pics, 9);
    let acknowledged = pics.acknowledge();
    assert_eq!(acknowledged.vector, vector(9));
    assert_eq!(acknowledged.ended, 1 << 9 | 1 << 2);
    // No interrupt is in service, so lower priorities are delivered at once.
    pics.write(0x20, 0x80);
    for irq in [5, 5, 6, 5] {
        pulse(&mut pics, irq);
        assert_eq!(pics.acknowledge().ended, 1 << irq);
    }
    assert_eq!(pics.save(Chip::Master).priority_add, 6, "rotated");
    pics.write(0x20, 0x00);
    pulse(&mut pics, 1);
    pics.acknowledge();
    assert_eq!(pics.save(Chip::Master).priority_add, 6);
}

#[test]
fn special_mask_mode_lets_lower_priorities_in() {
    let mut pics = pics();
    pulse(&mut pics, 3);
    expect(&mut pics, 3);
    pulse(&mut pics, 6);
    pics.write(0x21, 1 << 3);
    assert!(!pics.output());
    pics.write(0x20, 0x68);
    expect(&mut pics, 6);
    // A masked interrupt in service needs a specific end command.
    assert_eq!(pics.write(0x20, EOI).ended, 1 << 6);
    assert_eq!(pics.write(0x20, EOI).ended, 0);
    assert_eq!(pics.write(0x20, 0x60 | 3).ended, 1 << 3);
    pics.write(0x20, 0x48);
    assert_eq!(pics.save(Chip::Master).special_mask, 0);
}

#[test]
fn special_fully_nested_mode_nests_the_slave() {
    for (icw4, nests) in [(1, false), (0x11, true)] {
        let mut pics = initialized(icw4);
        pulse(&mut pics, 12);
        expect(&mut pics, 12);
        pulse(&mut pics, 8);
        assert_eq!(pics.output(), nests);
        if nests {
            expect(&mut pics, 8);
        }
        // Lower priorities of the master still wait.
        pulse(&mut pics, 3);
        assert_eq!(pics.save(Chip::Master).irr & 1 << 3, 1 << 3);
        assert!(!pics.output());
    }
}

#[test]
fn a_poll_acknowledges() {
    let mut pics = pics();
    pics.write(0x20, 0x0c);
    assert_eq!(pics.read(0x20), (7, 0), "nothing");
    pulse(&mut pics, 5);
    pics.write(0x20, 0x0c);
    assert_eq!(pics.read(0x21), (0x85, 0));
    assert_eq!(pics.save(Chip::Master).isr, 1 << 5);
    assert_eq!(pics.write(0x20, EOI).ended, 1 << 5);
    // A poll command turns only the next read into a poll.
    assert_eq!(pics.read(0x21).0, 0);

    pulse(&mut pics, 11);
    assert!(pics.output());
    pics.write(0xa0, 0x0c);
    assert_eq!(pics.read(0xa0).0, 0x83);
    assert!(!pics.output());
    assert_eq!(pics.write(0xa0, EOI).ended, 1 << 11);
}

#[test]
fn an_automatic_end_of_a_poll_is_reported() {
    let mut pics = initialized(3);
    pulse(&mut pics, 12);
    pics.write(0xa0, 0x0c);
    assert_eq!(pics.read(0xa0), (0x84, 1 << 12));
}

#[test]
fn initialization() {
    let mut pics = pics();
    pics.write(0x21, 0xf0);
    pulse(&mut pics, 1);
    expect(&mut pics, 1);
    pulse(&mut pics, 3);
    pics.set_line(4, 0, true);
    pics.write(0x20, 0x0b);
    let change = pics.write(0x20, 0x10);
    // The interrupts that ICW1 discards are reported as ended, because other parts may wait for their end.
    assert_eq!((change.ended, change.unmasked), (0b11010, 0xf0));
    let state = pics.save(Chip::Master);
    assert_eq!((state.irr, state.isr, state.imr), (0, 0, 0));
    assert_eq!(state.read_reg_select, 0);
    // Without ICW4 two more initialisation words follow.
    pics.write(0x21, 0x47);
    pics.write(0x21, 4);
    pics.write(0x21, 0x55);
    let state = pics.save(Chip::Master);
    assert_eq!(
        (state.irq_base, state.imr, state.init_state),
        (0x40, 0x55, 0)
    );
    // The line that stayed high can cause an edge again.
    pics.write(0x21, 0);
    assert_eq!(pics.set_line(4, 0, true), Outcome::Delivered(1));
    assert_eq!(pics.acknowledge().vector, 0x44);
}

#[test]
fn any_state_is_survived_and_kept() {
    let mut random = Random(1);
    let ports = [0x20, 0x21, 0xa0, 0xa1, 0x4d0, 0x4d1, 0, 0x22, 0xffff];
    for _ in 0..20_000 {
        let mut pics = Pics::new();
        let mut byte = || random.next() as u8;
        let state = PicState {
            last_irr: byte(),
            irr: byte(),
            imr: byte(),
            isr: byte(),
            priority_add: byte(),
            irq_base: byte(),
            read_reg_select: byte(),
            poll: byte(),
            special_mask: byte(),
            init_state: byte(),
            auto_eoi: byte(),
            rotate_on_auto_eoi: byte(),
            special_fully_nested_mode: byte(),
            init4: byte(),
            elcr: byte(),
            elcr_mask: byte(),
        };
        pics.restore(Chip::Slave, &state);
        assert_eq!(pics.save(Chip::Slave), state);
        pics.restore(Chip::Master, &state);
        let cascade = state.irr | 1 << 2;
        let mut saved = pics.save(Chip::Master);
        assert_eq!(saved.irr | 1 << 2, cascade);
        saved.irr = state.irr;
        assert_eq!(saved, state);
        for _ in 0..8 {
            let port = ports[random.below(ports.len() as u64) as usize];
            match random.below(4) {
                0 => _ = pics.read(port),
                1 => _ = pics.write(port, random.next() as u8),
                2 => _ = pics.acknowledge(),
                _ => {
                    let line = random.below(LINES as u64 + 2) as usize;
                    _ = pics.set_line(line, random.next() as u8, random.bool());
                }
            }
            if pics.output() {
                let request = pics.save(Chip::Master);
                assert_ne!(request.irr & !request.imr, 0);
            }
        }
    }
}

/// Ends the interrupt of `irq` as a guest does.
fn end(pics: &mut Pics, irq: usize) {
    let mut ended = 0;
    if irq >= 8 {
        ended |= pics.write(0xa0, 0x60 | irq as u8 & 7).ended;
        pics.write(0x20, 0x60 | 2);
    } else {
        ended |= pics.write(0x20, 0x60 | irq as u8).ended;
    }
    assert_eq!(ended, 1 << irq);
}

fn line_of(vector: u8) -> usize {
    (0..LINES).find(|&irq| self::vector(irq) == vector).unwrap()
}

/// Devices cause edges, lines are masked and unmasked, and a guest serves interrupts late. Each edge that was reported
/// as delivered, or that was the first at a masked line, causes one interrupt in the guest. Other edges cause none.
#[test]
fn every_edge_is_one_interrupt_or_coalesced() {
    let mut random = Random(2);
    let mut pics = pics();
    let lines = [0, 1, 3, 4, 5, 6, 8, 9, 11, 14];
    let (mut injected, mut reported, mut coalesced, mut served) =
        ([0; LINES], [0; LINES], [0; LINES], [0; LINES]);
    let mut waiting = [false; LINES];
    let mut in_service = std::vec::Vec::new();
    for round in 0..200_000 {
        let last = round > 199_000;
        match random.below(if last { 2 } else { 4 }) {
            0 if pics.output() => {
                let irq = line_of(pics.acknowledge().vector);
                assert!(core::mem::take(&mut waiting[irq]));
                served[irq] += 1;
                in_service.push(irq);
            }
            1 => {
                if let Some(irq) = in_service.pop() {
                    end(&mut pics, irq);
                } else if last {
                    pics.write(0x21, 0);
                    pics.write(0xa1, 0);
                }
            }
            2 => {
                let irq = lines[random.below(lines.len() as u64) as usize];
                injected[irq] += 1;
                match pulse(&mut pics, irq) {
                    Outcome::Delivered(1) => {
                        reported[irq] += 1;
                        assert!(!core::mem::replace(&mut waiting[irq], true));
                    }
                    Outcome::Coalesced => {
                        coalesced[irq] += 1;
                        assert!(waiting[irq]);
                    }
                    Outcome::Ignored if core::mem::replace(&mut waiting[irq], true) => {
                        coalesced[irq] += 1;
                    }
                    Outcome::Ignored => reported[irq] += 1,
                    outcome => panic!("{outcome:?}"),
                }
            }
            3 if random.below(8) == 0 => {
                // Line 2 stays unmasked, and no requested line is masked. Otherwise the master would keep the slave's
                // latched request, and line 15 would get a spurious interrupt.
                let state = pics.save(Chip::Slave);
                pics.write(0x21, random.next() as u8 & !(1 << 2));
                pics.write(0xa1, random.next() as u8 & !state.irr);
            }
            _ => {}
        }
    }
    for irq in lines {
        assert!(served[irq] > 0);
        assert_eq!(served[irq], reported[irq], "line {irq}");
        assert_eq!(reported[irq] + coalesced[irq], injected[irq]);
    }
}

/// Devices hold their line until the guest has served them. Each level is served, in any order of events.
#[test]
fn every_level_is_served() {
    let mut random = Random(3);
    let mut pics = pics();
    pics.write(0x4d0, 0xf8);
    pics.write(0x4d1, 0xde);
    let lines = [3, 4, 5, 7, 9, 10, 11, 12, 14];
    let mut held = [0u64; LINES];
    let (mut raised, mut served) = (0, 0);
    for round in 0..100_000 {
        let irq = lines[random.below(lines.len() as u64) as usize];
        let source = random.below(64) as u8;
        if round < 90_000 && held[irq] & 1 << source == 0 && random.below(4) == 0 {
            held[irq] |= 1 << source;
            raised += 1;
            let outcome = pics.set_line(irq, source, true);
            assert!(matches!(
                outcome,
                Outcome::Delivered(1) | Outcome::Coalesced
            ));
        }
        if pics.output() {
            let irq = line_of(pics.acknowledge().vector);
            // The guest serves one of the devices that hold the line.
            if held[irq] != 0 {
                let source = held[irq].trailing_zeros() as u8;
                held[irq] &= held[irq] - 1;
                served += 1;
                pics.set_line(irq, source, false);
            } else {
                assert_eq!(irq, 15, "only the slave's spurious interrupt");
                pics.write(0x20, EOI);
                continue;
            }
            end(&mut pics, irq);
        }
    }
    assert_eq!(held, [0; LINES]);
    assert_eq!(raised, served);
}

/// After a restore the sources that hold a line are unknown: the level stays until the line is lowered.
#[test]
fn a_restored_level_does_not_end_with_its_interrupt() {
    let mut pics = Pics::with_sources_until_end(1 << 1);
    let saved = pics.save(Chip::Master);
    let (irr, last_irr) = (1 << 5, 1 << 5 | 1 << 3);
    let state = PicState {
        irr,
        last_irr,
        isr: 1 << 5 | 1 << 3,
        elcr: 1 << 5,
        ..saved
    };
    pics.restore(Chip::Master, &state);
    assert_eq!(pics.write(0x20, 0x60 | 5).ended, 1 << 5);
    assert_eq!(pics.write(0x20, 0x60 | 3).ended, 1 << 3);
    let saved = pics.save(Chip::Master);
    assert_eq!((saved.irr, saved.last_irr), (irr, last_irr));
    pics.set_line(5, 0, false);
    assert!(!pics.output());
}
