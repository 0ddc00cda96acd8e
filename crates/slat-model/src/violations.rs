//! Violations of rules, kept as text until a test asks for them. If the code that finds a violation panicked, other
//! threads would wait for its locks forever.

use std::sync::Mutex;

/// The maximum number of violations that are kept. After one violation, each later access may cause another violation.
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

    /// Returns all violations as an error, if there are any. They stay in the list.
    pub(crate) fn check(&self) -> Result<(), String> {
        let all = self.0.lock().unwrap();
        match all.is_empty() {
            true => Ok(()),
            false => Err(all.join("\n")),
        }
    }
}
