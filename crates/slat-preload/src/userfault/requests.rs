//! The requests of a userfaultfd: their structures (`include/uapi/linux/userfaultfd.h`), checks and effects.

use slat_host::registered::{self, Content, Handler, MODE_MISSING, MODE_WP};
use slat_kvm::notify;
use slat_process::page_size;
use std::ops::Range;
use std::sync::atomic::Ordering;

const API: u32 = 0xc018_aa3f;
const REGISTER: u32 = 0xc020_aa00;
const UNREGISTER: u32 = 0x8010_aa01;
const WAKE: u32 = 0x8010_aa02;
pub(super) const COPY: u32 = 0xc028_aa03;
const ZEROPAGE: u32 = 0xc020_aa04;
const WRITEPROTECT: u32 = 0xc018_aa06;

/// Returns the bit of a request in the sets of requests that `UFFDIO_API` and `UFFDIO_REGISTER` return.
const fn bit(request: u32) -> u64 {
    1 << (request & 0x3f)
}

/// The features that slat has.
const FEATURES: u64 = {
    const PAGEFAULT_FLAG_WP: u64 = 1 << 0;
    const WP_UNPOPULATED: u64 = 1 << 13;
    PAGEFAULT_FLAG_WP
        | registered::EVENT_REMOVE
        | registered::THREAD_ID
        | registered::EXACT_ADDRESS
        | WP_UNPOPULATED
};

/// The features that a program may ask for. cloud-hypervisor asks for `UFFD_FEATURE_MISSING_SHMEM` whatever its memory
/// is. slat does not have this feature; so shared memory cannot be registered.
const ACCEPTED: u64 = {
    const MISSING_SHMEM: u64 = 1 << 5;
    FEATURES | MISSING_SHMEM
};

/// `UFFDIO_COPY_MODE_DONTWAKE`, `UFFDIO_ZEROPAGE_MODE_DONTWAKE`.
const DONT_WAKE: u64 = 1 << 0;
/// `UFFDIO_COPY_MODE_WP`.
const COPY_PROTECTED: u64 = 1 << 1;
/// `UFFDIO_WRITEPROTECT_MODE_WP`.
const PROTECT: u64 = 1 << 0;
/// `UFFDIO_WRITEPROTECT_MODE_DONTWAKE`.
const PROTECT_DONT_WAKE: u64 = 1 << 1;

/// A request with its structure, of which each field is one word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub(super) struct Request {
    pub(super) number: u64,
    pub(super) words: [u64; 5],
}

/// Checks that a range consists of whole pages.
fn pages(start: u64, len: u64) -> Result<Range<usize>, i32> {
    let size = page_size() as u64;
    let end = start.checked_add(len).ok_or(libc::EINVAL)?;
    let is_right = start.is_multiple_of(size) && len.is_multiple_of(size) && len != 0;
    match is_right && slat_kvm::user::in_user_space(start, len as usize) {
        true => Ok(start as usize..end as usize),
        false => Err(libc::EINVAL),
    }
}

/// Checks that `flags` has no other bits than those of `known`.
fn only(flags: u64, known: u64) -> Result<(), i32> {
    match flags & !known {
        0 => Ok(()),
        _ => Err(libc::EINVAL),
    }
}

impl Request {
    /// Returns the number of words of a request's structure.
    fn len(number: u32) -> Result<usize, i32> {
        match number {
            API | WRITEPROTECT => Ok(3),
            REGISTER | ZEROPAGE => Ok(4),
            UNREGISTER | WAKE => Ok(2),
            COPY => Ok(5),
            _ => Err(libc::EINVAL),
        }
    }

    /// Reads the structure at `argument` from the program's memory.
    pub(super) fn read(number: u32, argument: usize) -> Result<Self, i32> {
        let mut words = [0u64; 5];
        for (index, word) in words.iter_mut().take(Self::len(number)?).enumerate() {
            let from = (argument as *const u64).wrapping_add(index);
            // SAFETY: guarded loads may be made at any address.
            *word = unsafe { slat_guard::load(from) }.map_err(|_| libc::EFAULT)?;
        }
        Ok(Request {
            number: number.into(),
            words,
        })
    }

    /// Stores the structure at `argument`.
    pub(super) fn store(&self, argument: usize) -> Result<(), i32> {
        for (index, word) in self
            .words
            .iter()
            .take(Self::len(self.number as u32)?)
            .enumerate()
        {
            let to = (argument as *mut u64).wrapping_add(index);
            // SAFETY: guarded stores may be made at any address. The structure is the program's.
            unsafe { slat_guard::store(to, *word) }.map_err(|_| libc::EFAULT)?;
        }
        Ok(())
    }

    /// Returns the address of the content of `UFFDIO_COPY`, as the program has given it.
    pub(super) fn source(&self) -> usize {
        self.words[1] as usize
    }

    /// Carries out the request, and sets the fields that it returns. `source` is the address of the content of
    /// `UFFDIO_COPY` in this process.
    ///
    /// # Errors
    /// The kernel's errno.
    pub(super) fn carry_out(
        &mut self,
        handler: &'static Handler,
        source: usize,
    ) -> Result<(), i32> {
        if self.number as u32 == API {
            return self.begin(handler).inspect_err(|_| self.words = [0; 5]);
        }
        if handler.features.load(Ordering::SeqCst) & Handler::IS_READY == 0 {
            return Err(libc::EINVAL);
        }
        let [first, second, third, fourth, _] = self.words;
        match self.number as u32 {
            REGISTER => {
                let range = pages(first, second)?;
                only(third, MODE_MISSING | MODE_WP)?;
                if third == 0 {
                    return Err(libc::EINVAL);
                }
                notify::around(range.clone(), || {
                    registered::register(handler, range, third)
                })?;
                let protects = if third & MODE_WP != 0 {
                    bit(WRITEPROTECT)
                } else {
                    0
                };
                self.words[3] = bit(WAKE) | bit(COPY) | bit(ZEROPAGE) | protects;
                Ok(())
            }
            UNREGISTER => {
                let range = pages(first, second)?;
                notify::around(range.clone(), || registered::unregister(&range));
                Ok(())
            }
            WAKE => {
                registered::wake(&pages(first, second)?);
                Ok(())
            }
            COPY => {
                let range = pages(first, third)?;
                second.checked_add(third).ok_or(libc::EINVAL)?;
                only(fourth, DONT_WAKE | COPY_PROTECTED)?;
                let protected = fourth & COPY_PROTECTED != 0;
                let content = Content::At(source);
                let result = provide(handler, range, content, protected, fourth & DONT_WAKE == 0);
                self.words[4] = result.0;
                result.1
            }
            ZEROPAGE => {
                let range = pages(first, second)?;
                only(third, DONT_WAKE)?;
                let wakes = third & DONT_WAKE == 0;
                let result = provide(handler, range, Content::Zeroes, false, wakes);
                self.words[3] = result.0;
                result.1
            }
            WRITEPROTECT => {
                let range = pages(first, second)?;
                only(third, PROTECT | PROTECT_DONT_WAKE)?;
                let protected = third & PROTECT != 0;
                if third == PROTECT | PROTECT_DONT_WAKE {
                    return Err(libc::EINVAL);
                }
                let change = || registered::set_protection(handler, &range, protected);
                match protected {
                    true => notify::around(range.clone(), change)?,
                    // Only adds rights, so a vCPU that waits for this need not be interrupted.
                    false => change()?,
                }
                if !protected && third & PROTECT_DONT_WAKE == 0 {
                    registered::wake(&range);
                }
                Ok(())
            }
            _ => Err(libc::EINVAL),
        }
    }

    /// Carries out `UFFDIO_API`.
    fn begin(&mut self, handler: &Handler) -> Result<(), i32> {
        const UFFD_API: u64 = 0xaa;
        let [version, features, ..] = self.words;
        only(features, ACCEPTED)?;
        if version != UFFD_API {
            return Err(libc::EINVAL);
        }
        let (before, now) = (0, features | Handler::IS_READY);
        (handler.features)
            .compare_exchange(before, now, Ordering::SeqCst, Ordering::SeqCst)
            .map_err(|_| libc::EINVAL)?;
        self.words[1] = FEATURES;
        self.words[2] = bit(REGISTER) | bit(UNREGISTER) | bit(API);
        Ok(())
    }
}

/// Provides pages. Returns the value of the field that says how many bytes were provided, and the result of the
/// request.
fn provide(
    handler: &Handler,
    range: Range<usize>,
    content: Content,
    protected: bool,
    wakes: bool,
) -> (u64, Result<(), i32>) {
    let (done, failed) = registered::fill(handler, range.clone(), content, protected);
    if done != 0 && wakes {
        registered::wake(&(range.start..range.start + done));
    }
    outcome(done, failed)
}

/// Returns what a request that has provided `done` bytes returns. `failed` is the errno if these are not all.
pub(super) fn outcome(done: usize, failed: Option<i32>) -> (u64, Result<(), i32>) {
    match failed {
        None => (done as u64, Ok(())),
        Some(errno) if done == 0 => (i64::from(-errno) as u64, Err(errno)),
        // As on Linux, the program finds out the reason when it asks for the rest.
        Some(_) => (done as u64, Err(libc::EAGAIN)),
    }
}
