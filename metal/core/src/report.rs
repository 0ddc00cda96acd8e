//! Runs the scenarios, and reports their results.

use alloc::format;
use alloc::sync::Arc;
use core::fmt;

use crate::bench::Bench;
use crate::scenarios;
use crate::{Host, Machine};

/// A console for `write!`, which the function prints to.
pub struct Console(pub fn(&str));

impl fmt::Write for Console {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        (self.0)(text);
        Ok(())
    }
}

/// Does the first CPU's work: runs every scenario on `host`, which no VM uses, and ends the
/// emulator.
///
/// Prints a line for each on the console, and as the last one `metal NAME: N passed, N failed`.
pub fn run<M: Machine>(mut cpu: M::Cpu, host: Arc<Host<M>>) -> ! {
    let (mut passed, mut failed) = (0, 0);
    for (name, scenario) in scenarios::all::<M>() {
        let verdict = scenario(&mut Bench {
            cpu: &mut cpu,
            host: host.clone(),
        });
        let line = match verdict {
            Ok(figures) => {
                passed += 1;
                format!("scenario {name}: ok ({figures})\n")
            }
            Err(error) => {
                failed += 1;
                format!("scenario {name}: FAILED: {error}\n")
            }
        };
        M::print(&line);
    }
    M::print(&format!(
        "metal {}: {passed} passed, {failed} failed\n",
        M::NAME
    ));
    M::power_off()
}
