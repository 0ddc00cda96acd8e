//! The reader section of a vCPU: how the vCPU enters and leaves it, acknowledges flushes, and finds out that it has
//! missed one.

use core::ops::{Deref, DerefMut};

use super::Vcpu;
use crate::addr::Gpa;
use crate::format::{Format, all_gfns};
use crate::platform::Platform;
use crate::sync::atomic::Ordering::Relaxed;
use crate::sync::quiesce::Attention;
use crate::trace::Event;
use crate::vcpu::translate::Stop;

impl<P: Platform, F: Format> Vcpu<P, F> {
    /// Enters a reader section, which ends when the guard is dropped. Meanwhile flushes wait for this CPU. `token`
    /// tells the platform which CPU to kick (a thread id). If translations may have been flushed since the last
    /// section, raises [`Attention::FLUSH`].
    ///
    /// In `match vcpu.enter(0).prefault(range) { … }` the guard lives until the end of the `match`, like every
    /// temporary in its head. So an arm that waits for a flush, for example because it changes slots, waits forever.
    /// Bind the result first: `let mapped = vcpu.enter(0).prefault(range);`.
    pub fn enter(&mut self, token: usize) -> Entered<'_, P, F> {
        self.enter_unguarded(token);
        Entered(self)
    }

    /// Like [`Self::enter`], but the caller has to call [`Self::leave`] on every path, including a panic's. Use it if
    /// the vCPU is a field of an object that is borrowed as a whole while the vCPU is entered.
    pub fn enter_unguarded(&mut self, token: usize) {
        self.token = token;
        self.come_in(F::GRANULE.gpa(all_gfns::<F>().end));
    }

    /// Ends the reader section. Translations may be kept if the CPU checks the attention word after the next
    /// [`enter`](Self::enter), before it uses them.
    pub fn leave(&mut self) {
        self.flags_in = None;
        self.presence.leave();
    }

    /// Acknowledges all flushes so far. The caller has dropped every translation that it was given.
    pub fn quiesce(&mut self) {
        self.flags_in = None;
        self.presence.quiesce(&self.vm.readers);
        self.vm.platform.trace(Event::Quiesce);
    }

    fn come_in(&mut self, walkable: Gpa) {
        let (readers, token) = (&self.vm.readers, self.token);
        if self.presence.enter(readers, token, walkable) {
            self.flags_in = None;
            self.attention().raise(Attention::FLUSH);
        }
    }

    /// Runs `wait` outside the reader section, where it may take any time. If a flush takes place meanwhile, the value
    /// of [`Self::missed`] changes.
    pub(crate) fn outside<R>(&mut self, wait: impl FnOnce(&Self) -> R) -> R {
        let walkable = self.presence.leave();
        let answer = wait(self);
        self.come_in(walkable);
        answer
    }

    /// Returns how often the vCPU has entered a section after missing a flush. If the number has changed, every
    /// translation from before is void.
    #[inline]
    pub(super) fn missed(&self) -> u64 {
        self.presence.missed
    }

    /// Runs `access`, which may leave the reader section.
    ///
    /// # Errors
    /// [`Stop::Retry`] if a flush took place meanwhile, whatever `access` returns; otherwise the errors of `access`.
    #[inline]
    pub(super) fn unless_flushed<R, E: From<Stop>>(
        &mut self,
        access: impl FnOnce(&mut Self) -> Result<R, E>,
    ) -> Result<R, E> {
        let missed = self.missed();
        let answer = access(self);
        match self.missed() == missed {
            true => answer,
            false => Err(Stop::Retry.into()),
        }
    }

    /// Runs `work`, which may leave the reader section, for the owner of the CPU. If a flush takes place meanwhile, the
    /// result must tell the owner: `says_void` must be true for it. Otherwise the CPU would continue to use the
    /// translations that it was given before. Builds for tests assert this.
    #[inline]
    pub(super) fn for_owner<R>(
        &mut self,
        work: impl FnOnce(&mut Self) -> R,
        says_void: impl FnOnce(&R) -> bool,
    ) -> R {
        let missed = self.missed();
        let answer = work(self);
        debug_assert!(
            missed == self.missed() || says_void(&answer),
            "a flush went by, and the owner of the CPU is not told"
        );
        answer
    }

    /// Lets threads that have requested a flush continue, in the middle of a long operation. Translations that the CPU
    /// remembers may be void afterwards: the request stays raised.
    pub(crate) fn pass(&mut self) {
        if self.attention().flag().load(Relaxed) & Attention::FLUSH != 0 {
            self.outside(|_| ());
        }
    }
}

/// A vCPU in its reader section ([`Vcpu::enter`]). The vCPU leaves the section when this is dropped.
#[must_use = "the vCPU leaves when this is dropped"]
pub struct Entered<'v, P: Platform, F: Format>(&'v mut Vcpu<P, F>);

impl<P: Platform, F: Format> Deref for Entered<'_, P, F> {
    type Target = Vcpu<P, F>;
    fn deref(&self) -> &Vcpu<P, F> {
        self.0
    }
}

impl<P: Platform, F: Format> DerefMut for Entered<'_, P, F> {
    fn deref_mut(&mut self) -> &mut Vcpu<P, F> {
        self.0
    }
}

impl<P: Platform, F: Format> Drop for Entered<'_, P, F> {
    fn drop(&mut self) {
        self.0.leave();
    }
}
