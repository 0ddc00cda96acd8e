//! Violations of rules, kept as text until a test asks for them. A panic at the place where a violation
//! is found would leave other threads waiting for locks.

use std::sync::Mutex;

/// The number of violations that are kept. After one violation, each later access may cause another one.
const MOST: usize = 20;

/// The violations that were found, as text.
#[derive(Default)]
pub(crate) struct Violations(Mutex<Vec<String>>);

impl Violations {
    /// Adds a violation.
    pub(crate) fn note(&self, violation: String) {
        let mut all = self.0.lock().unwrap();
        if all.len() < MOST {
            all.push(violation);
        }
    }

    /// Returns all violations as the error, if there are any. The list keeps them.
    pub(crate) fn check(&self) -> Result<(), String> {
        let all = self.0.lock().unwrap();
        match all.is_empty() {
            true => Ok(()),
            false => Err(all.join("\n")),
        }
    }
}
