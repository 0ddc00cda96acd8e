//! Why the program failed.

/// Why the program failed, for a person to read.
pub type Failure = Box<dyn std::error::Error + Send + Sync>;
