//! The conversation with the process that runs the VM (see [`slat_kvm::publish`]).

use std::io::{BufRead, BufReader, ErrorKind, Write};
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use slat_kvm::debugger::BLOCK;
use slat_kvm::publish::{DEBUG, MOST_BYTES, VERSION};

use crate::processes::{self, why_not};

/// The maximum time to wait for a reply of the process.
const PATIENCE: Duration = Duration::from_secs(10);

/// The address space of an address: guest-virtual or guest-physical.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Space {
    Linear,
    Physical,
}

/// The reason why the process holds all vCPUs.
#[derive(Debug, PartialEq, Eq)]
pub enum Stopped {
    /// The VM has stopped because `slat gdb` has asked for the stop.
    Asked,
    /// The vCPU with this id has reached an instruction with a probe (a breakpoint).
    Code(u32),
    /// The vCPU with this id has accessed memory that a probe of this kind watches, at this address.
    Data(u32, String, u64),
    /// The vCPU with this id has executed one instruction.
    Step(u32),
    /// The VM has no vCPUs any more, or the process has ended.
    Gone,
}

impl Stopped {
    /// Parses the words after `stopped` in a reply.
    fn parse(words: &[&str]) -> Option<Self> {
        Some(match words {
            [] => Stopped::Asked,
            ["gone"] => Stopped::Gone,
            [vcpu, "code"] => Stopped::Code(vcpu.parse().ok()?),
            [vcpu, "step"] => Stopped::Step(vcpu.parse().ok()?),
            [vcpu, kind, at] => {
                Stopped::Data(vcpu.parse().ok()?, (*kind).to_owned(), at.parse().ok()?)
            }
            _ => return None,
        })
    }
}

/// A process that runs a VM.
pub struct Process {
    pid: i32,
    stream: BufReader<UnixStream>,
}

impl Process {
    /// Finds the process and connects to it.
    ///
    /// # Errors
    /// A sentence for the user.
    pub fn connect(pid: i32) -> Result<Self, String> {
        let stream = processes::connect(pid).ok_or_else(|| why_not(pid))?;
        let limited = stream
            .set_read_timeout(Some(PATIENCE))
            .and_then(|()| stream.set_write_timeout(Some(PATIENCE)));
        limited.map_err(|error| format!("the socket of process {pid}: {error}"))?;
        let stream = BufReader::new(stream);
        Ok(Process { pid, stream })
    }

    /// Begins to debug a VM of the process. The process then holds the VM's vCPUs. Returns the VM's number.
    ///
    /// # Errors
    /// A sentence for the user.
    pub fn attach(&mut self, vm: Option<u64>) -> Result<u64, String> {
        let vm = vm.map(|vm| format!(" {vm}")).unwrap_or_default();
        self.say(&format!("{DEBUG}{vm}"))?;
        if self.line()? != format!("slat {VERSION}") {
            return Err(format!(
                "process {} runs on another version of slat",
                self.pid
            ));
        }
        let line = self.line()?;
        match line.split_once(' ') {
            Some(("vm", number)) => number.parse().map_err(|_| self.nonsense(&line)),
            Some(("refused", why)) => Err(format!("process {} {why}", self.pid)),
            _ => Err(self.nonsense(&line)),
        }
    }

    /// Returns the descriptor on which to wait before calling [`stopped`](Self::stopped). `None`: a reply was already
    /// received.
    pub fn descriptor(&self) -> Option<RawFd> {
        match self.stream.buffer() {
            [] => Some(self.stream.get_ref().as_raw_fd()),
            _ => None,
        }
    }

    /// Waits until the process holds all vCPUs.
    ///
    /// # Errors
    /// A sentence for the user: a vCPU does not stop, or the reply cannot be parsed.
    pub fn stopped(&mut self) -> Result<Stopped, String> {
        let line = match self.line() {
            Ok(line) => line,
            Err(_) if self.has_ended() => return Ok(Stopped::Gone),
            Err(error) => return Err(error),
        };
        let words: Vec<_> = line.split(' ').collect();
        match words[..] {
            ["stopped", ref rest @ ..] => Stopped::parse(rest),
            _ => None,
        }
        .ok_or_else(|| self.nonsense(&line))
    }

    /// Whether the process has closed its end of the connection.
    fn has_ended(&mut self) -> bool {
        matches!(self.stream.fill_buf(), Ok([]))
    }

    /// Makes the process hold all vCPUs, if they run.
    pub fn stop(&mut self) -> Result<(), String> {
        self.say("stop")
    }

    /// Resumes all vCPUs. `own` lists vCPUs with the way in which each of them continues (run or step). All other vCPUs
    /// continue in the way `others`.
    pub fn resume(&mut self, others: &str, own: &[(u32, &str)]) -> Result<(), String> {
        let own: String = (own.iter())
            .map(|(vcpu, word)| format!(" {vcpu}:{word}"))
            .collect();
        self.do_or_fail(&format!("resume {others}{own}"))
    }

    /// Replaces all breakpoints and watchpoints of the process by `probes`. Each probe has a kind, an address and a
    /// number of bytes.
    pub fn set_probes<'a>(
        &mut self,
        probes: impl Iterator<Item = &'a (&'static str, u64, u64)>,
    ) -> Result<(), String> {
        let probes: String = probes
            .map(|(kind, at, bytes)| format!(" {kind}:{at}:{bytes}"))
            .collect();
        self.do_or_fail(&format!("probes{probes}"))
    }

    /// Returns the ids of the vCPUs.
    pub fn vcpus(&mut self) -> Result<Vec<u32>, String> {
        let line = self.ask("vcpus")?;
        let ids = line.strip_prefix("vcpus").map(str::split_whitespace);
        ids.and_then(|ids| ids.map(str::parse).collect::<Result<_, _>>().ok())
            .ok_or_else(|| self.nonsense(&line))
    }

    /// Returns the values of all registers of a vCPU. `None`: the vCPU does not exist, or the VMM is using it.
    pub fn registers(&mut self, vcpu: u32) -> Result<Option<[u8; BLOCK]>, String> {
        let value = self.value(&format!("get {vcpu}"))?;
        Ok(value.and_then(|bytes| bytes.try_into().ok()))
    }

    /// Sets a register. Returns `false` if the process refuses.
    pub fn set_register(&mut self, vcpu: u32, number: usize, value: &[u8]) -> Result<bool, String> {
        self.done(&format!("set {vcpu} {number} {}", text(value)))
    }

    /// Reads memory page by page, up to the first page that is not mapped. Returns the number of bytes read.
    pub fn read(
        &mut self,
        vcpu: u32,
        space: Space,
        at: u64,
        to: &mut [u8],
    ) -> Result<usize, String> {
        let space = name(space);
        let mut done = 0;
        while done < to.len() {
            let (at, len) = part(at, done, to.len());
            match self.value(&format!("read {vcpu} {space} {at} {len}"))? {
                Some(bytes) if bytes.len() == len => to[done..done + len].copy_from_slice(&bytes),
                _ => break,
            }
            done += len;
        }
        Ok(done)
    }

    /// Writes memory. Returns whether all of it was written.
    pub fn write(
        &mut self,
        vcpu: u32,
        space: Space,
        at: u64,
        bytes: &[u8],
    ) -> Result<bool, String> {
        let space = name(space);
        let mut done = 0;
        while done < bytes.len() {
            let (at, len) = part(at, done, bytes.len());
            let bytes = text(&bytes[done..done + len]);
            if !self.done(&format!("write {vcpu} {space} {at} {bytes}"))? {
                return Ok(false);
            }
            done += len;
        }
        Ok(true)
    }

    fn say(&mut self, line: &str) -> Result<(), String> {
        let said = self
            .stream
            .get_mut()
            .write_all(format!("{line}\n").as_bytes());
        said.map_err(|error| format!("process {} has ended: {error}", self.pid))
    }

    fn line(&mut self) -> Result<String, String> {
        let mut line = String::new();
        match self.stream.read_line(&mut line) {
            Ok(_) if line.ends_with('\n') => {
                line.pop();
                Ok(line)
            }
            Err(error) if [ErrorKind::WouldBlock, ErrorKind::TimedOut].contains(&error.kind()) => {
                Err(format!(
                    "process {} does not answer; it may be stopped, or a vCPU waits for its memory",
                    self.pid
                ))
            }
            _ => Err(format!("process {} has ended", self.pid)),
        }
    }

    fn ask(&mut self, line: &str) -> Result<String, String> {
        self.say(line)?;
        self.line()
    }

    /// Sends a request, and returns the bytes in the reply.
    fn value(&mut self, line: &str) -> Result<Option<Vec<u8>>, String> {
        let line = self.ask(line)?;
        Ok(line.strip_prefix("value ").and_then(bytes))
    }

    fn done(&mut self, line: &str) -> Result<bool, String> {
        Ok(self.ask(line)? == "done")
    }

    fn do_or_fail(&mut self, line: &str) -> Result<(), String> {
        match self.done(line)? {
            true => Ok(()),
            false => Err(format!("process {} refuses: {line}", self.pid)),
        }
    }

    fn nonsense(&self, line: &str) -> String {
        format!("process {} says what makes no sense: {line}", self.pid)
    }
}

fn name(space: Space) -> &'static str {
    match space {
        Space::Linear => "linear",
        Space::Physical => "physical",
    }
}

/// Returns the address and the length of the next part of a transfer, after `done` of `len` bytes from address `at`.
/// The part does not cross a page boundary.
fn part(at: u64, done: usize, len: usize) -> (u64, usize) {
    let at = at.wrapping_add(done as u64);
    let in_page = (0x1000 - at % 0x1000) as usize;
    (at, (len - done).min(in_page).min(MOST_BYTES))
}

fn text(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn bytes(text: &str) -> Option<Vec<u8>> {
    let digits = text.as_bytes().chunks(2);
    digits
        .map(|two| u8::from_str_radix(std::str::from_utf8(two).ok()?, 16).ok())
        .collect()
}
