//! Finds the instructions in code that enter the kernel, and the padding between functions.

use iced_x86::{Decoder, DecoderOptions, FlowControl, Instruction, Mnemonic};
use std::ops::Range;

/// The bytes of `syscall`.
pub const SYSCALL: [u8; 2] = [0x0f, 0x05];
/// The instructions `syscall` and `ret`.
const SYSCALL_RET: [u8; 3] = [0x0f, 0x05, 0xc3];
/// The instructions by which a signal handler returns to the kernel: mov rax, 15; syscall.
const RETURN: [u8; 9] = [0x48, 0xc7, 0xc0, 15, 0, 0, 0, 0x0f, 0x05];

/// Finds the instructions in the C library's text by which slat enters the kernel. Returns the offset of a `syscall`
/// that is followed by a return, and the offset of the code by which a signal handler returns to the kernel. `None` if
/// the text does not contain them.
pub fn find_entries(text: &[u8]) -> Option<(usize, Option<usize>)> {
    let at = |bytes: &[u8]| text.windows(bytes.len()).position(|window| window == bytes);
    Some((at(&SYSCALL_RET)?, Some(at(&RETURN)?)))
}

/// Whether code contains a `syscall` instruction. The two bytes may also be part of another instruction by chance, once
/// in some megabytes of code; such bytes do not count.
pub fn makes_calls(code: &[u8]) -> bool {
    candidates(code).any(|at| is_instruction(code, at))
}

/// Returns the offsets at which the two bytes of `syscall` occur, also within other instructions.
fn candidates(code: &[u8]) -> impl Iterator<Item = usize> {
    let mut from = 0;
    std::iter::from_fn(move || {
        loop {
            let at = from
                + code
                    .get(from..)?
                    .iter()
                    .position(|byte| *byte == SYSCALL[1])?;
            from = at + 1;
            if at > 0 && code[at - 1] == SYSCALL[0] {
                return Some(at - 1);
            }
        }
    })
}

/// Whether an instruction begins at `at`. Decoding that begins at a wrong byte finds a few wrong instructions, and then
/// the real instructions. So this function decodes from each of the preceding bytes in turn, and the majority of
/// results decides.
fn is_instruction(code: &[u8], at: usize) -> bool {
    const BEFORE: usize = 48;
    let first = at.saturating_sub(BEFORE);
    let (mut reached, mut tried) = (0, 0);
    for start in first..at {
        let mut decoder = Decoder::new(64, &code[start..], DecoderOptions::NONE);
        while start + decoder.position() < at && decoder.can_decode() {
            let _ = decoder.decode();
        }
        tried += 1;
        reached += usize::from(start + decoder.position() == at);
    }
    2 * reached >= tried
}

/// Returns the offset of `len` bytes of padding that a short jump can reach. Padding is the bytes between two
/// functions, which are never executed. `code` is a program's text. The jump's own two bytes end at offset `back`,
/// where the next instruction begins.
///
/// Decoding begins where an instruction is known to begin: at `back`, and at functions that are called. After a return
/// or a jump, padding extends to an aligned address. A call may return, so bytes after a call are padding only if the
/// next function is called, too.
pub fn padding(code: &[u8], back: usize, len: usize) -> Option<usize> {
    /// A short jump reaches from `back` - 128 to `back` + 127.
    const REACH: usize = 128;
    /// The number of bytes before the short jump's range in which this function also looks for beginnings of functions.
    const BEFORE: usize = 1024;
    let window = back.saturating_sub(BEFORE)..code.len().min(back + 2 * REACH);
    let functions = called(code, &window);
    let reached = back.saturating_sub(REACH)..back + REACH;
    let from = |start: usize| {
        let mut decoder = Decoder::new(64, &code[start..window.end], DecoderOptions::NONE);
        while decoder.can_decode() {
            let instruction = decoder.decode();
            let begin = start + decoder.position();
            if instruction.is_invalid() || begin >= reached.end {
                return None;
            }
            let end = begin + padding_at(&code[begin..window.end]);
            let is_between = match instruction.flow_control() {
                FlowControl::Return
                | FlowControl::UnconditionalBranch
                | FlowControl::IndirectBranch => end.is_multiple_of(ALIGNMENT),
                FlowControl::Call => functions.binary_search(&end).is_ok(),
                _ => false,
            };
            if is_between && end - begin >= len && reached.contains(&begin) {
                return Some(begin);
            }
        }
        None
    };
    let before = functions
        .iter()
        .rev()
        .copied()
        .filter(|start| *start < back);
    std::iter::once(back).chain(before).find_map(from)
}

/// The minimum alignment of functions.
const ALIGNMENT: usize = 16;

/// Returns the aligned offsets within `window` that are called from anywhere in `code`, in order. Other bytes may look
/// like such a call by chance: on average, at one of 2^32 positions.
fn called(code: &[u8], window: &Range<usize>) -> Vec<usize> {
    const CALL: u8 = 0xe8;
    let targets = code.windows(5).enumerate().filter_map(|(at, bytes)| {
        let [CALL, distance @ ..] = bytes else {
            return None;
        };
        let distance = i32::from_le_bytes(distance.try_into().ok()?);
        (at + 5).checked_add_signed(distance as isize)
    });
    let mut found: Vec<_> = targets
        .filter(|target| window.contains(target) && target.is_multiple_of(ALIGNMENT))
        .collect();
    found.sort_unstable();
    found.dedup();
    found
}

/// Returns the number of bytes of padding with which `code` begins.
fn padding_at(code: &[u8]) -> usize {
    let decoder = Decoder::new(64, code, DecoderOptions::NONE);
    let is_padding = |instruction: &Instruction| {
        matches!(instruction.mnemonic(), Mnemonic::Nop | Mnemonic::Int3)
    };
    let padding = decoder.into_iter().take_while(is_padding);
    padding.map(|instruction| instruction.len()).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn padding_is_what_lies_between_functions() {
        // mov rdi, rax; call +0; pop rbp; ret: 10 bytes.
        let end = [0x48, 0x89, 0xc7, 0xe8, 0, 0, 0, 0, 0x5d, 0xc3];
        // nop word [cs:rax+rax+0], of 11 bytes.
        let long = [0x66, 0x66, 0x2e, 0x0f, 0x1f, 0x84, 0, 0, 0, 0, 0];
        let nops = |count| vec![0x90; count];
        let at = |code: &[&[u8]], back| padding(&code.concat(), back, 5);
        assert_eq!(at(&[&end, &nops(6)], 0), Some(10));
        assert_eq!(at(&[&end, &[0xcc; 6]], 0), Some(10));
        assert_eq!(at(&[&end, &long, &nops(11)], 0), Some(10));
        assert_eq!(at(&[&end, &nops(22), &end], 0), Some(10));
        // Three cases without usable padding: the padding is too short; no function follows; the bytes are an aligned
        // part of a function, which is executed.
        assert_eq!(at(&[&nops(2), &end, &nops(4), &end], 2), None);
        assert_eq!(at(&[&end, &nops(5), &end], 0), None);
        assert_eq!(at(&[&end[..8], &nops(8), &end], 0), None);
        // The padding is after the end of the next function, at the end of the short jump's range.
        assert_eq!(at(&[&end, &end, &nops(12)], 0), Some(20));
        let far = [0x48, 0x89, 0xc7].repeat(43);
        assert_eq!(at(&[&far, &end, &nops(5)], 0), None);
        assert_eq!(at(&[&end], 0), None);
        // The padding is between two functions. The first 16 bytes call both of them.
        let call = |from: i32, to: i32| {
            let mut code = vec![0xe8];
            code.extend((to - from - 5).to_le_bytes());
            code
        };
        let calls = |second| [&call(0, 16)[..], &call(5, second), &nops(6)].concat();
        let code = |second| [calls(second), end.to_vec(), nops(6), far.clone()].concat();
        assert_eq!(at(&[&code(32)], 50), Some(26));
        // The previous function ends with a call: the padding counts if the function after it is called.
        let code = |second| [calls(second), end[..8].to_vec(), nops(8), far.clone()].concat();
        assert_eq!(at(&[&code(32)], 50), Some(24));
        assert_eq!(at(&[&code(48)], 50), None);
    }

    #[test]
    fn an_instruction_is_told_from_the_same_bytes_in_another() {
        // Code as a compiler might make it: mov rdi, rbx; lea rsi, [rsp+8]; test eax, eax; and so on.
        let filler = [
            0x48, 0x89, 0xdf, 0x48, 0x8d, 0x74, 0x24, 0x08, 0x85, 0xc0, 0x89, 0xd8, 0x48, 0x83,
            0xc4, 0x18,
        ];
        let code = |middle: &[u8]| [&filler.repeat(4), middle, &filler.repeat(4)].concat();
        // mov eax, 16; syscall.
        assert!(makes_calls(&code(&[0xb8, 16, 0, 0, 0, 0x0f, 0x05])));
        // syscall at the very beginning.
        assert!(makes_calls(&[0x0f, 0x05, 0xc3]));
        // mov eax, 0x050f; lea rax, [rip+0x050f]; call, whose distance contains these bytes.
        assert!(!makes_calls(&code(&[0xb8, 0x0f, 0x05, 0, 0])));
        assert!(!makes_calls(&code(&[0x48, 0x8d, 0x05, 0x0f, 0x05, 0, 0])));
        assert!(!makes_calls(&code(&[0xe8, 0, 0x0f, 0x05, 0])));
        assert!(!makes_calls(&[]) && !makes_calls(&[0x0f]) && !makes_calls(&[0x05]));
    }

    #[test]
    fn the_c_library_makes_calls_and_a_shell_does_not() {
        let text = |path: &str| {
            let bytes = std::fs::read(path).unwrap();
            makes_calls(&bytes)
        };
        let shell = std::fs::canonicalize("/bin/sh").unwrap();
        assert!(!text(shell.to_str().unwrap()));
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        let libc = maps.lines().find_map(|line| {
            line.split_whitespace()
                .last()
                .filter(|path| path.contains("libc.so"))
        });
        assert!(text(libc.unwrap()));
    }
}
