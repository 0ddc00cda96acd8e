//! Finds PROGRAM as a shell does, and determines how slat's library will get into PROGRAM's process.

use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::io::{self, Read};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use object::read::elf::{ElfFile64, FileHeader, ProgramHeader};
use object::{Object, elf};

use crate::arch::program::{MACHINE, NAME};

/// The reason why PROGRAM cannot run on slat: one line for the user, and the exit status that a shell would give.
#[derive(Debug)]
pub struct Refusal {
    /// The problem, and its solution if there is one.
    pub message: String,
    /// The exit status: 127 if PROGRAM was not found, 126 if PROGRAM was found but cannot be run.
    pub status: u8,
}

impl Refusal {
    fn not_found(message: String) -> Self {
        Refusal {
            message,
            status: 127,
        }
    }

    fn cannot_run(message: String) -> Self {
        Refusal {
            message,
            status: 126,
        }
    }
}

/// The maximum length of a chain of `#!` interpreters. Linux has a similar limit.
const MAX_INTERPRETERS: usize = 5;

/// The number of bytes to read from the beginning of a program, which is enough for a `#!` line.
const SCRIPT_LINE: usize = 256;

/// Returns the file that `program` names: `program` itself if it contains a `/`, else the first executable of that
/// name in `path`.
pub fn find(program: &OsStr, path: Option<&OsStr>) -> Result<PathBuf, Refusal> {
    let shown = program.display();
    if program.is_empty() {
        return Err(Refusal::not_found("the program's name is empty".to_owned()));
    }
    if program.as_bytes().contains(&b'/') {
        let file = PathBuf::from(program);
        return executable(&file).map(|()| file).map_err(|e| match e {
            NotExecutable::Missing(e) => Refusal::not_found(format!("{shown}: {e}")),
            NotExecutable::Directory => Refusal::cannot_run(format!("{shown}: is a directory")),
            NotExecutable::Mode => Refusal::cannot_run(format!("{shown}: is not executable")),
        });
    }
    let mut found_but = None;
    for directory in std::env::split_paths(path.unwrap_or(OsStr::new("/usr/bin:/bin"))) {
        // An empty element of PATH means the current directory, as in every shell.
        let file = if directory.as_os_str().is_empty() {
            Path::new(".").join(program)
        } else {
            directory.join(program)
        };
        match executable(&file) {
            Ok(()) => return Ok(file),
            Err(NotExecutable::Mode) => found_but = Some(file),
            Err(_) => {}
        }
    }
    Err(match found_but {
        Some(file) => Refusal::cannot_run(format!("{}: is not executable", file.display())),
        None => Refusal::not_found(format!("{shown}: no such program in PATH")),
    })
}

enum NotExecutable {
    Missing(io::Error),
    Directory,
    Mode,
}

fn executable(file: &Path) -> Result<(), NotExecutable> {
    let meta = fs::metadata(file).map_err(NotExecutable::Missing)?;
    if meta.is_dir() {
        Err(NotExecutable::Directory)
    } else if meta.permissions().mode() & 0o111 == 0 {
        Err(NotExecutable::Mode)
    } else {
        Ok(())
    }
}

/// The means by which slat's library gets into a program's process.
#[derive(Debug, PartialEq, Eq)]
pub enum Reach {
    /// The dynamic linker loads slat's library, because LD_PRELOAD names it. The program is linked with the libraries
    /// listed here.
    Preloaded(Vec<OsString>),
    /// slat's library loads the program itself, because the program is static, or uses another C library.
    Loads,
}

/// A program that slat can run.
#[derive(Debug)]
pub struct Program {
    /// The means by which slat's library gets into the program's process.
    pub reach: Reach,
    /// The file that the kernel executes: the program itself or, for a script, its interpreter.
    pub runs: PathBuf,
    /// For a script: the first arguments of the interpreter. The last of them is the script's path.
    pub before: Vec<OsString>,
}

/// Checks that slat's library can get into the process that executes `file`. If `file` is a script, checks its
/// interpreter.
pub fn check(file: &Path) -> Result<Program, Refusal> {
    let mut file = file.to_owned();
    let mut before = Vec::new();
    for _ in 0..MAX_INTERPRETERS {
        match interpreter_of_script(&file) {
            Err(e) => return Err(unreadable(&file, &e)),
            Ok(None) => {
                return check_elf(&file).map(|reach| Program {
                    reach,
                    runs: file,
                    before,
                });
            }
            Ok(Some((interpreter, word))) => {
                before.insert(0, file.clone().into_os_string());
                before.splice(0..0, word);
                if let Err(e) = fs::metadata(&interpreter) {
                    return Err(Refusal::not_found(format!(
                        "{}: its interpreter {}: {e}",
                        file.display(),
                        interpreter.display()
                    )));
                }
                file = interpreter;
            }
        }
    }
    Err(Refusal::cannot_run(format!(
        "{}: too many nested script interpreters",
        file.display()
    )))
}

fn unreadable(file: &Path, error: &io::Error) -> Refusal {
    Refusal::cannot_run(format!("{}: cannot be read: {error}", file.display()))
}

/// Returns the interpreter of a script, and the argument that the `#!` line gives it, if any.
fn interpreter_of_script(file: &Path) -> io::Result<Option<(PathBuf, Option<OsString>)>> {
    let mut line = Vec::with_capacity(SCRIPT_LINE);
    File::open(file)?
        .take(SCRIPT_LINE as u64)
        .read_to_end(&mut line)?;
    let Some(rest) = line.strip_prefix(b"#!") else {
        return Ok(None);
    };
    let line = rest.split(|&b| b == b'\n').next().unwrap_or_default();
    let line = line.trim_ascii();
    let end = line.iter().position(u8::is_ascii_whitespace);
    let (interpreter, word) = line.split_at(end.unwrap_or(line.len()));
    // The kernel passes the rest of the line as one argument.
    let word = word.trim_ascii();
    let word = (!word.is_empty()).then(|| OsStr::from_bytes(word).to_owned());
    Ok(Some((PathBuf::from(OsStr::from_bytes(interpreter)), word)))
}

fn check_elf(file: &Path) -> Result<Reach, Refusal> {
    let shown = file.display();
    let refuse = |why: &str| Err(Refusal::cannot_run(format!("{shown}: {why}")));

    // The section headers may be anywhere in the file, so this reads the whole file.
    let data = fs::read(file).map_err(|e| unreadable(file, &e))?;
    if !data.starts_with(&elf::ELFMAG) {
        return refuse("is neither an ELF program nor a script with #!");
    }
    if data.get(4) == Some(&elf::ELFCLASS32.0) {
        return refuse("is a 32-bit program; slat's library is 64-bit");
    }
    let Ok(header) = elf::FileHeader64::<object::Endianness>::parse(&*data) else {
        return refuse("is a damaged ELF file");
    };
    let Ok(endian) = header.endian() else {
        return refuse("is a damaged ELF file");
    };
    if header.e_machine(endian) != MACHINE {
        return refuse(&format!("is not {NAME}"));
    }
    if !matches!(header.e_type(endian), elf::ET_EXEC | elf::ET_DYN) {
        return refuse("is an ELF file, but not a program");
    }
    let Ok(segments) = header.program_headers(endian, &*data) else {
        return refuse("is a damaged ELF file");
    };
    let interpreter = segments
        .iter()
        .find_map(|s| s.interpreter(endian, &*data).ok().flatten());
    if gains_rights(file) {
        return refuse(
            "is set-user-id or set-group-id: slat cannot be in a program that gains rights. Run it without slat; if it starts a KVM program, let it start `slat run -- PROGRAM` in place of that",
        );
    }
    let Some(interpreter) = interpreter else {
        return Ok(Reach::Loads);
    };
    let linker = Path::new(OsStr::from_bytes(interpreter));
    if let Err(e) = fs::metadata(linker) {
        return Err(Refusal::not_found(format!(
            "{shown}: its dynamic linker {}: {e}",
            linker.display()
        )));
    }
    let is_musl = linker
        .file_name()
        .is_some_and(|name| name.as_bytes().starts_with(b"ld-musl"));
    if is_musl {
        return Ok(Reach::Loads);
    }
    Ok(Reach::Preloaded(
        linked_libraries(&data).unwrap_or_default(),
    ))
}

/// Returns the names of the libraries that an ELF program needs (DT_NEEDED).
fn linked_libraries(data: &[u8]) -> object::Result<Vec<OsString>> {
    let file = ElfFile64::<object::Endianness>::parse(data)?;
    let mut names = Vec::new();
    for library in file.import_libraries()? {
        names.push(OsStr::from_bytes(library?.name()).to_owned());
    }
    Ok(names)
}

/// Whether executing `file` changes the user or the group. If so, the dynamic linker ignores LD_PRELOAD (secure
/// mode).
fn gains_rights(file: &Path) -> bool {
    let Ok(meta) = fs::metadata(file) else {
        return false;
    };
    // SAFETY: the calls only return a number.
    let (uid, gid) = unsafe { (libc::getuid(), libc::getgid()) };
    let mode = meta.permissions().mode();
    (mode & libc::S_ISUID != 0 && meta.uid() != uid)
        || (mode & libc::S_ISGID != 0 && mode & libc::S_IXGRP != 0 && meta.gid() != gid)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_looked_up_in_path_and_a_path_is_taken_as_it_is() {
        assert_eq!(
            find(OsStr::new("sh"), Some(OsStr::new("/nonexistent:/bin"))).unwrap(),
            Path::new("/bin/sh")
        );
        assert_eq!(
            find(OsStr::new("/bin/sh"), None).unwrap(),
            Path::new("/bin/sh")
        );
    }

    #[test]
    fn what_is_not_there_is_127_and_what_cannot_run_is_126() {
        for (name, status) in [
            ("no-such-program-anywhere", 127),
            ("/no/such/program", 127),
            ("", 127),
            ("/", 126),
            ("/etc/passwd", 126),
        ] {
            assert_eq!(
                find(OsStr::new(name), Some(OsStr::new("/bin")))
                    .unwrap_err()
                    .status,
                status,
                "{name}"
            );
        }
    }

    #[test]
    fn a_program_is_preloaded_or_loads_the_library() {
        // This test program is linked as the command `slat` is.
        let reach = check(&std::env::current_exe().unwrap()).unwrap().reach;
        let libc = OsString::from("libc.so.6");
        match cfg!(target_env = "gnu") {
            true => {
                let links = matches!(&reach, Reach::Preloaded(linked) if linked.contains(&libc));
                assert!(links, "{reach:?}");
            }
            false => assert_eq!(reach, Reach::Loads),
        }
    }

    #[test]
    fn text_without_an_interpreter_line_is_no_program() {
        let refusal = check(Path::new("/etc/passwd")).unwrap_err();
        assert_eq!(refusal.status, 126);
    }
}
