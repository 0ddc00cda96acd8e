//! Macros that make entries of the exception table, for inline assembly.

/// Adds an entry to the exception table: if the instruction at label 2 faults, the thread continues at label 4.
macro_rules! guarded {
    () => {
        ".pushsection slat_guard_table,\"aR\",@progbits\n.long 2b - .\n.long 4f - .\n.popsection"
    };
}
pub(crate) use guarded;

/// The fix-up code, at label 4, of an access that reports a fault in the register operand `gone`: sets it, and
/// continues after the access.
macro_rules! report {
    () => {
        ".pushsection .text.slat_guard_fixup,\"ax\",@progbits\n4: mov {gone:e}, 1\njmp 3b\n.popsection"
    };
}
pub(crate) use report;
