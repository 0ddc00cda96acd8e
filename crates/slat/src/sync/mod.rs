//! The engine's own synchronisation: [`quiesce`] (who may still see what was taken away), a [`SpinLock`] for
//! sections that never wait, and a [`FairLock`] for whole operations. Whoever waits for either passes time
//! through the platform.

pub(crate) mod atomic;
pub(crate) mod fair;
pub(crate) mod held;
pub(crate) mod quiesce;
/// The proof that a reader section lasts. What readers look at without a lock is kept for them until their
/// section ends, so looking asks for this proof.
pub(crate) mod section;
pub(crate) mod spin;

pub(crate) use fair::FairLock;
pub(crate) use section::{Guarded, InSection};
pub(crate) use spin::SpinLock;
