//! Requests that only x86 has. For each kind of object, the architecture-neutral function passes the requests that it
//! does not know to the function in this folder.

pub(crate) mod system;
mod tables;
pub(crate) mod vcpu;
pub(crate) mod vm;

use crate::errno::Result;
use crate::user;

/// The result of a request. `None`: x86 does not have the request.
type Answer = Result<Option<i32>>;

/// The result of a request that succeeds and has no value.
const DONE: Answer = Ok(Some(0));
/// The result of a request that x86 does not have.
const UNKNOWN: Answer = Ok(None);

fn value(value: i32) -> Answer {
    Ok(Some(value))
}

/// Writes `value` to the client's memory at `address`, and returns success.
fn give<T: user::Plain>(address: u64, value: &T) -> Answer {
    user::write(address, value)?;
    DONE
}
