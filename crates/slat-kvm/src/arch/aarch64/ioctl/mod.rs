//! Requests that only arm64 has. Each function of this folder gets the requests that the neutral function of the same
//! object does not have.

pub(crate) mod system;
pub(crate) mod vcpu;
pub(crate) mod vm;

use crate::errno::Result;

/// The result of a request; `None` if arm64 does not have the request.
type Answer = Result<Option<i32>>;

/// Success without a value.
const DONE: Answer = Ok(Some(0));
/// The answer to a request that arm64 does not have.
const UNKNOWN: Answer = Ok(None);
