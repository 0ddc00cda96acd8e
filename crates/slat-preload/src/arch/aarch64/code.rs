//! Finds the instructions in code that enter the kernel. All instructions of AArch64 have four bytes and are aligned.

/// `svc #0`.
pub const SVC: u32 = 0xd400_0001;
/// `ret`.
const RET: u32 = 0xd65f_03c0;
/// `mov x8, #139`: loads the number of rt_sigreturn(2). Where a signal handler returns to the kernel, `svc #0` follows
/// this instruction.
const NUMBER: u32 = 0xd280_1168;

/// Splits code into its instructions.
fn instructions(code: &[u8]) -> impl Iterator<Item = u32> {
    let words = code.chunks_exact(size_of::<u32>());
    words.map(|word| u32::from_le_bytes(word.try_into().expect("four bytes")))
}

/// Returns the offsets of `svc #0` in code that begins at an aligned address. A data word in the code may equal `svc
/// #0` by chance: on average, one of 2^32 words.
pub fn calls(code: &[u8]) -> impl Iterator<Item = usize> {
    let found = instructions(code)
        .enumerate()
        .filter(|(_, word)| *word == SVC);
    found.map(|(index, _)| size_of::<u32>() * index)
}

/// Whether code contains an instruction that enters the kernel.
pub fn makes_calls(code: &[u8]) -> bool {
    calls(code).next().is_some()
}

/// Finds the instructions in the C library's text by which slat enters the kernel. Returns the offset of an `svc #0`
/// that is followed by a return, and the offset of the code by which a signal handler returns to the kernel. The result
/// is `None` if the text does not contain them. The second offset is `None` in glibc, because the kernel's vDSO has
/// that code.
pub fn find_entries(text: &[u8]) -> Option<(usize, Option<usize>)> {
    let at = |words: [u32; 2]| {
        let mut pairs = instructions(text).zip(instructions(&text[size_of::<u32>()..]));
        let index = pairs.position(|(one, next)| [one, next] == words)?;
        Some(size_of::<u32>() * index)
    };
    text.get(size_of::<u32>()..)?;
    Some((at([SVC, RET])?, at([NUMBER, SVC])))
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOP: u32 = 0xd503_201f;

    fn code(words: &[u32]) -> Vec<u8> {
        words.iter().flat_map(|word| word.to_le_bytes()).collect()
    }

    #[test]
    fn calls_are_aligned_words() {
        let text = code(&[NOP, SVC, RET, SVC]);
        assert_eq!(calls(&text).collect::<Vec<_>>(), [4, 12]);
        assert!(makes_calls(&text));
        // The bytes of `svc #0`: half in one instruction, half in the next.
        let split = code(&[SVC << 16, SVC >> 16, NOP]);
        assert!(!makes_calls(&split) && !makes_calls(&[]) && !makes_calls(&text[..6]));
        // Two similar instructions: `svc #1` and `hvc #0`.
        assert!(!makes_calls(&code(&[0xd400_0021, 0xd400_0002])));
    }

    #[test]
    fn entries_are_found_in_a_text() {
        assert_eq!(
            find_entries(&code(&[NOP, NUMBER, SVC, NOP, SVC, RET])),
            Some((16, Some(4)))
        );
        assert_eq!(find_entries(&code(&[SVC, RET])), Some((0, None)));
        assert_eq!(find_entries(&code(&[SVC, NOP, RET])), None);
        assert_eq!(find_entries(&[]), None);
    }
}
