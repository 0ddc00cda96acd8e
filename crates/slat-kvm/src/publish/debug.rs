//! The conversation with `slat gdb` (the reader). The conversation begins with `debug [VM]`, and ends when the reader
//! closes the socket.
//!
//! ```text
//! slat 1                       the version of this text
//! refused WHY                  the end: there is no such VM, or it has a debugger
//! vm 0                         or the number of the VM, whose vCPUs are being held from now on
//! ```
//!
//! The process sends one of these lines each time that the VM has run and all its vCPUs are held again:
//!
//! ```text
//! stopped                      the reader has asked to stop the VM
//! stopped 1 code               vCPU 1 is about to execute an instruction with a probe
//! stopped 1 write 4096         vCPU 1 has accessed this address, which a probe of this kind watches: write, read or
//!                              access
//! stopped 1 step               vCPU 1 has executed an instruction
//! stopped gone                 the VM has no vCPUs any more: the end
//! ```
//!
//! The process answers each line of the reader by one line. The answer is `failed` if the request fails. Only `stop`
//! has no answer: the line `stopped` follows when the vCPUs are held.
//!
//! ```text
//! vcpus                        vcpus 0 1 …: their ids
//! get 1                        value HEX: all registers of vCPU 1 (`debugger::REGISTERS`)
//! set 1 16 HEX                 done: register 16 has this value
//! read 1 linear 4096 16        value HEX: memory at a linear address of vCPU 1, or at a `physical` one
//! write 1 linear 4096 HEX      done
//! probes code:4096:1 write:8192:8
//!                              done: these are all probes from now on
//! resume on 1:step             done: all vCPUs go `on` but 1, which executes one instruction; `stay` is the third word
//! stop                         nothing until the vCPUs are held
//! ```
//!
//! The conversation has its own thread, so that other readers can ask for counters meanwhile. This thread is started by
//! a thread of slat to which the client's seccomp filters do not apply. While the VM runs, the conversation's thread
//! checks every 10 ms for input from the reader. A vCPU that stops wakes the conversation's thread.

use super::socket::Own;
use super::writer::{VERSION, Writer};
use crate::arch::{Probe, ProbeHit, ProbeKind};
use crate::background::{self, Background};
use crate::debugger::{self, Go, MOST_PROBES, Request, Session, Space, Stopped};
use crate::heap;
use crate::process::PerProcess;
use crate::signals::synchronous;
use std::ffi::CStr;
use std::fmt::{self, Write as _};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

/// The first word of the conversation.
pub const DEBUG: &str = "debug";
/// The greatest number of bytes of memory in one request.
pub const MOST_BYTES: usize = 1024;

/// The interval at which the conversation's thread checks for input from the reader while it waits for vCPUs.
const LOOKS_EVERY: Duration = Duration::from_millis(10);

/// The longest line of a reader: a line with all probes.
const LONGEST_LINE: usize = 4096 + 32 * MOST_PROBES;

/// The names of the kinds of probes.
const KINDS: [(&str, ProbeKind); 4] = [
    ("code", ProbeKind::Execute),
    ("write", ProbeKind::Write),
    ("read", ProbeKind::Read),
    ("access", ProbeKind::Access),
];

#[derive(Default)]
struct Conversation(Mutex<Option<(Own, Session)>>);

static CONVERSATION: PerProcess<Conversation> = PerProcess::new();

/// Begins a conversation with the reader at the socket `asked`. `words` are the words of the reader's line after
/// `debug`.
pub(super) fn begin<'a>(asked: Own, mut words: impl Iterator<Item = &'a str>) {
    let vm = words.next().map(str::parse).transpose();
    let session = match vm {
        Ok(vm) => Session::attach(vm),
        Err(_) => Err("does not understand the question"),
    };
    let mut to = Writer::new(&asked);
    let begun = match &session {
        Ok(session) => writeln!(to, "slat {VERSION}\nvm {}", session.vm),
        Err(why) => writeln!(to, "slat {VERSION}\nrefused {why}"),
    };
    if let (Ok(session), Ok(())) = (session, begun.and_then(|()| to.finish())) {
        let conversation = CONVERSATION.get();
        conversation.put(Some((asked, session)));
        if !background::start(conversation) {
            conversation.put(None);
        }
    }
}

impl Conversation {
    /// Stores `next`, the socket and session for the thread that starts next, and returns the value stored before. At
    /// most one session exists at a time.
    fn put(&self, next: Option<(Own, Session)>) -> Option<(Own, Session)> {
        let mut held = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        std::mem::replace(&mut *held, next)
    }
}

impl Background for Conversation {
    const NAME: &CStr = c"slat-gdb";
    const WITHOUT: &str = "`slat gdb` cannot debug this process";
    const STACK: usize = 128 << 10;

    fn run(&'static self) {
        // This thread accesses guest memory, so it needs the signals of guarded accesses and kicks.
        slat_guard::change_mask(libc::SIG_UNBLOCK, synchronous());
        if let Some((asked, session)) = self.put(None) {
            // An error means that the reader has closed the socket, or that the VM has ended.
            let _ = talk(&asked, session);
        }
    }
}

/// Answers the reader's lines until the reader closes the socket or the VM ends.
fn talk(asked: &Own, mut session: Session) -> fmt::Result {
    let mut to = Writer::new(asked);
    let mut line = [0; LONGEST_LINE];
    let mut len = 0;
    loop {
        let news = session.news();
        let stopped = match session.runs() {
            true => session.stopped(),
            false => None,
        };
        if let Some(stopped) = stopped {
            say(&mut to, stopped)?;
            to.finish()?;
        }
        if stopped == Some(Stopped::Gone) {
            return Ok(());
        }
        let runs = session.runs();
        match asked.receive_more(&mut line[len..], !runs) {
            None => return Ok(()),
            Some(0) if runs => session.wait(news, LOOKS_EVERY),
            Some(more) => len += more,
        }
        while let Some(end) = line[..len].iter().position(|byte| *byte == b'\n') {
            let words = std::str::from_utf8(&line[..end]).map_err(|_| fmt::Error)?;
            answer(&mut to, &mut session, words)?;
            to.finish()?;
            line.copy_within(end + 1..len, 0);
            len -= end + 1;
        }
    }
}

fn say(to: &mut Writer<'_>, stopped: Stopped) -> fmt::Result {
    match stopped {
        Stopped::Asked => writeln!(to, "stopped"),
        Stopped::Gone => writeln!(to, "stopped gone"),
        Stopped::Hit(vcpu, ProbeHit::Code) => writeln!(to, "stopped {vcpu} code"),
        Stopped::Hit(vcpu, ProbeHit::Step) => writeln!(to, "stopped {vcpu} step"),
        Stopped::Hit(vcpu, ProbeHit::Data(kind, at)) => {
            let (name, _) = KINDS
                .iter()
                .find(|known| known.1 == kind)
                .ok_or(fmt::Error)?;
            writeln!(to, "stopped {vcpu} {name} {at}")
        }
    }
}

/// Answers one line of the reader.
fn answer(to: &mut Writer<'_>, session: &mut Session, line: &str) -> fmt::Result {
    let mut words = line.split(' ');
    let done = match words.next() {
        Some("stop") => {
            // If the VM is held already, `stopped` was sent when the VM was held.
            if session.runs() {
                session.stop();
            }
            return Ok(());
        }
        Some("vcpus") => {
            to.write_str("vcpus")?;
            let mut written = Ok(());
            session.each(|vcpu| written = written.and_then(|()| write!(to, " {}", vcpu.id())));
            written?;
            return to.write_char('\n');
        }
        Some("get") => {
            let mut block = [0; debugger::BLOCK];
            let vcpu = words.next().and_then(|id| id.parse().ok());
            match vcpu.filter(|vcpu| session.request(*vcpu, &mut Request::Get(&mut block))) {
                Some(_) => return value(to, &block),
                None => None,
            }
        }
        Some("read") => {
            let mut bytes = [0; MOST_BYTES];
            match read(session, words, &mut bytes) {
                Some(bytes) => return value(to, bytes),
                None => None,
            }
        }
        Some("set") => set(session, words),
        Some("write") => write(session, words),
        Some("probes") => probes(session, words),
        Some("resume") => resume(session, words),
        _ => None,
    };
    to.write_str(done.map_or("failed\n", |()| "done\n"))
}

/// Sends an answer: `value` and the bytes in hexadecimal digits.
fn value(to: &mut Writer<'_>, bytes: &[u8]) -> fmt::Result {
    to.write_str("value ")?;
    bytes.iter().try_for_each(|byte| write!(to, "{byte:02x}"))?;
    to.write_char('\n')
}

/// Parses bytes from hexadecimal text.
fn bytes<'a>(text: &str, to: &'a mut [u8]) -> Option<&'a [u8]> {
    let to = to.get_mut(..text.len() / 2)?;
    for (byte, digits) in to.iter_mut().zip(text.as_bytes().chunks_exact(2)) {
        *byte = u8::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok()?;
    }
    text.len().is_multiple_of(2).then_some(to)
}

type Words<'a> = std::str::Split<'a, char>;

/// Parses a vCPU's id, the kind of an address, and the address.
fn place(words: &mut Words<'_>) -> Option<(u32, Space, u64)> {
    let vcpu = words.next()?.parse().ok()?;
    let space = match words.next()? {
        "linear" => Space::Linear,
        "physical" => Space::Physical,
        _ => return None,
    };
    Some((vcpu, space, words.next()?.parse().ok()?))
}

fn read<'a>(session: &Session, mut words: Words<'_>, to: &'a mut [u8]) -> Option<&'a [u8]> {
    let (vcpu, space, at) = place(&mut words)?;
    let len: usize = words.next()?.parse().ok()?;
    let to = to.get_mut(..len)?;
    session
        .request(vcpu, &mut Request::Read(space, at, to))
        .then_some(to)
}

fn write(session: &Session, mut words: Words<'_>) -> Option<()> {
    let (vcpu, space, at) = place(&mut words)?;
    let mut room = [0; MOST_BYTES];
    let bytes = bytes(words.next()?, &mut room)?;
    session
        .request(vcpu, &mut Request::Write(space, at, bytes))
        .then_some(())
}

fn set(session: &Session, mut words: Words<'_>) -> Option<()> {
    let vcpu = words.next()?.parse().ok()?;
    let register = words.next()?.parse().ok()?;
    let mut room = [0; 16];
    let value = bytes(words.next()?, &mut room)?;
    session
        .request(vcpu, &mut Request::Set(register, value))
        .then_some(())
}

fn probes(session: &Session, words: Words<'_>) -> Option<()> {
    let mut probes = heap::with_room(MOST_PROBES).ok()?;
    if words.clone().count() > MOST_PROBES {
        return None;
    }
    for word in words {
        let mut parts = word.split(':');
        let name = parts.next()?;
        let (_, kind) = *KINDS.iter().find(|known| known.0 == name)?;
        probes.push(Probe {
            kind,
            first: parts.next()?.parse().ok()?,
            bytes: parts.next()?.parse().ok()?,
        });
    }
    session.set_probes(probes);
    Some(())
}

fn resume(session: &mut Session, mut words: Words<'_>) -> Option<()> {
    let go = |word: &str| match word {
        "on" => Some(Go::On),
        "step" => Some(Go::Step),
        "stay" => Some(Go::Nowhere),
        _ => None,
    };
    let others = go(words.next()?)?;
    let own = |word: &str| {
        let (vcpu, word) = word.split_once(':')?;
        Some((vcpu.parse::<u32>().ok()?, go(word)?))
    };
    if words.clone().any(|word| own(word).is_none()) {
        return None;
    }
    let of = |vcpu| {
        let mut named = words.clone().filter_map(own);
        named.find(|(named, _)| *named == vcpu).map(|(_, go)| go)
    };
    session.resume(|vcpu| of(vcpu).unwrap_or(others)).ok()
}
