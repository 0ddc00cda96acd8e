use core::marker::PhantomData;

/// Proof, of no size, that a reader is in a section for as long as `'s` lasts.
///
/// The owner of a reader gives it for as long as the owner is borrowed, and whatever ends the section (to
/// leave, to quiesce, to wait outside) borrows the owner mutably. So what was reached with the proof cannot
/// be used after the section:
///
/// ```compile_fail,E0502
/// # #[allow(dead_code)]
/// # mod section { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/src/sync/section.rs")); }
/// # use section::{Guarded, InSection};
/// # struct Owner;
/// # impl Owner {
/// #     fn section(&self) -> InSection<'_> {
/// #         // SAFETY: there is no reader, and nothing that it would keep alive.
/// #         unsafe { InSection::assume() }
/// #     }
/// #     fn leave(&mut self) {}
/// # }
/// # let (tree, mut owner) = (Guarded::new(7), Owner);
/// let seen = tree.get(owner.section());
/// owner.leave();
/// assert_eq!(*seen, 7);
/// ```
///
/// but before:
///
/// ```
/// # #[allow(dead_code)]
/// # mod section { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/src/sync/section.rs")); }
/// # use section::{Guarded, InSection};
/// # struct Owner;
/// # impl Owner {
/// #     fn section(&self) -> InSection<'_> {
/// #         // SAFETY: there is no reader, and nothing that it would keep alive.
/// #         unsafe { InSection::assume() }
/// #     }
/// #     fn leave(&mut self) {}
/// # }
/// # let (tree, mut owner) = (Guarded::new(7), Owner);
/// let seen = tree.get(owner.section());
/// assert_eq!(*seen, 7);
/// owner.leave();
/// ```
///
/// It does not say of which VM the reader is: nothing in the engine has two VMs at hand.
#[derive(Clone, Copy)]
pub(crate) struct InSection<'s>(PhantomData<&'s ()>);

impl InSection<'_> {
    /// # Safety
    /// - as long as the answer is used, a reader of the VM that it is used for stays in the section that it
    ///   is in: it neither leaves nor quiesces.
    #[inline(always)]
    pub(crate) unsafe fn assume() -> Self {
        InSection(PhantomData)
    }
}

/// What readers look at without a lock: to be had only with the proof that one is in a section.
pub(crate) struct Guarded<T>(T);

impl<T> Guarded<T> {
    pub(crate) fn new(value: T) -> Self {
        Guarded(value)
    }

    #[inline(always)]
    pub(crate) fn get<'s>(&'s self, _: InSection<'s>) -> &'s T {
        &self.0
    }

    /// # Safety
    /// - of the value the caller uses what needs no reader section, or begins sections of its own around what
    ///   does.
    #[inline(always)]
    pub(crate) unsafe fn unguarded(&self) -> &T {
        &self.0
    }
}
