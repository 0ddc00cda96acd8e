use core::marker::PhantomData;

/// A zero-sized token that proves that a reader is in a section as long as `'s` lasts.
///
/// The token borrows the owner of the reader. Every method that ends the section (by leaving, quiescing, or waiting
/// outside) borrows the owner mutably. So a reference that was obtained with the token cannot be used after the
/// section:
///
/// ```compile_fail,E0502
/// # #[allow(dead_code)]
/// # mod section { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/src/sync/section.rs")); }
/// # use section::{Guarded, InSection};
/// # struct Owner;
/// # impl Owner {
/// #     fn section(&self) -> InSection<'_> {
/// #         // SAFETY: there is no reader, and nothing is freed.
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
/// But the reference can be used before the section ends:
///
/// ```
/// # #[allow(dead_code)]
/// # mod section { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/src/sync/section.rs")); }
/// # use section::{Guarded, InSection};
/// # struct Owner;
/// # impl Owner {
/// #     fn section(&self) -> InSection<'_> {
/// #         // SAFETY: there is no reader, and nothing is freed.
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
/// The token does not tell to which VM the reader belongs. It need not: the only operation on two VMs, making a clone
/// ([`crate::vm`]), is in a section of only one of them at a time.
#[derive(Clone, Copy)]
pub(crate) struct InSection<'s>(PhantomData<&'s ()>);

impl InSection<'_> {
    /// Makes a token for a caller that is in a reader section.
    ///
    /// # Safety
    /// - As long as the result is used, a reader of the VM whose data is accessed stays in its current section: it
    ///   neither leaves nor quiesces.
    #[inline(always)]
    pub(crate) unsafe fn assume() -> Self {
        InSection(PhantomData)
    }
}

/// A value that readers access without a lock. Access requires an [`InSection`].
pub(crate) struct Guarded<T>(T);

impl<T> Guarded<T> {
    pub(crate) fn new(value: T) -> Self {
        Guarded(value)
    }

    /// Returns a reference to the value, which can be used as long as the section lasts.
    #[inline(always)]
    pub(crate) fn get<'s>(&'s self, _: InSection<'s>) -> &'s T {
        &self.0
    }

    /// Returns a mutable reference to the value: `&mut self` shows that no reader has a reference to it.
    pub(crate) fn get_mut(&mut self) -> &mut T {
        &mut self.0
    }
}
