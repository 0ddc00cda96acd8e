//! Runs the scenarios, and tells.

use alloc::format;
use alloc::sync::Arc;

use slat::{Hpa, PAGE_SIZE};

use crate::bench::{Bench, CODE_PAGES, GIB, MIB};
use crate::scenarios;
use crate::{Heap, Host, Machine, Memory};

/// The first CPU's work: gives `heap` its memory, runs every scenario, and ends the emulator.
///
/// The console gets a line for each, and as the last one `metal NAME: N passed, N failed`.
///
/// # Safety
/// - `memory` is nobody else's, and its addresses are valid as they are;
/// - `heap` has no memory yet.
pub unsafe fn run<M: Machine>(mut cpu: M::Cpu, memory: Memory, heap: &Heap) -> ! {
    let at = |offset: u64| Hpa(memory.monitor.start.0.next_multiple_of(MIB) + offset);
    let small = at(0)..at((CODE_PAGES + 1) * PAGE_SIZE);
    let (heap_start, frames_start) = (at(MIB), at(17 * MIB));
    assert!(at(48 * MIB) <= memory.monitor.end, "too little memory");
    // SAFETY: the caller's promise; the parts do not overlap.
    let host = unsafe {
        heap.give(heap_start..frames_start);
        let large = memory.data..Hpa(memory.data.0 + GIB);
        Arc::new(Host::<M>::new(
            frames_start..memory.monitor.end,
            small.clone(),
            large,
        ))
    };
    let (mut passed, mut failed) = (0, 0);
    for (name, scenario) in scenarios::all::<M>() {
        let verdict = scenario(&mut Bench {
            cpu: &mut cpu,
            host: host.clone(),
            small: small.start,
            data: memory.data,
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
