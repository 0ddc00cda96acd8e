//! For each thread, the reason why its last failed call has failed, as text.

use std::cell::RefCell;
use std::ffi::{CString, c_char, c_int};
use std::fmt::Display;

thread_local! {
    static LAST: RefCell<CString> = RefCell::default();
    static BLAME: RefCell<Option<String>> = const { RefCell::new(None) };
}

/// Stores the text of an error for [`slat_last_error`]. If a callback has returned a wrong result during this call, the
/// text begins with what was wrong. Returns the errno.
pub(super) fn refused(errno: c_int, error: &impl Display) -> c_int {
    let text = match BLAME.take() {
        Some(blame) => format!("{blame}: {error}"),
        None => error.to_string(),
    };
    let text = CString::new(text.replace('\0', "?")).unwrap_or_default();
    // Ignore the error: if the thread is ending and has dropped its text, no code will ask for it.
    let _ = LAST.try_with(|last| last.replace(text));
    errno
}

/// Call at the beginning of each call of the library: forgets wrong results of callbacks in earlier calls.
pub(super) fn begin() {
    BLAME.take();
}

/// Stores a text about a wrong result of a callback. If the current call fails, [`refused`] adds it to the error.
pub(super) fn blame(answer: String) {
    BLAME.set(Some(answer));
}

/// Returns the reason why the engine has last refused a call of this thread, and what to do about it. The text is valid
/// until the thread's next call. Each call that returns a negative errno has such a text.
#[unsafe(no_mangle)]
pub extern "C" fn slat_last_error() -> *const c_char {
    // If the thread is ending, it may have dropped its text.
    LAST.try_with(|text| text.borrow().as_ptr())
        .unwrap_or(c"".as_ptr())
}
