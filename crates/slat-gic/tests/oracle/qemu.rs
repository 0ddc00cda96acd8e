//! Runs a list of accesses on a GIC of qemu-system-aarch64.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

const ASSEMBLER: &str = "aarch64-linux-gnu-as";
const LINKER: &str = "aarch64-linux-gnu-ld";
const EMULATOR: &str = "qemu-system-aarch64";

/// The time after which QEMU is ended: then the list of results is shorter, but a test does not wait for ever.
const SECONDS: &str = "120";

/// An access as the payload has it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Access {
    /// Reads a width in bytes.
    Read(usize, u64),
    Write(usize, u64, u64),
    /// Reads the system register with this index in the payload's list.
    ReadRegister(u64),
    WriteRegister(u64, u64),
}

impl Access {
    fn words(self) -> [u64; 4] {
        let kind = |width: usize, byte: u64| match width {
            1 => byte,
            4 => byte + 1,
            _ => byte + 2,
        };
        let [first, second, third] = match self {
            Access::Read(width, address) => [kind(width, 1), address, 0],
            Access::Write(width, address, value) => [kind(width, 4), address, value],
            Access::ReadRegister(index) => [7, index, 0],
            Access::WriteRegister(index, value) => [8, index, value],
        };
        [first, second, third, 0]
    }
}

/// A machine that executes lists.
pub struct Qemu {
    directory: PathBuf,
    version: &'static str,
}

fn installed(program: &str) -> bool {
    let output = Command::new(program).arg("--version").output();
    output.is_ok_and(|output| output.status.success())
}

fn run(command: &mut Command) {
    let output = command.output().unwrap();
    assert!(output.status.success(), "{command:?}: {output:?}");
}

impl Qemu {
    /// Builds the payload for GICs of a version. Returns `None`, and says why, where a tool is not installed.
    pub fn new(version: &'static str) -> Option<Self> {
        for program in [ASSEMBLER, LINKER, EMULATOR] {
            if !installed(program) {
                eprintln!("skipped: there is no {program}");
                return None;
            }
        }
        let name = format!("gic-oracle-{version}-{}", std::process::id());
        let directory = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
        fs::create_dir_all(&directory).unwrap();
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/oracle/payload.s");
        let (object, program) = (directory.join("payload.o"), directory.join("payload"));
        run(Command::new(ASSEMBLER).arg("-o").args([&object, &source]));
        run(Command::new(LINKER)
            .arg("-Ttext=0x40100000")
            .arg("-o")
            .args([&program, &object]));
        Some(Qemu { directory, version })
    }

    /// Returns the result of each read.
    pub fn execute(&self, accesses: &[Access]) -> Vec<u64> {
        let list = self.directory.join("list");
        let words = accesses.iter().flat_map(|access| access.words());
        let words = words.chain([0; 4]);
        let bytes: Vec<u8> = words.flat_map(u64::to_le_bytes).collect();
        fs::write(&list, bytes).unwrap();
        let mut command = Command::new("timeout");
        command.args([SECONDS, EMULATOR, "-M"]);
        command.arg(format!("virt,gic-version={}", self.version));
        command.args(
            "-cpu cortex-a57 -m 256 -nographic -nodefaults -serial stdio -monitor none".split(' '),
        );
        command.arg("-kernel").arg(self.directory.join("payload"));
        command
            .arg("-device")
            .arg(format!("loader,addr=0x48000000,file={}", list.display()));
        let output = command.stdin(Stdio::null()).output().unwrap();
        assert!(
            output.status.success(),
            "{command:?}: {:?} {}",
            output.status,
            String::from_utf8_lossy(&output.stderr)
        );
        let results = output.stdout.chunks_exact(8);
        assert!(results.remainder().is_empty());
        results
            .map(|bytes| u64::from_le_bytes(bytes.try_into().unwrap()))
            .collect()
    }
}

impl Drop for Qemu {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.directory);
    }
}
