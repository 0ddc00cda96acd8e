//! Programs that a program executes: of those that slat does not reach, and that name `/dev/kvm`, it says so.

mod common;

use common::on_slat;

on_slat! {
    a_static_child_that_names_the_device_is_told
    other_static_children_are_not
}

mod client {
    use std::fs::{self, File, OpenOptions};
    use std::io::Write as _;
    use std::os::unix::fs::OpenOptionsExt as _;
    use std::os::unix::process::CommandExt as _;
    use std::path::{Path, PathBuf};
    use std::process::Command;

    /// Makes a program that ends with status 7: an ELF file without an interpreter, which contains `text`.
    fn program(name: &str, text: &str) -> PathBuf {
        const BASE: u64 = 0x40_0000;
        // MOV EAX, 60 (exit); MOV EDI, 7; SYSCALL.
        let code = [0xb8, 60, 0, 0, 0, 0xbf, 7, 0, 0, 0, 0x0f, 0x05];
        let size = (120 + code.len() + text.len()) as u64;
        let mut file = b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0\x02\0\x3e\0\x01\0\0\0".to_vec();
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
        file.extend(code);
        file.extend(text.as_bytes());
        let path = std::env::temp_dir().join(format!("slat-{name}-{}", std::process::id()));
        let mut options = OpenOptions::new();
        let options = options.write(true).create(true).truncate(true).mode(0o755);
        options.open(&path).unwrap().write_all(&file).unwrap();
        path
    }

    /// Runs `command`, and returns what it and slat have said.
    fn said(command: &mut Command) -> String {
        let output = command.output().unwrap();
        assert_eq!(output.status.code(), Some(7), "{output:?}");
        String::from_utf8(output.stderr).unwrap()
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
    fn a_static_child_that_names_the_device_is_told() {
        let path = program("static", "opens /dev/kvm\0");
        let line = format!("slat: {} is statically linked, so slat", path.display());
        // By fork and execvp, and by a shell.
        let alone = said(&mut forked(&path));
        assert!(
            alone.starts_with(&line) && alone.lines().count() == 1,
            "{alone}"
        );
        let shell = said(
            Command::new("/bin/sh")
                .args(["-c", "\"$0\"; exit $?"])
                .arg(&path),
        );
        assert!(shell.starts_with(&line), "{shell}");
        fs::remove_file(path).unwrap();
    }

    #[test]
    #[ignore = "a client"]
    fn other_static_children_are_not() {
        let path = program("other", "opens nothing");
        let alone = said(&mut forked(&path));
        assert_eq!(alone, "");
        fs::remove_file(path).unwrap();
        // What cannot be read, or is no program, is the kernel's to refuse.
        let empty = std::env::temp_dir().join(format!("slat-empty-{}", std::process::id()));
        drop(File::create(&empty).unwrap());
        assert!(forked(&empty).output().is_err());
        fs::remove_file(empty).unwrap();
        assert!(Command::new("/no/such/program").output().is_err());
    }
}
