//! The error type of the program.

/// The reason why the program failed, as a text for the user.
pub type Failure = Box<dyn std::error::Error + Send + Sync>;
