//! The pair of 8259A interrupt controllers of a PC, with the edge/level registers of its chipset.
//!
//! The slave's output is input 2 of the master. As in KVM, the master latches a request of the slave like an edge. If
//! the slave withdraws the request before the CPU acknowledges it, the CPU gets the slave's spurious interrupt, 15.
//!
//! The guest ends an interrupt by a command, or makes the controller end it automatically. Calls that can end
//! interrupts return the lines of these interrupts, because other parts wait for their end: the resamplefds of
//! `KVM_IRQFD`, and the next tick of the 8254.
//!
//! As in KVM, these are not implemented: a single 8259A, and level-triggered mode for all inputs at once (ICW1's SNGL
//! and LTIM).

mod i8259;
#[cfg(test)]
mod tests;

use crate::line::{Lines, Outcome};
pub use i8259::PicState;

/// The number of lines of the pair.
pub const LINES: usize = 16;
/// The master's input that the slave's output drives.
const CASCADE: u8 = 2;
/// The input whose vector the CPU gets if it acknowledges an interrupt while no input has a request (a spurious
/// interrupt).
const SPURIOUS: u8 = 7;
/// The lines that the edge/level registers can make level-triggered: all lines but 0, 1, 2, 8 and 13.
const ELCR_MASK: [u8; 2] = [0xf8, 0xde];

/// One controller of the pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Chip {
    /// Lines 0 to 7.
    Master,
    /// Lines 8 to 15.
    Slave,
}

/// A register of the pair, as a port selects it.
#[derive(Clone, Copy)]
enum Register {
    Command,
    Data,
    EdgeLevel,
}

/// The result of acknowledging the pair's interrupt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Acknowledged {
    /// The vector of the interrupt that the CPU delivers.
    pub vector: u8,
    /// The lines, by bit, whose interrupt ended at once (automatic EOI).
    pub ended: u16,
}

/// The changes made by a write to a port.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Change {
    /// The lines, by bit, whose interrupt ended.
    pub ended: u16,
    /// The lines, by bit, that were masked before and are not masked any longer.
    pub unmasked: u16,
}

/// The pair of 8259A interrupt controllers of a PC.
#[derive(Clone, Debug)]
pub struct Pics {
    /// Master and slave.
    chips: [PicState; 2],
    lines: Lines<LINES>,
    /// The sources, by bit, that hold a line only until the guest ends the line's interrupt.
    until_end: u64,
}

impl Default for Pics {
    fn default() -> Self {
        Self::new()
    }
}

impl Pics {
    /// Creates the pair as after reset.
    pub const fn new() -> Self {
        Self::with_sources_until_end(0)
    }

    /// Creates the pair like [`new`](Self::new), but each source with a bit in `sources` raises its line only until the
    /// guest ends the line's interrupt. Such a source lowers the line before the pair looks at its lines again.
    /// Otherwise the slave would ask the master once more for that line, and the CPU would get a spurious interrupt.
    pub const fn with_sources_until_end(sources: u64) -> Self {
        Pics {
            chips: [PicState::new(ELCR_MASK[0]), PicState::new(ELCR_MASK[1])],
            lines: Lines::new(),
            until_end: sources,
        }
    }

    /// Makes the sources of `until_end` release the lines of `ended`. Call after the interrupts of these lines have
    /// ended, before [`cascade`](Self::cascade).
    fn release(&mut self, ended: u16) {
        for irq in (0..LINES).filter(|irq| ended >> irq & 1 != 0) {
            if self.lines.lower(irq, self.until_end) {
                self.chips[irq >> 3].set_input(irq as u8 & 7, false);
            }
        }
    }

    /// Makes `source` (modulo 64) hold line `irq` high, or stop holding it high. If the line is already high, there is
    /// no new edge, and the result is [`Outcome::Coalesced`]. (KVM's `KVM_IRQ_LINE_STATUS` reports this case as 1.)
    pub fn set_line(&mut self, irq: usize, source: u8, level: bool) -> Outcome {
        if irq >= LINES {
            return Outcome::Ignored;
        }
        let level = self.lines.set(irq, source, level);
        let outcome = self.chips[irq >> 3].set_input(irq as u8 & 7, level);
        self.cascade();
        outcome
    }

    /// Whether the pair asks the CPU for an interrupt now: its INTR line. Check after every other call.
    pub fn output(&self) -> bool {
        self.request(Chip::Master).is_some()
    }

    /// Acknowledges the interrupt for which [`output`](Self::output) asks. If there is no such interrupt any longer,
    /// returns the vector of a spurious interrupt.
    pub fn acknowledge(&mut self) -> Acknowledged {
        let [master, slave] = &mut self.chips;
        let mut vector = master.irq_base.wrapping_add(SPURIOUS);
        let mut ended = 0;
        if let Some(input) = master.request(Some(CASCADE)) {
            vector = master.irq_base.wrapping_add(input);
            ended = u16::from(master.acknowledge(input));
            if input == CASCADE {
                let input = slave.request(None);
                vector = slave.irq_base.wrapping_add(input.unwrap_or(SPURIOUS));
                ended |= input.map_or(0, |input| u16::from(slave.acknowledge(input)) << 8);
            }
        }
        self.release(ended);
        self.cascade();
        Acknowledged { vector, ended }
    }

    fn request(&self, chip: Chip) -> Option<u8> {
        let cascade = (chip == Chip::Master).then_some(CASCADE);
        self.chips[chip as usize].request(cascade)
    }

    /// If the slave has a request, latches it at the master's input that the slave drives. Call after every change.
    fn cascade(&mut self) {
        if self.request(Chip::Slave).is_some() {
            self.chips[0].latch(CASCADE);
        }
    }

    fn register(port: u16) -> Option<(Chip, Register)> {
        match port {
            0x20 => Some((Chip::Master, Register::Command)),
            0x21 => Some((Chip::Master, Register::Data)),
            0xa0 => Some((Chip::Slave, Register::Command)),
            0xa1 => Some((Chip::Slave, Register::Data)),
            0x4d0 => Some((Chip::Master, Register::EdgeLevel)),
            0x4d1 => Some((Chip::Slave, Register::EdgeLevel)),
            _ => None,
        }
    }

    /// Whether `port` belongs to the pair. All its ports are 8 bits wide.
    pub fn answers(port: u16) -> bool {
        Self::register(port).is_some()
    }

    /// Reads a port. Returns its value, and the lines, by bit, whose interrupt ended. Only a poll ends interrupts, and
    /// only with automatic EOI: as in the data sheet, a poll acknowledges an interrupt. (In KVM a poll always ends the
    /// interrupt, too.)
    pub fn read(&mut self, port: u16) -> (u8, u16) {
        let Some((chip, register)) = Self::register(port) else {
            return (0xff, 0);
        };
        let state = &mut self.chips[chip as usize];
        let data = match register {
            Register::Command => false,
            Register::Data => true,
            Register::EdgeLevel => return (state.elcr, 0),
        };
        let polled_slave = chip == Chip::Slave && state.poll != 0;
        let cascade = (chip == Chip::Master).then_some(CASCADE);
        let (value, ended) = state.read(data, cascade);
        if polled_slave {
            // The slave's request was served or withdrawn, so the master's request for its input is dropped.
            self.chips[0].irr &= !(1 << CASCADE);
        }
        let ended = chip.lines(ended);
        self.release(ended);
        self.cascade();
        (value, ended)
    }

    /// Writes a port.
    pub fn write(&mut self, port: u16, value: u8) -> Change {
        let Some((chip, register)) = Self::register(port) else {
            return Change::default();
        };
        let state = &mut self.chips[chip as usize];
        let masked = state.imr;
        let mut ended = 0;
        match register {
            Register::Command => ended = state.write_command(value),
            Register::Data => state.write_data(value),
            Register::EdgeLevel => state.write_elcr(value),
        }
        let unmasked = masked & !state.imr;
        let ended = chip.lines(ended);
        self.release(ended);
        self.cascade();
        Change {
            ended,
            unmasked: chip.lines(unmasked),
        }
    }

    /// Returns the registers of one controller, in the form that [`restore`](Self::restore) takes.
    pub fn save(&self, chip: Chip) -> PicState {
        self.chips[chip as usize]
    }

    /// Sets the registers of one controller. The levels of its lines do not change.
    pub fn restore(&mut self, chip: Chip, state: &PicState) {
        self.chips[chip as usize] = *state;
        self.cascade();
    }
}

impl Chip {
    /// Returns the lines of the pair that drive `inputs` of this controller. Both are sets of bits.
    fn lines(self, inputs: u8) -> u16 {
        match self {
            Chip::Master => u16::from(inputs),
            Chip::Slave => u16::from(inputs) << 8,
        }
    }
}
