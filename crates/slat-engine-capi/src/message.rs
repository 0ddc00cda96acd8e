//! Why the last call of a thread failed, in words.

use std::cell::RefCell;
use std::ffi::{CString, c_char, c_int};
use std::fmt::Display;

thread_local! {
    static LAST: RefCell<CString> = RefCell::default();
    static BLAME: RefCell<Option<String>> = const { RefCell::new(None) };
}

/// Keeps the text of an error for [`slat_last_error`], after what the platform has answered wrongly in this call, if it
/// did. Returns the errno.
pub(super) fn refused(errno: c_int, error: &impl Display) -> c_int {
    let text = match BLAME.take() {
        Some(blame) => format!("{blame}: {error}"),
        None => error.to_string(),
    };
    let text = CString::new(text.replace('\0', "?")).unwrap_or_default();
    // At a thread's end nobody asks any more.
    let _ = LAST.try_with(|last| last.replace(text));
    errno
}

/// Forgets what callbacks have answered in earlier calls.
pub(super) fn begin() {
    BLAME.take();
}

/// Keeps what a callback has answered wrongly, until the call that made it is refused.
pub(super) fn blame(answer: String) {
    BLAME.set(Some(answer));
}

/// Returns why the engine has refused something to this thread last, and what to do about it: a text that is valid
/// until the thread's next call. Each call that returns a negative errno has one.
#[unsafe(no_mangle)]
pub extern "C" fn slat_last_error() -> *const c_char {
    // At a thread's end there is none.
    LAST.try_with(|text| text.borrow().as_ptr())
        .unwrap_or(c"".as_ptr())
}
