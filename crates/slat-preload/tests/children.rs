//! Programs that a program executes: slat follows even those that load no libraries.

mod common;

use common::on_slat;

on_slat! {
    static_children_use_slat
    scripts_lead_to_a_static_program
    a_descriptor_is_executed
    a_cleaned_environment_keeps_slat
    what_is_no_program_is_refused_as_by_the_kernel
}

mod client {
    use std::fs::{self, File, OpenOptions};
    use std::io::Write as _;
    use std::os::fd::{AsRawFd as _, FromRawFd as _};
    use std::os::unix::fs::OpenOptionsExt as _;
    use std::os::unix::process::CommandExt as _;
    use std::path::{Path, PathBuf};
    use std::process::Command;

    /// The result of KVM_GET_API_VERSION on `/dev/kvm`.
    const API_VERSION: i32 = 12;

    const IS_X86: bool = cfg!(target_arch = "x86_64");

    /// The machine's number in an ELF file, and code that makes the calls open (or openat), ioctl and exit_group. The
    /// path of the device follows the code. On arm64 the code has a word 0 in place of each `svc`: this test program
    /// must not contain a word `svc` as data, because slat would take the word for an instruction.
    const MACHINE: (u8, &[u8]) = match IS_X86 {
        true => (
            62,
            &[
                0x48, 0x8d, 0x3d, 0x25, 0, 0, 0, 0xbe, 2, 0, 0, 0, 0xb8, 2, 0, 0, 0, 0x0f, 0x05,
                0x89, 0xc7, 0xbe, 0, 0xae, 0, 0, 0x31, 0xd2, 0xb8, 16, 0, 0, 0, 0x0f, 0x05, 0x89,
                0xc7, 0xb8, 231, 0, 0, 0, 0x0f, 0x05,
            ],
        ),
        false => (
            183,
            &[
                0x60, 0x0c, 0x80, 0x92, 0x41, 1, 0, 0x10, 0x42, 0, 0x80, 0xd2, 8, 7, 0x80, 0xd2, 0,
                0, 0, 0, 1, 0xc0, 0x95, 0xd2, 2, 0, 0x80, 0xd2, 0xa8, 3, 0x80, 0xd2, 0, 0, 0, 0,
                0xc8, 0x0b, 0x80, 0xd2, 0, 0, 0, 0,
            ],
        ),
    };

    /// Makes a program that exits with the result of KVM_GET_API_VERSION on `/dev/kvm`: an ELF file
    /// without an interpreter.
    fn program(name: &str) -> PathBuf {
        const BASE: u64 = 0x40_0000;
        let text = "/dev/kvm\0";
        let (machine, code) = MACHINE;
        let size = (120 + code.len() + text.len()) as u64;
        let mut file = b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0\x02\0".to_vec();
        file.extend([machine, 0, 1, 0, 0, 0]);
        for word in [BASE + 120, 64, 0] {
            file.extend(word.to_le_bytes());
        }
        for half in [0u16, 0, 64, 56, 1, 0, 0, 0] {
            file.extend(half.to_le_bytes());
        }
        // PT_LOAD, readable and executable.
        file.extend([1, 0, 0, 0, 5, 0, 0, 0]);
        for word in [0, BASE, BASE, size, size, 0x1000u64] {
            file.extend(word.to_le_bytes());
        }
        for word in code.chunks(4) {
            match word {
                [0, 0, 0, 0] => file.extend(std::hint::black_box(0xd400_0001_u32).to_le_bytes()),
                word => file.extend(word),
            }
        }
        file.extend(text.as_bytes());
        let path = std::env::temp_dir().join(format!("slat-{name}-{}", std::process::id()));
        let mut options = OpenOptions::new();
        let options = options.write(true).create(true).truncate(true).mode(0o755);
        options.open(&path).unwrap().write_all(&file).unwrap();
        path
    }

    /// Whether the kernel and the processor let slat load programs (`docs/dispatch.md`).
    fn can_load() -> bool {
        const SET_DISPATCH: libc::c_int = 59;
        // SAFETY: the call switches dispatch off on this thread, where dispatch is not on, or fails.
        let is_dispatched = unsafe { libc::prctl(SET_DISPATCH, 0, 0, 0, 0) } == 0;
        // For other processors slat rewrites all call sites.
        (is_dispatched || !IS_X86) && slat_process::pointers::can_be_separate()
    }

    /// Where slat can load programs, runs `command`, which must use slat and print nothing.
    fn uses_slat(command: &mut Command) {
        if !can_load() {
            return eprintln!("skipped: no Syscall User Dispatch, or no FSGSBASE");
        }
        let output = command.output().unwrap();
        assert_eq!(output.status.code(), Some(API_VERSION), "{output:?}");
        assert_eq!(String::from_utf8(output.stderr).unwrap(), "");
    }

    /// Returns the command that executes `path` in a child of `fork`.
    fn forked(path: &Path) -> Command {
        let mut command = Command::new(path);
        // SAFETY: the closure does nothing.
        unsafe { command.pre_exec(|| Ok(())) };
        command
    }

    #[test]
    #[ignore = "a client"]
    fn static_children_use_slat() {
        let path = program("static");
        // The program is started by posix_spawn, by fork and execvp, and by a shell.
        uses_slat(&mut Command::new(&path));
        uses_slat(&mut forked(&path));
        uses_slat(
            Command::new("/bin/sh")
                .args(["-c", "\"$0\"; exit $?"])
                .arg(&path),
        );
        // The program is found in PATH by its name.
        let directory = path.parent().unwrap();
        uses_slat(Command::new(path.file_name().unwrap()).env("PATH", directory));
        fs::remove_file(path).unwrap();
    }

    /// Makes a script in the directory of `program`, which is its interpreter.
    fn script(program: &Path, name: &str, end: &str) -> PathBuf {
        let script = program.with_extension(name);
        fs::write(&script, format!("#! {} word{end}", program.display())).unwrap();
        fs::set_permissions(&script, fs::metadata(program).unwrap().permissions()).unwrap();
        script
    }

    #[test]
    #[ignore = "a client"]
    fn scripts_lead_to_a_static_program() {
        let path = program("interpreter");
        let first = script(&path, "first", "\n");
        // This script's only line does not end with a newline.
        let second = script(&first, "second", "");
        for script in [&first, &second] {
            uses_slat(&mut Command::new(script));
            uses_slat(&mut forked(script));
        }
        for file in [second, first, path] {
            fs::remove_file(file).unwrap();
        }
    }

    #[test]
    #[ignore = "a client"]
    fn a_descriptor_is_executed() {
        let path = program("descriptor");
        let named = File::open(&path).unwrap();
        // SAFETY: the name ends with 0. No other code owns the descriptor.
        let mut unnamed = unsafe {
            File::from_raw_fd(libc::memfd_create(c"program".as_ptr(), libc::MFD_CLOEXEC))
        };
        unnamed.write_all(&fs::read(&path).unwrap()).unwrap();
        for file in [named, unnamed] {
            let run = move || {
                let words = [c"program".as_ptr(), std::ptr::null()];
                // SAFETY: the arrays end with null.
                unsafe { libc::fexecve(file.as_raw_fd(), words.as_ptr(), words[1..].as_ptr()) };
                Err(std::io::Error::last_os_error())
            };
            let mut command = Command::new("/bin/false");
            // SAFETY: the closure executes, and does nothing else.
            unsafe { command.pre_exec(run) };
            uses_slat(&mut command);
        }
        fs::remove_file(path).unwrap();
    }

    #[test]
    #[ignore = "a client"]
    fn a_cleaned_environment_keeps_slat() {
        const SHOWS_LIBRARY: &str = "case $LD_PRELOAD in *libslat_preload*) exit 12;; esac";
        let path = program("cleaned");
        uses_slat(Command::new(&path).env_clear());
        uses_slat(
            Command::new("/bin/sh")
                .args(["-c", "\"$0\"; exit $?"])
                .arg(&path)
                .env_clear(),
        );
        let mut shell = Command::new("/bin/sh");
        shell.args(["-c", SHOWS_LIBRARY]);
        uses_slat(shell.env_clear());
        uses_slat(Command::new("/usr/bin/env").args(["-i", "/bin/sh", "-c", SHOWS_LIBRARY]));
        fs::remove_file(path).unwrap();
    }

    #[test]
    #[ignore = "a client"]
    fn what_is_no_program_is_refused_as_by_the_kernel() {
        let empty = std::env::temp_dir().join(format!("slat-empty-{}", std::process::id()));
        drop(File::create(&empty).unwrap());
        assert!(forked(&empty).output().is_err());
        fs::remove_file(empty).unwrap();
        assert!(Command::new("/no/such/program").output().is_err());
    }
}
