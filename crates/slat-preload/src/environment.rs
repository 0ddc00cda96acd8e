//! The environment that the program's children get.

/// The LD_PRELOAD of the program's children, where it is not the program's own: `slat run` puts the runtimes of sanitizers that the
/// program is linked with before this library. In other programs these would work, too, and report what nobody asked for.
const CHILDRENS: &std::ffi::CStr = c"SLAT_CHILDRENS_LD_PRELOAD";

/// Call at the program's start, while it has one thread.
pub(crate) fn prepare() {
    // SAFETY: no other thread reads or changes the environment yet; `value`, which is a part of it, is copied before the variable is
    // removed. A failure for lack of memory leaves the environment as it is.
    unsafe {
        let value = libc::getenv(CHILDRENS.as_ptr());
        if !value.is_null() {
            libc::setenv(c"LD_PRELOAD".as_ptr(), value, 1);
            libc::unsetenv(CHILDRENS.as_ptr());
        }
    }
}
