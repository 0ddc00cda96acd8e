//! Starts QEMU, measures its processor time, and sends commands to its monitor or to the shell of a Linux guest.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use crate::Linux;
use crate::arch::x86_64::machine::Failure;
use crate::others;

pub const PROGRAM: &str = "qemu-system-x86_64";
/// The line that the guest's init program prints when its shell is ready (conformance/vmm/guest/init).
const READY: &str = "slat: guest ready";
/// A time limit that is longer than any step takes, even on a loaded machine.
const PATIENCE: Duration = Duration::from_secs(600);

/// Returns the version of QEMU, for example `QEMU 7.2.22`. `None` if QEMU is not installed.
pub fn version() -> Option<String> {
    others::version_of_qemu(PROGRAM)
}

/// The files that a PC boots, and the settings of the boot.
pub struct Payload {
    pub kernel: PathBuf,
    pub initrd: PathBuf,
    /// The disk, which the guest can only read.
    pub disk: PathBuf,
    /// The kernel's arguments, in addition to those for the console.
    pub arguments: &'static str,
    /// Whether a reset boots the guest again. If not, QEMU ends at a reset.
    pub reboots: bool,
}

/// A running QEMU. Dropping this value ends QEMU.
pub struct Qemu {
    child: Child,
    console: Stream,
    complaints: Stream,
    input: ChildStdin,
    /// The number of bytes of the console output that were already searched.
    position: usize,
}

impl Qemu {
    /// Starts a PC with one CPU on slat, or on QEMU's own software CPU.
    pub fn start(linux: &Linux, on_slat: bool, payload: &Payload) -> Result<Self, Failure> {
        let mut command = match on_slat {
            true => {
                let mut command = Command::new(&linux.slat);
                command.arg("run");
                for policy in &linux.policies {
                    command.args(["--set", policy]);
                }
                command.args(["--", PROGRAM, "-accel", "kvm", "-cpu", "host"]);
                command
            }
            false => {
                let mut command = Command::new(PROGRAM);
                command.args(["-accel", "tcg", "-cpu", "max"]);
                command
            }
        };
        let machine = "-M pc -smp 1 -m 512 -nodefaults -no-user-config -display none -serial stdio -monitor none";
        command.args(machine.split(' '));
        if !payload.reboots {
            command.arg("-no-reboot");
        }
        command.arg("-kernel").arg(&payload.kernel);
        command.arg("-initrd").arg(&payload.initrd);
        let arguments = format!("console=ttyS0 panic=-1 reboot=t {}", payload.arguments);
        command.args(["-append", &arguments]);
        // The disk is given by -blockdev with JSON options, because a path may contain any character.
        let node = serde_json::json!({"driver": "raw", "node-name": "disk", "read-only": true,
            "file": {"driver": "file", "filename": &payload.disk}});
        command.args(["-blockdev", &node.to_string()]);
        command.args(["-device", "virtio-blk-pci,drive=disk,ioeventfd=on"]);
        Self::spawn(command)
    }

    /// Starts a process that ends when this process ends.
    pub fn spawn(mut command: Command) -> Result<Self, Failure> {
        command.stdin(Stdio::piped());
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        // SAFETY: between fork and exec, the child makes only one system call, which is safe there. The call makes
        // the child end when this process ends.
        unsafe {
            command.pre_exec(
                || match libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) {
                    0 => Ok(()),
                    _ => Err(io::Error::last_os_error()),
                },
            );
        }
        let mut child = command.spawn()?;
        let (Some(input), Some(output), Some(errors)) =
            (child.stdin.take(), child.stdout.take(), child.stderr.take())
        else {
            unreachable!("all three are pipes");
        };
        Ok(Qemu {
            child,
            console: Stream::read(output),
            complaints: Stream::read(errors),
            input,
            position: 0,
        })
    }

    /// Makes QEMU's monitor execute `command`, and returns its output. The monitor uses QEMU's standard input and
    /// output.
    pub fn ask(&mut self, command: &str) -> Result<String, Failure> {
        const PROMPT: &str = "(qemu) ";
        self.expect(PROMPT)?;
        self.input.write_all(format!("{command}\n").as_bytes())?;
        let position = self.position;
        let answer = self.expect(PROMPT)?;
        // The search for the next prompt begins at this position.
        self.position = position + answer.len();
        Ok(answer)
    }

    /// Waits until the guest's shell is ready.
    pub fn boot(&mut self) -> Result<(), Failure> {
        self.expect(READY).map(drop)
    }

    /// Makes the guest's shell reset the machine, and waits for the shell of the next boot.
    pub fn reboot(&mut self) -> Result<(), Failure> {
        self.input.write_all(b"echo b >/proc/sysrq-trigger\n")?;
        self.boot()
    }

    /// Makes the guest's shell run `command`, which must succeed. Returns the time that the command took.
    pub fn run(&mut self, command: &str) -> Result<Duration, Failure> {
        const BEGIN: &str = "<begins>";
        const END: &str = "<ends:";
        // The command quotes each mark in two parts, so that the terminal's echo of the command does not match the
        // mark.
        let line = format!("echo '<be''gins>'; {command}; echo '<en''ds:'$?'>'\n");
        self.input.write_all(line.as_bytes())?;
        self.expect(BEGIN)?;
        let began = Instant::now();
        let output = self.expect(END)?;
        let time = began.elapsed();
        let status = self.expect(">")?;
        match status.as_str() {
            "0" => Ok(time),
            _ => Err(format!("the guest: {command}: status {status}: {}", output.trim()).into()),
        }
    }

    /// Returns the processor time that the process has used.
    pub fn cpu_time(&self) -> Result<Duration, Failure> {
        let mut clock = 0;
        let mut time = libc::timespec {
            tv_sec: 0,
            tv_nsec: 0,
        };
        // SAFETY: the calls write to local variables. The process has not been waited for, so its id is not reused.
        let failed = unsafe {
            libc::clock_getcpuclockid(self.child.id() as libc::pid_t, &mut clock) != 0
                || libc::clock_gettime(clock, &mut time) != 0
        };
        if failed {
            return Err("the processor time of QEMU cannot be read".into());
        }
        Ok(Duration::new(time.tv_sec as u64, time.tv_nsec as u32))
    }

    /// Waits until the console shows `text`, after the text that was found last. Returns the output between the two
    /// texts.
    fn expect(&mut self, text: &str) -> Result<String, Failure> {
        match self.console.wait_for(text, self.position) {
            Some(at) => {
                let between = self.console.text(self.position..at);
                self.position = at + text.len();
                Ok(between)
            }
            None => {
                let last = |stream: &Stream| {
                    let all = stream.text(0..usize::MAX);
                    let lines: Vec<_> = all.lines().collect();
                    lines[lines.len().saturating_sub(20)..].join("\n")
                };
                let (console, complaints) = (last(&self.console), last(&self.complaints));
                Err(format!("QEMU's guest does not say {text:?}:\n{console}\n{complaints}").into())
            }
        }
    }
}

impl Drop for Qemu {
    fn drop(&mut self) {
        // QEMU may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A file that is deleted when this value is dropped.
pub struct TemporaryFile(pub PathBuf);

impl TemporaryFile {
    /// Makes an empty file. At most one file of each `kind` may exist at a time.
    pub fn new(kind: &str) -> io::Result<Self> {
        let name = format!("slat-bench-{}.{kind}", std::process::id());
        let file = TemporaryFile(std::env::temp_dir().join(name));
        File::create_new(&file.0)?;
        Ok(file)
    }
}

impl Drop for TemporaryFile {
    fn drop(&mut self) {
        // A failure is ignored, because nothing can be done about it.
        let _ = std::fs::remove_file(&self.0);
    }
}

/// The output of a program. A thread reads the output, so that the program never waits for space in the pipe.
struct Stream(Arc<(Mutex<Printed>, Condvar)>);

#[derive(Default)]
struct Printed {
    bytes: Vec<u8>,
    is_closed: bool,
}

impl Stream {
    fn read(mut pipe: impl Read + Send + 'static) -> Self {
        let stream = Stream(Arc::default());
        let shared = stream.0.clone();
        thread::spawn(move || {
            let mut buffer = [0; 4096];
            loop {
                let count = pipe.read(&mut buffer).unwrap_or(0);
                let mut printed = lock(&shared.0);
                printed.bytes.extend_from_slice(&buffer[..count]);
                printed.is_closed = count == 0;
                shared.1.notify_all();
                if count == 0 {
                    return;
                }
            }
        });
        stream
    }

    /// Waits for `text` in the output from position `from` on, and returns the text's position. `None`: the program has
    /// ended, or the text does not appear in time.
    fn wait_for(&self, text: &str, from: usize) -> Option<usize> {
        let end = Instant::now() + PATIENCE;
        let (printed, changed) = &*self.0;
        let mut printed = lock(printed);
        loop {
            let mut parts = printed.bytes[from..].windows(text.len());
            if let Some(at) = parts.position(|part| part == text.as_bytes()) {
                return Some(from + at);
            }
            let left = end.saturating_duration_since(Instant::now());
            if printed.is_closed || left.is_zero() {
                return None;
            }
            let waited = changed.wait_timeout(printed, left);
            printed = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn text(&self, range: std::ops::Range<usize>) -> String {
        let printed = lock(&self.0.0);
        let end = range.end.min(printed.bytes.len());
        String::from_utf8_lossy(&printed.bytes[range.start..end]).into_owned()
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
