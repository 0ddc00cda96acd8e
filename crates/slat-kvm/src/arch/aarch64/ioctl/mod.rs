//! Requests that only arm64 has. For each kind of object, the architecture-neutral function passes the requests that it
//! does not know to the function in this folder.

pub(crate) mod system;
pub(crate) mod vcpu;
pub(crate) mod vm;

use crate::errno::Result;

/// The result of a request; `None` if arm64 does not have the request.
type Answer = Result<Option<i32>>;

/// The result of a request that has succeeded and returns no value.
const DONE: Answer = Ok(Some(0));
/// The answer to a request that arm64 does not have.
const UNKNOWN: Answer = Ok(None);
