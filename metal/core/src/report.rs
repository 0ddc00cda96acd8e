//! Runs the scenarios, and reports their results.

use alloc::format;
use alloc::sync::Arc;
use core::fmt;

use slat::{Format, MmuKind};

use crate::bench::Bench;
use crate::guest::Tables;
use crate::scenarios;
use crate::{Host, Machine};

/// A console for `write!`. The function prints the text.
pub struct Console(pub fn(&str));

impl fmt::Write for Console {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        (self.0)(text);
        Ok(())
    }
}

/// Does the first CPU's work: runs every scenario on `host`, which no VM uses, and then ends the emulator. Runs the
/// scenarios with the tables of each kind of MMU that the walker's format supports.
///
/// Prints a line for each scenario on the console, and as the last line `metal NAME: N passed, N failed`.
pub fn run<M: Machine>(mut cpu: M::Cpu, host: Arc<Host<M>>) -> ! {
    let (mut passed, mut failed) = (0, 0);
    let mmus = MmuKind::ALL.iter().filter(|mmu| match mmu {
        MmuKind::Tdp => !Tables::<M>::SHADOWS,
        other => other.serves::<Tables<M>>(),
    });
    let all = mmus.flat_map(|mmu| scenarios::all::<M>().map(move |scenario| (*mmu, scenario)));
    for (mmu, (name, scenario)) in all {
        let verdict = scenario(&mut Bench {
            cpu: &mut cpu,
            host: host.clone(),
            mmu,
        });
        let name = match mmu {
            MmuKind::Tdp => name.into(),
            other => format!("{name}, {}", other.name()),
        };
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
