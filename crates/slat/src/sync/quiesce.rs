//! Quiescent-state-based reclamation: decides when removed data may be freed because no reader uses it any more. (KVM
//! uses SRCU for this purpose.)
//!
//! Walkers and slot look-ups take no lock. So removed data is kept until every reader has passed a *quiescent point*: a
//! moment at which the reader has no pointer into tables or slots and, if it is a software CPU, no cached translation.
//! The same mechanism acknowledges TLB flushes of software CPUs: a flush waits until each software CPU has passed a
//! quiescent point.
//!
//! # Protocol
//! There is one counter, the *generation*. Every reader owns one word, whose value is
//!
//! * 0 if the reader is outside a reader section: writers do not wait for it;
//! * g if the reader is in a section, and the generation was g at its last quiescent point.
//!
//! A writer removes something (clears entries, swaps the slot set) and then calls [`Readers::synchronize`], which
//! raises the generation to n and waits for every reader whose word is neither 0 nor at least n. A reader that enters a
//! section reads the generation, stores it in its word, and reads the generation again; if the generation has changed,
//! it repeats this. Both sides use sequentially consistent accesses. So either the writer sees the reader's word, or
//! the reader sees the raised generation, and thus also everything that the writer changed before it raised the
//! generation (release/acquire). The same is true for the list of readers: if a writer does not find a reader in the
//! list, that reader enters after the raise. To leave, a reader stores 0 with release ordering, so everything that it
//! did in the section happens before everything that a writer does after seeing the 0.
//!
//! For a look-up of a few instructions, a thread need not own a reader ([`Readers::brief`]). All threads share one word
//! for such look-ups: the thread that changes it from 0 to the generation owns it until it stores 0 again.
//!
//! # Deadlock
//! A reader that must wait (for host memory, for a flush, for the end of an invalidation) leaves its section before and
//! enters a section again afterwards. So no reader waits while a writer waits for that reader. [`Reader::enter`]
//! returns whether the generation was raised meanwhile; if so, every translation that the reader has cached is void. A
//! vCPU that is not in KVM_RUN is also outside.
//!
//! # Attention
//! Each reader has a word of *attention* bits that its software CPU checks at every block boundary. `synchronize` sets
//! [`Attention::FLUSH`] in this word; the other bits belong to the client. [`Reader::quiesce`] clears this bit *before*
//! it reads the generation. So a request between the two sets the bit again, and the CPU sees the bit at the next block
//! boundary.

use alloc::boxed::Box;
use core::iter;

use crate::heap::{self, OutOfMemory, Shared};
use crate::stats::Counters;
use crate::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering::*};
use crate::sync::walker_buffer::WalkerBuffer;
use crate::sync::{InSection, OnceBox, wait_while};

/// A word of bits that make a software CPU leave its loop at the next block boundary. A clone refers to the same word.
///
/// ```
/// use slat::Attention;
/// const SIGNAL: u32 = 1 << 1;
/// let word = Attention::new()?;
/// word.clone().raise(SIGNAL);
/// assert_eq!(word.take(SIGNAL | Attention::FLUSH), SIGNAL);
/// # Ok::<(), slat::OutOfMemory>(())
/// ```
#[derive(Clone, Debug)]
pub struct Attention(Shared<Word>);

/// The attention word. It has a cache line of its own, because a software CPU reads the word at every block boundary.
#[derive(Debug)]
#[repr(align(64))]
struct Word(AtomicU32);

impl Attention {
    /// The engine sets this bit to request [`crate::Vcpu::quiesce`]. All other bits are free for the client.
    pub const FLUSH: u32 = 1 << 0;

    /// Makes a word with no bits set. A vCPU already has a word ([`crate::Vcpu::attention`]).
    ///
    /// # Errors
    /// [`OutOfMemory`].
    pub fn new() -> Result<Self, OutOfMemory> {
        Ok(Attention(Shared::try_new(Word(AtomicU32::new(0)))?))
    }

    /// Returns the word. If it is not 0, the CPU must leave its loop.
    pub fn flag(&self) -> &AtomicU32 {
        &self.0.0
    }

    /// Sets bits. Any thread, or a signal handler, may call this.
    pub fn raise(&self, bits: u32) {
        self.flag().fetch_or(bits, SeqCst);
    }

    /// Clears bits and returns which of them were set.
    pub fn take(&self, bits: u32) -> u32 {
        self.flag().fetch_and(!bits, SeqCst) & bits
    }
}

/// The state of one reader. It has a cache line of its own, because the owner writes it whenever it enters.
#[repr(align(64))]
pub(crate) struct Reader {
    /// 0 outside of a section; in a section, the generation of the last quiescent point.
    state: AtomicU64,
    /// The generation of the last quiescent point; unlike `state`, it is kept outside a section. Only the owner writes
    /// it.
    seen: AtomicU64,
    /// The token given to [`Reader::enter`], for [`crate::WaitFor::Reader`].
    token: AtomicUsize,
    /// Whether the reader has an owner.
    owned: AtomicBool,
    attention: Attention,
    /// The counters of the reader's owner. They are not reset for a new owner, because only sums over all readers are
    /// used.
    pub(crate) counters: Counters,
    /// The pages that the page walker of the reader's owner has recorded. A new owner gets the buffer with its
    /// contents.
    pub(crate) written: WalkerBuffer,
    /// The next reader in the list.
    next: OnceBox<Reader>,
}

impl Reader {
    /// Makes a reader that the caller owns, or, if `owned` is `false`, a reader without an owner. Not inlined:
    /// otherwise each caller's stack frame would contain space for a reader.
    ///
    /// # Errors
    /// [`OutOfMemory`].
    #[cold]
    #[inline(never)]
    fn new(owned: bool) -> Result<Box<Self>, OutOfMemory> {
        heap::boxed(Reader {
            state: AtomicU64::new(0),
            seen: AtomicU64::new(0),
            token: AtomicUsize::new(0),
            owned: AtomicBool::new(owned),
            attention: Attention::new()?,
            counters: Counters::default(),
            written: WalkerBuffer::new(),
            next: OnceBox::new(),
        })
    }

    pub(crate) fn attention(&self) -> &Attention {
        &self.attention
    }

    /// Makes the caller the owner of the reader if the reader has no owner. Returns whether the caller is the owner
    /// now.
    fn try_own(&self) -> bool {
        !self.owned.load(Relaxed)
            && self
                .owned
                .compare_exchange(false, true, Acquire, Relaxed)
                .is_ok()
    }

    /// Returns whether the reader is in a section.
    pub(crate) fn is_inside(&self) -> bool {
        self.state.load(Relaxed) != 0
    }

    /// Begins a reader section. Returns whether the generation was raised since the reader's last quiescent point. If
    /// so, every translation that the caller has cached is void.
    #[inline]
    pub(crate) fn enter(&self, readers: &Readers, token: usize) -> bool {
        self.token.store(token, Relaxed);
        self.settle(readers)
    }

    /// Ends a reader section. Data that the caller keeps from the section may be used again only if the next
    /// [`Self::enter`] returns `false`.
    #[inline]
    pub(crate) fn leave(&self) {
        self.state.store(0, Release);
    }

    /// Passes a quiescent point in a section. The caller must have dropped all pointers and cached translations before.
    pub(crate) fn quiesce(&self, readers: &Readers) {
        self.attention.take(Attention::FLUSH);
        self.settle(readers);
    }

    /// Stores the newest generation in the reader's word. Returns whether the generation was raised since the reader's
    /// last quiescent point.
    #[inline]
    fn settle(&self, readers: &Readers) -> bool {
        self.settle_from(readers, readers.generation.load(SeqCst))
    }

    /// Like [`Self::settle`], but first stores `generation`, which the caller has read before and which may be out of
    /// date.
    #[inline]
    fn settle_from(&self, readers: &Readers, mut generation: u64) -> bool {
        loop {
            self.state.store(generation, SeqCst);
            let now = readers.generation.load(SeqCst);
            if now == generation {
                break;
            }
            generation = now;
        }
        let missed = self.seen.load(Relaxed) != generation;
        self.seen.store(generation, Relaxed);
        missed
    }

    /// Returns whether the reader has passed a quiescent point of `generation` or later, or is outside a section.
    fn has_passed(&self, generation: u64) -> bool {
        let state = self.state.load(SeqCst);
        state == 0 || state >= generation
    }
}

/// A reader in a section. Its owner may use the reader exclusively. Dropping it ends the section and releases the
/// reader.
pub(crate) struct Inside<'a> {
    reader: &'a Reader,
    /// Where to release the reader, if it was borrowed for an operation. `None` for a [brief section](Readers::brief).
    borrowed_from: Option<&'a Readers>,
}

impl<'a> Inside<'a> {
    /// Returns a token that proves that the reader is in a section.
    #[inline(always)]
    pub(crate) fn inside(&self) -> InSection<'_> {
        // SAFETY: `self` was made after the reader had entered, by the thread that owns the reader until `self` is
        // dropped. Only methods that borrow `self` mutably, and dropping `self`, end the section.
        unsafe { InSection::assume() }
    }

    pub(crate) fn reader(&self) -> &'a Reader {
        self.reader
    }

    /// Ends the section, runs `wait`, and begins another section of the same reader. The reader belongs to `readers`.
    pub(crate) fn outside<R>(&mut self, readers: &Readers, wait: impl FnOnce() -> R) -> R {
        self.reader.leave();
        let result = wait();
        self.reader.enter(readers, 0);
        result
    }
}

impl Drop for Inside<'_> {
    #[inline]
    fn drop(&mut self) {
        match self.borrowed_from {
            None => self.reader.leave(),
            Some(readers) => readers.release(self.reader),
        }
    }
}

/// All readers of one VM.
pub(crate) struct Readers {
    generation: AtomicU64,
    /// The reader of [brief sections](Self::brief). A thread owns it during one such section.
    brief: OnceBox<Reader>,
    /// A reader that only operations use, so that an operation need not search the list, which may contain a thousand
    /// vCPUs' readers. If this reader is in use, an operation takes a reader from the list.
    operation: OnceBox<Reader>,
    /// The first reader of the list, which only grows. Readers without an owner are reused.
    first: OnceBox<Reader>,
}

impl Readers {
    pub(crate) fn new() -> Self {
        Readers {
            generation: AtomicU64::new(1),
            brief: OnceBox::new(),
            operation: OnceBox::new(),
            first: OnceBox::new(),
        }
    }

    /// Allocates the readers of operations and of brief sections.
    ///
    /// # Errors
    /// [`OutOfMemory`].
    pub(crate) fn prepare(&self) -> Result<(), OutOfMemory> {
        self.operation.get_or_make(|| Reader::new(false))?;
        self.brief.get_or_make(|| Reader::new(true))?;
        Ok(())
    }

    /// Begins a *brief section*: for a few instructions that wait for nothing and do not check [`Attention`]. The
    /// caller may already be in a section of another reader. If another thread is in a brief section, uses another
    /// reader. `None`: there is no memory for another reader.
    ///
    /// To borrow a reader, an operation changes the reader's `owned` flag, and then stores the reader's word: two
    /// locked instructions on x86. A brief section needs only one, because the word itself shows whether the reader is
    /// in use: the compare-exchange that stores the generation succeeds only if the word is 0. Like the store in
    /// [`Reader::enter`], it is sequentially consistent, and the generation is read again after it. So the argument of
    /// the module comment applies here, too.
    #[inline]
    pub(crate) fn brief(&self) -> Option<Inside<'_>> {
        let begin = |reader: &Reader| {
            let generation = self.generation.load(SeqCst);
            let free = reader
                .state
                .compare_exchange(0, generation, SeqCst, Relaxed)
                .is_ok();
            if free && self.generation.load(SeqCst) != generation {
                reader.settle(self);
            }
            free
        };
        match self.brief.get() {
            Some(reader) if begin(reader) => Some(Inside {
                reader,
                borrowed_from: None,
            }),
            _ => self.enter().ok(),
        }
    }

    /// Begins a section of one operation.
    ///
    /// # Errors
    /// [`OutOfMemory`] if no reader is free, and there is no memory for another.
    pub(crate) fn enter(&self) -> Result<Inside<'_>, OutOfMemory> {
        let reader = self.borrow()?;
        reader.enter(self, 0);
        Ok(Inside {
            reader,
            borrowed_from: Some(self),
        })
    }

    /// Returns a reader for one operation. The caller must release it by [`Readers::release`].
    ///
    /// # Errors
    /// [`OutOfMemory`] if no reader is free, and there is no memory for another.
    #[inline]
    pub(crate) fn borrow(&self) -> Result<&Reader, OutOfMemory> {
        match self.operation.get() {
            Some(reader) if reader.try_own() => Ok(reader),
            _ => self.register(),
        }
    }

    /// Returns a reader that the caller then owns and must release by [`Readers::release`].
    ///
    /// # Errors
    /// [`OutOfMemory`] if no reader is free, and there is no memory for another.
    #[cold]
    pub(crate) fn register(&self) -> Result<&Reader, OutOfMemory> {
        let mut made = None;
        let mut next = &self.first;
        loop {
            if let Some(reader) = next.get() {
                if reader.try_own() {
                    // Clear the attention word: the client of the last owner may still have it, and may have set bits
                    // that are not for the new owner.
                    reader.attention.take(u32::MAX);
                    return Ok(reader);
                }
                next = &reader.next;
                continue;
            }
            let new = match made.take() {
                Some(new) => new,
                None => Reader::new(true)?,
            };
            // `set` is sequentially consistent, like the accesses to readers' words: if a writer does not find the new
            // reader in the list, it has raised the generation before the reader enters.
            match next.set(new) {
                Ok(reader) => return Ok(reader),
                // Another thread has added a reader here: continue after it.
                Err(new) => made = Some(new),
            }
        }
    }

    /// Releases a reader from [`Readers::register`] or [`Readers::borrow`]: ends its section, and gives up its
    /// ownership.
    #[inline]
    pub(crate) fn release(&self, reader: &Reader) {
        reader.leave();
        reader.owned.store(false, Release);
    }

    /// Iterates over all readers, with or without an owner.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &Reader> {
        let own = self.brief.get().into_iter().chain(self.operation.get());
        own.chain(iter::successors(self.first.get(), |reader| {
            reader.next.get()
        }))
    }

    /// Waits until every reader has been outside a section, or has passed a quiescent point, since the call began.
    /// Calls `wait(round, token)` in each round of waiting for the reader with the token `token`. Returns the
    /// generation that the readers have passed. The caller must be in no section.
    pub(crate) fn synchronize(&self, wait: impl FnMut(u32, usize)) -> u64 {
        self.synchronize_those(|_| true, wait)
    }

    /// Like [`Self::synchronize`], but sets [`Attention::FLUSH`] only for the readers for whose attention word `wanted`
    /// returns `true`, and waits for each only as long as `wanted` does.
    pub(crate) fn synchronize_those(
        &self,
        wanted: impl Fn(&Attention) -> bool,
        mut wait: impl FnMut(u32, usize),
    ) -> u64 {
        let generation = self.generation.fetch_add(1, SeqCst) + 1;
        // Read the list after raising the generation: a reader that is added to the list later enters with the new
        // generation.
        self.iter().for_each(|reader| {
            if wanted(&reader.attention) && !reader.has_passed(generation) {
                reader.attention.raise(Attention::FLUSH);
            }
        });
        self.iter().for_each(|reader| {
            wait_while(
                || wanted(&reader.attention) && !reader.has_passed(generation),
                |round| wait(round, reader.token.load(Relaxed)),
            );
        });
        generation
    }

    /// Returns the lowest generation of a [`Readers::synchronize`] that begins after this call. When all readers have
    /// passed this generation, no reader uses data that was removed before this call.
    pub(crate) fn next_generation(&self) -> u64 {
        self.generation.load(SeqCst) + 1
    }

    /// Returns whether every reader has passed a quiescent point of `generation` or later, or is outside a section.
    pub(crate) fn all_passed(&self, generation: u64) -> bool {
        self.iter().all(|r| r.has_passed(generation))
    }

    /// Returns whether any reader is in a section: for checks that are valid only if no reader is active.
    pub(crate) fn any_inside(&self) -> bool {
        self.iter().any(Reader::is_inside)
    }
}

impl Drop for Readers {
    fn drop(&mut self) {
        // Drop the readers one by one: dropping the first reader would drop the others in nested calls, which could
        // overflow the stack.
        let mut next = self.first.take();
        while let Some(mut reader) = next {
            next = reader.next.take();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use core::ptr;

    #[test]
    fn a_writer_does_not_wait_for_a_reader_outside() {
        let readers = Readers::new();
        let reader = readers.register().unwrap();
        reader.enter(&readers, 0);
        reader.leave();
        readers.synchronize(|_, _| panic!("waited"));
    }

    #[test]
    fn a_reader_inside_is_asked_and_waited_for() {
        let readers = Readers::new();
        let reader = readers.register().unwrap();
        reader.enter(&readers, 7);
        let mut waits = 0;
        readers.synchronize(|_, token| {
            assert_eq!(token, 7);
            assert_eq!(reader.attention.flag().load(Relaxed), Attention::FLUSH);
            waits += 1;
            if waits == 3 {
                reader.quiesce(&readers);
            }
        });
        assert_eq!(waits, 3);
        assert_eq!(reader.attention.flag().load(Relaxed), 0);
    }

    #[test]
    fn a_writer_may_wait_for_some_readers_alone() {
        const WANTED: u32 = 1 << 5;
        let readers = Readers::new();
        let [one, other] = [(); 2].map(|()| readers.register().unwrap());
        one.enter(&readers, 1);
        other.enter(&readers, 2);
        one.attention.raise(WANTED);
        let wanted = |attention: &Attention| attention.flag().load(SeqCst) & WANTED != 0;
        readers.synchronize_those(wanted, |_, token| {
            assert_eq!(token, 1);
            one.quiesce(&readers);
        });
        assert_eq!(other.attention.flag().load(SeqCst), 0, "it was not asked");
        // `synchronize`, in contrast, waits for both readers.
        let mut asked = 0;
        readers.synchronize(|_, token| {
            asked += token;
            [one, other][token - 1].quiesce(&readers);
        });
        assert_eq!(asked, 3);
    }

    #[test]
    fn enter_returns_whether_a_generation_was_missed() {
        let readers = Readers::new();
        let reader = readers.register().unwrap();
        reader.enter(&readers, 0);
        reader.leave();
        assert!(!reader.enter(&readers, 0));
        reader.leave();
        readers.synchronize(|_, _| ());
        assert!(reader.enter(&readers, 0));
    }

    #[test]
    fn a_released_reader_is_used_again() {
        let readers = Readers::new();
        let first = readers.register().unwrap();
        readers.release(first);
        let second = readers.register().unwrap();
        assert!(ptr::eq(first, second));
        assert!(!ptr::eq(second, readers.register().unwrap()));
    }

    #[test]
    fn a_brief_section_is_waited_for_and_two_may_overlap() {
        let readers = Readers::new();
        readers.prepare().unwrap();
        let first = readers.brief().unwrap();
        assert!(first.borrowed_from.is_none());
        let second = readers.brief().unwrap();
        assert!(second.borrowed_from.is_some());
        let mut sections = [Some(first), Some(second)];
        readers.synchronize(|round, _| drop(sections[round as usize].take()));
        assert!(sections.iter().any(Option::is_none));
        drop(sections);
        assert!(!readers.any_inside());
        // Both readers are free again, so the brief section uses its own reader.
        assert!(readers.brief().unwrap().borrowed_from.is_none());
        readers.synchronize(|_, _| panic!("waited"));
        assert_eq!(readers.iter().count(), 2);
    }

    #[test]
    fn a_reader_that_enters_while_the_generation_rises_sees_that() {
        let readers = Readers::new();
        let reader = readers.register().unwrap();
        reader.enter(&readers, 0);
        reader.leave();
        // Simulate a reader that has read the generation but not stored it yet: the writer finds no reader in a
        // section.
        let before = readers.generation.load(SeqCst);
        let after = readers.synchronize(|_, _| panic!("waited"));
        assert!(reader.settle_from(&readers, before));
        assert!(reader.has_passed(after));
        readers.synchronize(|_, _| reader.quiesce(&readers));
    }
}
