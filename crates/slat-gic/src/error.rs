//! The reason why an access by KVM's device attributes is refused.

use crate::memory::Fault;

/// An error of an access by KVM's device attributes. Each error is one errno of KVM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Error {
    /// EINVAL: the value, the vCPU or the interrupt is wrong, or restored tables are inconsistent.
    Invalid,
    /// ENXIO: the register or the attribute does not exist, or a needed address is not set.
    NoAttribute,
    /// EBUSY: the access is allowed only at another time, for example only before initialization.
    Busy,
    /// EEXIST: the address or the table entry is set already.
    Exists,
    /// E2BIG: the address is outside the guest's physical address space, or there are too many vCPUs.
    TooBig,
    /// ENOENT: there is no such redistributor region.
    NotFound,
    /// ENODEV: the attribute belongs to another type of device.
    NoDevice,
    /// EFAULT: a table is not in guest memory.
    Fault,
}

impl Error {
    /// Returns Linux's positive number of the error.
    pub const fn errno(self) -> i32 {
        match self {
            Error::NotFound => 2,
            Error::NoAttribute => 6,
            Error::TooBig => 7,
            Error::Fault => 14,
            Error::Busy => 16,
            Error::Exists => 17,
            Error::NoDevice => 19,
            Error::Invalid => 22,
        }
    }
}

impl From<Fault> for Error {
    fn from(_: Fault) -> Self {
        Error::Fault
    }
}
