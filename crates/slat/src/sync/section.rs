use core::marker::PhantomData;

/// A zero-sized proof that a reader is in a section for as long as `'s` lasts.
///
/// The owner of a reader returns the proof for as long as the owner is borrowed. Every method that ends the section (by
/// leaving, quiescing, or waiting outside) borrows the owner mutably. So a reference that was reached with the proof
/// cannot be used after the section:
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
/// The proof does not name the VM of the reader: the only operation on two VMs, making a clone ([`crate::vm`]), is in a
/// section of one of the two only.
#[derive(Clone, Copy)]
pub(crate) struct InSection<'s>(PhantomData<&'s ()>);

impl InSection<'_> {
    /// Makes a proof that the caller is in a reader section.
    ///
    /// # Safety
    /// - as long as the result is used, a reader of the VM in question stays in its current section: it neither leaves
    ///   nor quiesces.
    #[inline(always)]
    pub(crate) unsafe fn assume() -> Self {
        InSection(PhantomData)
    }
}

/// A value that readers access without a lock. Access needs the proof that the caller is in a section.
pub(crate) struct Guarded<T>(T);

impl<T> Guarded<T> {
    pub(crate) fn new(value: T) -> Self {
        Guarded(value)
    }

    /// Returns the value, for as long as the section lasts.
    #[inline(always)]
    pub(crate) fn get<'s>(&'s self, _: InSection<'s>) -> &'s T {
        &self.0
    }

    /// Returns the value mutably, for an owner that no reader can reach yet.
    pub(crate) fn get_mut(&mut self) -> &mut T {
        &mut self.0
    }
}
