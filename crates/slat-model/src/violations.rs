//! Broken rules, kept as text until a test asks for them: a panic where they are found would leave other
//! threads waiting for locks.

use std::sync::Mutex;

/// Violations that are kept; there may be one for each later access.
const MOST: usize = 20;

/// A list of violations.
#[derive(Default)]
pub(crate) struct Violations(Mutex<Vec<String>>);

impl Violations {
    /// Adds one.
    pub(crate) fn note(&self, violation: String) {
        let mut all = self.0.lock().unwrap();
        if all.len() < MOST {
            all.push(violation);
        }
    }

    /// Returns all of them as the error, if there are any. They stay.
    pub(crate) fn check(&self) -> Result<(), String> {
        let all = self.0.lock().unwrap();
        match all.is_empty() {
            true => Ok(()),
            false => Err(all.join("\n")),
        }
    }
}
