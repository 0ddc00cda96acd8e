//! Whether the program has `syscall` instructions of its own.

use iced_x86::{Decoder, DecoderOptions};

/// The bytes of `syscall`.
const SYSCALL: [u8; 2] = [0x0f, 0x05];

/// Whether code contains a `syscall` instruction. The same two bytes inside another instruction do not count: in megabytes of code they
/// are found by chance.
pub fn makes_calls(code: &[u8]) -> bool {
    candidates(code).any(|at| is_instruction(code, at))
}

/// Returns where the bytes are.
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

/// Whether an instruction begins at `at`. Decoding that begins anywhere before falls into step with the code after a few instructions:
/// so the places before are asked, and the majority decides.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_instruction_is_told_from_the_same_bytes_in_another() {
        // Code that the compiler might have made: mov rdi, rbx; lea rsi, [rsp+8]; test eax, eax; and so on.
        let filler = [
            0x48, 0x89, 0xdf, 0x48, 0x8d, 0x74, 0x24, 0x08, 0x85, 0xc0, 0x89, 0xd8, 0x48, 0x83,
            0xc4, 0x18,
        ];
        let code = |middle: &[u8]| [&filler.repeat(4), middle, &filler.repeat(4)].concat();
        // mov eax, 16; syscall.
        assert!(makes_calls(&code(&[0xb8, 16, 0, 0, 0, 0x0f, 0x05])));
        // syscall at the very beginning.
        assert!(makes_calls(&[0x0f, 0x05, 0xc3]));
        // mov eax, 0x050f; lea rax, [rip+0x050f]; call with these bytes in its distance.
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
