//! Why the last call of a thread failed, in words.

use std::cell::RefCell;
use std::ffi::{CString, c_char, c_int};
use std::fmt::Display;

thread_local! {
    static LAST: RefCell<CString> = RefCell::default();
}

/// Keeps the text of an error for [`slat_last_error`]. Returns the errno.
pub(super) fn refused(errno: c_int, error: &impl Display) -> c_int {
    let text = CString::new(error.to_string()).expect("the engine's texts have no NUL");
    LAST.replace(text);
    errno
}

/// Returns why the engine has refused something to this thread last, and what to do about it: a text that is valid until the thread's next
/// call. A value that a call does not know, such as a format, changes no text.
#[unsafe(no_mangle)]
pub extern "C" fn slat_last_error() -> *const c_char {
    // At a thread's end there is none.
    LAST.try_with(|text| text.borrow().as_ptr())
        .unwrap_or(c"".as_ptr())
}
