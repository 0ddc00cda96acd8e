//! The host's floating-point unit while compiled code computes.
//!
//! Compiled code computes with the default settings: results are rounded to nearest, denormals are neither read nor
//! written as zeros, and no exception is taken. A program may have chosen other settings for its threads, for example
//! with `-ffast-math`. The host also collects exception flags. The flag for inexact results means the same on all hosts
//! and for all guests, so compiled code uses the host's flag instead of computing it.

use crate::arch;

/// The settings and flags that the host's unit had before [`begin`].
#[derive(Clone, Copy, Debug, Default)]
pub struct Before(u64);

/// Loads the default settings, and clears the flags. Until [`Before::end`], the thread may execute only compiled code
/// and functions that do not compute floating point. The flags of other functions would be taken for those of compiled
/// code.
pub fn begin() -> Before {
    Before(arch::begin_floats())
}

impl Before {
    /// Restores the settings and flags. Returns whether a result since [`begin`] was inexact.
    pub fn end(self) -> bool {
        arch::end_floats(self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::hint::black_box;

    #[test]
    fn the_flag_says_whether_a_result_was_inexact() {
        let quotient = |a: f64, b: f64| {
            let before = begin();
            black_box(black_box(a) / black_box(b));
            before.end()
        };
        assert!(!quotient(1.0, 4.0));
        assert!(quotient(1.0, 3.0));
        // A flag that was set before `begin` does not count, and `end` restores it.
        let outer = begin();
        assert!(!quotient(1.0, 2.0));
        assert!(!outer.end());
        let outer = begin();
        assert!(quotient(1.0, 3.0));
        assert!(!outer.end());
    }
}
