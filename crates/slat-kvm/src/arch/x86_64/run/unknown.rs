//! Reports the instructions that the CPU lacks, on standard error.

use crate::messages::say;
use crate::process::PerProcess;
use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::sync::{Mutex, PoisonError};

/// Reports an instruction that the CPU cannot execute, once for the same bytes and at most 64 times.
pub(crate) fn cannot_execute(vcpu: u32, rip: u64, bytes: &[u8], reason: &str) {
    static SAID: PerProcess<Mutex<BTreeSet<Vec<u8>>>> = PerProcess::new();
    let mut said = SAID.get().lock().unwrap_or_else(PoisonError::into_inner);
    if said.len() >= 64 || !said.insert(bytes.to_vec()) {
        return;
    }
    let mut hex = String::new();
    for byte in bytes {
        let _ = write!(hex, " {byte:02x}");
    }
    say(format_args!(
        "vCPU {vcpu} at {rip:#x} cannot execute{hex}: {reason}"
    ));
}
