//! Accesses to the fields of `kvm_run`, which the client may access at the same time.

/// Reads one field of `kvm_run`.
macro_rules! field {
    ($run:expr, $($path:tt)+) => {
        // SAFETY: the field is within the mapping, which lives as long as the `RunPage`, and every bit pattern of the
        // field is valid.
        unsafe { std::ptr::read_volatile(&raw const (*$run.ptr()).$($path)+) }
    };
}

/// Writes one field of `kvm_run`.
macro_rules! set_field {
    ($run:expr, $value:expr, $($path:tt)+) => {
        // SAFETY: the field is within the mapping, which lives as long as the `RunPage`, and is plain data.
        unsafe { std::ptr::write_volatile(&raw mut (*$run.ptr()).$($path)+, $value) }
    };
}
pub(crate) use {field, set_field};
