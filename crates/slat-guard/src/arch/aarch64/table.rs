//! Entries of the exception table, written by assembly.

/// Adds an entry to the exception table: the instruction at label 2, continuing at label 4.
macro_rules! guarded {
    () => {
        ".pushsection slat_guard_table,\"aR\",@progbits\n.long 2b - .\n.long 4f - .\n.popsection"
    };
}
pub(crate) use guarded;

/// Adds an entry to the exception table: the instruction at label 2, continuing at the operand `gone`.
macro_rules! guarded_to_label {
    () => {
        ".pushsection slat_guard_table,\"aR\",@progbits\n.long 2b - .\n.long {gone} - .\n.popsection"
    };
}
pub(crate) use guarded_to_label;

/// Defines the fix-up of accesses that report through a register: sets `gone` and continues after the access.
macro_rules! report {
    () => {
        ".pushsection .text.slat_guard_fixup,\"ax\",@progbits\n4: mov {gone:w}, #1\nb 3b\n.popsection"
    };
}
pub(crate) use report;
