//! Runs operations that a fuzzer's bytes choose. The targets in `fuzz/` call only these functions. The engine's tests
//! call these functions with pseudo-random bytes.

use crate::ops::Mix;
use crate::rng::Rng;
use crate::setup::Setup;
use crate::trial::Subject;

/// More operations than any fuzzer's input can contain.
const STEPS: usize = 1 << 16;

/// Runs operations. The first byte chooses a format and a setup. The other bytes choose the operations.
fn run(mix: Mix, bytes: &[u8]) {
    let Some((first, rest)) = bytes.split_first() else {
        return;
    };
    let formats = Subject::ALL.len();
    let subject = Subject::ALL[usize::from(*first) % formats];
    let choices = usize::from(*first) / formats;
    let setup = Setup {
        rings: choices & 1 != 0,
        failures: choices & 2 != 0,
        many_slots: choices & 4 != 0,
        mix,
        // On a smaller machine, the fuzzer tries more inputs per second.
        host_pages: 1 << 12,
    };
    subject.run(setup, Rng::from_bytes(rest), STEPS);
}

/// Creates, moves and deletes memslots and changes their flags, in both address spaces, with valid and invalid
/// arguments. Compares each result, and the look-ups after it, with the model.
pub fn slot_operations(bytes: &[u8]) {
    run(Mix::SLOTS, bytes);
}

/// Runs any operations on a VM, compares the results with the model, and audits the VM.
pub fn operation_streams(bytes: &[u8]) {
    run(Mix::ALL, bytes);
}
