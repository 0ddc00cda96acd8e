//! One 8259A: requests, masks, priorities and the command words (Intel 8259A data sheet, 231468-003).

use crate::line::Outcome;

/// The registers of one 8259A: the fields of `kvm_pic_state`.
///
/// A saved state may come from a VMM, so that every field can have any value.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PicState {
    /// The last levels of the inputs, for detecting edges.
    pub last_irr: u8,
    /// Interrupt request register.
    pub irr: u8,
    /// Interrupt mask register.
    pub imr: u8,
    /// In-service register.
    pub isr: u8,
    /// The input with the highest priority.
    pub priority_add: u8,
    /// The vector of input 0 (ICW2).
    pub irq_base: u8,
    /// Whether a read of the command port returns the in-service register instead of the request register (OCW3).
    pub read_reg_select: u8,
    /// Whether the next read is a poll (OCW3).
    pub poll: u8,
    /// Whether special mask mode is on (OCW3).
    pub special_mask: u8,
    /// The initialization word that the data port expects next, counted from ICW2 as 1. 0 after initialization.
    pub init_state: u8,
    /// Whether interrupts end automatically (ICW4).
    pub auto_eoi: u8,
    /// Whether priorities rotate at an automatic EOI (OCW2).
    pub rotate_on_auto_eoi: u8,
    /// Whether special fully nested mode is on (ICW4).
    pub special_fully_nested_mode: u8,
    /// Whether ICW4 is part of the initialization (ICW1).
    pub init4: u8,
    /// The level-triggered inputs.
    pub elcr: u8,
    /// The bits of `elcr` that the guest can set.
    pub elcr_mask: u8,
}

/// Bit of a command: the command is ICW1.
const ICW1: u8 = 1 << 4;
const ICW1_ICW4: u8 = 1;
const ICW4_AEOI: u8 = 1 << 1;
const ICW4_SFNM: u8 = 1 << 4;
/// Bit of a command that makes it OCW3, if [`ICW1`] is clear.
const OCW3: u8 = 1 << 3;
const OCW3_READ: u8 = 1 << 1;
const OCW3_READ_ISR: u8 = 1;
const OCW3_POLL: u8 = 1 << 2;
const OCW3_MASK_MODE: u8 = 1 << 6;
const OCW3_SPECIAL_MASK: u8 = 1 << 5;
/// OCW2: rotate priorities.
const OCW2_ROTATE: u8 = 1 << 7;
/// OCW2: the command names its input.
const OCW2_SPECIFIC: u8 = 1 << 6;
/// OCW2: EOI, the end of an interrupt.
const OCW2_EOI: u8 = 1 << 5;

/// The value that a poll returns if no input has a request, as in KVM.
const NOTHING_POLLED: u8 = 7;
const POLLED: u8 = 1 << 7;

impl PicState {
    pub(super) const fn new(elcr_mask: u8) -> Self {
        PicState {
            last_irr: 0,
            irr: 0,
            imr: 0,
            isr: 0,
            priority_add: 0,
            irq_base: 0,
            read_reg_select: 0,
            poll: 0,
            special_mask: 0,
            init_state: 0,
            auto_eoi: 0,
            rotate_on_auto_eoi: 0,
            special_fully_nested_mode: 0,
            init4: 0,
            elcr: 0,
            elcr_mask,
        }
    }

    /// Sets the level of an input.
    pub(super) fn set_input(&mut self, input: u8, level: bool) -> Outcome {
        let bit = 1 << input;
        let level_triggered = self.elcr & bit != 0;
        // An edge needs a low line before it. A second edge is ignored while the input's request still waits.
        let new = level && self.irr & bit == 0 && (level_triggered || self.last_irr & bit == 0);
        if level {
            self.last_irr |= bit;
        } else {
            self.last_irr &= !bit;
            if level_triggered {
                self.irr &= !bit;
            }
        }
        if new {
            self.irr |= bit;
        }
        match (self.imr & bit != 0, level) {
            (true, _) => Outcome::Ignored,
            (false, false) => Outcome::Lowered,
            (false, true) if new => Outcome::Delivered(1),
            (false, true) => Outcome::Coalesced,
        }
    }

    /// Latches a request of the slave at the input `cascade`.
    pub(super) fn latch(&mut self, cascade: u8) {
        self.irr |= 1 << cascade;
    }

    /// Returns the input with the highest priority among the inputs `set`, and its priority: 0 is the highest.
    fn highest(&self, set: u8) -> Option<(u8, u32)> {
        let highest = u32::from(self.priority_add & 7);
        let distance = set.rotate_right(highest).trailing_zeros();
        (set != 0).then(|| ((distance + highest) as u8 & 7, distance))
    }

    /// Returns the input whose interrupt the CPU gets next. `cascade` is the input that a slave drives. In special
    /// fully nested mode, an interrupt in service at `cascade` does not hold back another interrupt of the slave.
    pub(super) fn request(&self, cascade: Option<u8>) -> Option<u8> {
        let (input, distance) = self.highest(self.irr & !self.imr)?;
        let in_service = match self.special_mask != 0 {
            true => self.isr & !self.imr,
            false => self.isr,
        };
        let nested = self.special_fully_nested_mode != 0 && cascade == Some(input);
        self.highest(in_service)
            .is_none_or(|(_, served)| distance < served || nested && distance == served)
            .then_some(input)
    }

    /// Moves the interrupt of `input` from requested to in service. Returns the inputs whose interrupts have ended by
    /// this: `input` itself, with automatic EOI.
    pub(super) fn acknowledge(&mut self, input: u8) -> u8 {
        let bit = 1 << input;
        if self.elcr & bit == 0 {
            self.irr &= !bit;
        }
        if self.auto_eoi == 0 {
            self.isr |= bit;
            return 0;
        }
        if self.rotate_on_auto_eoi != 0 {
            self.rotate(input);
        }
        bit
    }

    /// Gives `input` the lowest priority.
    fn rotate(&mut self, input: u8) {
        self.priority_add = (input + 1) & 7;
    }

    /// Ends the interrupts in service of `inputs`. Returns the inputs that were in service.
    fn end(&mut self, inputs: u8) -> u8 {
        let ended = self.isr & inputs;
        self.isr &= !inputs;
        ended
    }

    /// Reads the data port if `data` is true, otherwise the command port. Returns the value, and the inputs whose
    /// interrupts the read has ended.
    pub(super) fn read(&mut self, data: bool, cascade: Option<u8>) -> (u8, u8) {
        if self.poll != 0 {
            self.poll = 0;
            return match self.request(cascade) {
                Some(input) => (POLLED | input, self.acknowledge(input)),
                None => (NOTHING_POLLED, 0),
            };
        }
        let value = match (data, self.read_reg_select != 0) {
            (true, _) => self.imr,
            (false, true) => self.isr,
            (false, false) => self.irr,
        };
        (value, 0)
    }

    /// Writes the command port. Returns the inputs whose interrupts the command has ended.
    pub(super) fn write_command(&mut self, value: u8) -> u8 {
        if value & ICW1 != 0 {
            return self.initialize(value);
        }
        if value & OCW3 != 0 {
            if value & OCW3_POLL != 0 {
                self.poll = 1;
            }
            if value & OCW3_READ != 0 {
                self.read_reg_select = u8::from(value & OCW3_READ_ISR != 0);
            }
            if value & OCW3_MASK_MODE != 0 {
                self.special_mask = u8::from(value & OCW3_SPECIAL_MASK != 0);
            }
            return 0;
        }
        let rotate = value & OCW2_ROTATE != 0;
        let input = match (value & OCW2_SPECIFIC != 0, value & OCW2_EOI != 0) {
            (true, _) => Some(value & 7),
            // In special mask mode, only a specific EOI command ends a masked interrupt in service.
            (false, true) if self.special_mask != 0 => {
                self.highest(self.isr & !self.imr).map(|(input, _)| input)
            }
            (false, true) => self.highest(self.isr).map(|(input, _)| input),
            (false, false) => {
                self.rotate_on_auto_eoi = u8::from(rotate);
                None
            }
        };
        let Some(input) = input else {
            return 0;
        };
        if rotate {
            self.rotate(input);
        }
        match value & OCW2_EOI != 0 {
            true => self.end(1 << input),
            false => 0,
        }
    }

    /// Carries out ICW1. Drops the pending requests of edge-triggered inputs, and ends all interrupts in service.
    /// Returns a mask of the inputs of these requests and interrupts. The caller must report their end now, because
    /// the guest sends no EOI for them.
    ///
    /// As in KVM, a line that is high during ICW1 counts as low: if the line is raised again before it falls, that is
    /// an edge. According to the data sheet, the line has to fall first.
    fn initialize(&mut self, icw1: u8) -> u8 {
        let ended = self.isr | self.irr & !self.elcr;
        self.last_irr = 0;
        self.irr &= self.elcr;
        self.isr = 0;
        self.imr = 0;
        self.priority_add = 0;
        self.special_mask = 0;
        self.read_reg_select = 0;
        self.poll = 0;
        self.rotate_on_auto_eoi = 0;
        self.init4 = icw1 & ICW1_ICW4;
        if self.init4 == 0 {
            self.special_fully_nested_mode = 0;
            self.auto_eoi = 0;
        }
        self.init_state = 1;
        ended
    }

    /// Writes the data port: during initialization the next initialization word, otherwise the mask.
    pub(super) fn write_data(&mut self, value: u8) {
        match self.init_state {
            1 => {
                self.irq_base = value & 0xf8;
                self.init_state = 2;
            }
            // The guest cannot change the wiring of the pair, so the ICW3 that describes it has no effect.
            2 if self.init4 != 0 => self.init_state = 3,
            2 => self.init_state = 0,
            3 => {
                self.special_fully_nested_mode = u8::from(value & ICW4_SFNM != 0);
                self.auto_eoi = u8::from(value & ICW4_AEOI != 0);
                self.init_state = 0;
            }
            _ => self.imr = value,
        }
    }

    /// Writes the edge/level register.
    pub(super) fn write_elcr(&mut self, value: u8) {
        self.elcr = value & self.elcr_mask;
    }
}
