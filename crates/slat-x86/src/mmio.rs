//! MMIO accesses, whose data the device model provides.
//!
//! *MMIO reads*: the CPU abandons the instruction, which has had no effect, and ends the run. The caller provides the
//! data. In the next run, the CPU executes the instruction again from its start, in its decoded form. A read whose data
//! the caller has provided returns the data, without translating the address again.
//!
//! *MMIO writes*: the instruction puts its writes, as fragments of at most 8 bytes, into a queue, and is then done.
//! Each fragment in the queue ends a run.
//!
//! [`complete`](crate::complete) finishes such an instruction before anything else is executed.

use crate::Cpu;
use crate::devices::{Fragment, MOST_FRAGMENTS};
use crate::flow::Break;
use crate::machine::{Access, Exit};

impl Cpu {
    /// Returns the guest-physical address of this access if compiled code has already found that it is to a device. A
    /// second call returns `None`.
    #[cfg(feature = "jit")]
    #[inline]
    pub(crate) fn take_met(&mut self, lin: u64, access: Access) -> Option<u64> {
        (self.devices.met)
            .take_if(|met| (met.lin, met.access) == (lin, access))
            .map(|met| met.gpa)
    }

    /// Returns `None`: without the compiler, there is no compiled code.
    #[cfg(not(feature = "jit"))]
    #[inline]
    pub(crate) fn take_met(&mut self, _: u64, _: Access) -> Option<u64> {
        None
    }

    /// Provides the data of the MMIO read that ended the last run.
    pub fn complete_mmio_read(&mut self, data: &[u8]) {
        if let Some(mut read) = self.devices.asked.take() {
            let len = data.len().min(usize::from(read.len));
            read.data[..len].copy_from_slice(&data[..len]);
            self.fixed.answers.push(read);
            self.slow = true;
        }
    }

    /// Whether the caller has provided data for reads of the instruction at RIP.
    pub(crate) fn has_answers(&self) -> bool {
        !self.fixed.answers.waiting().is_empty()
    }

    /// Call when the instruction at RIP starts again. Its first read will get the first provided data.
    pub(crate) fn rewind_answers(&mut self) {
        self.devices.taken = 0;
    }

    /// Drops the data that the caller has provided. Call when the instruction is done or has ended in an exception.
    pub(crate) fn clear_answers(&mut self) {
        self.fixed.answers.clear();
        self.devices.taken = 0;
    }

    /// Returns the guest-physical address of a read at `lin`, if the caller has provided its data, and the current
    /// execution of the instruction has not made the read yet.
    pub(crate) fn answered_at(&self, lin: u64) -> Option<u64> {
        let mut left = self.fixed.answers.waiting().iter().skip(self.devices.taken);
        left.find(|answer| answer.lin == lin)
            .map(|answer| answer.gpa)
    }

    pub(crate) fn mmio_read(&mut self, lin: u64, gpa: u64, buffer: &mut [u8]) -> Result<(), Break> {
        let len = buffer.len();
        let answers = &mut self.fixed.answers;
        if let Some(answer) = answers.waiting().get(self.devices.taken)
            && answer.lin == lin
            && usize::from(answer.len) == len
        {
            buffer.copy_from_slice(&answer.data[..len]);
            self.devices.taken += 1;
            return Ok(());
        }
        // Drop the provided data of later reads, which is for other addresses.
        answers.end = self.devices.taken;
        if answers.end == MOST_FRAGMENTS {
            return Err(self.unimplemented("an instruction with very many MMIO reads"));
        }
        let read = Fragment {
            lin,
            gpa,
            len: len as u8,
            data: [0; 8],
        };
        self.devices.asked = Some(read);
        Err(self.leave(Exit::Mmio {
            gpa,
            len: read.len,
            write: false,
            data: read.data,
        }))
    }

    pub(crate) fn mmio_write(&mut self, gpa: u64, bytes: &[u8]) -> Result<(), Break> {
        let mut write = Fragment {
            lin: 0,
            gpa,
            len: bytes.len() as u8,
            data: [0; 8],
        };
        write.data[..bytes.len()].copy_from_slice(bytes);
        if !self.fixed.writes.push(write) {
            return Err(self.unimplemented("an instruction with very many MMIO writes"));
        }
        self.stop = true;
        self.slow = true;
        Ok(())
    }

    /// Whether there are writes that the device model has not received.
    pub(crate) fn has_writes(&self) -> bool {
        !self.fixed.writes.waiting().is_empty()
    }

    /// Removes the next write from the queue, and returns the exit for it.
    pub(crate) fn next_mmio_write(&mut self) -> Option<Exit> {
        let Fragment { gpa, len, data, .. } = self.fixed.writes.pop()?;
        Some(Exit::Mmio {
            gpa,
            len,
            write: true,
            data,
        })
    }

    /// Whether there is data of a string input that the CPU has not stored in memory yet.
    pub(crate) fn has_input(&self) -> bool {
        self.devices.port.is_some_and(|port| port.answered)
    }

    /// Whether the last instruction must still access memory before it is done.
    pub(crate) fn waits_for_memory(&self) -> bool {
        self.svm.is_exit_due() || self.has_answers() || self.has_input()
    }
}
