//! When decoded code has to be looked at again: the clock of a CPU.
//!
//! A look at memory before each block would cost more than the block. So each event that may make code stale
//! advances a number of the clock. Whoever has looked at a page of code keeps the numbers of that time. While the
//! clock still has them, nothing has happened. There are three numbers, because events differ in what has to be
//! done; the dearest comes first:
//!
//! | number | advances when | another one than kept means |
//! |---|---|---|
//! | *generation* | translations are dropped | look the page up again |
//! | *epoch* | an event serialises instructions | compare the page with memory: a client or a device may have stored to it |
//! | *stamp* | one of these two does; a page with decoded code is stored to, by whatever CPU | look which of these it was |
//!
//! The stamp alone is read before each block, by the run loop and by compiled code, and it is enough: it advances with
//! each of the others, so a page with the current stamp has the current generation and the current epoch. The three
//! cannot be one. With the generation alone, each interrupt would look up every page again, which is a walk; with the
//! epoch alone, each store to a page with code would compare all others with memory.
//!
//! Epoch and stamp exist twice, for supervisor code and for user code: an IRET to a user advances the user's alone
//! ([`Clock::serialize`]). A page is looked up as one or the other, and the CPU runs one at a time, so a change of the
//! CPL exchanges the stamp ([`Clock::enter`]). The generation exists once, as a flush concerns both. No number wraps
//! around: 64 bits last for centuries.
//!
//! Two more numbers are no time of a CPU, but tell contents apart: a page's *version*, which all CPUs share, rises with
//! each store to it (`code_pages`); its *edition* is another one whenever this CPU has found it changed (`snapshot`).

/// The numbers of a CPU. They begin at 1: a page that keeps 0 was never looked at.
pub(crate) struct Clock {
    generation: u64,
    /// For supervisor code and for user code.
    epochs: [u64; 2],
    stamps: [u64; 2],
    /// The one of `stamps` for the current CPL. Compiled code reads it.
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

    /// Returns the epoch of user code, or of supervisor code.
    pub(crate) fn epoch(&self, is_user: bool) -> u64 {
        self.epochs[usize::from(is_user)]
    }

    /// Call when code of another privilege begins to run.
    pub(crate) fn enter(&mut self, is_user: bool) {
        self.is_user = is_user;
        self.stamp = self.stamps[usize::from(is_user)];
    }

    /// Call after dropping translations: has all code looked up again.
    pub(crate) fn flush(&mut self) {
        self.generation += 1;
        self.change();
    }

    /// Call after a store to a page with decoded code: has all code looked at before it is executed next.
    pub(crate) fn change(&mut self) {
        self.stamps = self.stamps.map(|stamp| stamp + 1);
        self.enter(self.is_user);
    }

    /// Call for an event that serialises instructions (SDM volume 3, "Serializing Instructions"), and for an interrupt
    /// and a far transfer, by which guests begin code that a device has loaded: stores of the client and of devices to
    /// code, made before, are seen from the next block on.
    pub(crate) fn serialize(&mut self) {
        self.epochs = self.epochs.map(|epoch| epoch + 1);
        self.change();
    }

    /// Call for an IRET, after it has changed the CPL. To a user it serialises the user's instructions alone: each page
    /// fault of a user ends with it, and to compare the supervisor's code for the next one would cost more than all
    /// else that the fault does. What a client or a device stores to a supervisor's code is seen after the next of the
    /// many events that serialise all, interrupts among them.
    pub(crate) fn serialize_return(&mut self) {
        if !self.is_user {
            return self.serialize();
        }
        self.epochs[1] += 1;
        self.stamps[1] += 1;
        self.enter(true);
    }
}
