//! The clock of a CPU: three numbers from which the CPU knows when it must check decoded code again.
//!
//! Comparing a block with memory before each run would cost more than running it. So each event that may make decoded
//! code stale advances a number of the clock, and each page of code records the clock's numbers when it was last
//! checked. If the clock still has the recorded numbers, no such event has happened since. The clock has three numbers,
//! because different events require different checks. In the table, the most expensive check is first:
//!
//! | number | advances when | check if the page's number is older |
//! |---|---|---|
//! | *generation* | translations are dropped | look the page up again |
//! | *epoch* | an event serialises instructions | compare with memory: a client or a device may have stored to it |
//! | *stamp* | generation or epoch advances; any CPU stores to a page with decoded code | find out which happened |
//!
//! Before each block, the run loop and compiled code read only the stamp. The stamp suffices, because it advances with
//! the generation and with the epoch. So a page with the current stamp also has the current generation and epoch. A
//! single number would cost too much. If there were only a generation, each interrupt would advance it, and the CPU
//! would translate the address of every page again. If there were only an epoch, each store to a page with code would
//! advance it, and the CPU would compare all other pages with memory.
//!
//! There is one epoch and one stamp for supervisor code, and another pair for user code. An IRET to user code advances
//! only the user's pair ([`Clock::serialize_return`]). A page of code belongs either to supervisor code or to user
//! code. When the CPL changes between the two, [`Clock::enter`] selects the other stamp. There is only one generation,
//! because a flush affects all code. No 64-bit number wraps around within centuries.
//!
//! Two more numbers, which are not part of the clock, identify the contents of a page. A page's *version*, which all
//! CPUs share, rises with each store to the page (`code_pages`). A page's *edition*, which belongs to one CPU, changes
//! whenever this CPU finds the page changed (`snapshot`).

/// Numbers that tell a CPU when decoded code must be checked again. They begin at 1: a page of code with the number 0
/// was never checked.
pub(crate) struct Clock {
    generation: u64,
    /// One epoch for supervisor code and one for user code.
    epochs: [u64; 2],
    stamps: [u64; 2],
    /// The element of `stamps` for the current CPL, copied for compiled code to read.
    pub(crate) stamp: u64,
    is_user: bool,
}

impl Clock {
    pub(crate) const fn new() -> Self {
        Self {
            generation: 1,
            epochs: [1; 2],
            stamps: [1; 2],
            stamp: 1,
            is_user: false,
        }
    }

    pub(crate) fn generation(&self) -> u64 {
        self.generation
    }

    /// Returns the epoch of user code if `is_user`, else that of supervisor code.
    pub(crate) fn epoch(&self, is_user: bool) -> u64 {
        self.epochs[usize::from(is_user)]
    }

    /// Call when the privilege level changes between user and supervisor.
    pub(crate) fn enter(&mut self, is_user: bool) {
        self.is_user = is_user;
        self.stamp = self.stamps[usize::from(is_user)];
    }

    /// Call after dropping translations. Makes the CPU translate the address of each page of code again.
    pub(crate) fn flush(&mut self) {
        self.generation += 1;
        self.change();
    }

    /// Call after a store to a page with decoded code. Makes the CPU check each page of code before it executes the
    /// page's code again.
    pub(crate) fn change(&mut self) {
        self.stamps = self.stamps.map(|stamp| stamp + 1);
        self.enter(self.is_user);
    }

    /// Call for an event that serialises instructions (SDM volume 3, "Serializing Instructions"). Also call for
    /// interrupts and far transfers, because guests use these to start code that a device has loaded. The next block
    /// sees all earlier stores of the VMM and of devices to code.
    pub(crate) fn serialize(&mut self) {
        self.epochs = self.epochs.map(|epoch| epoch + 1);
        self.change();
    }

    /// Call for an IRET, after it has changed the CPL. An IRET to user code serialises only user code, because every
    /// page fault in user code ends with one: if it also serialised supervisor code, comparing that code with memory
    /// again for the next fault would cost more than the rest of the fault. Supervisor code sees a store by the VMM or
    /// a device after the next event that serialises all code. Such events, interrupts for example, are frequent.
    pub(crate) fn serialize_return(&mut self) {
        if !self.is_user {
            return self.serialize();
        }
        self.epochs[1] += 1;
        self.stamps[1] += 1;
        self.enter(true);
    }
}
