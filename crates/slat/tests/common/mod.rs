//! Code that several files of tests use.

use std::cell::Cell;

use slat::{Config, MmuKind};

thread_local! {
    static MMU: Cell<MmuKind> = const { Cell::new(MmuKind::Tdp) };
}

/// Returns the configuration with which the test on this thread makes VMs.
pub fn config() -> Config {
    Config::default().with_mmu(MMU.get())
}

/// Runs a test with the default MMU.
#[allow(dead_code, reason = "not every file of tests needs it")]
pub fn tdp(test: impl FnOnce()) {
    test();
}

/// Runs a test with the direct MMU.
pub fn direct(test: impl FnOnce()) {
    MMU.set(MmuKind::Direct);
    test();
    MMU.set(MmuKind::Tdp);
}

/// Runs a test with the shadow MMU.
#[allow(dead_code, reason = "not every file of tests needs it")]
pub fn shadow(test: impl FnOnce()) {
    MMU.set(MmuKind::Shadow);
    test();
    MMU.set(MmuKind::Tdp);
}

/// Runs each test, a function that is generic over the format, on every format with the default MMU. Also runs it with
/// the direct MMU, on the formats that can have one.
#[allow(unused_macros, reason = "not every file of tests needs it")]
macro_rules! on_every_format {
    ($($test:ident,)*) => {$(
        mod $test {
            use slat::Ept;
            use slat::format::{Ept5, Npt, Npt5, Stage2, Sv39x4, Sv48x4, Sv57x4, X86};

            #[test]
            fn ept() { super::$test::<Ept>() }
            #[test]
            fn ept_with_5_levels() { super::$test::<Ept5>() }
            #[test]
            fn npt() { super::$test::<Npt>() }
            #[test]
            fn npt_with_5_levels() { super::$test::<Npt5>() }
            #[test]
            fn ept_direct() { super::common::direct(super::$test::<Ept>) }
            #[test]
            fn npt_direct() { super::common::direct(super::$test::<Npt>) }
            #[test]
            fn ept_with_5_levels_direct() { super::common::direct(super::$test::<Ept5>) }
            #[test]
            fn x86_with_5_levels() { super::$test::<X86<5>>() }
            #[test]
            fn stage_2() { super::$test::<Stage2<48>>() }
            #[test]
            fn stage_2_with_a_concatenated_root() { super::$test::<Stage2<40>>() }
            #[test]
            fn stage_2_with_hardware_dirty_state() { super::$test::<Stage2<48, true>>() }
            #[test]
            fn stage_2_with_52_bits() { super::$test::<Stage2<52>>() }
            #[test]
            fn sv39x4() { super::$test::<Sv39x4>() }
            #[test]
            fn sv48x4() { super::$test::<Sv48x4>() }
            #[test]
            fn sv57x4() { super::$test::<Sv57x4>() }
        }
    )*};
}

/// Runs each test, a function, with the default MMU and with the direct MMU.
#[allow(unused_macros, reason = "not every file of tests needs it")]
macro_rules! on_both_mmus {
    ($($test:ident,)*) => {$(
        mod $test {
            #[test]
            fn tdp() { super::common::tdp(super::$test) }
            #[test]
            fn direct() { super::common::direct(super::$test) }
        }
    )*};
}
