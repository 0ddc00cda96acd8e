//! Makes the arguments of requests: structs at good and bad addresses, and memory that a call may write.

use crate::memory::{Guarded, PAGE, fill};
use slat_kvm::user::Plain;
use slat_model::Rng;
use std::ops::Range;

/// The number of accessible pages of a buffer. A guard page follows them.
const OPEN: usize = 3;
/// The number of read-only pages after the guard page.
const READ_ONLY: usize = 3;

/// Values at which requests may change their behaviour.
pub const BOUNDARIES: [u64; 24] = [
    0,
    1,
    2,
    3,
    7,
    8,
    0xff,
    0x100,
    0xfff,
    0x1000,
    0xffff,
    0x1_0000,
    0x7fff_ffff,
    0x8000_0000,
    0xffff_ffff,
    1 << 32,
    (1 << 36) - 1,
    (1 << 40) - 0x1000,
    1 << 47,
    1 << 52,
    i64::MAX as u64,
    1 << 63,
    u64::MAX - 0xfff,
    u64::MAX,
];

/// Returns the bytes of a struct.
pub fn bytes_of<T: Plain>(value: &T) -> Vec<u8> {
    // SAFETY: `value` is a live value of a `Plain` type, which has no padding that matters.
    unsafe { std::slice::from_raw_parts(std::ptr::from_ref(value).cast::<u8>(), size_of::<T>()) }
        .to_vec()
}

/// Changes a few fields at random. This function does not know the struct's real fields, so it changes runs of 1, 2, 4
/// or 8 bytes, usually aligned.
pub fn mutate(rng: &mut Rng, bytes: &mut [u8]) {
    if bytes.is_empty() || rng.one_in(3) {
        return;
    }
    for _ in 0..=rng.below(3) {
        let len = rng.pick(&[1usize, 2, 4, 4, 8, 8]).min(bytes.len());
        let mut at = rng.below((bytes.len() - len) as u64 + 1) as usize;
        if !rng.one_in(8) {
            at -= at % len;
        }
        let value = match rng.below(4) {
            0 => rng.word(),
            1 => 1 << rng.below(64),
            _ => rng.pick(&BOUNDARIES),
        };
        bytes[at..at + len].copy_from_slice(&value.to_le_bytes()[..len]);
    }
}

/// A buffer for the arguments of the requests of one lane (a thread of the stream).
#[derive(Debug)]
pub struct Buffer {
    memory: Guarded,
    before: Vec<u8>,
}

impl Buffer {
    /// Makes an empty buffer for a request's argument.
    pub fn new() -> Self {
        let memory = Guarded::reserve((OPEN + 1 + READ_ONLY) * PAGE);
        memory.open(0, OPEN * PAGE);
        memory.open((OPEN + 1) * PAGE, READ_ONLY * PAGE);
        let start = memory.start() + (OPEN + 1) * PAGE;
        // SAFETY: the pages belong to the buffer, and no reference to them exists.
        let protected =
            unsafe { libc::mprotect(start as *mut _, READ_ONLY * PAGE, libc::PROT_READ) };
        assert_eq!(protected, 0);
        Buffer {
            memory,
            before: Vec::new(),
        }
    }

    fn open(&self) -> Range<usize> {
        self.memory.start()..self.memory.start() + OPEN * PAGE
    }

    /// Whether `len` bytes at `address` can be read and written.
    pub fn is_open(&self, address: u64, len: usize) -> bool {
        let (open, at) = (self.open(), address as usize);
        at >= open.start && at.checked_add(len).is_some_and(|end| end <= open.end)
    }

    /// Writes `bytes` to the buffer, and returns their address. Usually all of the bytes are in accessible memory.
    pub fn place(&mut self, rng: &mut Rng, bytes: &[u8]) -> u64 {
        assert!(bytes.len() <= OPEN * PAGE);
        let open = self.open();
        // SAFETY: the memory belongs to the buffer.
        unsafe { fill(open.clone()) };
        let at = match rng.below(16) {
            // The struct ends at the beginning of the guard page.
            0..=4 => open.end - bytes.len(),
            // The guard page begins in the middle of the struct.
            5 => (open.end - bytes.len()) + 1 + rng.below(bytes.len().max(1) as u64) as usize,
            6 => open.start + 1 + rng.below((open.len() - bytes.len()) as u64 / 2 + 1) as usize,
            7 => open.end + PAGE,
            8 => {
                let bad = [
                    0,
                    8,
                    0xffff,
                    open.end,
                    1 << 47,
                    usize::MAX - 3,
                    usize::MAX & !0xfff,
                    1 << 63,
                ];
                rng.pick(&bad)
            }
            _ => open.start + PAGE - bytes.len().min(PAGE) / 2 / 8 * 8,
        };
        if open.contains(&at) {
            let len = bytes.len().min(open.end - at);
            self.memory.write(at - open.start, &bytes[..len]);
        }
        self.before = self.memory.read(0, OPEN * PAGE);
        at as u64
    }

    /// Panics if a byte of the buffer outside `allowed` was written since the last [`place`](Self::place).
    pub fn check(&self, what: &str, allowed: Range<u64>) {
        self.memory.check();
        let open = self.open();
        let after = self.memory.read(0, OPEN * PAGE);
        let stray = (0..after.len()).find(|at| {
            after[*at] != self.before[*at] && !allowed.contains(&((open.start + at) as u64))
        });
        if let Some(at) = stray {
            panic!(
                "{what} wrote to {:#x}; the argument is at {allowed:#x?}",
                open.start + at
            );
        }
    }

    /// Returns the 32-bit word at `address`, if it is in the buffer.
    pub fn word_at(&self, address: u64) -> Option<u32> {
        let at = (address as usize).checked_sub(self.memory.start())?;
        let bytes = (at + 4 <= OPEN * PAGE).then(|| self.memory.read(at, 4))?;
        Some(u32::from_le_bytes(bytes.try_into().expect("four bytes")))
    }
}

impl Default for Buffer {
    fn default() -> Self {
        Self::new()
    }
}
