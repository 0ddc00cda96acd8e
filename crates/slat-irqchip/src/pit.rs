//! The 8254 timer of a PC: counter 0 drives IRQ 0, counter 2 the speaker. Counter 1 has no effect.
//!
//! Each end of a count of counter 0 is a tick, for which IRQ 0 has to be pulsed. If the caller is late, or the guest
//! slow, there are more ticks than interrupts. With reinjection, which is KVM's default, a tick waits until the guest
//! has acknowledged the previous tick, so that no tick is lost. [`Pit::expire`] and [`Pit::acknowledged`] each return
//! whether to pulse IRQ 0 now. Without reinjection, all ticks that one call of `expire` finds cause one pulse.
//!
//! Counts follow the data sheet in all modes, binary and decimal. The exception is that a new initial count takes
//! effect in the middle of a period (as in KVM). Where KVM is less exact, guests get the data sheet's behaviour: a
//! control word alone stops the counter, a low gate stops a count, and OUT of modes 1, 2, 4 and 5 is not inverted.

mod channel;
mod reinject;
#[cfg(test)]
mod tests;
mod ticks;
mod time;

use channel::Channel;
pub use channel::ChannelState;
use reinject::Reinjection;
use ticks::Ticks;

/// A flag of [`PitState`]: an HPET has taken over IRQ 0, so that counter 0 has no ticks (`KVM_PIT_FLAGS_HPET_LEGACY`).
pub const HPET_LEGACY: u32 = 1;
/// A flag of [`PitState`]: the speaker's bit of port 0x61 is set (`KVM_PIT_FLAGS_SPEAKER_DATA_ON`).
pub const SPEAKER_DATA_ON: u32 = 2;

/// The port of counter 0. The ports of counters 1 and 2 follow.
const COUNTERS: u16 = 0x40;
const CONTROL: u16 = 0x43;
/// The port of the gate of counter 2 and of the speaker.
const SPEAKER: u16 = 0x61;

/// Bits of a control word for one counter: the bytes to read and write. If no bit is set, the word is the count latch
/// command.
const CONTROL_BYTES: u8 = 3 << 4;
/// The counter number that makes a control word a read-back command.
const READ_BACK: u8 = 3;
const READ_BACK_NO_COUNT: u8 = 1 << 5;
const READ_BACK_NO_STATUS: u8 = 1 << 4;

/// Bits of port 0x61.
const SPEAKER_GATE: u8 = 1;
const SPEAKER_DATA: u8 = 1 << 1;
const SPEAKER_REFRESH: u8 = 1 << 4;
const SPEAKER_OUT: u8 = 1 << 5;
/// The memory refresh bit changes every 2^14 ns, as in KVM. On a PC it changes about every 15 us.
const REFRESH_SHIFT: u32 = 14;

/// The registers of the 8254: the fields of `kvm_pit_state2`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PitState {
    /// The registers of the three counters.
    pub channels: [ChannelState; 3],
    /// [`HPET_LEGACY`] and [`SPEAKER_DATA_ON`]; other flags have no effect.
    pub flags: u32,
}

/// The 8254 timer (PIT), and port 0x61, which controls the gate of counter 2.
#[derive(Clone, Debug)]
pub struct Pit {
    channels: [Channel; 3],
    flags: u32,
    /// Whether this 8254 serves port 0x61.
    speaker: bool,
    /// The ticks of counter 0's current count, and how many of them were counted.
    ticks: Ticks,
    reinjection: Reinjection,
}

impl Pit {
    /// Creates an 8254 as after reset. With `speaker` it serves port 0x61 (`KVM_PIT_SPEAKER_DUMMY`). Here and in all
    /// other calls, `now` is in nanoseconds and never goes back. If VMMs read `count_load_time`, `now` has to be a time
    /// of `CLOCK_MONOTONIC`.
    pub fn new(speaker: bool, now: u64) -> Self {
        Pit {
            channels: [false, false, true].map(|gated| Channel::new(gated, now)),
            flags: 0,
            speaker,
            ticks: Ticks::default(),
            reinjection: Reinjection::new(),
        }
    }

    /// Whether `port` belongs to the 8254. All its ports are 8 bits wide.
    pub fn answers(&self, port: u16) -> bool {
        matches!(port, COUNTERS..=CONTROL) || port == SPEAKER && self.speaker
    }

    /// Reads a port.
    pub fn read(&mut self, port: u16, now: u64) -> u8 {
        match port {
            _ if !self.answers(port) => 0xff,
            COUNTERS..CONTROL => self.channels[usize::from(port - COUNTERS)].read(now),
            SPEAKER => self.read_speaker(now),
            // The control word cannot be read.
            _ => 0,
        }
    }

    /// Writes a port. The write may change the [next deadline](Self::next_deadline).
    pub fn write(&mut self, port: u16, value: u8, now: u64) {
        match port {
            _ if !self.answers(port) => {}
            COUNTERS..CONTROL => {
                let index = usize::from(port - COUNTERS);
                if self.channels[index].write(value, now) && index == 0 {
                    self.restart_ticks();
                }
            }
            SPEAKER => {
                self.channels[2].set_gate(value & SPEAKER_GATE != 0, now);
                match value & SPEAKER_DATA != 0 {
                    true => self.flags |= SPEAKER_DATA_ON,
                    false => self.flags &= !SPEAKER_DATA_ON,
                }
            }
            _ => self.write_control(value, now),
        }
    }

    fn write_control(&mut self, control: u8, now: u64) {
        let counter = control >> 6;
        if counter == READ_BACK {
            self.read_back(control, now);
            return;
        }
        let channel = &mut self.channels[usize::from(counter)];
        if control & CONTROL_BYTES == 0 {
            channel.latch_count(now);
            return;
        }
        channel.program(control);
        if counter == 0 {
            self.restart_ticks();
        }
    }

    /// Latches the counts and the status of several counters.
    fn read_back(&mut self, command: u8, now: u64) {
        for (index, channel) in self.channels.iter_mut().enumerate() {
            if command & 2 << index == 0 {
                continue;
            }
            if command & READ_BACK_NO_COUNT == 0 {
                channel.latch_count(now);
            }
            if command & READ_BACK_NO_STATUS == 0 {
                channel.latch_status(now);
            }
        }
    }

    fn read_speaker(&self, now: u64) -> u8 {
        let bit = |bit, set| if set { bit } else { 0 };
        bit(SPEAKER_GATE, self.channels[2].gate())
            | bit(SPEAKER_DATA, self.flags & SPEAKER_DATA_ON != 0)
            | bit(SPEAKER_REFRESH, now >> REFRESH_SHIFT & 1 != 0)
            | bit(SPEAKER_OUT, self.channels[2].out_at(now))
    }

    /// Begins to count ticks from the beginning of counter 0's count. Call after a change of this count: ticks of the
    /// old count no longer matter.
    fn restart_ticks(&mut self) {
        let count = match self.flags & HPET_LEGACY {
            0 => self.channels[0].programmed(),
            _ => None,
        };
        self.ticks = count.map_or_else(Ticks::default, |(mode, run)| Ticks::new(mode, run));
        self.reinjection.reset();
    }

    /// Returns the time of counter 0's next tick. Call [`expire`](Self::expire) then.
    pub fn next_deadline(&self) -> Option<u64> {
        self.ticks.next()
    }

    /// Counts the ticks of counter 0 until `now`. Returns whether IRQ 0 has to be pulsed: raised, and lowered at once.
    pub fn expire(&mut self, now: u64) -> bool {
        let due = self.ticks.expire(now);
        self.reinjection.tick(due)
    }

    /// Notes that the guest has acknowledged IRQ 0: an 8259A or an I/O APIC has ended its interrupt. Returns whether
    /// IRQ 0 has to be pulsed, for a tick that was waiting.
    pub fn acknowledged(&mut self) -> bool {
        self.reinjection.acknowledge()
    }

    /// Drops the waiting ticks, and stops waiting for an acknowledgement. Call after the guest has unmasked IRQ 0, as
    /// KVM does, because the interrupt that the guest should acknowledge may have been lost.
    pub fn reset_reinjection(&mut self) {
        self.reinjection.reset();
    }

    /// Turns reinjection on or off (`KVM_REINJECT_CONTROL`).
    pub fn set_reinject(&mut self, on: bool) {
        self.reinjection.set(on);
    }

    /// Returns whether reinjection is on.
    pub fn reinject(&self) -> bool {
        self.reinjection.is_on()
    }

    /// Returns the registers, in the form that [`restore`](Self::restore) takes.
    pub fn save(&self) -> PitState {
        PitState {
            channels: self.channels.each_ref().map(Channel::save),
            flags: self.flags,
        }
    }

    /// Sets the registers. As in KVM, all counts begin again, so a count that had ended ends once more.
    pub fn restore(&mut self, state: &PitState, now: u64) {
        for (channel, state) in self.channels.iter_mut().zip(&state.channels) {
            channel.restore(state, now);
        }
        self.flags = state.flags;
        self.restart_ticks();
    }
}
