//! Executes cases with qemu-aarch64, by `helper.c`.

use std::io::{Read, Write};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

/// The registers before or after a case.
#[derive(Clone, Copy, Debug, PartialEq)]
#[repr(C)]
pub struct Registers {
    pub x: [u64; 31],
    pub sp: u64,
    pub pc: u64,
    pub pstate: u64,
    pub fpcr: u32,
    pub fpsr: u32,
    /// The number of the signal that has ended the case.
    pub signal: u32,
    unused: u32,
    pub v: [[u64; 2]; 32],
}

pub const WINDOW: usize = 512;
/// Words of code of a case.
pub const WORDS: usize = 64;
/// The greatest number of cases in a batch.
pub const CASES: usize = 1024;
const PAGE: usize = 4096;

/// The address of the code of case 0. Random addresses hardly ever reach the helper and its mappings.
const CODE: u64 = 0x41_2340_0000;
const PAGES: u64 = 0x50_0000_0000;
/// The distance between sets. The interpreter has one set of pages, and qemu all of them: a program that adds a random
/// number to its base must not get to another set.
const APART: u64 = 0x3_57f9_1000;

/// The rights of the two pages of each set: read and write. The window of a case's memory covers parts of both pages.
pub const RIGHTS: [[[bool; 2]; 2]; 5] = [
    [[true, true], [true, true]],
    [[true, true], [false, false]],
    [[true, true], [true, false]],
    [[false, false], [true, true]],
    [[true, false], [true, true]],
];

/// A case and its result, in the layout of `helper.c`.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct Record {
    pub before: Registers,
    pub after: Registers,
    pub memory: [u8; WINDOW],
    pub memory_after: [u8; WINDOW],
    pub code: [u32; WORDS],
    /// The word at which execution begins.
    pub start: u32,
    /// The set of pages.
    pub set: u32,
}

#[repr(C)]
struct File {
    cases: u64,
    unused: [u64; 511],
    pages: [[u8; 2 * PAGE]; RIGHTS.len()],
    records: [Record; CASES],
}

/// Returns the address of the first word of a case.
pub fn code(case: usize) -> u64 {
    CODE + (case * WORDS * 4) as u64
}

/// Returns the address of the border between the two pages of a set.
pub fn border(set: u32) -> u64 {
    PAGES + u64::from(set) * APART + PAGE as u64
}

pub struct Qemu {
    file: *mut File,
    _descriptor: OwnedFd,
    program: PathBuf,
    child: Child,
    to: ChildStdin,
    from: ChildStdout,
}

fn installed(program: &str) -> bool {
    Command::new(program)
        .arg("--version")
        .output()
        .is_ok_and(|output| output.status.success())
}

const COMPILER: &str = "aarch64-linux-gnu-gcc";
const EMULATOR: &str = "qemu-aarch64";

fn built() -> PathBuf {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/oracle/helper.c");
    let process = std::process::id();
    let thread = std::thread::current().id();
    let name = format!("a64-oracle-{process}-{thread:?}");
    let program = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    let flags = "-O1 -static -nostdlib -ffreestanding -fno-stack-protector -mgeneral-regs-only -Wall -Werror \
        -Wl,-Ttext-segment=0x312340000000";
    let status = Command::new(COMPILER)
        .args(flags.split(' '))
        .arg("-o")
        .args([&program, &source])
        .arg("-lgcc")
        .status()
        .unwrap();
    assert!(status.success());
    program
}

impl Qemu {
    /// Starts qemu-aarch64. If it is not installed, prints that and returns `None`.
    pub fn start() -> Option<Self> {
        for program in [EMULATOR, COMPILER] {
            if !installed(program) {
                eprintln!("skipped: {program} is not installed");
                return None;
            }
        }
        let program = built();
        // SAFETY: the name is a string that ends with 0; the result is checked.
        let descriptor = unsafe { libc::memfd_create(c"cases".as_ptr(), 0) };
        assert!(descriptor >= 0);
        // SAFETY: the descriptor is open, and nothing else owns it.
        let descriptor = unsafe { OwnedFd::from_raw_fd(descriptor) };
        let bytes = size_of::<File>();
        // SAFETY: the call has no pointers.
        let status = unsafe { libc::ftruncate(descriptor.as_raw_fd(), bytes as i64) };
        assert_eq!(status, 0);
        let rights = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: the kernel chooses the address.
        let file = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                bytes,
                rights,
                libc::MAP_SHARED,
                descriptor.as_raw_fd(),
                0,
            )
        };
        assert_ne!(file, libc::MAP_FAILED);
        let mut child = Command::new(EMULATOR)
            .args(["-cpu", "max,pauth=off,sve=off,sme=off"])
            .arg(&program)
            .arg(descriptor.as_raw_fd().to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let (to, from) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
        Some(Self {
            file: file.cast(),
            _descriptor: descriptor,
            program,
            child,
            to,
            from,
        })
    }

    /// Waits until the helper answers or has ended.
    fn wait(&self) {
        let mut poll = libc::pollfd {
            fd: self.from.as_raw_fd(),
            events: libc::POLLIN,
            revents: 0,
        };
        // SAFETY: the list has one descriptor.
        let ready = unsafe { libc::poll(&mut poll, 1, 600_000) };
        assert_eq!(ready, 1, "the helper does not answer: a case does not end");
    }

    /// Executes cases. Afterwards the records contain the results.
    pub fn run(&mut self, cases: &mut [Record]) {
        if cases.is_empty() {
            return;
        }
        // SAFETY: the file is mapped with all its records. The helper does not access the file before it is told to.
        let file = unsafe { &mut *self.file };
        file.cases = cases.len() as u64;
        file.records[..cases.len()].copy_from_slice(cases);
        self.to.write_all(&[0]).unwrap();
        self.to.flush().unwrap();
        self.wait();
        let mut answer = [0];
        let answered = self.from.read_exact(&mut answer);
        assert!(
            answered.is_ok(),
            "the helper has ended: {:?}",
            self.child.wait()
        );
        // SAFETY: the helper has answered, and does not access the file before the next batch.
        let file = unsafe { &*self.file };
        cases.copy_from_slice(&file.records[..cases.len()]);
    }
}

impl Drop for Qemu {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = std::fs::remove_file(&self.program);
        // SAFETY: the mapping belongs to this value, and nothing refers to it any more.
        unsafe { libc::munmap(self.file.cast(), size_of::<File>()) };
    }
}

impl Registers {
    pub fn zero() -> Self {
        Self {
            x: [0; 31],
            sp: 0,
            pc: 0,
            pstate: 0,
            fpcr: 0,
            fpsr: 0,
            signal: 0,
            unused: 0,
            v: [[0; 2]; 32],
        }
    }
}
