//! What several files of tests use.

/// Runs each test, a function that is generic over the format, on every format.
macro_rules! on_every_format {
    ($($test:ident,)*) => {$(
        mod $test {
            use slat::Ept;
            use slat::format::{Npt, Stage2, Sv39x4, Sv48x4, X86};

            #[test]
            fn ept() { super::$test::<Ept>() }
            #[test]
            fn npt() { super::$test::<Npt>() }
            #[test]
            fn x86_with_5_levels() { super::$test::<X86<5>>() }
            #[test]
            fn stage_2() { super::$test::<Stage2<48>>() }
            #[test]
            fn stage_2_with_a_concatenated_root() { super::$test::<Stage2<40>>() }
            #[test]
            fn stage_2_with_hardware_dirty_state() { super::$test::<Stage2<48, true>>() }
            #[test]
            fn sv39x4() { super::$test::<Sv39x4>() }
            #[test]
            fn sv48x4() { super::$test::<Sv48x4>() }
        }
    )*};
}
