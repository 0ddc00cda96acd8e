//! What the engine promises about faults, slots and invalidations, one promise a test, single-threaded.

mod invalidations;
mod levels;
mod logs;
mod machine;
mod mmio;
mod slots;
mod translations;
