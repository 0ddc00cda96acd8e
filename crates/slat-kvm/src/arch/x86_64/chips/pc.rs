//! The 8259 pair and the I/O APIC of a VM, shared by its vCPUs and by all threads that raise interrupts.

use crate::arch::x86_64::chips::targets::Sent;
use crate::arch::x86_64::chips::timer::Timer;
use crate::arch::x86_64::chips::vectors::Vectors;
use crate::errno::Result;
use crate::irqfd::RESAMPLE;
use crate::ticker::{Alarm, Client};
use crate::vcpus::Targets;
use slat::Shared;
use slat_irqchip::ioapic::{self, IoApic};
use slat_irqchip::line::Outcome;
use slat_irqchip::message::Message;
use slat_irqchip::pic::{Chip, PicState, Pics};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

/// The irq source id (KVM's word) of the 8254. A line is high as long as any source holds it high.
pub(crate) const TIMER: u8 = 2;

/// The controllers' lines whose interrupts the guest has ended by an EOI. They are collected while a controller is
/// locked, and reported to irqfds and the 8254 after it is unlocked.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Ended {
    /// Lines of the 8259 pair, one bit for each line.
    pub(crate) lines: u16,
    /// Pins of the I/O APIC, one bit for each pin.
    pub(crate) pins: u32,
}

impl Ended {
    fn lines(lines: u16) -> Self {
        Ended { lines, pins: 0 }
    }

    fn add_pin(&mut self, pin: usize) {
        self.pins |= 1 << pin;
    }
}

/// The controllers of a PC.
pub(crate) struct Chips {
    pics: Mutex<Pics>,
    ioapic: Mutex<IoApic>,
    /// The guest-physical address of the I/O APIC's registers. Written under the I/O APIC's lock.
    ioapic_base: AtomicU64,
    /// The vectors of the I/O APIC's redirection entries. Written under the I/O APIC's lock.
    ioapic_vectors: Vectors,
    /// The level of the 8259 pair's INTR line. Written under the 8259 pair's lock.
    external: AtomicBool,
    /// The 8254, once the client has created it.
    pub(crate) timer: OnceLock<Shared<Timer>>,
    /// The alarm that ends the pause after an interrupt storm. Postponed interrupts are then delivered.
    storm: Shared<Client>,
}

/// The length of the pause after an interrupt storm. A storm is an interrupt whose line was still high at many EOIs in
/// a row.
const STORM_PAUSE: Duration = Duration::from_millis(10);

impl Drop for Chips {
    fn drop(&mut self) {
        self.storm.leave();
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Chips {
    /// Creates the controllers in their reset state. When the alarm `storm` rings, [`storm_paused`](Self::storm_paused)
    /// has to be called.
    ///
    /// # Errors
    /// `ENOMEM`.
    pub(crate) fn new(storm: Alarm) -> Result<Self> {
        Ok(Chips {
            pics: Mutex::new(Pics::with_sources_until_end(1 << RESAMPLE)),
            ioapic: Mutex::default(),
            ioapic_base: AtomicU64::new(ioapic::DEFAULT_BASE),
            ioapic_vectors: Vectors::default(),
            external: AtomicBool::new(false),
            timer: OnceLock::new(),
            storm: Client::register(storm)?,
        })
    }

    /// Whether the 8259 pair requests an interrupt.
    pub(crate) fn has_external(&self) -> bool {
        self.external.load(Ordering::SeqCst)
    }

    /// Whether a redirection entry of the I/O APIC has this vector.
    pub(crate) fn ioapic_has(&self, vector: u8) -> bool {
        self.ioapic_vectors.contains(vector)
    }

    /// Locks the 8259 pair and runs `work` on the pair. Then notifies vCPUs if the pair's INTR line has risen.
    fn with_pics<R>(&self, vcpus: &Targets, work: impl FnOnce(&mut Pics) -> R) -> R {
        let mut pics = lock(&self.pics);
        let result = work(&mut pics);
        let external = pics.output();
        let before = self.external.swap(external, Ordering::SeqCst);
        drop(pics);
        if external && !before {
            vcpus.notice_external();
        }
        result
    }

    /// Locks the I/O APIC and runs `work` on the I/O APIC. If the `bool` that `work` returns is true, the vectors or
    /// the base address may have changed, and this function publishes them.
    fn with_ioapic<R>(&self, work: impl FnOnce(&mut IoApic) -> (R, bool)) -> R {
        let mut ioapic = lock(&self.ioapic);
        let (result, changed) = work(&mut ioapic);
        if changed {
            self.ioapic_vectors.store(ioapic.vectors());
            self.ioapic_base.store(ioapic.base(), Ordering::SeqCst);
        }
        result
    }

    /// Sends a message of the I/O APIC, which is locked. Publishes the message's vector before sending, because a vCPU
    /// may end the interrupt at once.
    fn send(&self, vcpus: &Targets, message: &Message) -> Sent {
        self.ioapic_vectors.insert(message.vector);
        vcpus.send(None, message)
    }

    /// Sets the level that `source` gives a line of the 8259 pair.
    pub(crate) fn set_pic_line(
        &self,
        vcpus: &Targets,
        line: u8,
        source: u8,
        level: bool,
    ) -> Outcome {
        self.with_pics(vcpus, |pics| pics.set_line(line.into(), source, level))
    }

    /// Lets `source` raise a line of the 8259 pair and lower it again.
    pub(crate) fn pulse_pic_line(&self, vcpus: &Targets, line: u8, source: u8) {
        self.with_pics(vcpus, |pics| {
            for level in [true, false] {
                pics.set_line(line.into(), source, level);
            }
        });
    }

    /// Lets `source` raise a pin of the I/O APIC and lower it again.
    pub(crate) fn pulse_ioapic_pin(&self, vcpus: &Targets, pin: u8, source: u8) {
        self.with_ioapic(|ioapic| {
            for level in [true, false] {
                let deliver = &mut |message| self.send(vcpus, &message).taken;
                ioapic.set_line(pin.into(), source, level, deliver);
            }
            ((), false)
        });
    }

    /// Sets the level that `source` gives a pin of the I/O APIC. If every local APIC that accepts the interrupt had it
    /// pending already, the interrupt counts as coalesced.
    pub(crate) fn set_ioapic_pin(
        &self,
        vcpus: &Targets,
        pin: u8,
        source: u8,
        level: bool,
    ) -> Outcome {
        let mut new = 0;
        let outcome = self.with_ioapic(|ioapic| {
            let deliver = &mut |message| {
                let sent = self.send(vcpus, &message);
                new += sent.new;
                sent.taken
            };
            (ioapic.set_line(pin.into(), source, level, deliver), false)
        });
        match outcome {
            Outcome::Delivered(_) if new == 0 => Outcome::Coalesced,
            outcome => outcome,
        }
    }

    /// Acknowledges the 8259 pair's interrupt. Returns the interrupt's vector; `None` if the pair's INTR line has
    /// fallen meanwhile.
    pub(crate) fn acknowledge(&self, vcpus: &Targets) -> Option<(u8, Ended)> {
        let acknowledged =
            self.with_pics(vcpus, |pics| pics.output().then(|| pics.acknowledge()))?;
        Some((acknowledged.vector, Ended::lines(acknowledged.ended)))
    }

    /// Ends the interrupt with this vector at the I/O APIC. `level`: whether the local APIC received the interrupt as
    /// level-triggered.
    pub(crate) fn end_of_interrupt(&self, vcpus: &Targets, vector: u8, level: bool) -> Ended {
        let mut ended = Ended::default();
        let postponed = self.with_ioapic(|ioapic| {
            let postponed = ioapic.end_of_interrupt(
                vector,
                level,
                &mut |pin| {
                    ended.add_pin(pin);
                    1 << RESAMPLE
                },
                &mut |message| self.send(vcpus, &message).taken,
            );
            (postponed, false)
        });
        if postponed != 0 {
            self.storm.set_deadline(Some(Instant::now() + STORM_PAUSE));
        }
        ended
    }

    /// Reads `data.len()` bytes from a port of the 8259 pair.
    pub(crate) fn read_pics(&self, vcpus: &Targets, port: u16, data: &mut [u8]) -> Ended {
        data.fill(0);
        let [byte] = data else {
            return Ended::default();
        };
        let (value, ended) = self.with_pics(vcpus, |pics| pics.read(port));
        *byte = value;
        Ended::lines(ended)
    }

    /// Writes to a port of the 8259 pair.
    pub(crate) fn write_pics(&self, vcpus: &Targets, port: u16, data: &[u8]) -> Ended {
        let &[byte] = data else {
            return Ended::default();
        };
        let change = self.with_pics(vcpus, |pics| pics.write(port, byte));
        self.line_unmasked(change.unmasked & 1 != 0);
        Ended::lines(change.ended)
    }

    /// Whether `gpa` is an address of the I/O APIC's registers.
    pub(crate) fn ioapic_contains(&self, gpa: u64) -> bool {
        let base = self.ioapic_base.load(Ordering::SeqCst);
        gpa.wrapping_sub(base) < ioapic::WINDOW
    }

    /// Reads registers of the I/O APIC.
    pub(crate) fn read_ioapic(&self, gpa: u64, data: &mut [u8]) {
        let ioapic = lock(&self.ioapic);
        ioapic.read(gpa.wrapping_sub(ioapic.base()), data);
    }

    /// Writes registers of the I/O APIC. `is_timers` says whether a given pin is the 8254's.
    pub(crate) fn write_ioapic(
        &self,
        vcpus: &Targets,
        gpa: u64,
        data: &[u8],
        is_timers: impl FnOnce(usize) -> bool,
    ) -> Ended {
        let mut ended = Ended::default();
        let written = self.with_ioapic(|ioapic| {
            let written = ioapic.write(
                gpa.wrapping_sub(ioapic.base()),
                data,
                &mut |pin| {
                    ended.add_pin(pin);
                    1 << RESAMPLE
                },
                &mut |message| self.send(vcpus, &message).taken,
            );
            let changed = written.is_some();
            (written, changed)
        });
        self.line_unmasked(written.is_some_and(|w| w.unmasked && is_timers(w.pin)));
        ended
    }

    /// Discards the ticks that the guest missed while the 8254's line was masked. Call after the guest has unmasked a
    /// line. Does nothing unless `is_timers`: the unmasked line is the 8254's.
    fn line_unmasked(&self, is_timers: bool) {
        if let Some(timer) = self.timer.get().filter(|_| is_timers) {
            timer.reset_reinjection();
        }
    }

    pub(crate) fn save_pic(&self, chip: Chip) -> PicState {
        lock(&self.pics).save(chip)
    }

    pub(crate) fn restore_pic(&self, vcpus: &Targets, chip: Chip, state: &PicState) {
        self.with_pics(vcpus, |pics| pics.restore(chip, state));
    }

    pub(crate) fn save_ioapic(&self) -> ioapic::IoApicState {
        lock(&self.ioapic).save()
    }

    pub(crate) fn restore_ioapic(&self, vcpus: &Targets, state: &ioapic::IoApicState) {
        self.with_ioapic(|ioapic| {
            ioapic.restore(state, &mut |message| self.send(vcpus, &message).taken);
            ((), true)
        });
    }

    /// Delivers the interrupts that were postponed because of an interrupt storm.
    pub(crate) fn storm_paused(&self, vcpus: &Targets) {
        self.with_ioapic(|ioapic| {
            ioapic.deliver_pending(&mut |message| self.send(vcpus, &message).taken);
            ((), false)
        });
    }
}
