//! The I/O APIC of a PC: an 82093AA, version 0x11, with 24 pins.
//!
//! As in KVM, a high line means that a device asks for an interrupt; the polarity bit of a redirection entry has no
//! effect. An edge at a masked pin is lost, while a level waits until the pin is unmasked. A level that stays high is
//! delivered again at each EOI. After `SUCCESSIVE` redeliveries in a row, the caller is asked to let the guest run
//! for a while first.
//!
//! Messages go to a closure `deliver`, which returns how many local APICs have accepted the message. An entry with
//! delivery mode ExtINT sends a message like any other entry, and the local APICs decide about the message (KVM's APICs
//! drop it, because the 8259 pair is wired to LINT0).
//!
//! These parts are not implemented: an EOI register, which version 0x20 introduced; and KVM's record of the CPUs that
//! have not yet ended the interrupt of pin 8 (the RTC). While this record is not empty, KVM reports a further edge at
//! that pin as coalesced.

#[cfg(test)]
mod tests;

use crate::line::{Lines, Outcome};
use crate::message::{BROADCAST, DeliveryMode, Destination, Message};

/// The number of pins. Each has a line and a redirection entry.
pub const PINS: usize = 24;
/// The physical address of the I/O APIC's registers after reset.
pub const DEFAULT_BASE: u64 = 0xfec0_0000;
/// The size in bytes of the registers' address range.
pub const WINDOW: u64 = 0x100;
/// The number of redeliveries in a row of a level-triggered interrupt after which [`IoApic::end_of_interrupt`]
/// postpones the next redelivery. The number is KVM's.
pub(crate) const SUCCESSIVE: u32 = 10_000;

/// Offsets of registers in the I/O APIC's address range.
const IOREGSEL: u64 = 0x00;
const IOWIN: u64 = 0x10;

/// Numbers of the registers that software selects by IOREGSEL.
const REGISTER_ID: u32 = 0;
const REGISTER_VERSION: u32 = 1;
const REGISTER_ARBITRATION: u32 = 2;
/// The number of the register with the low half of redirection entry 0. The next registers are the high half of entry
/// 0, the low half of entry 1, and so on.
const REGISTER_ENTRIES: u32 = 0x10;

const VERSION: u32 = 0x11 | (PINS as u32 - 1) << 16;
const ID_SHIFT: u32 = 24;
const ID_MASK: u32 = 0xf;

/// Fields of a redirection entry.
const LOGICAL: u64 = 1 << 11;
const DELIVERY_STATUS: u64 = 1 << 12;
const REMOTE_IRR: u64 = 1 << 14;
const LEVEL: u64 = 1 << 15;
const MASKED: u64 = 1 << 16;
const DESTINATION_SHIFT: u32 = 56;
/// Bits of a redirection entry that the guest cannot write.
const READ_ONLY: u64 = REMOTE_IRR | DELIVERY_STATUS;

/// The registers of the I/O APIC: the fields of `kvm_ioapic_state`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IoApicState {
    /// The physical address of the registers.
    pub base_address: u64,
    /// The number of the register that IOREGSEL selects.
    pub ioregsel: u32,
    /// The ID of the I/O APIC, as the guest has written it.
    pub id: u32,
    /// The pins whose line is high, one bit for each pin. In a saved state, the bits of edges that were delivered are
    /// clear. When a state is restored, an interrupt is delivered for each bit that is set.
    pub irr: u32,
    /// Padding, which KVM keeps.
    pub pad: u32,
    /// The redirection entries.
    pub redirtbl: [u64; PINS],
}

/// The result of a write to a redirection entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EntryWrite {
    /// The pin of the entry.
    pub pin: usize,
    /// Whether the write has unmasked the pin.
    pub unmasked: bool,
}

/// The I/O APIC.
#[derive(Clone, Debug)]
pub struct IoApic {
    state: IoApicState,
    /// The pins whose edge in `state.irr` was delivered, one bit for each pin.
    delivered: u32,
    lines: Lines<PINS>,
    /// For each pin, the number of times in a row that its level was delivered again at its EOI.
    successive: [u32; PINS],
}

impl Default for IoApic {
    fn default() -> Self {
        Self::new()
    }
}

fn is_masked(entry: u64) -> bool {
    entry & MASKED != 0
}

fn is_level(entry: u64) -> bool {
    entry & LEVEL != 0
}

fn vector_of(entry: u64) -> u8 {
    entry as u8
}

fn message(entry: u64) -> Message {
    Message {
        vector: vector_of(entry),
        mode: DeliveryMode::of(entry as u32),
        level: is_level(entry),
        assert: true,
        destination: Destination::new(
            (entry >> DESTINATION_SHIFT) as u32,
            entry & LOGICAL != 0,
            BROADCAST,
        ),
    }
}

impl IoApic {
    /// Creates an I/O APIC as after reset: every pin is masked.
    pub const fn new() -> Self {
        IoApic {
            state: IoApicState {
                base_address: DEFAULT_BASE,
                ioregsel: 0,
                id: 0,
                irr: 0,
                pad: 0,
                redirtbl: [MASKED; PINS],
            },
            delivered: 0,
            lines: Lines::new(),
            successive: [0; PINS],
        }
    }

    /// Makes `source` (modulo 64) hold the line of `pin` high, or stop holding it high.
    pub fn set_line(
        &mut self,
        pin: usize,
        source: u8,
        level: bool,
        deliver: &mut impl FnMut(Message) -> usize,
    ) -> Outcome {
        if pin >= PINS {
            return Outcome::Ignored;
        }
        match self.lines.set(pin, source, level) {
            true => self.raise(pin, deliver),
            false => {
                self.state.irr &= !(1 << pin);
                Outcome::Lowered
            }
        }
    }

    /// Records that the line of `pin` is high, and delivers the interrupt.
    fn raise(&mut self, pin: usize, deliver: &mut impl FnMut(Message) -> usize) -> Outcome {
        let bit = 1 << pin;
        let entry = self.state.redirtbl[pin];
        if !is_level(entry) {
            // Marks the edge as not delivered, even if the code below coalesces it with a pending edge. As in KVM, a
            // restored state delivers all such edges again.
            self.delivered &= !bit;
            if self.state.irr & bit != 0 {
                return Outcome::Coalesced;
            }
        }
        self.state.irr |= bit;
        self.service(pin, deliver)
    }

    /// Sends the message of `pin`, unless the pin is masked or its level waits for an EOI.
    fn service(&mut self, pin: usize, deliver: &mut impl FnMut(Message) -> usize) -> Outcome {
        let entry = self.state.redirtbl[pin];
        if is_masked(entry) || is_level(entry) && entry & REMOTE_IRR != 0 {
            return Outcome::Ignored;
        }
        let accepted = deliver(message(entry));
        if !is_level(entry) {
            self.delivered |= 1 << pin;
        } else if accepted != 0 {
            self.state.redirtbl[pin] |= REMOTE_IRR;
        }
        Outcome::Delivered(accepted)
    }

    /// Whether the interrupt of `pin` is level-triggered, its line is high, and the interrupt could be delivered now.
    fn is_waiting(&self, pin: usize) -> bool {
        let entry = self.state.redirtbl[pin];
        self.state.irr & 1 << pin != 0 && is_level(entry) && entry & (MASKED | REMOTE_IRR) == 0
    }

    /// Makes all `sources` release the line of `pin`.
    fn lower(&mut self, pin: usize, sources: u64) {
        if self.lines.lower(pin, sources) {
            self.state.irr &= !(1 << pin);
        }
    }

    /// Returns the physical address of the registers.
    pub fn base(&self) -> u64 {
        self.state.base_address
    }

    /// Whether `gpa` is in the registers' address range.
    pub fn contains(&self, gpa: u64) -> bool {
        gpa.wrapping_sub(self.state.base_address) < WINDOW
    }

    /// Returns the index of the redirection entry whose low or high half IOREGSEL selects.
    fn selected_entry(&self) -> Option<usize> {
        let half = self.state.ioregsel.checked_sub(REGISTER_ENTRIES)?;
        let pin = half as usize / 2;
        (pin < PINS).then_some(pin)
    }

    fn selects_high_half(&self) -> bool {
        self.state.ioregsel & 1 != 0
    }

    fn selected(&self) -> u32 {
        match (self.state.ioregsel, self.selected_entry()) {
            (REGISTER_ID | REGISTER_ARBITRATION, _) => (self.state.id & ID_MASK) << ID_SHIFT,
            (REGISTER_VERSION, _) => VERSION,
            (_, Some(pin)) if self.selects_high_half() => (self.state.redirtbl[pin] >> 32) as u32,
            (_, Some(pin)) => self.state.redirtbl[pin] as u32,
            // No register has this number. KVM returns all ones, too.
            (_, None) => u32::MAX,
        }
    }

    /// Reads from `offset` in the registers' address range. Registers are 32 bits wide; bytes of `data`
    /// beyond them become zero.
    pub fn read(&self, offset: u64, data: &mut [u8]) {
        let value = match offset {
            IOREGSEL => self.state.ioregsel,
            IOWIN => self.selected(),
            _ => 0,
        };
        data.fill(0);
        for (to, from) in data.iter_mut().zip(value.to_le_bytes()) {
            *to = from;
        }
    }

    /// Writes to `offset` in the registers' address range. Returns the redirection entry that was written, if any;
    /// local APICs then have to look at [`vectors`](Self::vectors).
    ///
    /// If a level waits at the pin of this entry and can be delivered now, it may be out of date, because the guest may
    /// have served the device while the pin was masked. So this calls `acknowledged` for the pin, as
    /// [`end_of_interrupt`](Self::end_of_interrupt) does. If the line is still high afterwards, the level is delivered.
    pub fn write(
        &mut self,
        offset: u64,
        data: &[u8],
        acknowledged: &mut impl FnMut(usize) -> u64,
        deliver: &mut impl FnMut(Message) -> usize,
    ) -> Option<EntryWrite> {
        // As in KVM, a narrow write sets the upper bytes to zero, and only the lower four bytes of an eight-byte write
        // are used.
        let value = match *data {
            [a] => u32::from_le_bytes([a, 0, 0, 0]),
            [a, b] => u32::from_le_bytes([a, b, 0, 0]),
            [a, b, c, d] | [a, b, c, d, _, _, _, _] => u32::from_le_bytes([a, b, c, d]),
            _ => return None,
        };
        match (offset, self.state.ioregsel) {
            (IOREGSEL, _) => self.state.ioregsel = value & 0xff,
            (IOWIN, REGISTER_ID) => self.state.id = value >> ID_SHIFT & ID_MASK,
            (IOWIN, _) => {
                let pin = self.selected_entry()?;
                let unmasked = self.write_entry(pin, value);
                if self.is_waiting(pin) {
                    self.lower(pin, acknowledged(pin));
                }
                if self.is_waiting(pin) {
                    self.service(pin, deliver);
                }
                return Some(EntryWrite { pin, unmasked });
            }
            _ => {}
        }
        None
    }

    /// Writes the selected half of the redirection entry of `pin`. Returns whether the write has unmasked the pin.
    fn write_entry(&mut self, pin: usize, value: u32) -> bool {
        let old = self.state.redirtbl[pin];
        let value = u64::from(value);
        let new = match self.selects_high_half() {
            true => old & 0xffff_ffff | value << 32,
            false => old & !0xffff_ffff | value,
        };
        let mut new = new & !READ_ONLY | old & READ_ONLY;
        // This I/O APIC has no EOI register. So operating systems can end an interrupt by switching its pin to
        // edge-triggered mode and back to level-triggered mode.
        if !is_level(new) {
            new &= !REMOTE_IRR;
        }
        // A high line is no edge when the pin is switched to edge-triggered mode. When the pin is switched to
        // level-triggered mode, the high line counts as a level.
        match (is_level(old), is_level(new)) {
            (true, false) => self.delivered |= 1 << pin & self.state.irr,
            (false, true) => self.delivered &= !(1 << pin),
            _ => {}
        }
        self.state.redirtbl[pin] = new;
        is_masked(old) && !is_masked(new)
    }

    /// Handles the EOI by which a local APIC has ended the interrupt `vector`. `level` is the vector's bit in the
    /// APIC's TMR.
    ///
    /// Calls `acknowledged` with each pin that has the vector. `acknowledged` returns the sources, by bit, that held
    /// the line only until this EOI (KVM's resample irqfds), or 0. Then, if `level` is true, each pin whose line is
    /// still high is delivered again.
    ///
    /// Returns the pins, by bit, that were delivered again `SUCCESSIVE` times in a row, because their devices are not
    /// being served. The caller has to deliver these pins by [`deliver_pending`](Self::deliver_pending), after the
    /// guest has run for a while (10 ms in KVM).
    pub fn end_of_interrupt(
        &mut self,
        vector: u8,
        level: bool,
        acknowledged: &mut impl FnMut(usize) -> u64,
        deliver: &mut impl FnMut(Message) -> usize,
    ) -> u32 {
        let mut postponed = 0;
        for pin in 0..PINS {
            if vector_of(self.state.redirtbl[pin]) != vector {
                continue;
            }
            self.lower(pin, acknowledged(pin));
            if !level || !is_level(self.state.redirtbl[pin]) {
                continue;
            }
            self.state.redirtbl[pin] &= !REMOTE_IRR;
            if !self.is_waiting(pin) {
                self.successive[pin] = 0;
                continue;
            }
            self.successive[pin] += 1;
            if self.successive[pin] < SUCCESSIVE {
                self.service(pin, deliver);
            } else {
                self.successive[pin] = 0;
                postponed |= 1 << pin;
            }
        }
        postponed
    }

    /// Delivers the level-triggered interrupts that wait at unmasked pins. Call some time after
    /// [`end_of_interrupt`](Self::end_of_interrupt) has postponed a level.
    pub fn deliver_pending(&mut self, deliver: &mut impl FnMut(Message) -> usize) {
        for pin in 0..PINS {
            if self.is_waiting(pin) {
                self.service(pin, deliver);
            }
        }
    }

    /// Whether the redirection entry of a pin has this vector. If so, the caller must report the vector's EOI to the
    /// I/O APIC.
    pub fn handles(&self, vector: u8) -> bool {
        self.state
            .redirtbl
            .iter()
            .any(|&entry| vector_of(entry) == vector)
    }

    /// Returns the vectors, by bit, for which [`handles`](Self::handles) is true. A caller can end interrupts with
    /// other vectors without a lock.
    pub fn vectors(&self) -> [u64; 4] {
        let mut vectors = [0; 4];
        for &entry in &self.state.redirtbl {
            let vector = usize::from(vector_of(entry));
            vectors[vector / 64] |= 1 << (vector % 64);
        }
        vectors
    }

    /// Returns the registers, in the form that [`restore`](Self::restore) takes.
    pub fn save(&self) -> IoApicState {
        IoApicState {
            irr: self.state.irr & !self.delivered,
            ..self.state
        }
    }

    /// Sets the registers, and delivers the interrupts that wait in `state.irr`. The sources of the
    /// lines do not change.
    pub fn restore(&mut self, state: &IoApicState, deliver: &mut impl FnMut(Message) -> usize) {
        self.state = IoApicState { irr: 0, ..*state };
        self.delivered = 0;
        self.successive = [0; PINS];
        for pin in (0..PINS).filter(|pin| state.irr & 1 << pin != 0) {
            self.raise(pin, deliver);
        }
    }
}
