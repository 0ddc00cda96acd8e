//! Errors of the KVM API: an errno, as kvm-ioctls reports it.

pub use vmm_sys_util::errno::Error;

/// What every call of this crate answers.
pub type Result<T> = std::result::Result<T, Error>;

/// `Err` with the given (positive) errno.
pub(crate) fn fail<T>(errno: i32) -> Result<T> {
    Err(Error::new(errno))
}

/// `ENOMEM`, for whatever says that an allocation failed.
pub(crate) fn no_memory<E>(_: E) -> Error {
    Error::new(libc::ENOMEM)
}

/// The errno the last system call of this thread left behind.
pub(crate) fn last() -> Error {
    Error::last()
}
