//! The tables of the instruction decoder.

use crate::heap::{self, OutOfMemory};
use iced_x86::{Decoder, DecoderOptions};
use slat_process::once::{Prepared, apart_from_forks};

/// An upper bound of the heap bytes that the decoder's tables use, once per process. A test checks it.
pub const DECODER_BYTES: usize = 512 << 10;

/// Makes the decoder build its tables now. Otherwise it would build them at its first use in a process, and could not
/// report a failed allocation. So this function first checks that there is enough memory, although other threads may
/// still use it up before the tables are built.
pub(crate) fn build_tables() -> Result<(), OutOfMemory> {
    static BUILT: Prepared = Prepared::new();
    BUILT.once(|| {
        heap::probe(DECODER_BYTES)?;
        // No fork may happen meanwhile: the child would wait forever for the decoder's lock, which another thread held.
        apart_from_forks(|| {
            let _ = Decoder::new(64, &[], DecoderOptions::NONE);
        });
        Ok(())
    })
}
