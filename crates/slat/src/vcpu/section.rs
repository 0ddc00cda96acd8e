//! The reader section of a vCPU: how the vCPU enters and leaves the section, acknowledges flushes, and notices that a
//! flush took place outside.

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
    /// Enters a reader section, which ends when the guard is dropped. During the section, flushes wait for this vCPU.
    /// `token` (a thread id) tells the platform which thread to kick. If a flush took place since the vCPU's last
    /// section, raises [`Attention::FLUSH`].
    ///
    /// In `match vcpu.enter(0).prefault(range) { … }` the guard lives until the end of the `match`, like every
    /// temporary in its head. So an arm that waits for a flush, for example because it changes slots, waits forever. To
    /// avoid this, bind the result first: `let mapped = vcpu.enter(0).prefault(range);`.
    pub fn enter(&mut self, token: usize) -> Entered<'_, P, F> {
        self.enter_unguarded(token);
        Entered(self)
    }

    /// Like [`Self::enter`], but without a guard: the caller must call [`Self::leave`] on every path, also after a
    /// panic. Use this if the vCPU is a field of an object that must be borrowed as a whole while the vCPU is entered.
    pub fn enter_unguarded(&mut self, token: usize) {
        self.token = token;
        self.come_in(F::GRANULE.gpa(all_gfns::<F>().end));
    }

    /// Ends the reader section. The CPU may keep its translations if it checks the attention word after the next
    /// [`enter`](Self::enter), before it uses them.
    pub fn leave(&mut self) {
        self.flags_in = None;
        self.presence.leave();
    }

    /// Acknowledges all flushes so far. Call after dropping every translation that the CPU remembers.
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

    /// Leaves the reader section, runs `wait`, which may take any time, and enters a new section. If a flush took place
    /// meanwhile, [`Self::missed`] returns another value than before.
    pub(crate) fn outside<R>(&mut self, wait: impl FnOnce(&Self) -> R) -> R {
        let walkable = self.presence.leave();
        let answer = wait(self);
        self.come_in(walkable);
        answer
    }

    /// Returns how often the vCPU, entering a section, has noticed a flush that took place outside. If the number has
    /// changed, every translation that the vCPU remembers from before is void.
    #[inline]
    pub(super) fn missed(&self) -> u64 {
        self.presence.missed
    }

    /// Runs `access`, which may leave the reader section.
    ///
    /// # Errors
    /// [`Stop::Retry`] if a flush took place while the vCPU was outside, whatever `access` returns; otherwise the
    /// errors of `access`.
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

    /// Runs `work`, which may leave the reader section. If a flush takes place while the vCPU is outside, the result
    /// must tell the caller of the vCPU that its translations are void: `says_void` must return `true` for the result.
    /// Otherwise the CPU would continue to use them. Debug builds assert this.
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

    /// Call regularly during a long operation: leaves the reader section for a moment if a flush is requested, so that
    /// the requesting threads can continue. Afterwards translations that the CPU remembers may be void;
    /// [`Attention::FLUSH`] stays raised.
    pub(crate) fn pass(&mut self) {
        if self.attention().flag().load(Relaxed) & Attention::FLUSH != 0 {
            self.outside(|_| ());
        }
    }
}

/// A vCPU in its reader section ([`Vcpu::enter`]). The vCPU leaves the section when this guard is dropped.
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
