//! Errors of the KVM API: an errno, as kvm-ioctls reports it.

pub use vmm_sys_util::errno::Error;

/// The result of every call of this crate.
pub type Result<T> = std::result::Result<T, Error>;

/// Returns `Err` with the given (positive) errno.
pub(crate) fn fail<T>(errno: i32) -> Result<T> {
    Err(Error::new(errno))
}

/// Returns `ENOMEM`. Call with the error of a failed allocation, of any type.
pub(crate) fn no_memory<E>(_: E) -> Error {
    Error::new(libc::ENOMEM)
}

/// Returns the errno of this thread's last system call that failed.
pub(crate) fn last() -> Error {
    Error::last()
}
