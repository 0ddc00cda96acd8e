//! Policies: which mechanisms a VM uses, and how. Those that KVM has carry the names of its module
//! parameters. All may be changed while the VM runs; they decide what is done from then on.

use core::fmt;
use core::sync::atomic::{AtomicU64, Ordering::*};

use crate::format::Format;
use crate::table::SplitWalk;

/// What a policy can be set to.
#[derive(Clone, Copy)]
enum Kind {
    /// `0` and `1`, also `off`/`on`, `N`/`Y`.
    Switch,
    /// A number up to this one.
    Number(u64),
    /// One of these words; the value is its index.
    Choice(&'static [&'static str]),
    /// One of these words, or a number above 0 up to this one; the words' values are `u64::MAX`
    /// downwards.
    NumberOr(u64, &'static [&'static str]),
}

macro_rules! policies {
    ($($(#[$doc:meta])* $name:ident: $kind:expr, $default:expr;)*) => {
        /// The policies of one VM.
        #[derive(Debug)]
        pub struct Policy {
            $($name: AtomicU64,)*
        }

        impl Default for Policy {
            fn default() -> Self {
                Policy { $($name: AtomicU64::new($default),)* }
            }
        }

        impl Policy {
            $($(#[$doc])* fn $name(&self) -> u64 {
                self.$name.load(Relaxed)
            })*

            /// Every policy: name, kind, value.
            fn all(&self) -> impl Iterator<Item = (&'static str, Kind, &AtomicU64)> {
                [$((stringify!($name), $kind, &self.$name),)*].into_iter()
            }
        }
    };
}

/// Value of `prefetch=adaptive`.
const ADAPTIVE: u64 = u64::MAX;
/// Value of `prefetch=off`.
const OFF: u64 = u64::MAX - 1;

policies! {
    /// Cache the absence of a memslot in the tables, so that repeated MMIO needs no slot look-up.
    mmio_caching: Kind::Switch, 1;
    /// Map at 2 MiB and 1 GiB where slot and host allow.
    huge_pages: Kind::Switch, 1;
    /// Huge leaves are not executable.
    nx_huge_pages: Kind::Switch, 0;
    /// A huge leaf in the way of an execution fault is split in place; off: it is zapped, and what it
    /// mapped faults back in, as KVM did before it split.
    nx_huge_pages_split: Kind::Switch, 1;
    /// Each recovery takes away one of so many tables that NX has split; 0: none.
    nx_huge_pages_recovery_ratio: Kind::Number(u32::MAX as u64), 60;
    /// Milliseconds between two recoveries; the client calls them.
    nx_huge_pages_recovery_period_ms: Kind::Number(u32::MAX as u64), 60_000;
    /// Split huge leaves when a slot begins to log dirty pages (or, with manual protection, when
    /// pages are cleared), not at the first write to each.
    eager_page_split: Kind::Switch, 1;
    /// Pages that an eager split works on before it lets others pass; a multiple of 512.
    eager_page_split_chunk: Kind::Number(1 << 30), 1 << 18;
    /// What an eager split passes over.
    split_walk: Kind::Choice(&["full-walk", "skip-last-level", "default"]), 2;
    /// Pages around a fault that are mapped with it, if resident.
    prefetch: Kind::NumberOr(512, &["adaptive", "off"]), 8;
    /// How writes to logged slots are found out.
    dirty_log: Kind::Choice(&["write-protect", "dirty-bit"]), 0;
    /// Whether a read or fetch that maps a page of a logged slot is logged, and the page writable at
    /// once; off: only writes are. `auto`: as KVM does where the walker runs ([`Format::LOGS_READS`]).
    dirty_log_reads: Kind::Choice(&["auto", "on", "off"]), 0;
}

/// How far a fault prefetches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Prefetch {
    Off,
    /// The aligned window of so many pages, a power of two.
    Window(u64),
    /// A window that follows what the vCPU does.
    Adaptive,
}

impl Policy {
    pub(crate) fn caches_mmio(&self) -> bool {
        self.mmio_caching() != 0
    }

    pub(crate) fn maps_huge(&self) -> bool {
        self.huge_pages() != 0
    }

    pub(crate) fn huge_is_nx(&self) -> bool {
        self.nx_huge_pages() != 0
    }

    pub(crate) fn nx_splits_in_place(&self) -> bool {
        self.nx_huge_pages_split() != 0
    }

    pub(crate) fn recovery_ratio(&self) -> u64 {
        self.nx_huge_pages_recovery_ratio()
    }

    /// Milliseconds between two calls of [`crate::Vm::recover_nx_huge_pages`]; 0: never.
    pub fn recovery_period_ms(&self) -> u64 {
        self.nx_huge_pages_recovery_period_ms()
    }

    pub(crate) fn splits_eagerly(&self) -> bool {
        self.eager_page_split() != 0
    }

    pub(crate) fn split_chunk(&self) -> u64 {
        self.eager_page_split_chunk().next_multiple_of(512).max(512)
    }

    pub(crate) fn walk_for_split(&self) -> SplitWalk {
        match self.split_walk() {
            0 => SplitWalk::Full,
            1 => SplitWalk::SkipLastLevel,
            _ => SplitWalk::SkipWithoutHuge,
        }
    }

    pub(crate) fn prefetches(&self) -> Prefetch {
        match self.prefetch() {
            ADAPTIVE => Prefetch::Adaptive,
            OFF | 0 | 1 => Prefetch::Off,
            // The largest power of two that is not above the number.
            pages => Prefetch::Window(1 << pages.ilog2()),
        }
    }

    pub(crate) fn logs_by_dirty_bit(&self) -> bool {
        self.dirty_log() == 1
    }

    pub(crate) fn logs_reads<F: Format>(&self) -> bool {
        match self.dirty_log_reads() {
            0 => F::LOGS_READS,
            choice => choice == 1,
        }
    }

    /// The names of all policies, with their values as [`Policy::set`] takes them.
    pub fn iter(&self) -> impl Iterator<Item = (&'static str, PolicyValue)> {
        self.all().map(|(name, kind, value)| {
            let value = value.load(Relaxed);
            (name, PolicyValue { kind, value })
        })
    }

    /// Sets the policy `name`, for what is done from now on. For a VM that has been running use
    /// [`crate::Vm::set_policy`], which also undoes what the new value forbids.
    ///
    /// # Errors
    /// [`PolicyError`]; nothing was changed.
    pub fn set(&self, name: &str, value: &str) -> Result<(), PolicyError> {
        let (_, kind, place) = self
            .all()
            .find(|(known, ..)| *known == name)
            .ok_or(PolicyError::NoSuchPolicy)?;
        let value = kind
            .parse(value)
            .ok_or(PolicyError::BadValue(Expected(kind)))?;
        place.store(value, Relaxed);
        Ok(())
    }
}

impl Kind {
    fn parse(self, text: &str) -> Option<u64> {
        let number = |max| text.parse().ok().filter(|n| *n <= max);
        let word = |words: &[&str]| words.iter().position(|w| *w == text).map(|i| i as u64);
        match self {
            Kind::Switch => match text {
                "0" | "off" | "N" | "n" => Some(0),
                "1" | "on" | "Y" | "y" => Some(1),
                _ => None,
            },
            Kind::Number(max) => number(max),
            Kind::Choice(words) => word(words),
            Kind::NumberOr(max, words) => word(words)
                .map(|i| u64::MAX - i)
                .or_else(|| number(max).filter(|n| *n > 0)),
        }
    }
}

/// The value of a policy; displays as [`Policy::set`] takes it.
#[derive(Clone, Copy)]
pub struct PolicyValue {
    kind: Kind,
    value: u64,
}

impl fmt::Display for PolicyValue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let word = |words: &[&'static str], i: u64| words.get(i as usize).copied();
        let word = match self.kind {
            Kind::Switch => word(&["off", "on"], self.value),
            Kind::Choice(words) => word(words, self.value),
            Kind::NumberOr(_, words) => word(words, u64::MAX - self.value),
            Kind::Number(_) => None,
        };
        match word {
            Some(word) => f.pad(word),
            None => self.value.fmt(f),
        }
    }
}

/// What a policy accepts; displays as a list.
#[derive(Clone, Copy)]
pub struct Expected(Kind);

impl fmt::Debug for Expected {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl fmt::Display for Expected {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let words = |f: &mut fmt::Formatter<'_>, words: &[&str]| {
            words
                .iter()
                .enumerate()
                .try_for_each(|(i, word)| write!(f, "{}{word}", if i > 0 { ", " } else { "" }))
        };
        match self.0 {
            Kind::Switch => words(f, &["on", "off"]),
            Kind::Number(max) => write!(f, "a number up to {max}"),
            Kind::Choice(choice) => words(f, choice),
            Kind::NumberOr(max, choice) => {
                words(f, choice)?;
                write!(f, ", or a number from 1 to {max}")
            }
        }
    }
}

/// Why a policy was not set.
#[derive(Clone, Copy, Debug)]
pub enum PolicyError {
    /// See [`Policy::iter`] for the names.
    NoSuchPolicy,
    /// It takes other values.
    BadValue(Expected),
}

impl fmt::Display for PolicyError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            PolicyError::NoSuchPolicy => f.write_str("there is no such policy"),
            PolicyError::BadValue(expected) => write!(f, "it takes {expected}"),
        }
    }
}

impl core::error::Error for PolicyError {}

#[cfg(test)]
mod tests {
    use super::*;
    use std::string::ToString;

    #[test]
    fn every_policy_takes_back_the_value_it_shows() {
        let policy = Policy::default();
        for (name, value) in policy.iter() {
            policy.set(name, &value.to_string()).unwrap();
        }
    }

    #[test]
    fn bad_values_are_refused_with_what_is_expected() {
        let policy = Policy::default();
        assert!(matches!(
            policy.set("nx", "1"),
            Err(PolicyError::NoSuchPolicy)
        ));
        let error = policy.set("prefetch", "513").unwrap_err();
        assert_eq!(
            error.to_string(),
            "it takes adaptive, off, or a number from 1 to 512"
        );
        policy.set("prefetch", "adaptive").unwrap();
        assert_eq!(policy.prefetches(), Prefetch::Adaptive);
        policy.set("prefetch", "24").unwrap();
        assert_eq!(policy.prefetches(), Prefetch::Window(16));
    }
}
