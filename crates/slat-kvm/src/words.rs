//! The words for the values of policies.

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

/// A mechanism that is on or off.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Switch(pub bool);

self::words! { Switch, "on, off":
    "on" => Switch(true),
    "off" => Switch(false),
}
