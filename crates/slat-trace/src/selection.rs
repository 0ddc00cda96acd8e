//! The set of tracepoints that are recorded.

use crate::points::{Description, POINTS};
use std::fmt;
use std::str::FromStr;

/// A set of tracepoints: one bit for each tracepoint, at the tracepoint's index in [`POINTS`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Selection(pub(crate) u64);

impl Selection {
    /// All tracepoints.
    pub const ALL: Selection = Selection(u64::MAX >> (u64::BITS as usize - POINTS.len()));

    /// Whether the tracepoint at this index in [`POINTS`] is in the set.
    pub fn has(self, index: usize) -> bool {
        self.0 >> index & 1 != 0
    }
}

impl Description {
    /// Whether `word` names the tracepoint: by its name, by `SYSTEM:NAME`, or with its whole system by
    /// `SYSTEM` or `SYSTEM:*`.
    fn is_named(&self, word: &str) -> bool {
        match word.split_once(':') {
            None => word == self.name || word == self.system,
            Some((system, name)) => system == self.system && (name == self.name || name == "*"),
        }
    }
}

impl FromStr for Selection {
    /// A message that names the tracepoints.
    type Err = String;

    /// Parses words that are separated by commas. Each word names one tracepoint, or all tracepoints of a system.
    fn from_str(text: &str) -> Result<Self, String> {
        let mut bits = 0;
        for word in text.split(',') {
            let named = (POINTS.iter().enumerate()).filter(|(_, point)| point.is_named(word));
            let found = named.fold(0, |bits, (index, _)| bits | 1 << index);
            if found == 0 {
                let names: Vec<_> = POINTS.iter().map(|point| point.name).collect();
                return Err(format!(
                    "there is no tracepoint \"{word}\"; there are kvm, kvmmmu and slat for all of one system, and {}",
                    names.join(", ")
                ));
            }
            bits |= found;
        }
        Ok(Selection(bits))
    }
}

/// Writes the text that [`Selection::from_str`] reads.
impl fmt::Display for Selection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let chosen = (POINTS.iter().enumerate()).filter(|(index, _)| self.has(*index));
        let names: Vec<_> = chosen.map(|(_, point)| point.name).collect();
        f.write_str(&names.join(","))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(text: &str) -> String {
        text.parse::<Selection>().unwrap().to_string()
    }

    #[test]
    fn points_are_chosen_by_name_and_by_system() {
        assert_eq!(names("kvm_exit"), "kvm_exit");
        assert_eq!(names("kvm:kvm_exit,kvm_entry"), "kvm_entry,kvm_exit");
        assert_eq!(names("slat"), names("slat:*"));
        let all = names("kvm,kvmmmu,slat");
        assert_eq!(all, Selection::ALL.to_string());
        assert_eq!(all.parse(), Ok(Selection::ALL));
    }

    #[test]
    fn what_does_not_exist_is_refused() {
        for word in ["", "kvm_exits", "slat:kvm_exit", "kvm_exit,"] {
            let error = word.parse::<Selection>().unwrap_err();
            assert!(error.contains("kvm_userspace_exit"), "{error}");
        }
    }

    #[test]
    fn no_two_points_have_one_name() {
        for (index, point) in POINTS.iter().enumerate() {
            assert!(POINTS[..index].iter().all(|other| other.name != point.name));
        }
    }
}
