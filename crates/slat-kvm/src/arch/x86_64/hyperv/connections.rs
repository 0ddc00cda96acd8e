//! `KVM_HYPERV_EVENTFD`: connections that a guest signals by a hypercall. The only effect of the hypercall is that the
//! connection's eventfd is signalled.

use crate::errno::{Result, fail};
use crate::eventfd::EventFd;
use crate::heap;
use kvm_bindings::{KVM_HYPERV_CONN_ID_MASK, KVM_HYPERV_EVENTFD_DEASSIGN, kvm_hyperv_eventfd};
use std::sync::{PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

/// The connections of a VM, sorted by id.
#[derive(Debug, Default)]
pub(crate) struct Connections(RwLock<Vec<(u32, EventFd)>>);

impl Connections {
    fn read(&self) -> RwLockReadGuard<'_, Vec<(u32, EventFd)>> {
        self.0.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, Vec<(u32, EventFd)>> {
        self.0.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds or removes a connection. After a removal has returned, the guest no longer signals the connection's
    /// eventfd.
    ///
    /// # Errors
    /// `EINVAL` for unknown flags, an id of more than 24 bits, and a descriptor that is no eventfd; `EEXIST` for adding
    /// an id that is in use, `ENOENT` for removing an id that is not in use; `EBADF`, `EMFILE`, `ENOMEM`.
    pub(crate) fn change(&self, asked: &kvm_hyperv_eventfd) -> Result<()> {
        let id = asked.conn_id;
        if asked.flags & !KVM_HYPERV_EVENTFD_DEASSIGN != 0 || id & !KVM_HYPERV_CONN_ID_MASK != 0 {
            return fail(libc::EINVAL);
        }
        let find = |list: &[(u32, EventFd)]| list.binary_search_by_key(&id, |entry| entry.0);
        if asked.flags == KVM_HYPERV_EVENTFD_DEASSIGN {
            let mut list = self.write();
            let Ok(at) = find(&list) else {
                return fail(libc::ENOENT);
            };
            list.remove(at);
            return Ok(());
        }
        let eventfd = EventFd::take(asked.fd)?;
        let mut list = self.write();
        let Err(at) = find(&list) else {
            return fail(libc::EEXIST);
        };
        heap::reserve(&mut list, 1)?;
        list.insert(at, (id, eventfd));
        Ok(())
    }

    /// Signals the eventfd of a connection. Returns whether the connection exists.
    pub(crate) fn signal(&self, id: u32) -> bool {
        let list = self.read();
        let found = list.binary_search_by_key(&id, |entry| entry.0);
        found.map(|at| list[at].1.signal()).is_ok()
    }
}
