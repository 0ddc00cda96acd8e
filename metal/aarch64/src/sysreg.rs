//! System registers, by their names in the Arm ARM.

/// Reads a system register.
macro_rules! read {
    ($register:ident) => {{
        let value: u64;
        // SAFETY: reading a register of EL2 or the CPU's identification has no effect.
        unsafe {
            core::arch::asm!(
                concat!("mrs {}, ", stringify!($register)),
                out(reg) value,
                options(nomem, nostack, preserves_flags)
            )
        };
        value
    }};
}

/// Writes a system register. Unsafe: the caller has to know the effects of the write.
macro_rules! write {
    ($register:ident, $value:expr) => {
        core::arch::asm!(
            concat!("msr ", stringify!($register), ", {}"),
            in(reg) $value,
            options(nostack, preserves_flags)
        )
    };
}

pub(crate) use {read, write};
