//! One counter of the 8254 (Intel 8254 data sheet, 231164-005).

use super::time::ticks;

/// The registers of one counter: the fields of `kvm_pit_channel_state`.
///
/// A saved state may come from a VMM, so that every field can have any value.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ChannelState {
    /// The initial count. 0 means 65,536.
    pub count: u32,
    /// The count that the count latch command has stored.
    pub latched_count: u16,
    /// The bytes of `latched_count` that are read next, in the form of `rw_mode`; 0 for none.
    pub count_latched: u8,
    /// Whether the next read returns `status`.
    pub status_latched: u8,
    /// The status that the read-back command has stored.
    pub status: u8,
    /// The byte of the count that the next read returns: a value of `rw_mode`, or 4 for the second of two bytes.
    pub read_state: u8,
    /// The byte of the initial count that is written next, in the form of `read_state`.
    pub write_state: u8,
    /// The first byte of two that were written.
    pub write_latch: u8,
    /// The bytes of the count that reads and writes transfer: 1 low, 2 high, 3 low and then high.
    pub rw_mode: u8,
    /// The mode, 0 to 5. Other values mean that the counter was not programmed yet; KVM uses 0xff.
    pub mode: u8,
    /// Whether the counter counts in four decimal digits.
    pub bcd: u8,
    /// The level of the gate input: 1 is high.
    pub gate: u8,
    /// The time at which the count began, in nanoseconds.
    pub count_load_time: i64,
}

/// Values of `rw_mode`, `read_state`, `write_state` and `count_latched`. All others mean the low byte.
const HIGH: u8 = 2;
const BOTH: u8 = 3;
const BOTH_HIGH: u8 = 4;

/// Bits of the status byte.
const STATUS_OUT: u8 = 1 << 7;
const STATUS_NULL_COUNT: u8 = 1 << 6;

/// The mode of a counter that was not programmed.
const UNPROGRAMMED: u8 = 0xff;
const GREATEST: u32 = 0x1_0000;

/// The counting mode (data sheet, "Mode Definitions").
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Mode {
    /// 0: OUT rises at the end of the count.
    TerminalCount,
    /// 1: a rising gate starts the count, during which OUT is low.
    OneShot,
    /// 2: OUT is low for the last tick of each period.
    RateGenerator,
    /// 3: OUT is low for the second half of each period.
    SquareWave,
    /// 4: OUT is low for one tick at the end of the count.
    SoftwareStrobe,
    /// 5: like 4, but a rising gate starts the count.
    HardwareStrobe,
}

impl Mode {
    /// Whether only a rising gate starts the count. In the other modes, a low gate stops it.
    fn is_triggered(self) -> bool {
        matches!(self, Mode::OneShot | Mode::HardwareStrobe)
    }

    pub(super) fn is_periodic(self) -> bool {
        matches!(self, Mode::RateGenerator | Mode::SquareWave)
    }
}

/// A count that has begun.
#[derive(Clone, Copy, Debug)]
pub(super) struct Run {
    /// The time at which the count began.
    pub(super) since: u64,
    /// The length of the count in ticks, at least 1.
    pub(super) ticks: u64,
    /// The time at which a low gate stopped the count.
    stopped: Option<u64>,
}

/// One counter of the 8254.
#[derive(Clone, Debug)]
pub(super) struct Channel {
    state: ChannelState,
    /// Whether port 0x61 controls the gate. Otherwise the gate is always high, even if its register says that it is
    /// low.
    gated: bool,
    /// The count in progress. `None`: the counter waits for its initial count, or for a rising gate.
    run: Option<Run>,
}

impl Channel {
    pub(super) fn new(gated: bool, now: u64) -> Self {
        let state = ChannelState {
            mode: UNPROGRAMMED,
            gate: u8::from(!gated),
            ..ChannelState::default()
        };
        let mut channel = Channel {
            state,
            gated,
            run: None,
        };
        channel.restore(&state, now);
        channel
    }

    pub(super) fn save(&self) -> ChannelState {
        self.state
    }

    /// Sets the registers. As in KVM, the count begins again, even if it had ended or needs a rising gate.
    pub(super) fn restore(&mut self, state: &ChannelState, now: u64) {
        self.state = *state;
        self.set_count(state.count, now);
        self.start(now);
    }

    /// Returns the mode. A counter that was not programmed counts periodically.
    fn mode(&self) -> Mode {
        match self.state.mode {
            0 => Mode::TerminalCount,
            1 => Mode::OneShot,
            3 => Mode::SquareWave,
            4 => Mode::SoftwareStrobe,
            5 => Mode::HardwareStrobe,
            _ => Mode::RateGenerator,
        }
    }

    /// Returns the count in progress and its mode, if the guest or a VMM has programmed the counter.
    pub(super) fn programmed(&self) -> Option<(Mode, Run)> {
        self.run
            .filter(|_| self.state.mode <= 5)
            .map(|run| (self.mode(), run))
    }

    /// Returns the level of the gate, as port 0x61 shows it.
    pub(super) fn gate(&self) -> bool {
        self.state.gate != 0
    }

    /// Sets the level of the gate.
    pub(super) fn set_gate(&mut self, high: bool, now: u64) {
        let was_high = core::mem::replace(&mut self.state.gate, u8::from(high)) != 0;
        if high == was_high {
            return;
        }
        let mode = self.mode();
        match (&mut self.run, high) {
            (_, true) if mode.is_triggered() => self.start(now),
            (Some(_), true) if mode.is_periodic() => self.start(now),
            (Some(run), true) => {
                if let Some(stopped) = run.stopped.take() {
                    run.since = run.since.saturating_add(now.saturating_sub(stopped));
                    self.state.count_load_time = run.since as i64;
                }
            }
            (Some(run), false) if !mode.is_triggered() => run.stopped = Some(now),
            _ => {}
        }
    }

    /// Begins a count at the time `now`.
    fn start(&mut self, now: u64) {
        let stopped = self.gated && !self.gate() && !self.mode().is_triggered();
        self.state.count_load_time = now as i64;
        self.run = Some(Run {
            since: now,
            ticks: self.count_in_ticks(),
            stopped: stopped.then_some(now),
        });
    }

    /// Sets the initial count of the next count.
    fn set_count(&mut self, count: u32, now: u64) {
        self.state.count = if count == 0 { GREATEST } else { count };
        self.state.count_load_time = now as i64;
    }

    /// Returns the length of the initial count in ticks of the clock.
    fn count_in_ticks(&self) -> u64 {
        let count = self.state.count;
        let ticks = match (self.is_decimal(), count) {
            (true, GREATEST) => 10_000,
            (true, _) => (0..4).rev().fold(0, |value, digit| {
                value * 10 + u64::from(count >> (4 * digit) & 15)
            }),
            (false, _) => u64::from(count),
        };
        ticks.max(1)
    }

    fn is_decimal(&self) -> bool {
        self.state.bcd & 1 != 0
    }

    /// Sets an initial count. As in KVM, the count takes effect at once, even in the middle of a period. In the modes
    /// that a rising gate starts, the count waits for the gate.
    fn load(&mut self, count: u32, now: u64) {
        self.set_count(count, now);
        if !self.mode().is_triggered() {
            self.start(now);
        }
    }

    /// Writes the counter's port. Returns whether the write has begun or stopped a count.
    pub(super) fn write(&mut self, value: u8, now: u64) -> bool {
        match self.state.write_state {
            HIGH => self.load(u32::from(value) << 8, now),
            BOTH => {
                self.state.write_latch = value;
                self.state.write_state = BOTH_HIGH;
                if self.mode() != Mode::TerminalCount {
                    return false;
                }
                // The first of two bytes stops the count in this mode.
                self.run = None;
            }
            BOTH_HIGH => {
                self.state.write_state = BOTH;
                let count = u16::from_le_bytes([self.state.write_latch, value]);
                self.load(u32::from(count), now);
            }
            _ => self.load(u32::from(value), now),
        }
        true
    }

    /// Carries out a control word that sets bytes, mode and digits. The counter then waits for its initial count.
    pub(super) fn program(&mut self, control: u8) {
        let bytes = control >> 4 & 3;
        self.state.rw_mode = bytes;
        self.state.read_state = bytes;
        self.state.write_state = bytes;
        self.state.count_latched = 0;
        self.state.mode = match control >> 1 & 7 {
            // The chip ignores bit 2 of the mode in modes 2 and 3, so 6 and 7 mean 2 and 3.
            mode @ 6.. => mode - 4,
            mode => mode,
        };
        self.state.bcd = control & 1;
        self.run = None;
    }

    /// Reads the counter's port.
    pub(super) fn read(&mut self, now: u64) -> u8 {
        if self.state.status_latched != 0 {
            self.state.status_latched = 0;
            return self.state.status;
        }
        let latched = self.state.count_latched != 0;
        let (count, next) = match latched {
            true => (self.state.latched_count, &mut self.state.count_latched),
            false => (self.count_at(now), &mut self.state.read_state),
        };
        let [low, high] = count.to_le_bytes();
        let (value, after) = match (*next, latched) {
            (BOTH, true) => (low, HIGH),
            (BOTH, false) => (low, BOTH_HIGH),
            (BOTH_HIGH, false) => (high, BOTH),
            (HIGH, false) => (high, HIGH),
            (HIGH, true) => (high, 0),
            (_, true) => (low, 0),
            (same, false) => (low, same),
        };
        *next = after;
        value
    }

    /// Latches the count, unless an earlier latched count was not read yet.
    pub(super) fn latch_count(&mut self, now: u64) {
        if self.state.count_latched == 0 {
            self.state.latched_count = self.count_at(now);
            self.state.count_latched = self.state.rw_mode;
        }
    }

    /// Latches the status, unless an earlier latched status was not read yet.
    pub(super) fn latch_status(&mut self, now: u64) {
        if self.state.status_latched != 0 {
            return;
        }
        let mut status =
            (self.state.rw_mode & 3) << 4 | (self.state.mode & 7) << 1 | self.state.bcd & 1;
        if self.out_at(now) {
            status |= STATUS_OUT;
        }
        if self.run.is_none() {
            status |= STATUS_NULL_COUNT;
        }
        self.state.status = status;
        self.state.status_latched = 1;
    }

    /// Returns the current count of the counting element.
    fn count_at(&self, now: u64) -> u16 {
        let Some(run) = self.run else {
            return self.state.count as u16;
        };
        let (gone, count) = (run.gone(now), run.ticks);
        let modulus = if self.is_decimal() { 10_000 } else { 0x1_0000 };
        let left = match self.mode() {
            Mode::RateGenerator => count - gone % count,
            // The count decreases by two at each tick, in both halves. An odd count begins with the next smaller even
            // number, and its first half has one tick more.
            Mode::SquareWave => {
                let (half, gone) = (count.div_ceil(2), gone % count);
                let gone_of_half = if gone < half { gone } else { gone - half };
                (count & !1) - 2 * gone_of_half
            }
            // Below zero the count continues from the largest count.
            _ => (count % modulus + modulus - gone % modulus) % modulus,
        };
        self.digits((left % modulus) as u16)
    }

    /// Returns `count` as the counter's port shows it: in decimal digits, if the counter is decimal.
    fn digits(&self, count: u16) -> u16 {
        match self.is_decimal() {
            true => (0..4).rev().fold(0, |digits, place| {
                digits * 16 + count / 10u16.pow(place) % 10
            }),
            false => count,
        }
    }

    /// Returns the level of OUT.
    pub(super) fn out_at(&self, now: u64) -> bool {
        let mode = self.mode();
        let Some(run) = self.run else {
            return mode != Mode::TerminalCount;
        };
        let (gone, count) = (run.gone(now), run.ticks);
        match mode {
            Mode::TerminalCount | Mode::OneShot => gone >= count,
            Mode::SoftwareStrobe | Mode::HardwareStrobe => gone != count,
            // While the gate is low, OUT is high.
            _ if run.stopped.is_some() => true,
            Mode::RateGenerator => gone % count != count - 1,
            Mode::SquareWave => gone % count < count.div_ceil(2),
        }
    }
}

impl Run {
    /// Returns the number of ticks of the clock since the count began, without the ticks during which the gate was low.
    fn gone(&self, now: u64) -> u64 {
        ticks(self.stopped.unwrap_or(now).saturating_sub(self.since))
    }
}
