//! The tables of the instruction decoder.

use crate::heap::{self, OutOfMemory};
use iced_x86::{Decoder, DecoderOptions};
use slat_process::once::{Prepared, apart_from_forks};

/// More heap bytes than the decoder's tables use, once per process (checked by a test).
pub const DECODER_BYTES: usize = 512 << 10;

/// Has the decoder build its tables. The decoder builds them at its first use in a process, and cannot report a failed
/// allocation. So this function first checks that there is enough memory, though other threads may use it up meanwhile.
pub(crate) fn build_tables() -> Result<(), OutOfMemory> {
    static BUILT: Prepared = Prepared::new();
    BUILT.once(|| {
        heap::probe(DECODER_BYTES)?;
        // The decoder's own lock would hang a child that was forked meanwhile.
        apart_from_forks(|| {
            let _ = Decoder::new(64, &[], DecoderOptions::NONE);
        });
        Ok(())
    })
}
