//! The words for the values of policies, and the policies that every architecture has.

use crate::arch::Tier;

/// Declares the words for the values of a policy. Messages to the user list these words.
macro_rules! words {
    ($Type:ident, $expected:literal: $($word:literal => $value:expr,)*) => {
        impl $Type {
            pub(crate) const EXPECTED: &str = $expected;
            const WORDS: &[(&str, Self)] = &[$(($word, $value),)*];

            /// Parses the word for a value. For "on" and "off", also accepts the other texts that Linux accepts for a
            /// module parameter.
            pub(crate) fn parse(text: &str) -> Option<Self> {
                let word = match text {
                    "1" | "Y" | "y" => "on",
                    "0" | "N" | "n" => "off",
                    word => word,
                };
                Some(Self::WORDS.iter().find(|(known, _)| *known == word)?.1)
            }
        }

        impl std::fmt::Display for $Type {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                let word = Self::WORDS.iter().find(|(_, value)| value == self);
                f.pad(word.expect("each value has a word").0)
            }
        }
    };
}
pub(crate) use words;

/// Declares the policies of an architecture's CPU: name, values, and default.
macro_rules! policies {
    ($($(#[$doc:meta])* $NAME:ident $Name:ident($Type:ident) = $default:expr;)*) => {
        /// A policy of the CPU, with its value.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum CpuPolicy {
            $($(#[$doc])* $Name($Type),)*
        }

        impl CpuPolicy {
            /// All policies, each with its default value.
            pub(crate) const DEFAULTS: &[Self] = &[$(CpuPolicy::$Name($default),)*];

            /// Returns the name of the policy.
            pub(crate) fn name(&self) -> &'static str {
                match self {
                    $(CpuPolicy::$Name(_) => $NAME,)*
                }
            }

            /// Returns the values that the policy can have, as a list for a message.
            pub(crate) fn expected(&self) -> &'static str {
                match self {
                    $(CpuPolicy::$Name(_) => $Type::EXPECTED,)*
                }
            }

            /// Returns the value of the policy.
            pub(crate) fn value(&self) -> &dyn std::fmt::Display {
                match self {
                    $(CpuPolicy::$Name(value) => value,)*
                }
            }

            /// Parses a value of the policy `name`. `None`: there is no such policy, or it has no such value.
            pub(crate) fn parse(name: &str, value: &str) -> Option<Self> {
                match name {
                    $($NAME => $Type::parse(value).map(CpuPolicy::$Name),)*
                    _ => None,
                }
            }
        }
    };
}
pub(crate) use policies;

/// A mechanism that is on or off.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Switch(pub bool);

self::words! { Switch, "on, off":
    "on" => Switch(true),
    "off" => Switch(false),
}

/// The name of the policy [`Jit`], which says which guest code is compiled.
pub(crate) const JIT: &str = "jit";

/// The policy that says which guest code is compiled.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Jit {
    /// No code: all code is interpreted.
    Off,
    /// Code that runs often is compiled, by slat's own threads.
    #[default]
    On,
    /// All code that can be compiled is compiled before it runs for the first time, on the vCPU's thread. This value is
    /// slow, and is only for testing the compiler.
    AtOnce(Tier),
}
