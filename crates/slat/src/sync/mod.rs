//! The engine's own synchronisation: [`quiesce`] (who may still see what was taken away) and a
//! spinning [`Lock`] whose waiter passes time through the platform.

pub(crate) mod atomic;
pub(crate) mod lock;
pub(crate) mod quiesce;
/// The proof that a reader section lasts. What readers look at without a lock is kept for them until their
/// section ends, so looking asks for this proof.
pub(crate) mod section;

pub(crate) use lock::Lock;
pub(crate) use section::{Guarded, InSection};
