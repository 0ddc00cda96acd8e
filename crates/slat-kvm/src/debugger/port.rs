//! The place where the thread of a vCPU waits while a debugger holds the vCPU.

use crate::arch::{Probe, ProbeHit};
use crate::thread::bits;
use crate::ticker;
use slat::Attention;
use slat_process::wait;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// The time limit of each sleep. A sleep without a time limit would continue after a signal handler, because the kernel
/// restarts it.
const LONGEST_SLEEP: Duration = Duration::from_secs(60);

/// A number that changes whenever the debugger has to check the vCPUs of this process: a vCPU has stopped or has begun
/// to wait. The debugger's thread sleeps on this word. It is changed with release after the vCPU's state, and read with
/// acquire before the debugger looks at that state.
pub(super) static NEWS: AtomicU32 = AtomicU32::new(0);

/// The work that a vCPU's thread has to do before the vCPU continues.
#[derive(Default)]
pub(crate) struct Orders {
    pub(crate) probes: Vec<Probe>,
    /// Whether the vCPU executes one instruction only.
    pub(crate) steps: bool,
    /// Whether the vCPU ignores a probe at its next instruction.
    pub(crate) passes: bool,
}

struct State<T> {
    /// Whether a debugger is attached to the VM.
    attached: bool,
    held: bool,
    /// The vCPU that its thread lends to the debugger while the thread waits in this port.
    lent: Option<NonNull<T>>,
    /// The orders that the vCPU's thread has not carried out yet.
    orders: Option<Orders>,
    /// The probe that has stopped the vCPU. `None`: no probe has stopped it, or the debugger already knows of the stop.
    hit: Option<ProbeHit>,
}

/// The place where a vCPU's thread waits for its debugger, and the state that the thread lends to the debugger
/// meanwhile.
pub(crate) struct Port<T> {
    attention: Attention,
    state: Mutex<State<T>>,
}

// SAFETY: the pointer refers to a `T` on another thread's stack. `T` is `Send`, and threads use the `T` only while
// they hold the lock, so one at a time.
unsafe impl<T: Send> Send for Port<T> {}
// SAFETY: the pointer refers to a `T` on another thread's stack. `T` is `Send`, and threads use the `T` only while
// they hold the lock, so one at a time.
unsafe impl<T: Send> Sync for Port<T> {}

/// The part of a port that a debugger uses.
pub(crate) trait Held {
    /// Holds the vCPU: its thread waits before the next instruction of the guest.
    fn hold(&self);

    /// Lets the vCPU continue with these orders.
    fn release(&self, orders: Orders);

    /// Ends the debugger's hold: the vCPU continues without probes.
    fn detach(&self);

    /// Returns the probe that has stopped the vCPU.
    fn hit(&self) -> Option<ProbeHit>;

    /// Forgets the probe that has stopped the vCPU.
    fn forget_hit(&self);
}

impl<T> Port<T> {
    pub(crate) fn new(attention: Attention) -> Self {
        Port {
            attention,
            state: Mutex::new(State {
                attached: false,
                held: false,
                lent: None,
                orders: None,
                hit: None,
            }),
        }
    }

    fn state(&self) -> MutexGuard<'_, State<T>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether a debugger asks the vCPU's thread to wait in the port. Reads only the attention word.
    pub(crate) fn calls(&self) -> bool {
        self.attention.flag().load(Ordering::SeqCst) & bits::HOLD != 0
    }

    /// Removes and returns the debugger's orders for the vCPU. `None`: there are no new orders.
    pub(crate) fn orders(&self) -> Option<Orders> {
        self.state().orders.take()
    }

    /// Waits while the vCPU is held, and lends `vcpu` to the debugger meanwhile. After each sleep calls `leaves` with
    /// the bits that were raised during the sleep, and with whether a signal ended the sleep. The wait also ends when
    /// `leaves` returns true. Call on the vCPU's thread, outside the engine.
    pub(crate) fn wait(&self, vcpu: &mut T, mut leaves: impl FnMut(u32, bool) -> bool) {
        let mut quiet = Quiet::begin(&self.attention);
        let (mut raised, mut interrupted) = (quiet.bits, false);
        let lent = NonNull::from(vcpu);
        let mut told = false;
        let mut state = self.state();
        while state.held && !leaves(raised, interrupted) {
            state.lent = Some(lent);
            drop(state);
            if !std::mem::replace(&mut told, true) {
                tell();
            }
            interrupted = ticker::sleep(&self.attention, LONGEST_SLEEP);
            if interrupted {
                quiet.bits |= bits::SIGNAL;
            }
            raised = quiet.again();
            state = self.state();
        }
        state.lent = None;
        quiet.bits &= !bits::HOLD;
        if state.held {
            quiet.bits |= bits::HOLD;
        }
    }

    /// Calls `work` with the vCPU, if the vCPU's thread waits in this port. Returns `Err` with the unused `work` if the
    /// thread does not wait in this port.
    pub(crate) fn with_lent<R, W: FnOnce(&mut T) -> R>(&self, work: W) -> Result<R, W> {
        let state = self.state();
        match state.lent {
            // SAFETY: the waiting thread lent its exclusive reference, and uses the vCPU again only after it has locked
            // the state, which is locked here.
            Some(mut lent) => Ok(work(unsafe { lent.as_mut() })),
            None => Err(work),
        }
    }

    /// Holds the vCPU for the debugger, because a probe has stopped the vCPU. If the debugger is no longer attached,
    /// the vCPU continues. Call on the vCPU's thread.
    pub(crate) fn stopped(&self, hit: ProbeHit) {
        let mut state = self.state();
        if state.attached {
            state.hit = Some(hit);
            state.held = true;
            self.attention.raise(bits::HOLD);
            drop(state);
            tell();
        }
    }

    fn change(&self, change: impl FnOnce(&mut State<T>)) {
        change(&mut self.state());
        ticker::raise(&self.attention, bits::HOLD);
    }
}

impl<T> Held for Port<T> {
    fn hold(&self) {
        self.change(|state| {
            state.attached = true;
            state.held = true;
        });
    }

    fn release(&self, orders: Orders) {
        self.change(|state| {
            state.attached = true;
            state.held = false;
            state.orders = Some(orders);
        });
    }

    fn detach(&self) {
        self.change(|state| {
            (state.attached, state.held, state.hit) = (false, false, None);
            state.orders = Some(Orders::default());
        });
    }

    fn hit(&self) -> Option<ProbeHit> {
        self.state().hit
    }

    fn forget_hit(&self) {
        self.state().hit = None;
    }
}

/// Wakes the debugger.
fn tell() {
    NEWS.fetch_add(1, Ordering::Release);
    wait::wake(&NEWS);
}

/// Hides the raised bits of an attention word, so that a reader of the word sees only new bits. Dropping this value
/// raises the hidden bits again.
pub(crate) struct Quiet<'a> {
    attention: &'a Attention,
    bits: u32,
}

impl<'a> Quiet<'a> {
    pub(crate) fn begin(attention: &'a Attention) -> Self {
        let bits = attention.take(u32::MAX);
        Quiet { attention, bits }
    }

    /// Clears and returns the bits that were raised since the last call.
    fn again(&mut self) -> u32 {
        let raised = self.attention.take(u32::MAX);
        self.bits |= raised;
        raised
    }
}

impl Drop for Quiet<'_> {
    fn drop(&mut self) {
        // The vCPU was outside the engine, so no thread waits for this vCPU's acknowledgement of a flush. RETRY makes
        // the vCPU drop its translations.
        if self.bits & Attention::FLUSH != 0 {
            self.bits = self.bits & !Attention::FLUSH | bits::RETRY;
        }
        ticker::raise(self.attention, self.bits);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::thread;

    fn until(done: impl Fn() -> bool) {
        let begin = std::time::Instant::now();
        while !done() {
            assert!(begin.elapsed() < Duration::from_secs(20));
            thread::yield_now();
        }
    }

    #[test]
    fn a_waiting_thread_lends_and_takes_back() {
        let port = Arc::new(Port::new(Attention::new().unwrap()));
        assert!(!port.calls());
        port.hold();
        let vcpu = {
            let port = port.clone();
            thread::spawn(move || {
                let mut value = 1;
                assert!(port.calls());
                port.wait(&mut value, |_, _| false);
                value
            })
        };
        until(|| port.with_lent(|value| *value += 1).is_ok());
        // Another thread raises a bit during the wait. The bit must not end the wait, and must not be lost.
        ticker::raise(&port.attention, bits::IRQ);
        port.release(Orders {
            steps: true,
            ..Orders::default()
        });
        assert_eq!(vcpu.join().unwrap(), 2);
        assert!(port.with_lent(|_| ()).is_err());
        assert_ne!(port.attention.take(bits::IRQ), 0);
        assert!(port.orders().unwrap().steps);
    }

    #[test]
    fn a_signal_ends_the_wait_and_the_vcpu_stays_held() {
        let port = Arc::new(Port::new(Attention::new().unwrap()));
        port.hold();
        let vcpu = {
            let port = port.clone();
            thread::spawn(move || {
                port.wait(&mut (), |raised, _| raised & bits::SIGNAL != 0);
            })
        };
        until(|| port.with_lent(|_| ()).is_ok());
        ticker::raise(&port.attention, bits::SIGNAL);
        vcpu.join().unwrap();
        assert_eq!(
            port.attention.take(u32::MAX),
            bits::SIGNAL | bits::HOLD,
            "for the next run"
        );
    }

    #[test]
    fn a_hit_holds_nobody_without_a_debugger() {
        let port: Port<()> = Port::new(Attention::new().unwrap());
        port.stopped(ProbeHit::Step);
        assert!(!port.calls() && port.hit().is_none());
        port.hold();
        port.stopped(ProbeHit::Code);
        assert_eq!(port.hit(), Some(ProbeHit::Code));
        port.detach();
        assert!(port.orders().unwrap().probes.is_empty());
        port.wait(&mut (), |_, _| panic!("not held"));
    }
}
