//! The engine's behaviour in faults, slot changes and invalidations. Each test checks one rule, on one thread.

mod invalidations;
mod levels;
mod logs;
mod machine;
mod mmio;
mod slots;
mod translations;
