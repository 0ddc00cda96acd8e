//! Tests `slat gdb` with a small client of GDB's remote protocol.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Child, ChildStderr, Stdio};
use std::time::{Duration, Instant};

use super::harness::{Client, Scratch, poll, text, unless};

/// Register numbers of GDB, and the offset of some registers' values in the packet that has all registers.
const RAX: usize = 0;
const RIP: usize = 16;

/// Starts `slat gdb`, and connects to it as GDB does. Returns the process, its standard error, and the connection.
fn connect(scratch: &Scratch, pid: u32) -> (Child, BufReader<ChildStderr>, TcpStream) {
    let mut command = scratch.slat(&["gdb", &pid.to_string(), "--listen", ":0"]);
    let mut slat = command.stderr(Stdio::piped()).spawn().unwrap();
    let mut line = String::new();
    let mut errors = BufReader::new(slat.stderr.take().unwrap());
    errors.read_line(&mut line).unwrap();
    let port = line.trim_end().rsplit_once("target remote :");
    let (_, port) = port.unwrap_or_else(|| panic!("{line}"));
    let stream = TcpStream::connect(("127.0.0.1", port.parse().unwrap())).unwrap();
    (slat, errors, stream)
}

/// A debugger's connection, and the `slat gdb` that serves it. Dropping this kills `slat gdb`.
struct Gdb {
    stream: TcpStream,
    slat: Child,
    /// Keeps the pipe open, so that `slat gdb` can print.
    _errors: BufReader<ChildStderr>,
}

impl Gdb {
    fn start(scratch: &Scratch, pid: u32) -> Self {
        let (slat, errors, stream) = connect(scratch, pid);
        let patience = Some(Duration::from_secs(20));
        stream.set_read_timeout(patience).unwrap();
        let mut gdb = Gdb {
            stream,
            slat,
            _errors: errors,
        };
        gdb.ask("qSupported:swbreak+;hwbreak+;vContSupported+");
        gdb
    }

    fn byte(&mut self) -> u8 {
        let mut byte = [0];
        self.stream.read_exact(&mut byte).unwrap();
        byte[0]
    }

    fn say(&mut self, packet: &str) {
        let sum = packet.bytes().fold(0u8, u8::wrapping_add);
        write!(self.stream, "${packet}#{sum:02x}").unwrap();
        assert_eq!(self.byte(), b'+', "{packet}");
    }

    /// Reads a packet. An asterisk means that the character before it is repeated.
    fn reply(&mut self) -> String {
        assert_eq!(self.byte(), b'$');
        let mut reply = String::new();
        loop {
            match self.byte() {
                b'#' => break,
                b'*' => {
                    let last = reply.chars().next_back().unwrap();
                    let more = self.byte() - 29;
                    reply.extend((0..more).map(|_| last));
                }
                byte => reply.push(byte.into()),
            }
        }
        let _sum = (self.byte(), self.byte());
        self.stream.write_all(b"+").unwrap();
        reply
    }

    fn ask(&mut self, packet: &str) -> String {
        self.say(packet);
        self.reply()
    }

    fn done(&mut self, packet: &str) {
        assert_eq!(self.ask(packet), "OK", "{packet}");
    }

    /// Returns the value of a vCPU's register.
    fn register(&mut self, vcpu: u32, number: usize) -> u64 {
        self.done(&format!("Hg{:x}", vcpu + 1));
        number_of(&self.ask(&format!("p{number:x}")))
    }

    /// Resumes the VM by `packet`, and waits until the VM stops.
    fn until_stop(&mut self, packet: &str) -> String {
        self.ask(packet)
    }

    fn interrupt(&mut self) -> String {
        self.stream.write_all(&[3]).unwrap();
        self.reply()
    }

    fn kill(&mut self) {
        self.slat.kill().unwrap();
        self.slat.wait().unwrap();
    }
}

impl Drop for Gdb {
    fn drop(&mut self) {
        let _ = self.slat.kill();
        let _ = self.slat.wait();
    }
}

/// Parses a hexadecimal number whose first byte is the lowest.
fn number_of(digits: &str) -> u64 {
    let bytes = digits.as_bytes().chunks(2);
    bytes.rev().fold(0, |all, two| {
        let two = std::str::from_utf8(two).unwrap();
        all << 8 | u64::from_str_radix(two, 16).unwrap_or_else(|_| panic!("{digits}"))
    })
}

/// Starts a client with two vCPUs, and attaches a debugger to its VM.
fn debugged(scratch: &Scratch) -> (Client, Gdb) {
    let client = scratch.start(&[], "two_vcpus");
    scratch.published(client.pid());
    let gdb = Gdb::start(scratch, client.pid());
    (client, gdb)
}

/// Waits until the VM of the process executes instructions.
fn executes(scratch: &Scratch, pid: u32) {
    let counted = || {
        let process = scratch.published(pid);
        process["total"]["cpu"]["instructions"].as_u64().unwrap()
    };
    let first = counted();
    poll(20, || unless(counted() >= first + 100_000, "it is held"));
}

#[test]
fn vcpus_are_threads_whose_registers_and_memory_can_be_read_and_written() {
    let scratch = Scratch::new("gdb-threads");
    let (_client, mut gdb) = debugged(&scratch);
    assert_eq!(gdb.ask("qfThreadInfo"), "m01,02");
    let mut description = String::new();
    loop {
        let at = description.len();
        let part = gdb.ask(&format!("qXfer:features:read:target.xml:{at:x},800"));
        description += &part[1..];
        if part.starts_with('l') {
            break;
        }
    }
    assert!(description.contains("<reg name=\"gs_base\" bitsize=\"64\""));
    assert!(description.ends_with("</target>"), "{description}");
    assert!(gdb.register(0, RIP) < 6);
    assert!((0x100..0x103).contains(&gdb.register(1, RIP)));
    let before = gdb.register(1, RAX);
    assert_eq!(gdb.register(1, RAX), before, "it is held");
    gdb.done("P0=efbeadde00000000");
    assert_eq!(gdb.register(1, RAX), 0xdead_beef);
    let all = gdb.ask("g");
    assert!(all.starts_with("efbeadde00000000"), "{all}");
    assert_eq!(gdb.ask("m0,6"), "40a30030ebfa");
    gdb.done("M3456,2:1234");
    assert_eq!(gdb.ask("m3455,4"), "00123400");
    // This address is after the end of memory. In real mode without paging, linear and physical addresses are equal.
    assert_eq!(gdb.ask("m100000,1"), "E0e");
    // This packet is the command `monitor phys on`.
    gdb.done("qRcmd,70687973206f6e");
    assert_eq!(gdb.ask("m3456,2"), "1234");
    // A segment selector cannot be set.
    assert!(gdb.ask("P12=01000000").starts_with('E'));
}

#[test]
fn breakpoints_and_watchpoints_stop_all_vcpus() {
    let scratch = Scratch::new("gdb-breaks");
    let (_client, mut gdb) = debugged(&scratch);
    gdb.done("Z0,1,1");
    let mut before = None;
    for _ in 0..3 {
        assert_eq!(gdb.until_stop("vCont;c"), "T05thread:01;swbreak:;");
        assert_eq!(gdb.register(0, RIP), 1);
        let now = gdb.register(0, RAX) as u16;
        assert!(before.is_none_or(|before: u16| now == before.wrapping_add(1)));
        before = Some(now);
        let other = gdb.register(1, RAX);
        assert_eq!(gdb.register(1, RAX), other);
    }
    gdb.done("z0,1,1");
    gdb.done("Z1,100,1");
    assert_eq!(gdb.until_stop("vCont;c"), "T05thread:02;swbreak:;");
    assert_eq!(gdb.register(1, RIP), 0x100);
    gdb.done("z1,100,1");
    for (kind, name) in [(2, "watch"), (4, "awatch")] {
        gdb.done(&format!("Z{kind},3001,1"));
        let stopped = gdb.until_stop("vCont;c");
        let expected = format!("T05thread:01;{name}:3001;");
        assert_eq!(stopped, expected);
        assert_eq!(gdb.register(0, RIP), 4);
        gdb.done(&format!("z{kind},3001,1"));
    }
    // Nothing reads this address.
    gdb.done("Z3,3000,2");
    gdb.say("vCont;c");
    std::thread::sleep(Duration::from_millis(100));
    assert_eq!(gdb.interrupt(), "T02thread:01;");
}

#[test]
fn a_step_is_one_instruction_of_one_vcpu() {
    let scratch = Scratch::new("gdb-steps");
    let (_client, mut gdb) = debugged(&scratch);
    gdb.done("Z0,0,1");
    gdb.until_stop("vCont;c");
    let other = gdb.register(1, RAX);
    for rip in [1, 4, 0] {
        assert_eq!(gdb.until_stop("vCont;s:1"), "T05thread:01;");
        assert_eq!(gdb.register(0, RIP), rip);
    }
    assert_eq!(gdb.register(1, RAX), other, "it was not named");
    let rip = gdb.register(1, RIP);
    assert_eq!(gdb.until_stop("vCont;s:2"), "T05thread:02;");
    assert_ne!(gdb.register(1, RIP), rip);
}

#[test]
fn however_a_debugger_goes_the_guest_goes_on() {
    let scratch = Scratch::new("gdb-goes");
    let client = scratch.start(&[], "two_vcpus");
    let pid = client.pid();
    scratch.published(pid);
    for way in ["detached", "gone", "killed", "killed while the guest runs"] {
        let mut gdb = Gdb::start(&scratch, pid);
        gdb.done("Z0,1,1");
        gdb.until_stop("vCont;c");
        match way {
            "detached" => gdb.done("D"),
            "gone" => gdb.stream.shutdown(std::net::Shutdown::Both).unwrap(),
            "killed" => gdb.kill(),
            _ => {
                gdb.done("z0,1,1");
                gdb.done("Z2,3500,1");
                gdb.say("vCont;c");
                gdb.kill();
            }
        }
        executes(&scratch, pid);
    }
}

#[test]
fn one_debugger_at_a_time() {
    let scratch = Scratch::new("gdb-two");
    let (client, gdb) = debugged(&scratch);
    let (mut second, mut errors, _stream) = connect(&scratch, client.pid());
    let mut error = String::new();
    errors.read_to_string(&mut error).unwrap();
    assert_eq!(second.wait().unwrap().code(), Some(1));
    assert!(error.contains("has a debugger already"), "{error}");
    // Other commands can read the VM's counters while it is debugged.
    scratch.published(client.pid());
    drop(gdb);
    let none = scratch.slat(&["gdb", "2147483647"]).output().unwrap();
    assert!(text(&none.stderr).contains("there is no process 2147483647"));
}

#[test]
fn the_first_instruction_waits_for_a_debugger() {
    let scratch = Scratch::new("gdb-wait");
    let client = scratch.start(&["--gdb-wait"], "computes");
    scratch.published(client.pid());
    std::thread::sleep(Duration::from_millis(100));
    let mut gdb = Gdb::start(&scratch, client.pid());
    assert_eq!((gdb.register(0, RIP), gdb.register(0, RAX)), (0, 0));
    assert_eq!(gdb.until_stop("vCont;s:1"), "T05thread:01;");
    assert_eq!((gdb.register(0, RIP), gdb.register(0, RAX)), (1, 1));
    gdb.done("D");
    executes(&scratch, client.pid());
}

#[test]
fn a_vmm_pauses_a_vcpu_that_a_debugger_holds() {
    let scratch = Scratch::new("gdb-pauses");
    let mut client = scratch.start(&[], "pauses");
    scratch.published(client.pid());
    let mut gdb = Gdb::start(&scratch, client.pid());
    let held = (gdb.register(0, RIP), gdb.register(0, RAX));
    let mut pause = || {
        client.proceed();
        let said = client.said("ready");
        let numbers = said.lines().next().unwrap().split_once(' ').unwrap();
        client.proceed();
        client.said("ready");
        (numbers.0.parse().unwrap(), numbers.1.parse().unwrap())
    };
    for _ in 0..3 {
        assert_eq!(pause(), held, "its client has paused it, and run it again");
    }
    assert_eq!((gdb.register(0, RIP), gdb.register(0, RAX)), held);
    gdb.done("D");
    let begin = Instant::now();
    while pause() == held {
        assert!(begin.elapsed() < Duration::from_secs(20));
    }
}

/// Code that a debugger writes is executed, even where the guest has executed other code. The debugger is told about
/// each vCPU that hits a watchpoint, even if several vCPUs hit one at the same time.
#[test]
fn each_hit_of_each_vcpu_is_told() {
    let scratch = Scratch::new("gdb-hits");
    let (client, mut gdb) = debugged(&scratch);
    gdb.say("vCont;c");
    executes(&scratch, client.pid());
    gdb.interrupt();
    // The second vCPU: inc ax; mov [0x3400], ax; jmp to the beginning.
    gdb.done("M100,6:40a30034ebfa");
    gdb.done(&format!("P{RIP:x}=0001000000000000"));
    gdb.done("Hg2");
    gdb.done(&format!("P{RIP:x}=0001000000000000"));
    gdb.done("Hg1");
    gdb.done(&format!("P{RIP:x}=0000000000000000"));
    gdb.done("Z2,3000,2");
    gdb.done("Z2,3400,2");
    let mut counts = [0; 2].map(|_| None::<u16>);
    let mut stops = [0; 2];
    for _ in 0..200 {
        let vcpu = match gdb.until_stop("vCont;c").as_str() {
            "T05thread:01;watch:3000;" => 0,
            "T05thread:02;watch:3400;" => 1,
            other => panic!("{other}"),
        };
        let count = gdb.register(vcpu, RAX) as u16;
        let vcpu = vcpu as usize;
        if let Some(before) = counts[vcpu] {
            assert_eq!(count, before.wrapping_add(1), "a store of {vcpu} is missed");
        }
        counts[vcpu] = Some(count);
        stops[vcpu] += 1;
        if stops.iter().all(|stops| *stops >= 5) {
            return;
        }
    }
    panic!("one vCPU only: {stops:?}");
}

/// A vCPU that is created while its VM is debugged is held like the others, and has their breakpoints.
#[test]
fn a_new_vcpu_has_the_debugger_of_the_others() {
    let scratch = Scratch::new("gdb-new");
    for runs in [false, true] {
        let mut client = scratch.start(&[], "adds_a_vcpu");
        scratch.published(client.pid());
        let mut gdb = Gdb::start(&scratch, client.pid());
        gdb.done("Z0,101,1");
        if runs {
            gdb.say("vCont;c");
            client.proceed();
        } else {
            client.proceed();
            poll(20, || {
                let threads = gdb.ask("qfThreadInfo");
                unless(threads == "m01,02", "one vCPU")
            });
            // Gives the new vCPU time to run.
            std::thread::sleep(Duration::from_millis(200));
            gdb.say("vCont;c");
        }
        assert_eq!(gdb.reply(), "T05thread:02;swbreak:;");
        assert_eq!(gdb.register(1, RIP), 0x101);
        gdb.done("D");
        client.said("ready");
    }
}

#[test]
fn a_new_vcpu_waits_for_no_debugger_that_has_gone() {
    let scratch = Scratch::new("gdb-gone");
    let mut client = scratch.start(&["--gdb-wait"], "adds_a_vcpu");
    scratch.published(client.pid());
    let mut gdb = Gdb::start(&scratch, client.pid());
    gdb.done("D");
    client.proceed();
    client.said("ready");
}

/// Adjacent linear addresses may be far apart in physical memory.
#[test]
fn memory_of_two_pages_is_read_and_written_by_linear_addresses() {
    let scratch = Scratch::new("gdb-pages");
    let client = scratch.start(&[], "pages");
    scratch.published(client.pid());
    executes(&scratch, client.pid());
    let mut gdb = Gdb::start(&scratch, client.pid());
    gdb.done("M6ffe,4:01020304");
    assert_eq!(gdb.ask("m6ffd,6"), "000102030400");
    // This packet is the command `monitor phys on`.
    gdb.done("qRcmd,70687973206f6e");
    assert_eq!(gdb.ask("m8ffd,4"), "00010200");
    assert_eq!(gdb.ask("ma000,4"), "03040000");
    // The debugger may write to a page table that the guest uses. From now on, the guest copies a byte of another
    // page.
    gdb.done("M101018,4:03a00000");
    gdb.say("vCont;c");
    executes(&scratch, client.pid());
    gdb.interrupt();
    assert_eq!(gdb.ask("m5000,1"), "03");
}
