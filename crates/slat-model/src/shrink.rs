//! Shortens a run that failed.

use std::any::Any;
use std::cell::Cell;
use std::fmt;
use std::panic::{self, AssertUnwindSafe};
use std::sync::Once;
use std::time::{Duration, Instant};

use crate::ops::Op;

/// A run in which engine, platform and model disagreed. [`fmt::Display`] writes all that is needed to repeat the run.
#[derive(Debug)]
pub struct Failure<O = Op> {
    /// The message of the check that failed, with the expected and the actual result.
    pub why: String,
    /// A sequence of operations that fails, too, perhaps with another message. If any one of them is left out, the
    /// sequence does not fail.
    pub ops: Vec<O>,
    /// The run's description: subject, seed, setup, steps.
    pub(crate) run: String,
}

impl<O> Failure<O> {
    /// Writes all that is needed to repeat the run. `text` writes an operation.
    pub(crate) fn write(
        &self,
        f: &mut fmt::Formatter<'_>,
        text: impl Fn(&O) -> String,
    ) -> fmt::Result {
        writeln!(f, "{}\n{}", self.why, self.run)?;
        write!(f, "these {} operations fail, too:", self.ops.len())?;
        self.ops
            .iter()
            .try_for_each(|op| write!(f, "\n    {}", text(op)))
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.write(f, |op| format!("{op:?}"))
    }
}

/// The time limit for shortening. Operations that were not tried by then stay in the sequence.
const PATIENCE: Duration = Duration::from_secs(20);

/// Runs `run`. If `run` panics, the error has the panic's message and the text of `what`. The error also has a
/// shortened sequence of the operations that `record` returns, with which `replay` still panics.
pub(crate) fn run_or_shrink<R, O: Clone>(
    run: impl FnOnce() -> R,
    what: impl FnOnce() -> String,
    record: impl FnOnce() -> Vec<O>,
    replay: impl Fn(&[O]),
) -> Result<R, Failure<O>> {
    panic::catch_unwind(AssertUnwindSafe(run)).map_err(|why| Failure {
        why: message(&*why),
        ops: silent(|| shrink(record(), |ops| panics(|| replay(ops)))),
        run: what(),
    })
}

/// Leaves out operations, as long as the remaining sequence fails.
fn shrink<O: Clone>(mut ops: Vec<O>, fail: impl Fn(&[O]) -> bool) -> Vec<O> {
    let begin = Instant::now();
    let mut chunk = ops.len() / 2;
    while chunk > 0 {
        let mut at = 0;
        while at < ops.len() && begin.elapsed() < PATIENCE {
            let end = (at + chunk).min(ops.len());
            let fewer = [&ops[..at], &ops[end..]].concat();
            if fail(&fewer) {
                ops = fewer;
            } else {
                at = end;
            }
        }
        chunk /= 2;
    }
    ops
}

/// Returns whether `what` panics.
pub(crate) fn panics(what: impl FnOnce()) -> bool {
    panic::catch_unwind(AssertUnwindSafe(what)).is_err()
}

/// Runs `what`. Panic messages of this thread are not printed during the run.
pub(crate) fn silent<R>(what: impl FnOnce() -> R) -> R {
    thread_local! {
        static SILENT: Cell<bool> = const { Cell::new(false) };
    }
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let before = panic::take_hook();
        panic::set_hook(Box::new(move |info| {
            if !SILENT.get() {
                before(info);
            }
        }));
    });
    SILENT.set(true);
    let result = what();
    SILENT.set(false);
    result
}

/// Returns the message of a panic.
fn message(why: &(dyn Any + Send)) -> String {
    let text = why.downcast_ref::<String>().cloned();
    let text = text.or_else(|| why.downcast_ref::<&str>().map(|text| text.to_string()));
    text.unwrap_or_else(|| "a panic without a message".into())
}
