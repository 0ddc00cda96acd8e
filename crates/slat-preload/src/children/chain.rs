//! Finds the program that runs when a file is executed. If the file is a script, that is its interpreter, which may be
//! a script, too. Also determines how slat reaches that program.

use crate::elf::Headers;
use crate::real::{Opened, kernel};
use std::ffi::{CStr, c_char};

/// The means by which slat reaches a program.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Reach {
    /// LD_PRELOAD names this library.
    Preloaded,
    /// The kernel executes this library, which then loads the program.
    Loaded,
    /// slat does not reach the program: the file is a 32-bit program, gains rights (setuid), or is no program at all.
    /// slat then leaves the environment unchanged.
    Not,
}

/// The first line of a script: the interpreter and one optional word, each followed by a NUL.
#[derive(Clone, Copy)]
struct Line {
    bytes: [u8; Self::LEN],
    /// The offset of the word; 0 if there is none.
    word: usize,
}

impl Line {
    /// The number of bytes that the kernel reads (`include/uapi/linux/binfmts.h`, `BINPRM_BUF_SIZE`).
    const LEN: usize = 256;

    /// Reads the first line of a script. `None`: the file is no script.
    fn read(file: &Opened) -> Option<Self> {
        let mut bytes = [0; Self::LEN];
        // SAFETY: the buffer is live, and has this length.
        unsafe {
            kernel!(
                libc::SYS_pread64,
                file.fd(),
                bytes.as_mut_ptr(),
                Self::LEN - 1,
                0
            )
        }
        .ok()?;
        let rest = bytes.strip_prefix(b"#!")?;
        let end = rest.iter().position(|byte| matches!(byte, b'\n' | 0));
        let line = &rest[..end.unwrap_or(rest.len())];
        let is_blank = |byte: &u8| matches!(byte, b' ' | b'\t');
        let start = line.iter().position(|byte| !is_blank(byte))?;
        let name = &line[start..];
        let name_len = name.iter().position(is_blank).unwrap_or(name.len());
        let rest = &name[name_len..];
        let word = rest
            .iter()
            .position(|byte| !is_blank(byte))
            .map(|at| &rest[at..]);
        let word = word
            .map(|word| word.trim_ascii_end())
            .filter(|word| !word.is_empty());
        let mut line = Line {
            bytes: [0; Self::LEN],
            word: 0,
        };
        line.bytes[..name_len].copy_from_slice(&name[..name_len]);
        if let Some(word) = word {
            line.word = name_len + 1;
            line.bytes[line.word..line.word + word.len()].copy_from_slice(word);
        }
        Some(line)
    }

    fn interpreter(&self) -> &CStr {
        CStr::from_bytes_until_nul(&self.bytes).unwrap_or_default()
    }

    fn word(&self) -> Option<*const c_char> {
        (self.word > 0).then(|| self.bytes[self.word..].as_ptr().cast())
    }
}

/// Whether a process gains rights by executing `file`. A process gains rights only if the kernel executes `file`
/// itself, not if slat loads `file`.
fn gains_rights(file: &Opened) -> bool {
    // SAFETY: all-zero is a valid `stat`, which the call fills in.
    unsafe {
        let mut stat: libc::stat = std::mem::zeroed();
        let known = kernel!(libc::SYS_fstat, file.fd(), &raw mut stat).is_ok();
        known && stat.st_mode & (libc::S_ISUID | libc::S_ISGID) != 0
    }
}

/// Determines how slat reaches a program that is not a script.
fn reach(file: &Opened) -> Reach {
    let Some(headers) = Headers::read(file) else {
        return Reach::Not;
    };
    if gains_rights(file) {
        return Reach::Not;
    }
    let mut name = [0; libc::PATH_MAX as usize];
    let is_loaded = match headers.interpreter(file, &mut name) {
        // A program linked with musl cannot load this library, which needs glibc.
        Some(interpreter) => {
            let mut parts = interpreter.to_bytes().rsplit(|byte| *byte == b'/');
            parts
                .next()
                .is_some_and(|name| name.starts_with(b"ld-musl"))
        }
        None => headers.loaded().next().is_some(),
    };
    match is_loaded {
        true => Reach::Loaded,
        false => Reach::Preloaded,
    }
}

/// The result of the search for the program that runs when a file is executed: the way in which slat reaches this
/// program, and the scripts that lead to it.
pub struct Chain {
    lines: [Line; Self::LONGEST],
    len: usize,
    /// The means by which slat reaches the program.
    pub reach: Reach,
}

impl Chain {
    /// The maximum number of scripts that the kernel follows (`fs/exec.c`).
    pub const LONGEST: usize = 5;

    /// Follows the scripts and interpreters that begin with the file `program`. `None`: a file cannot be opened or
    /// executed.
    pub fn from(program: &CStr) -> Option<Self> {
        const NONE: Line = Line {
            bytes: [0; Line::LEN],
            word: 0,
        };
        let mut chain = Chain {
            lines: [NONE; Self::LONGEST],
            len: 0,
            reach: Reach::Not,
        };
        loop {
            let file = Opened::new(chain.program(program), libc::O_RDONLY)?;
            match Line::read(&file) {
                Some(line) => {
                    *chain.lines.get_mut(chain.len)? = line;
                    chain.len += 1;
                }
                None => {
                    chain.reach = reach(&file);
                    return Some(chain);
                }
            }
        }
    }

    /// Whether the executed file is a script.
    pub fn has_scripts(&self) -> bool {
        self.len > 0
    }

    fn lines(&self) -> &[Line] {
        &self.lines[..self.len]
    }

    /// Returns the program that runs when the file `given` is executed.
    pub fn program<'a>(&'a self, given: &'a CStr) -> &'a CStr {
        self.lines().last().map_or(given, Line::interpreter)
    }

    /// Returns the words that replace the first argument if the executed file, at `path`, is a script. As in the
    /// kernel, these are each interpreter with its optional word, and then the script's path.
    pub fn words(&self, path: *const c_char) -> impl Iterator<Item = *const c_char> {
        let each = self.lines().iter().rev();
        let words = each.flat_map(|line| [Some(line.interpreter().as_ptr()), line.word()]);
        words.flatten().chain([path])
    }
}

/// Whether a path's last component is the name of a dynamic linker. A dynamic linker is a static program, but it loads
/// preloaded libraries into the program that its argument names.
pub fn is_linker(path: &CStr) -> bool {
    let name = path.to_bytes().rsplit(|byte| *byte == b'/').next();
    name.is_some_and(|name| name.starts_with(b"ld-linux") || name.starts_with(b"ld.so"))
}
