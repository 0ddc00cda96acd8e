//! The engine's own synchronisation: [`quiesce`] (how long readers may use removed data), the [`SpinLock`] for critical
//! sections that never wait, and the [`FairLock`] for long operations. Waiters for either lock call
//! [`crate::Platform::wait`].

pub(crate) mod atomic;
pub(crate) mod fair;
pub(crate) mod held;
pub(crate) mod once_box;
pub(crate) mod quiesce;
/// Tokens that prove that a thread is in a reader section. Data that readers access without a lock is valid only until
/// the section ends, so each access requires such a token.
pub(crate) mod section;
pub(crate) mod spin;
pub(crate) mod walker_buffer;

pub(crate) use fair::FairLock;
pub(crate) use once_box::OnceBox;
pub(crate) use section::{Guarded, InSection};
pub(crate) use spin::SpinLock;

/// Waits as long as `holds` returns `true`: calls `wait` with the number of the round, from 0 on.
pub(crate) fn wait_while(holds: impl Fn() -> bool, mut wait: impl FnMut(u32)) {
    let mut round = 0;
    while holds() {
        wait(round);
        round += 1;
    }
}
