//! The example, whose guest is x86's.

#[path = "boot.rs"]
mod boot;
#[path = "../clones/guest.rs"]
mod guest;
#[path = "../clones/state.rs"]
mod state;

use guest::{Guest, Template, private_bytes};
use kvm_bindings::{KVM_GUESTDBG_ENABLE, KVM_GUESTDBG_SINGLESTEP, kvm_guest_debug};
use slat_kvm::{Kvm, VcpuExit};
use std::error::Error;
use std::process::ExitCode;
use std::time::{Duration, Instant};

type Result<T> = std::result::Result<T, Box<dyn Error + Send + Sync>>;

const MEMORY: usize = 128 << 20;
const COMMAND_LINE: &str = "earlycon=uart8250,io,0x3f8 keep_bootcon printk.devkmsg=on acpi=off pci=off noapic reboot=t panic=-1 nokaslr rdinit=/first";

/// The guest's first program. What it writes to /dev/kmsg is a message of the kernel's.
const FIRST: &str = "#!/bin/busybox sh
/bin/busybox mount -t devtmpfs dev /dev
exec </dev/null >/dev/null 2>&1
echo '<1>ready' >/dev/kmsg
request=$(/ask)
echo \"<1>clone $request\" >/dev/kmsg
/bin/busybox reboot -f
";

/// A program that reads a request from port 0x500, and prints it:
///
/// ```text
///     mov eax, 172           ; iopl(3)
///     mov edi, 3
///     syscall
///     mov edx, 0x500
///     in eax, dx             ; four characters
///     push rax
///     mov eax, 1             ; write(1, rsp, 4)
///     mov edi, eax
///     mov rsi, rsp
///     mov edx, 4
///     syscall
///     mov eax, 60            ; exit(0)
///     xor edi, edi
///     syscall
/// ```
const ASK: &[u8] = &[
    0xb8, 0xac, 0x00, 0x00, 0x00, 0xbf, 0x03, 0x00, 0x00, 0x00, 0x0f, 0x05, 0xba, 0x00, 0x05, 0x00,
    0x00, 0xed, 0x50, 0xb8, 0x01, 0x00, 0x00, 0x00, 0x89, 0xc7, 0x48, 0x89, 0xe6, 0xba, 0x04, 0x00,
    0x00, 0x00, 0x0f, 0x05, 0xb8, 0x3c, 0x00, 0x00, 0x00, 0x31, 0xff, 0x0f, 0x05,
];
const REQUEST_PORT: u16 = 0x500;

/// The number of clones that turn themselves off. A kernel waits a second before it turns the machine off.
const OFF: usize = 3;

/// Data and line status of the first serial line, and "everything was sent".
const SERIAL: u16 = 0x3f8;
const SERIAL_STATUS: u16 = 0x3fd;
const SENT: u8 = 0x60;

/// Returns an ELF file that is loaded as a whole and starts with `code`.
fn program(code: &[u8]) -> Vec<u8> {
    const ADDRESS: u64 = 0x40_0000;
    const HEADERS: u64 = 64 + 56;
    let size = HEADERS + code.len() as u64;
    // An executable for x86-64, version 1, with one program header after the header of the file; then that header:
    // PT_LOAD, readable and executable.
    let words = [
        0x0001_0102_464c_457f,
        0,
        0x0000_0001_003e_0002,
        ADDRESS + HEADERS,
        64,
        0,
        0x0038_0040_0000_0000,
        0x0000_0000_0000_0001,
        0x0000_0005_0000_0001,
        0,
        ADDRESS,
        ADDRESS,
        size,
        size,
        0x1000,
    ];
    let headers = words.into_iter().flat_map(u64::to_le_bytes);
    headers.chain(code.iter().copied()).collect()
}

/// The reason why a guest has stopped.
#[derive(Debug, PartialEq)]
enum Stop {
    /// It reads its request.
    Asks,
    /// It has printed a line, which is in the console's text.
    Line,
    /// It is off.
    Off,
}

/// Runs `guest` until it stops, and adds what it prints to `console`.
fn run(guest: &mut Guest, console: &mut String) -> Result<Stop> {
    loop {
        match guest.vcpu.run()? {
            VcpuExit::IoOut(SERIAL, &[b'\n']) => return Ok(Stop::Line),
            VcpuExit::IoOut(SERIAL, &[byte]) => console.push(byte.into()),
            VcpuExit::IoIn(SERIAL_STATUS, data) => data.fill(SENT),
            VcpuExit::IoIn(REQUEST_PORT, data) => {
                data.fill(0);
                return Ok(Stop::Asks);
            }
            VcpuExit::IoIn(_, data) | VcpuExit::MmioRead(_, data) => data.fill(0xff),
            VcpuExit::IoOut(..) | VcpuExit::MmioWrite(..) => {}
            VcpuExit::Shutdown => return Ok(Stop::Off),
            exit => return Err(format!("unexpected exit: {exit:?}").into()),
        }
    }
}

/// Boots the guest until it asks for its request, and completes the instruction by which it asks.
fn get_ready(kvm: &Kvm, guest: &mut Guest, kernel: &[u8], initrd: &[u8]) -> Result<()> {
    let own = [
        ("first", 0o100_755, FIRST.as_bytes()),
        ("ask", 0o100_755, &program(ASK)),
    ];
    let initrd = [boot::archive(&own), initrd.to_vec()].concat();
    boot::load(kvm, guest, MEMORY, kernel, &initrd, COMMAND_LINE)?;
    let mut console = String::new();
    loop {
        match run(guest, &mut console)? {
            Stop::Asks => return guest.end_instruction(),
            Stop::Line => console.push('\n'),
            Stop::Off => return Err(format!("the guest is off:\n{console}").into()),
        }
    }
}

/// The cost of one clone, from its creation on.
#[derive(Default)]
struct Times {
    /// Until it was made, had executed one instruction, and had printed its line.
    made: Duration,
    first: Duration,
    line: Duration,
}

/// Makes a clone, and lets it carry out `request`. Returns the clone after it has printed its line.
fn serve(template: &Template, request: u32, times: &mut Times) -> Result<Guest> {
    let begin = Instant::now();
    let mut guest = template.clone_guest()?;
    let text = format!("{request:04}");
    guest.set_input(u32::from_le_bytes(text.as_bytes().try_into()?))?;
    times.made += begin.elapsed();
    let mut debug = kvm_guest_debug {
        control: KVM_GUESTDBG_ENABLE | KVM_GUESTDBG_SINGLESTEP,
        ..Default::default()
    };
    guest.vcpu.set_guest_debug(&debug)?;
    match guest.vcpu.run()? {
        VcpuExit::Debug(_) => {}
        exit => return Err(format!("unexpected exit: {exit:?}").into()),
    }
    times.first += begin.elapsed();
    debug.control = 0;
    guest.vcpu.set_guest_debug(&debug)?;
    let mut console = String::new();
    // The kernel prints its time before a line, and lines of its own when it finds that the host was slow.
    while !console.trim_end().ends_with(&format!("] clone {text}")) {
        console.clear();
        let stop = run(&mut guest, &mut console)?;
        if stop != Stop::Line || console.contains("clone") && !console.contains(&text) {
            return Err(format!("clone {text}: {stop:?}, it has printed {console:?}").into());
        }
    }
    times.line += begin.elapsed();
    Ok(guest)
}

/// Makes `count` clones, which are there at the same time when the last one has printed its line. Then the first of
/// them turn themselves off.
fn serve_all(template: &Template, count: u32) -> Result<()> {
    let before = private_bytes()?;
    let mut times = Times::default();
    let mut guests = Vec::new();
    for request in 0..count {
        guests.push(serve(template, request, &mut times)?);
    }
    let bytes = private_bytes()?.saturating_sub(before) / u64::from(count);
    let tables = guests
        .iter()
        .map(|guest| guest.vm.engine().memory_usage().table_bytes);
    let tables = tables.sum::<u64>() / u64::from(count);
    for guest in guests.iter_mut().take(OFF) {
        let mut console = String::new();
        while run(guest, &mut console)? != Stop::Off {}
    }
    let ms = |time: Duration| time.as_secs_f64() * 1e3 / f64::from(count);
    println!(
        "{count:>4} clones, each: made in {:.3} ms, first instruction after {:.3} ms, its line after {:.2} ms; {} KiB, of which tables {} KiB",
        ms(times.made),
        ms(times.first),
        ms(times.line),
        bytes >> 10,
        tables >> 10
    );
    Ok(())
}

pub fn main() -> ExitCode {
    let words: Vec<_> = std::env::args().skip(1).collect();
    let work = || -> Result<()> {
        let [kernel, initrd, counts @ ..] = &words[..] else {
            return Err("usage: linux_clones VMLINUX INITRD COUNT...".into());
        };
        let read = |path: &String| std::fs::read(path).map_err(|error| format!("{path}: {error}"));
        let (kernel, initrd) = (read(kernel)?, read(initrd)?);
        let begin = Instant::now();
        let template = Template::new(MEMORY, |kvm, guest| get_ready(kvm, guest, &kernel, &initrd))?;
        println!("Linux has booted in {:.2} s", begin.elapsed().as_secs_f64());
        counts
            .iter()
            .try_for_each(|count| serve_all(&template, count.parse()?))
    };
    match work() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("linux_clones: {error}");
            ExitCode::FAILURE
        }
    }
}
