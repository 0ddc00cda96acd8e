//! Control and status registers, by their names in the manual.

/// Reads a register.
macro_rules! read {
    ($register:ident) => {{
        let value: u64;
        // SAFETY: reads of these registers have no side effects.
        unsafe {
            core::arch::asm!(
                concat!("csrr {}, ", stringify!($register)),
                out(reg) value,
                options(nomem, nostack, preserves_flags)
            )
        };
        value
    }};
}

/// Writes a register. Unsafe: the caller has to know the effects of the write.
macro_rules! write {
    ($register:ident, $value:expr) => {
        core::arch::asm!(
            concat!("csrw ", stringify!($register), ", {}"),
            in(reg) $value,
            options(nostack, preserves_flags)
        )
    };
}

pub(crate) use {read, write};
