//! Finds the offsets at which the code of a region is entered.
//!
//! A function that Cranelift compiles has one entry, but a region can be entered at the beginning of each of its paths.
//! A jump by a table at the function's beginning would be slow, because the table is in the code, not in the data
//! caches, and because a host predicts such jumps badly. So paths are entered directly. The function still begins with
//! the jump by a table, because without it Cranelift would drop the paths. This jump is never executed. At the
//! beginning of a path all state is in the `Cpu`. So the code there needs only R15 and a frame on the stack. `dispatch`
//! makes the frame, of one size for all regions.
//!
//! Cranelift's source locations mark the beginnings of paths. For other code of a region, the source location is the
//! number of a step.

use cranelift_codegen::CompiledCode;
use cranelift_codegen::ir::SourceLoc;
use iced_x86::{Decoder, DecoderOptions, Mnemonic, Register};
use slat_jit::Refused;

/// The size of a region's frame in bytes. The baseline tier uses at most 1,024 bytes. Half of Cranelift's functions use
/// 64 bytes. The largest function in a boot uses 304 bytes. OpenSSL's AES-GCM uses 1,392 bytes, because its loop keeps
/// all vector registers in values. With a limit of 1,024, AES-GCM stayed in the baseline tier and took eight times as
/// long. The frame is smaller than a page, so that no frame reaches beyond the page that guards a stack.
pub(super) const FRAME: u32 = 3072;

/// The bit of a source location that marks the beginning of a path.
const BEGINS: u32 = 1 << 30;

/// Returns the location of the first instruction of the path that begins with a block. `block` is the block's index.
pub(super) fn begins(block: usize) -> SourceLoc {
    SourceLoc::new(BEGINS | block as u32)
}

/// Returns for each of `blocks` blocks the offset at which Cranelift's function can be entered at this block; `None` if
/// it cannot be entered there.
///
/// # Errors
/// [`Refused::Unable`] if the function needs a larger frame.
pub(super) fn of(compiled: &CompiledCode, blocks: usize) -> Result<Box<[Option<u32>]>, Refused> {
    if frame(compiled.code_buffer()) > FRAME {
        return Err(Refused::Unable);
    }
    let mut entries = vec![None; blocks];
    for place in compiled.buffer.get_srclocs_sorted() {
        if !place.loc.is_default() && place.loc.bits() & BEGINS != 0 {
            entries[(place.loc.bits() & !BEGINS) as usize] = Some(place.start);
        }
    }
    Ok(entries.into())
}

/// Returns the size in bytes of the frame that a function makes: push rbp; mov rbp,rsp; sub rsp,bytes. (The size that
/// Cranelift reports does not include the arguments of helpers.)
fn frame(code: &[u8]) -> u32 {
    let mut made = Decoder::new(64, code, DecoderOptions::NONE)
        .into_iter()
        .skip(2);
    match made.next() {
        Some(insn) if insn.mnemonic() == Mnemonic::Sub && insn.op0_register() == Register::RSP => {
            insn.immediate32()
        }
        _ => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::frame;

    #[test]
    fn frames_are_those_of_the_code() {
        let begin = b"\x55\x48\x89\xe5";
        for (code, bytes) in [
            (&b"\x48\x83\xec\x40"[..], 0x40),
            (b"\x48\x81\xec\x00\x08\x00\x00", 0x800),
            (b"\x48\x83\xe8\x40", 0),
        ] {
            assert_eq!(frame(&[begin, code].concat()), bytes);
        }
    }
}
