//! Interleaves two operations at every step of the first. The first operation is the *victim*, the second the
//! *intruder*. The victim stops at its n-th step. The intruder runs until it is done or must wait. Then the victim
//! continues. This is repeated for every n (if hundreds of steps are alike, for many of them). Meanwhile a *holder*, a
//! CPU that acknowledges flushes only when it must, uses translations from before.

use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Condvar, Mutex};
use std::thread;

use slat_model::{Event, SimPlatform};

/// The data on which operations are interleaved.
pub trait Scene: Send + Sync {
    /// A description of a translation that the holder thread uses.
    type Held: Sync;
    /// Whether a victim (the operation that is interrupted) may reach no event at which it can be stopped.
    fn may_be_still() -> bool {
        false
    }
    /// Whether a victim may be stopped at this event, so that the intruder, the other operation, runs.
    fn is_step(_: &Event) -> bool {
        true
    }
    fn platform(&self) -> &SimPlatform;
    /// Gets the translations that `held` describes, and uses them until victim and intruder are done, or both wait for
    /// a flush. Runs on the thread of the [`Holder`].
    fn hold(&self, held: &[Self::Held], holder: &Holder<'_>);
    /// Checks the state. Called when no thread runs.
    fn check(&self);
}

/// The knowledge of the holder about the two operations, victim and intruder. The holder is the thread that keeps using
/// old translations.
pub struct Holder<'a> {
    ready: &'a AtomicBool,
    stop: &'a AtomicBool,
    progress: &'a Mutex<Progress>,
}

impl Holder<'_> {
    /// Call when the holder has all its translations: then the victim begins.
    pub fn is_ready(&self) {
        self.ready.store(true, SeqCst);
    }

    /// Returns whether victim and intruder are done.
    pub fn is_over(&self) -> bool {
        self.stop.load(SeqCst)
    }

    /// Returns whether neither the victim nor the intruder can continue before the holder acknowledges a flush.
    pub fn may_quiesce(&self) -> bool {
        self.progress.lock().unwrap().holder_may_quiesce
    }
}

#[derive(Default)]
pub struct Progress {
    pub steps: usize,
    pub paused: bool,
    pub resumed: bool,
    pub victim_done: bool,
    /// Whether the victim's last event was a wait. Further events of the same wait are no steps.
    waits: bool,
    /// Whether the victim and the intruder have done all they can do without the holder.
    pub holder_may_quiesce: bool,
}

/// The number of first steps, and of last steps, of a victim at each of which the intruder runs.
const ENDS: usize = 64;

/// Runs `victim` once for each of its steps, with `intruder` at that step. `held` describes the translations of the
/// holder; if it is empty, there is no holder. Many steps in the middle are alike, such as visits of all leaves of a
/// slot. Of these, only every seventh is used.
pub fn interleave<S: Scene>(
    prepare: impl Fn() -> Arc<S>,
    held: &[S::Held],
    victim: fn(&S),
    intruder: fn(&S),
) {
    let mut step = 1;
    loop {
        let scene = prepare();
        let progress = Arc::new((Mutex::new(Progress::default()), Condvar::new()));
        scene.platform().set_hook({
            let progress = progress.clone();
            move |event| on_event::<S>(&progress, event, step)
        });
        let stop = AtomicBool::new(false);
        let ready = AtomicBool::new(held.is_empty());
        let mut steps_left = false;
        thread::scope(|scope| {
            let begin = |name: &str| thread::Builder::new().name(name.into());
            if !held.is_empty() {
                let hold = || {
                    let holder = Holder {
                        ready: &ready,
                        stop: &stop,
                        progress: &progress.0,
                    };
                    scene.hold(held, &holder);
                };
                begin("holder").spawn_scoped(scope, hold).unwrap();
            }
            while !ready.load(SeqCst) {
                thread::yield_now();
            }
            let start = |name: &str, act: fn(&S)| {
                let (scene, progress) = (scene.clone(), progress.clone());
                let is_victim = name == "victim";
                let run = move || {
                    let _done = Done {
                        progress: &progress,
                        is_victim,
                    };
                    act(&scene);
                };
                begin(name).spawn_scoped(scope, run).unwrap()
            };
            let victim = start("victim", victim);
            {
                let mut now = progress.0.lock().unwrap();
                while !now.paused && !now.victim_done {
                    now = progress.1.wait(now).unwrap();
                }
                steps_left = now.paused;
            }
            let intruder = start("intruder", intruder);
            let ends = [intruder.join(), victim.join()];
            stop.store(true, SeqCst);
            ends.into_iter().for_each(Result::unwrap);
        });
        scene.platform().clear_hook();
        scene.check();
        if !steps_left {
            assert!(
                step > 1 || S::may_be_still(),
                "the victim had hardly a step"
            );
            return;
        }
        let is_in_the_middle = step > ENDS && step + ENDS < progress.0.lock().unwrap().steps;
        step += if is_in_the_middle { 7 } else { 1 };
    }
}

/// When dropped, lets the other threads continue, also if an operation has panicked.
struct Done<'a> {
    progress: &'a (Mutex<Progress>, Condvar),
    is_victim: bool,
}

impl Drop for Done<'_> {
    fn drop(&mut self) {
        let mut now = self.progress.0.lock().unwrap();
        now.victim_done |= self.is_victim;
        now.resumed |= !self.is_victim;
        now.holder_may_quiesce |= now.resumed;
        self.progress.1.notify_all();
    }
}

fn on_event<S: Scene>(progress: &(Mutex<Progress>, Condvar), event: Event, step: usize) {
    let thread = thread::current();
    let waits = matches!(event, Event::Wait(_));
    match thread.name() {
        Some("victim") if S::is_step(&event) => {
            let mut now = progress.0.lock().unwrap();
            let goes_on = std::mem::replace(&mut now.waits, waits) && waits;
            now.steps += usize::from(!goes_on);
            if now.steps == step && !goes_on {
                now.paused = true;
                progress.1.notify_all();
                while !now.resumed {
                    now = progress.1.wait(now).unwrap();
                }
            }
            now.holder_may_quiesce |= waits;
        }
        Some("intruder" | "holder") if waits => {
            let mut now = progress.0.lock().unwrap();
            now.resumed |= now.paused || thread.name() == Some("intruder");
            now.holder_may_quiesce |= thread.name() == Some("intruder");
            progress.1.notify_all();
        }
        _ => {}
    }
}
