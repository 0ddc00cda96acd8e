//! Finds the offsets at which the code of a region is entered.
//!
//! A function that Cranelift compiles has one entry, but a region can be entered at the beginning of each of its paths.
//! A jump through a table at the function's beginning would be slow: the table would be in the code, not in the data
//! caches, and hosts predict such jumps badly. So `dispatch` enters paths directly. The function still begins with such
//! a jump, because Cranelift would drop the paths otherwise, but it is never executed. At the beginning of a path all
//! state is in the `Cpu`, so the code there needs only R15 and a frame on the stack. `dispatch` makes the frame, which
//! has the same size for all regions.
//!
//! Cranelift's source locations mark the beginnings of paths. For other code of a region, the source location is the
//! number of a step.

use cranelift_codegen::CompiledCode;
use cranelift_codegen::ir::SourceLoc;
use iced_x86::{Decoder, DecoderOptions, Mnemonic, Register};
use slat_jit::Refused;

/// The size of a region's frame in bytes. The baseline tier uses at most 1,024 bytes. Of Cranelift's functions, half
/// use 64 bytes, and the largest one in a boot uses 304 bytes. OpenSSL's AES-GCM uses 1,392 bytes, because its loop
/// keeps all vector registers in values; with a limit of 1,024, it stayed in the baseline tier and took eight times as
/// long. The frame is smaller than a page, so that no frame reaches beyond the page that guards a stack.
pub(super) const FRAME: u32 = 3072;

/// The bit of a source location that says that a path begins here.
const BEGINS: u32 = 1 << 30;

/// Returns the source location of the first instruction of the path that begins with block number `block`.
pub(super) fn begins(block: usize) -> SourceLoc {
    SourceLoc::new(BEGINS | block as u32)
}

/// For each of `blocks` blocks, returns the offset in the function's code at which the function can be entered at this
/// block. `None`: the function cannot be entered at this block.
///
/// # Errors
/// [`Refused::Unable`] if the function needs a larger frame than [`FRAME`].
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

/// Returns the size in bytes of the frame that a function makes by `push rbp`, `mov rbp,rsp` and `sub rsp,bytes`. (The
/// size that Cranelift reports does not include the arguments of helpers.)
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
