//! Two operations, interleaved at every step of the first: the *victim* is stopped at its n-th step, the *intruder*
//! runs until it is done or must wait, then the victim goes on; for every n (of hundreds that are alike, for many).
//! Meanwhile a *holder*, a CPU that acknowledges flushes only when it must, uses what it was given before.

use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Condvar, Mutex};
use std::thread;

use slat_model::{Event, SimPlatform};

/// Where two operations are interleaved.
pub trait Scene: Send + Sync {
    /// Something that the holder uses.
    type Held: Sync;
    /// Whether a victim may have no step at all.
    fn may_be_still() -> bool {
        false
    }
    /// Whether a victim may be stopped at this event.
    fn is_step(_: &Event) -> bool {
        true
    }
    fn platform(&self) -> &SimPlatform;
    /// Gets what is `held`, and uses it until the end. Runs on the holder's thread.
    fn hold(&self, held: &[Self::Held], holder: &Holder<'_>);
    /// Checks all when no thread runs.
    fn check(&self);
}

/// What a holder knows of the other two.
pub struct Holder<'a> {
    ready: &'a AtomicBool,
    stop: &'a AtomicBool,
    progress: &'a Mutex<Progress>,
}

impl Holder<'_> {
    /// Call when all is got: the victim begins.
    pub fn is_ready(&self) {
        self.ready.store(true, SeqCst);
    }

    /// Returns whether both are done.
    pub fn is_over(&self) -> bool {
        self.stop.load(SeqCst)
    }

    /// Returns whether nobody can go on unless a flush is acknowledged.
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
    /// The victim's last event was a wait, which goes on: that is no other step.
    waits: bool,
    /// Both have done what they can without the holder.
    pub holder_may_quiesce: bool,
}

/// Steps at the beginning and at the end of a victim after each of which the intruder runs.
const ENDS: usize = 64;

/// Runs `victim` once for each of its steps, with `intruder` in between. `held`: what the holder uses; there is none
/// without. Steps in the middle of many are alike, such as visits of all leaves of a slot: every seventh of them.
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

/// Lets the others go on when it is dropped, also because an operation has panicked.
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
