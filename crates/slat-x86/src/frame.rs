//! Words that an instruction or an event pushes on the stack with one store.

/// Up to `BYTES` bytes to push on a stack. They are in memory order, so the word that is pushed last comes first.
pub(crate) struct Frame<const BYTES: usize> {
    bytes: [u8; BYTES],
    /// The index of the first byte of the word that was pushed last.
    start: usize,
}

impl<const BYTES: usize> Frame<BYTES> {
    pub(crate) fn new() -> Self {
        Self {
            bytes: [0; BYTES],
            start: BYTES,
        }
    }

    /// Pushes the low `size` bytes of `word`.
    pub(crate) fn push(&mut self, word: u64, size: usize) {
        let end = self.start;
        self.start -= size;
        self.bytes[self.start..end].copy_from_slice(&word.to_le_bytes()[..size]);
    }

    /// Returns the bytes in memory order.
    pub(crate) fn bytes(&self) -> &[u8] {
        &self.bytes[self.start..]
    }
}
