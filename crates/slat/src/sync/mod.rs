//! The engine's own synchronisation: [`quiesce`] (who may still see what was taken away) and a
//! spinning [`Lock`] whose waiter passes time through the platform.

pub(crate) mod atomic;
pub(crate) mod lock;
pub(crate) mod quiesce;

pub(crate) use lock::Lock;
