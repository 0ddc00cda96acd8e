//! Requests that only x86 has. Each function of this folder gets the requests that the neutral function of the same
//! object does not have.

pub(crate) mod system;
mod tables;
pub(crate) mod vcpu;
pub(crate) mod vm;

use crate::errno::Result;
use crate::user;

/// What a request returns; `None` if x86 does not have the request.
type Answer = Result<Option<i32>>;

/// Success without a value.
const DONE: Answer = Ok(Some(0));
/// The answer to a request that x86 does not have.
const UNKNOWN: Answer = Ok(None);

fn value(value: i32) -> Answer {
    Ok(Some(value))
}

/// Writes `value` to the client's memory at `address`, and returns success.
fn give<T: user::Plain>(address: u64, value: &T) -> Answer {
    user::write(address, value)?;
    DONE
}
