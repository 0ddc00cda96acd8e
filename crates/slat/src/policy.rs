//! Policies: the mechanisms that a VM uses, and their parameters. A policy that KVM has, too, is called like KVM's
//! module parameter. [`Vm::set_policy`](crate::Vm::set_policy) changes a policy, even of a running VM. The new value
//! applies to all later operations of the VM.

use core::fmt;
use core::sync::atomic::{AtomicU64, Ordering::*};

use crate::format::Format;

/// A value of a policy. The engine stores it as a number; a command line has it as a word or a number.
trait Value: Copy + fmt::Display {
    /// A list of the values that [`Value::parse`] accepts, for error messages.
    const EXPECTED: &'static str;

    fn parse(text: &str) -> Option<Self>;
    fn to_bits(self) -> u64;
    fn from_bits(bits: u64) -> Self;
}

macro_rules! policies {
    ($($(#[$doc:meta])* $name:ident $Name:ident: $Type:ty = $default:expr;)*) => {
        /// The values of all policies of a VM: for making the VM ([`Config`](crate::Config)), or as a copy of its
        /// current values ([`Vm::policy`](crate::Vm::policy)).
        ///
        /// ```
        /// use slat::{Policy, Prefetch};
        /// let mut policy = Policy::default();
        /// policy.prefetch = Prefetch::Window(8);
        /// ```
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[non_exhaustive]
        pub struct Policy {
            $($(#[$doc])* pub $name: $Type,)*
        }

        impl Default for Policy {
            fn default() -> Self {
                Policy { $($name: $default,)* }
            }
        }

        impl Policy {
            /// Returns every policy, with its value.
            pub fn iter(&self) -> impl Iterator<Item = Setting> + use<> {
                [$(Setting::$Name(self.$name),)*].into_iter()
            }

            /// Sets one policy in this struct. (To set a policy of a VM, use
            /// [`Vm::set_policy`](crate::Vm::set_policy).)
            pub fn set(&mut self, setting: Setting) {
                match setting {
                    $(Setting::$Name(value) => self.$name = value,)*
                }
            }
        }

        /// Policies that any thread may read and change, without a lock.
        #[derive(Debug)]
        pub struct AtomicPolicy {
            $($name: AtomicU64,)*
        }

        impl AtomicPolicy {
            /// Makes the atomic form of `policy`.
            pub fn new(policy: Policy) -> Self {
                AtomicPolicy { $($name: AtomicU64::new(policy.$name.to_bits()),)* }
            }

            $(pub(crate) fn $name(&self) -> $Type {
                Value::from_bits(self.$name.load(Relaxed))
            })*

            /// Returns the current policies. Each is read separately, not all at the same moment.
            pub fn get(&self) -> Policy {
                Policy { $($name: self.$name(),)* }
            }

            /// Replaces the value of one policy.
            pub fn set(&self, setting: Setting) {
                match setting {
                    $(Setting::$Name(value) => self.$name.store(value.to_bits(), Relaxed),)*
                }
            }
        }

        /// A policy with a value.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[non_exhaustive]
        pub enum Setting {
            $($(#[$doc])* $Name($Type),)*
        }

        impl Setting {
            /// Makes a setting from a command line's words: the name of a policy, and a value as displayed by
            /// [`Setting::value`].
            ///
            /// # Errors
            /// [`PolicyError`].
            ///
            /// ```
            /// use slat::{Prefetch, Setting};
            /// let off = Setting::parse("prefetch", "off")?;
            /// assert_eq!(off, Setting::Prefetch(Prefetch::Off));
            /// let error = Setting::parse("prefetch", "513").unwrap_err();
            /// assert_eq!(error.to_string(), "it takes adaptive, off, or a number from 1 to 512");
            /// # Ok::<(), slat::PolicyError>(())
            /// ```
            pub fn parse(name: &str, value: &str) -> Result<Self, PolicyError> {
                match name {
                    $(stringify!($name) => Value::parse(value)
                        .map(Setting::$Name)
                        .ok_or(PolicyError::BadValue(<$Type as Value>::EXPECTED)),)*
                    _ => Err(PolicyError::NoSuchPolicy),
                }
            }

            /// Returns the name of the policy.
            pub fn name(&self) -> &'static str {
                match self {
                    $(Setting::$Name(_) => stringify!($name),)*
                }
            }

            /// Returns a list of the values that the policy can have, for error messages.
            pub fn expected(&self) -> &'static str {
                match self {
                    $(Setting::$Name(_) => <$Type as Value>::EXPECTED,)*
                }
            }

            /// Returns the value for display, in the form that [`Setting::parse`] accepts.
            pub fn value(&self) -> &dyn fmt::Display {
                match self {
                    $(Setting::$Name(value) => value as &dyn fmt::Display,)*
                }
            }
        }
    };
}

policies! {
    /// Whether the page tables cache that no memslot contains a frame, so that repeated MMIO needs no slot look-up.
    mmio_caching MmioCaching: Switch = Switch::On;
    /// Whether faults map huge pages (2 MiB and 1 GiB) where the memslot and the host allow it.
    huge_pages HugePages: Switch = Switch::On;
    /// Whether huge leaves are not executable.
    nx_huge_pages NxHugePages: Switch = Switch::Off;
    /// Whether an execution fault splits a huge leaf in place. Off: the fault zaps the leaf, and all its pages fault
    /// again, as in KVM before it could split in place.
    nx_huge_pages_split NxHugePagesSplit: Switch = Switch::On;
    /// Each recovery of huge pages zaps 1/value of the tables that exist only because `nx_huge_pages` forbids a huge
    /// leaf; 0: it zaps none.
    nx_huge_pages_recovery_ratio NxHugePagesRecoveryRatio: u32 = 60;
    /// The interval, in milliseconds, at which the client should call
    /// [`Vm::recover_nx_huge_pages`](crate::Vm::recover_nx_huge_pages); 0: never.
    nx_huge_pages_recovery_period_ms NxHugePagesRecoveryPeriodMs: u32 = 60_000;
    /// Whether huge leaves are split when a slot begins to log dirty pages (or, with KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2,
    /// when pages are cleared). Off: a huge leaf is split at the first write to it.
    eager_page_split EagerPageSplit: Switch = Switch::On;
    /// Number of pages after which an eager split pauses to let other threads continue; rounded up to a multiple of
    /// 512.
    eager_page_split_chunk EagerPageSplitChunk: u32 = 1 << 18;
    /// Which tables an eager split reads in search of huge leaves.
    split_walk SplitWalk: SplitWalk = SplitWalk::Default;
    /// Which resident pages around a faulting page the fault also maps.
    prefetch Prefetch: Prefetch = Prefetch::Adaptive;
    /// How writes to logged slots are detected. Logs to dirty rings always use write protection. It is the default for
    /// two reasons: it needs no feature of the CPU, and logging can start without visiting every leaf
    /// (`hierarchical_protect`). The other methods must clear the dirty bit of every leaf when logging starts, but save
    /// the write fault of each page.
    dirty_log DirtyLog: DirtyLogMethod = DirtyLogMethod::WriteProtect;
    /// How a range is write-protected for its dirty log. On: through the entries that refer to the range's tables: the
    /// highest entries that cover only frames of the range (EPT), or one entry for each 2 MiB (NPT). The first write
    /// below such an entry then protects the leaves of the table. Off: every leaf is protected at once. The policy has
    /// an effect only with [`MmuKind::Tdp`](crate::MmuKind), [`DirtyLogMethod::WriteProtect`], and formats whose
    /// walkers check the right to write in entries that refer to tables.
    hierarchical_protect HierarchicalProtect: Switch = Switch::On;
    /// Whether a page of a logged slot becomes dirty already when a read or fetch maps it. Such a page is mapped
    /// writable at once, so that a later write causes no fault. Off: only writes make pages dirty.
    dirty_log_reads DirtyLogReads: DirtyLogReads = DirtyLogReads::Auto;
}

/// Declares the values of a policy, in the order of the numbers that represent them, each with its word on command
/// lines.
macro_rules! words {
    ($(#[$doc:meta])* $Type:ident, $expected:literal: $($(#[$value_doc:meta])* $Value:ident = $word:literal,)*) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum $Type {
            $($(#[$value_doc])* $Value,)*
        }

        impl $Type {
            const ALL: &[(Self, &str)] = &[$(($Type::$Value, $word),)*];
        }

        impl fmt::Display for $Type {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.pad(Self::ALL[*self as usize].1)
            }
        }

        impl Value for $Type {
            const EXPECTED: &'static str = $expected;

            fn parse(text: &str) -> Option<Self> {
                Some(Self::ALL.iter().find(|(_, word)| *word == text)?.0)
            }

            fn to_bits(self) -> u64 {
                self as u64
            }

            fn from_bits(bits: u64) -> Self {
                Self::ALL[bits as usize].0
            }
        }
    };
}

words! {
    /// Which tables an eager split reads in search of huge leaves.
    SplitWalk, "full-walk, skip-last-level, default":
    /// All tables, including tables that the split has just made.
    Full = "full-walk",
    /// An eager split enters all tables except those of level 1.
    SkipLastLevel = "skip-last-level",
    /// All tables except those of level 1, and tables of level 2 that have no huge leaf.
    Default = "default",
}

words! {
    /// The method by which writes to logged slots are detected.
    DirtyLogMethod, "write-protect, dirty-bit, buffer":
    /// A page is write-protected until the write fault of the first write to it has recorded it.
    WriteProtect = "write-protect",
    /// The page walker sets the dirty bits of leaves, on formats that have them ([`Format::SETS_DIRTY`]).
    DirtyBit = "dirty-bit",
    /// Like [`Self::DirtyBit`], but the walker also writes to a buffer the page of each dirty bit that it sets (Intel's
    /// PML, Arm's HDBSS). So a harvest reads only the leaves of these pages ([`Vm::drain`](crate::Vm::drain)). Not used
    /// for shadow pages.
    Buffer = "buffer",
}

words! {
    /// Whether pages of logged slots are logged when the guest reads them.
    DirtyLogReads, "auto, on, off":
    /// Reads are logged if KVM logs them on the architecture of this format ([`Format::LOGS_READS`]).
    Auto = "auto",
    /// Reads are logged.
    On = "on",
    /// Reads are not logged.
    Off = "off",
}

/// A mechanism that is on or off.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Switch {
    /// The mechanism is not used.
    Off,
    /// The mechanism is used.
    On,
}

impl Switch {
    /// Whether the mechanism is on.
    pub fn is_on(self) -> bool {
        self == Switch::On
    }
}

impl From<bool> for Switch {
    fn from(on: bool) -> Self {
        match on {
            true => Switch::On,
            false => Switch::Off,
        }
    }
}

impl fmt::Display for Switch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Switch::Off => "off",
            Switch::On => "on",
        })
    }
}

impl Value for Switch {
    const EXPECTED: &'static str = "on, off";

    /// Also accepts the words that Linux accepts for a boolean module parameter.
    fn parse(text: &str) -> Option<Self> {
        match text {
            "0" | "off" | "N" | "n" => Some(Switch::Off),
            "1" | "on" | "Y" | "y" => Some(Switch::On),
            _ => None,
        }
    }

    fn to_bits(self) -> u64 {
        self as u64
    }

    fn from_bits(bits: u64) -> Self {
        (bits != 0).into()
    }
}

impl Value for u32 {
    const EXPECTED: &'static str = "a number up to 4294967295";

    fn parse(text: &str) -> Option<Self> {
        text.parse().ok()
    }

    fn to_bits(self) -> u64 {
        self.into()
    }

    fn from_bits(bits: u64) -> Self {
        bits as u32
    }
}

/// Which pages around a faulting page the fault also maps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Prefetch {
    /// A fault maps only its own page.
    Off,
    /// A fault maps the aligned window of this many pages around its own page. The number is rounded down to a power of
    /// two, at most 512.
    Window(u16),
    /// A fault maps a window whose size adapts to the vCPU's accesses: only the page itself if the accesses are
    /// scattered, and up to 512 pages if they are close together.
    Adaptive,
}

impl Prefetch {
    /// The largest number of pages in a window: the pages of one table.
    const MOST: u16 = 512;

    /// Returns the size of a [`Prefetch::Window`] in pages: `pages` rounded down to a power of two, from 1 to 512.
    pub(crate) fn window(pages: u16) -> u64 {
        1 << pages.clamp(1, Self::MOST).ilog2()
    }
}

impl fmt::Display for Prefetch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Prefetch::Off => f.pad("off"),
            Prefetch::Window(pages) => pages.fmt(f),
            Prefetch::Adaptive => f.pad("adaptive"),
        }
    }
}

impl Value for Prefetch {
    const EXPECTED: &'static str = "adaptive, off, or a number from 1 to 512";

    fn parse(text: &str) -> Option<Self> {
        match text {
            "off" => Some(Prefetch::Off),
            "adaptive" => Some(Prefetch::Adaptive),
            _ => text
                .parse()
                .ok()
                .filter(|pages| (1..=Self::MOST).contains(pages))
                .map(Prefetch::Window),
        }
    }

    fn to_bits(self) -> u64 {
        match self {
            Prefetch::Off => 0,
            Prefetch::Window(pages) => pages.max(1).into(),
            Prefetch::Adaptive => u64::MAX,
        }
    }

    fn from_bits(bits: u64) -> Self {
        match bits {
            0 => Prefetch::Off,
            u64::MAX => Prefetch::Adaptive,
            pages => Prefetch::Window(pages as u16),
        }
    }
}

impl AtomicPolicy {
    pub(crate) fn split_chunk(&self) -> u64 {
        u64::from(self.eager_page_split_chunk())
            .next_multiple_of(512)
            .max(512)
    }

    pub(crate) fn logs_reads<F: Format>(&self) -> bool {
        match self.dirty_log_reads() {
            DirtyLogReads::Auto => F::LOGS_READS,
            choice => choice == DirtyLogReads::On,
        }
    }
}

/// The reason why two words of a command line are not a valid [`Setting`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum PolicyError {
    /// There is no policy with this name. [`Policy::iter`] returns all policies.
    NoSuchPolicy,
    /// The policy cannot have this value. Contains a list of the values that it can have.
    BadValue(&'static str),
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
        let mut policy = Policy::default();
        for setting in policy.iter() {
            let parsed = Setting::parse(setting.name(), &setting.value().to_string());
            assert_eq!(parsed, Ok(setting));
            policy.set(setting);
        }
        assert_eq!(policy, Policy::default());
    }

    #[test]
    fn every_word_of_a_policy_is_stored_as_itself() {
        let live = AtomicPolicy::new(Policy::default());
        for (name, words) in [
            (
                "split_walk",
                &["full-walk", "skip-last-level", "default"][..],
            ),
            ("dirty_log", &["write-protect", "dirty-bit"]),
            ("dirty_log_reads", &["auto", "on", "off"]),
            ("prefetch", &["off", "adaptive", "1", "24", "512"]),
            ("nx_huge_pages", &["on", "off"]),
            ("nx_huge_pages_recovery_ratio", &["0", "4294967295"]),
        ] {
            for word in words {
                let setting = Setting::parse(name, word).unwrap();
                live.set(setting);
                let stored = live.get().iter().find(|policy| policy.name() == name);
                let stored = stored.unwrap();
                assert_eq!(
                    (stored, stored.value().to_string()),
                    (setting, word.to_string())
                );
            }
        }
    }

    #[test]
    fn bad_values_are_refused() {
        let error = |name, value| Setting::parse(name, value).unwrap_err();
        assert_eq!(error("nx", "1"), PolicyError::NoSuchPolicy);
        for (name, value) in [
            ("prefetch", "0"),
            ("prefetch", "513"),
            ("nx_huge_pages", "2"),
            ("split_walk", "1"),
            ("nx_huge_pages_recovery_ratio", "4294967296"),
        ] {
            assert!(matches!(error(name, value), PolicyError::BadValue(_)));
        }
    }

    #[test]
    fn a_window_is_a_power_of_two_within_a_table() {
        let windows = [0, 1, 2, 24, 511, 512, u16::MAX].map(Prefetch::window);
        assert_eq!(windows, [1, 1, 2, 16, 256, 512, 512]);
    }
}
