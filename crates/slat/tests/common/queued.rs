//! A change that waits for a lock while an operation is in one of its steps, and gets the lock before the operation's
//! next step.

use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};

use slat::WaitFor;
use slat_model::{Event, SimPlatform};

/// A change on another thread, which has not begun yet or waits for the lock.
pub struct Queued<'p> {
    platform: &'p SimPlatform,
    thread: Arc<Mutex<Option<JoinHandle<()>>>>,
}

impl<'p> Queued<'p> {
    /// Starts `change` on another thread when this thread next reads a table. This thread continues when the other
    /// thread waits for the lock.
    pub fn at_the_next_table(
        platform: &'p SimPlatform,
        change: impl FnOnce() + Send + 'static,
    ) -> Self {
        let thread = Arc::new(Mutex::new(None));
        let (this, waits) = (thread::current().id(), AtomicBool::new(false));
        let (change, started) = (Mutex::new(Some(change)), thread.clone());
        platform.set_hook(move |event| match event {
            Event::Wait(WaitFor::Turn) if thread::current().id() != this => {
                waits.store(true, SeqCst)
            }
            Event::Entries(_) if thread::current().id() == this => {
                if let Some(change) = change.lock().unwrap().take() {
                    *started.lock().unwrap() = Some(thread::spawn(change));
                    while !waits.load(SeqCst) {
                        thread::yield_now();
                    }
                }
            }
            _ => {}
        });
        Queued { platform, thread }
    }

    /// Waits until the change is made.
    pub fn join(self) {
        let thread = self.thread.lock().unwrap().take();
        thread.expect("a table was read").join().unwrap();
        self.platform.clear_hook();
    }
}
