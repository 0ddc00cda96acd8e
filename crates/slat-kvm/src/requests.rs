//! Builds the request numbers of KVM's ioctls from the direction, the size of the argument, the type (`KVMIO`) and the
//! number, as usual in Linux.

/// The type byte of every KVM ioctl.
pub const KVMIO: u32 = 0xae;

const NONE: u32 = 0;
const WRITE: u32 = 1;
const READ: u32 = 2;

const fn ioc(direction: u32, number: u32, size: usize) -> u32 {
    direction << 30 | (size as u32) << 16 | KVMIO << 8 | number
}

pub(crate) const fn io(number: u32) -> u32 {
    ioc(NONE, number, 0)
}

/// Encodes a request to which the client passes a `T`.
pub(crate) const fn iow<T>(number: u32) -> u32 {
    ioc(WRITE, number, size_of::<T>())
}

/// Encodes a request that returns a `T` to the client.
pub(crate) const fn ior<T>(number: u32) -> u32 {
    ioc(READ, number, size_of::<T>())
}

pub(crate) const fn iowr<T>(number: u32) -> u32 {
    ioc(READ | WRITE, number, size_of::<T>())
}

/// Defines requests, and the function that returns a request's name.
macro_rules! requests {
    ($function:ident: $($name:ident = $value:expr;)*) => {
        $(#[allow(missing_docs)] pub const $name: u32 = $value;)*

        /// Returns the name of a request, for messages. `None`: the request is unknown.
        pub(crate) fn $function(request: u32) -> Option<&'static str> {
            match request {
                $(_ if request == $name => Some(stringify!($name)),)*
                _ => None,
            }
        }
    };
}
pub(crate) use requests;
