//! Writes an answer to a socket.

use super::socket::Own;
use std::fmt::{self, Write as _};

/// The version of the formats of all answers.
pub const VERSION: u32 = 1;

/// Writes an answer in parts, without the heap.
pub(super) struct Writer<'a> {
    to: &'a Own,
    part: [u8; 4096],
    len: usize,
    failed: bool,
}

impl<'a> Writer<'a> {
    pub(super) fn new(to: &'a Own) -> Self {
        Writer {
            to,
            part: [0; 4096],
            len: 0,
            failed: false,
        }
    }

    /// Sends the rest of the text.
    pub(super) fn finish(&mut self) -> fmt::Result {
        self.failed |= !self.to.send(&self.part[..self.len]);
        self.len = 0;
        if self.failed { Err(fmt::Error) } else { Ok(()) }
    }
}

impl fmt::Write for Writer<'_> {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        let mut bytes = text.as_bytes();
        while !bytes.is_empty() {
            if self.len == self.part.len() {
                self.finish()?;
            }
            let room = self.part.len() - self.len;
            let (now, later) = bytes.split_at(bytes.len().min(room));
            self.part[self.len..][..now.len()].copy_from_slice(now);
            self.len += now.len();
            bytes = later;
        }
        Ok(())
    }
}

/// Writes each value, with a space before it.
pub(super) fn values(to: &mut Writer<'_>, mut values: impl Iterator<Item = u64>) -> fmt::Result {
    values.try_for_each(|value| write!(to, " {value}"))
}

/// Writes the names of the values in lines of this `kind`.
pub(super) fn names(to: &mut Writer<'_>, kind: &str, names: &[&str]) -> fmt::Result {
    write!(to, "names {kind}")?;
    names.iter().try_for_each(|name| write!(to, " {name}"))?;
    to.write_char('\n')
}
