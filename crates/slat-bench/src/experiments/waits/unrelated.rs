//! The calls on unrelated memory that another thread makes repeatedly during a long operation.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering::SeqCst};
use std::time::{Duration, Instant};

use slat::{Access, Ept, Gpa, Hva, Region, Stop, Vcpu, Vm};

use super::histogram::Histogram;
use crate::Failure;
use crate::bare::{self, Bare, PAGE};
use crate::rounds::thread_time;

/// A small memslot. Its address is so far from the large memslot and from the other small memslots that they have only
/// the root table in common.
const SMALL: Place = Place::at(1, 1 << 40);
const COMES_AND_GOES: Place = Place::at(2, 2 << 40);
const PAGES: u64 = 16;

/// A small memslot.
struct Place {
    id: u32,
    gpa: u64,
}

impl Place {
    const fn at(id: u32, gpa: u64) -> Self {
        Place { id, gpa }
    }

    fn backing(&self) -> u64 {
        (1 << 45) + self.gpa
    }

    fn region(&self, pages: u64) -> Region {
        bare::region(self.id, self.gpa, pages, self.backing())
    }
}

/// The kinds of calls. They concern other memory than the long operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Unrelated {
    /// Begins `Vm::invalidate` of one mapped page, and ends it at once.
    Invalidate,
    /// Creates a small slot, and deletes it after one of its pages was mapped. Both calls are measured.
    SlotChange,
    /// A fault of a vCPU on a page that is not mapped.
    Fault,
}

impl Unrelated {
    pub(super) const ALL: [(Unrelated, &str); 3] = [
        (Unrelated::Invalidate, "invalidate"),
        (Unrelated::SlotChange, "slot"),
        (Unrelated::Fault, "fault"),
    ];
}

/// Creates the memslot for [`Unrelated::Invalidate`], which invalidates one of its pages.
pub(super) fn create_slot(vm: &Vm<Bare, Ept>) -> Result<(), Failure> {
    Ok(vm.set_memory_region(0, &SMALL.region(PAGES))?)
}

/// A state of the operation: the operation has not begun.
const BEFORE: u8 = 0;
const DURING: u8 = 1;
const AFTER: u8 = 2;

/// The result of an operation during which another thread made calls, and the time that other programs have taken from
/// the two threads.
pub(super) struct Beside<R> {
    /// The result of the long operation.
    pub(super) result: R,
    /// The time that the long operation took.
    pub(super) time: Duration,
    /// The time for which one of the threads did not have its processor, because other programs used it. The threads
    /// never sleep, so this is their wall time minus their processor time.
    pub(super) lost: Duration,
}

/// Runs `operation` while another thread makes `calls`. Records in `waits` the times of the calls that overlap with the
/// operation.
///
/// # Errors
/// The errors of the calls.
pub(super) fn beside<R>(
    vm: &Arc<Vm<Bare, Ept>>,
    calls: Unrelated,
    waits: &mut Histogram,
    operation: impl FnOnce() -> R,
) -> Result<Beside<R>, Failure> {
    let progress = &AtomicU8::new(BEFORE);
    let began = &AtomicBool::new(false);
    let mut caller = Caller {
        cpu: vm.create_vcpu()?,
        progress,
        waits,
    };
    std::thread::scope(|scope| {
        // Dropping `end` ends the calls, even if the operation panics. The scope then waits for the thread that makes
        // the calls.
        let end = End(progress);
        let thread = scope.spawn(move || {
            let start = Clocks::now();
            while progress.load(SeqCst) != AFTER {
                caller.call(calls)?;
                began.store(true, SeqCst);
            }
            Ok::<_, Failure>(start.elapsed())
        });
        while !began.load(SeqCst) && !thread.is_finished() {
            std::thread::yield_now();
        }
        progress.store(DURING, SeqCst);
        let start = Clocks::now();
        let result = operation();
        let (time, lost) = start.elapsed();
        drop(end);
        let (_, lost_by_caller) = thread.join().expect("the calls do not panic")?;
        Ok(Beside {
            result,
            time,
            lost: lost + lost_by_caller,
        })
    })
}

/// The wall time and a thread's processor time at one moment.
struct Clocks {
    wall: Instant,
    cpu: Duration,
}

impl Clocks {
    fn now() -> Self {
        Clocks {
            wall: Instant::now(),
            cpu: thread_time(),
        }
    }

    /// Returns the time since the clocks were read. Also returns the part of that time in which the thread did not have
    /// a processor.
    fn elapsed(&self) -> (Duration, Duration) {
        let (wall, cpu) = (self.wall.elapsed(), thread_time() - self.cpu);
        (wall, wall.saturating_sub(cpu))
    }
}

struct End<'a>(&'a AtomicU8);

impl Drop for End<'_> {
    fn drop(&mut self) {
        self.0.store(AFTER, SeqCst);
    }
}

/// The thread that makes the calls.
struct Caller<'a> {
    cpu: Vcpu<Bare, Ept>,
    progress: &'a AtomicU8,
    waits: &'a mut Histogram,
}

impl Caller<'_> {
    fn call(&mut self, calls: Unrelated) -> Result<(), Failure> {
        match calls {
            Unrelated::Invalidate => {
                self.write_to(&SMALL)?;
                self.timed(|caller| {
                    caller.invalidate();
                    Ok(())
                })
            }
            Unrelated::Fault => {
                self.timed(|caller| caller.write_to(&SMALL))?;
                self.invalidate();
                Ok(())
            }
            Unrelated::SlotChange => {
                let set = |pages| {
                    let region = COMES_AND_GOES.region(pages);
                    move |caller: &mut Self| Ok(bare::set(caller.cpu.vm(), &region)?)
                };
                self.timed(set(PAGES))?;
                self.write_to(&COMES_AND_GOES)?;
                self.timed(set(0))
            }
        }
    }

    /// Invalidates the page in [`SMALL`] that [`Self::write_to`] has mapped.
    fn invalidate(&self) {
        let page = Hva(SMALL.backing())..Hva(SMALL.backing() + PAGE);
        drop(self.cpu.vm().invalidate(page));
    }

    /// Writes to a page of `slot`, so that a leaf exists that can be zapped.
    fn write_to(&mut self, slot: &Place) -> Result<(), Failure> {
        loop {
            self.cpu.enter_unguarded(0);
            let result = self.cpu.translate(Gpa(slot.gpa), Access::Write);
            self.cpu.leave();
            match result {
                // A flush by the vCPU has interrupted the fault, so the fault is tried again.
                Err(Stop::Retry) => {}
                Err(stop) => return Err(stop.into()),
                Ok(_) => return Ok(()),
            }
        }
    }

    fn timed(
        &mut self,
        call: impl FnOnce(&mut Self) -> Result<(), Failure>,
    ) -> Result<(), Failure> {
        let was_over = self.progress.load(SeqCst) == AFTER;
        let began = Instant::now();
        call(self)?;
        let time = began.elapsed();
        if !was_over && self.progress.load(SeqCst) != BEFORE {
            self.waits.record(time);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_calls_in_progress_during_the_operation_count() {
        for (calls, _) in Unrelated::ALL {
            let vm = bare::vm();
            create_slot(&vm).unwrap();
            let mut waits = Histogram::new();
            let sleep = || std::thread::sleep(Duration::from_millis(20));
            let beside = beside(&vm, calls, &mut waits, sleep).unwrap();
            assert!(beside.time >= Duration::from_millis(20));
            // A sleeping thread has no processor, so its sleep counts as lost time.
            assert!(beside.lost >= Duration::from_millis(15));
            assert!(waits.calls() > 0);
            assert_eq!(vm.stats().pages_4k, 0, "{calls:?}");
        }
    }

    #[test]
    fn what_goes_wrong_beside_the_operation_is_an_error() {
        // Only the slot's memory is mapped; all other addresses are not.
        let vm = bare::vm();
        let mut waits = Histogram::new();
        assert!(beside(&vm, Unrelated::Invalidate, &mut waits, || ()).is_err());
        assert_eq!(waits.calls(), 0);
    }
}
