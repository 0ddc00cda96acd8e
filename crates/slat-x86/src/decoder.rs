//! The tables of the instruction decoder.

use crate::heap::{self, OutOfMemory};
use iced_x86::{Decoder, DecoderOptions};
use std::sync::Once;

/// More heap bytes than the decoder's tables use, once per process (checked by a test).
pub const DECODER_BYTES: usize = 512 << 10;

/// Has the decoder build its tables. It builds them at the first use in a process, and cannot report a failed allocation. So
/// this checks first that there is enough memory: other threads may still use it up meanwhile.
pub(crate) fn build_tables() -> Result<(), OutOfMemory> {
    static BUILT: Once = Once::new();
    if !BUILT.is_completed() {
        heap::probe(DECODER_BYTES)?;
        BUILT.call_once(|| {
            let _ = Decoder::new(64, &[], DecoderOptions::NONE);
        });
    }
    Ok(())
}
