//! Who may still see what was taken away.
//!
//! Walkers and slot look-ups take no lock. What they may have seen is therefore kept until each of
//! them has passed a *quiescent point*: a moment at which it holds no pointer into tables or slots
//! and, if it is a software CPU, no translation. The same mechanism acknowledges TLB flushes of
//! software CPUs, because for them both promises are one.
//!
//! # Protocol
//! There is one counter, the *generation*. Every reader owns one word:
//!
//! * 0: it is outside. Nobody waits for it.
//! * g: it is inside, and passed a quiescent point when the generation was g.
//!
//! A writer takes something away (clears entries, swaps the slot set) and then calls
//! [`Readers::synchronize`]: it raises the generation to n and waits for every reader whose word is
//! neither 0 nor at least n. A reader that enters stores the generation it read and reads it again;
//! both sides use sequentially consistent accesses, so either the writer sees the reader's word, or
//! the reader sees the raised generation, and with it (release/acquire through the generation)
//! everything that was changed before. The list of readers is part of this: a reader that the writer
//! does not find in it comes in later. Leaving is a release store of 0, so all that a reader did
//! happened before a writer that sees the 0.
//!
//! # Deadlock
//! A reader that must itself wait (for host memory, for a flush, for an invalidation to end) leaves
//! first and enters again afterwards; [`Reader::enter`] then tells whether it has missed a
//! generation, in which case every translation it remembers is void. So nobody waits while being
//! waited for. A vCPU outside KVM_RUN is outside here, too.
//!
//! # Attention
//! Each reader carries a word of *attention* bits that its software CPU looks at at every block
//! boundary. `synchronize` raises [`Attention::FLUSH`] there; the other bits are the client's.
//! [`Reader::quiesce`] lowers the bit *before* it reads the generation: a request that comes between
//! raises the bit again and is seen at the next boundary.

use crate::heap::{self, Shared};
use crate::stats::Counters;
use crate::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicU64, AtomicUsize, Ordering::*};
use crate::table::OutOfMemory;
use alloc::boxed::Box;
use core::ptr;

/// Bits that make a software CPU leave its loop at the next block boundary.
#[derive(Debug, Default)]
#[repr(align(64))]
pub struct Attention(AtomicU32);

impl Attention {
    /// The engine asks for [`crate::Vcpu::quiesce`]. All other bits are free for the client.
    pub const FLUSH: u32 = 1 << 0;

    /// The word to look at; non-zero means: come out.
    pub fn flag(&self) -> &AtomicU32 {
        &self.0
    }

    /// Sets bits, from any thread or a signal handler.
    pub fn raise(&self, bits: u32) {
        self.0.fetch_or(bits, SeqCst);
    }

    /// Clears bits and returns which of them were set.
    pub fn take(&self, bits: u32) -> u32 {
        self.0.fetch_and(!bits, SeqCst) & bits
    }
}

/// One reader's words. On a cache line of its own: it is written at every entry.
#[repr(align(64))]
pub(crate) struct Reader {
    /// 0 outside, otherwise the generation of the last quiescent point.
    state: AtomicU64,
    /// Generation of the last quiescent point, also while outside. Written by the owner only.
    seen: AtomicU64,
    /// What [`Reader::enter`] was given, for [`crate::WaitFor::Reader`].
    token: AtomicUsize,
    taken: AtomicBool,
    attention: Shared<Attention>,
    /// What the owner counted. Stays when the reader changes hands: only sums are asked for.
    pub(crate) counters: Counters,
    /// Next in the list of all readers; set once, before publication.
    next: AtomicPtr<Reader>,
}

impl Reader {
    pub(crate) fn attention(&self) -> &Shared<Attention> {
        &self.attention
    }

    fn try_take(&self) -> bool {
        !self.taken.load(Relaxed)
            && self
                .taken
                .compare_exchange(false, true, Acquire, Relaxed)
                .is_ok()
    }

    pub(crate) fn is_inside(&self) -> bool {
        self.state.load(Relaxed) != 0
    }

    /// Begins a reader section. `true`: generations have passed since the last quiescent point,
    /// every translation remembered from before is void.
    #[inline]
    pub(crate) fn enter(&self, readers: &Readers, token: usize) -> bool {
        self.token.store(token, Relaxed);
        self.settle(readers)
    }

    /// Ends a reader section: nothing of it is remembered, or `enter`'s answer will be respected.
    #[inline]
    pub(crate) fn leave(&self) {
        self.state.store(0, Release);
    }

    /// A quiescent point inside a section: the caller holds nothing and remembers nothing.
    pub(crate) fn quiesce(&self, readers: &Readers) {
        self.attention.take(Attention::FLUSH);
        self.settle(readers);
    }

    #[inline]
    fn settle(&self, readers: &Readers) -> bool {
        self.settle_from(readers, readers.generation.load(SeqCst))
    }

    /// `generation` was read some time before.
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

    fn has_passed(&self, generation: u64) -> bool {
        let state = self.state.load(SeqCst);
        state == 0 || state >= generation
    }
}

/// All readers of one VM.
pub(crate) struct Readers {
    generation: AtomicU64,
    /// Head of a list that only grows; a reader that was given back is taken again.
    head: AtomicPtr<Reader>,
    /// A taken reader that nobody uses now: operations come and go, and must not search the list
    /// behind a thousand vCPUs each time.
    spare: AtomicPtr<Reader>,
}

impl Readers {
    pub(crate) fn new() -> Self {
        Readers {
            generation: AtomicU64::new(1),
            head: AtomicPtr::new(ptr::null_mut()),
            spare: AtomicPtr::new(ptr::null_mut()),
        }
    }

    /// A reader for the length of one operation. Give it back with [`Readers::put_aside`].
    #[inline]
    pub(crate) fn borrow(&self) -> Result<&Reader, OutOfMemory> {
        // SAFETY: only readers of this list are put aside, and they live as long as `self`.
        match unsafe { self.spare.swap(ptr::null_mut(), Acquire).as_ref() } {
            Some(reader) => Ok(reader),
            None => self.register(),
        }
    }

    #[inline]
    pub(crate) fn put_aside(&self, reader: &Reader) {
        reader.leave();
        let spare = self.spare.swap(ptr::from_ref(reader).cast_mut(), AcqRel);
        // SAFETY: as in `borrow`.
        if let Some(other) = unsafe { spare.as_ref() } {
            self.release(other);
        }
    }

    /// A reader for one owner at a time. Give it back with [`Readers::release`].
    pub(crate) fn register(&self) -> Result<&Reader, OutOfMemory> {
        if let Some(free) = self.iter().find(|r| r.try_take()) {
            // The old owner's client may still hold the attention word; its bits are not ours.
            free.attention.take(u32::MAX);
            return Ok(free);
        }
        let mut head = self.head.load(Relaxed);
        let reader = Box::into_raw(heap::boxed(Reader {
            state: AtomicU64::new(0),
            seen: AtomicU64::new(0),
            token: AtomicUsize::new(0),
            taken: AtomicBool::new(true),
            attention: Shared::try_new(Attention::default())?,
            counters: Counters::default(),
            next: AtomicPtr::new(head),
        })?);
        // SAFETY: freed when `self` is dropped.
        let new = unsafe { &*reader };
        // Sequentially consistent, as the words are: a writer that does not find the new reader in
        // the list has raised the generation before the reader comes in.
        while let Err(now) = self
            .head
            .compare_exchange_weak(head, reader, SeqCst, Relaxed)
        {
            head = now;
            new.next.store(head, Relaxed);
        }
        Ok(new)
    }

    pub(crate) fn release(&self, reader: &Reader) {
        reader.leave();
        reader.taken.store(false, Release);
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &Reader> {
        let mut at = self.head.load(SeqCst);
        core::iter::from_fn(move || {
            // SAFETY: list nodes are published whole (Release/Acquire) and live as long as `self`.
            let reader = unsafe { at.as_ref()? };
            at = reader.next.load(Relaxed);
            Some(reader)
        })
    }

    /// Waits until every reader has passed a quiescent point after this call began. The caller is
    /// inside no section of its own. `wait(round, token)` passes time for the reader with `token`.
    pub(crate) fn synchronize(&self, mut wait: impl FnMut(u32, usize)) -> u64 {
        let generation = self.ask();
        for reader in self.iter() {
            let mut round = 0;
            while !reader.has_passed(generation) {
                wait(round, reader.token.load(Relaxed));
                round += 1;
            }
        }
        generation
    }

    /// Raises the generation and asks the readers inside to pass a quiescent point; waits for nobody.
    pub(crate) fn ask(&self) -> u64 {
        let generation = self.generation.fetch_add(1, SeqCst) + 1;
        for reader in self.iter() {
            if !reader.has_passed(generation) {
                reader.attention.raise(Attention::FLUSH);
            }
        }
        generation
    }

    /// The generation at which nobody can hold what was taken away before this call.
    pub(crate) fn next_generation(&self) -> u64 {
        self.generation.load(SeqCst) + 1
    }

    /// Whether every reader has passed a quiescent point since [`Readers::ask`] gave `generation`.
    pub(crate) fn all_passed(&self, generation: u64) -> bool {
        self.iter().all(|r| r.has_passed(generation))
    }

    /// Whether anybody is inside: for checks that need a quiet VM.
    pub(crate) fn any_inside(&self) -> bool {
        self.iter().any(Reader::is_inside)
    }
}

impl Drop for Readers {
    fn drop(&mut self) {
        let mut at = self.head.load(Relaxed);
        while !at.is_null() {
            // SAFETY: `&mut self` proves that nobody holds a reference to a node; each was made by
            // `Box::into_raw` and is in the list once.
            let reader = unsafe { Box::from_raw(at) };
            at = reader.next.load(Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nobody_waits_for_a_reader_outside() {
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
    fn entering_tells_whether_a_generation_was_missed() {
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
    fn a_reader_that_enters_while_the_generation_rises_is_told() {
        let readers = Readers::new();
        let reader = readers.register().unwrap();
        reader.enter(&readers, 0);
        reader.leave();
        // It has read the generation; before it has stored it, a writer finds nobody inside.
        let before = readers.generation.load(SeqCst);
        let after = readers.synchronize(|_, _| panic!("waited"));
        assert!(reader.settle_from(&readers, before));
        assert!(reader.has_passed(after));
        readers.synchronize(|_, _| reader.quiesce(&readers));
    }
}
