//! The buffers that hardware walkers fill, one for each vCPU. The buffers are small, so that they are often full.

use std::mem::take;
use std::sync::Mutex;

use slat::Gfn;

use crate::setup::VCPUS;

/// An address space, and a frame in it whose dirty bit a page walker has set.
type Written = (usize, Gfn);

/// The buffers in which the page walkers of all vCPUs record written pages (Intel: PML).
#[derive(Default)]
pub(crate) struct WalkerBuffers([Mutex<Vec<Written>>; VCPUS]);

impl WalkerBuffers {
    /// The number of entries of each buffer.
    const MOST: usize = 4;

    /// If the buffer of vCPU `i` is full, empties it and returns its entries. The vCPU then leaves the guest. `None`:
    /// the buffer is not full.
    pub(crate) fn take_full(&self, i: usize) -> Option<Vec<Written>> {
        let mut buffer = self.0[i].lock().unwrap();
        (buffer.len() == Self::MOST).then(|| take(&mut *buffer))
    }

    /// Adds an entry to the buffer of vCPU `i`, which is not full.
    pub(crate) fn write(&self, i: usize, written: Written) {
        let mut buffer = self.0[i].lock().unwrap();
        assert!(
            buffer.len() < Self::MOST,
            "no walker writes to a full buffer"
        );
        buffer.push(written);
    }

    /// Empties all buffers. Calls `give` with each entry.
    pub(crate) fn drain(&self, give: &mut dyn FnMut(usize, Gfn)) {
        for buffer in &self.0 {
            let written = take(&mut *buffer.lock().unwrap());
            written
                .into_iter()
                .for_each(|(space, gfn)| give(space, gfn));
        }
    }
}
