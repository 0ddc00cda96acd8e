//! The example, whose guest is x86's.

#[path = "guest.rs"]
mod guest;
#[path = "state.rs"]
mod state;

use guest::{Guest, Template, private_bytes};
use slat_kvm::{Kvm, VcpuExit};
use std::error::Error;
use std::process::ExitCode;
use std::time::{Duration, Instant};

type Result<T> = std::result::Result<T, Box<dyn Error + Send + Sync>>;

const MEMORY: usize = 64 << 20;
/// The memory that the guest fills before it is ready.
const FILLED: u32 = 16 << 20;
const CODE: usize = 0x1000;

/// Runs in protected mode, without paging. EBP is the end of the memory that the program fills.
///
/// ```text
///       mov edi, 0x100000
/// fill: imul eax, eax, 0x19660d      ; memory from 1 MiB gets computed words
///       add eax, 0x3c6ef35f
///       stosd
///       cmp edi, ebp
///       jb fill
///       in eax, 0x10                 ; ready: it asks what to do
///       mov [0x100000], eax          ; the request goes to memory, and into code that has run
///       mov [patch + 1], eax
/// patch: mov ebx, 0
///       add ebx, [0x100000]
///       mov eax, ebx
///       out 0x11, eax                ; twice the request
///       xor eax, eax
///       mov edi, 0x100000
/// all:  add eax, [edi]               ; the sum of the memory
///       add edi, 4
///       cmp edi, ebp
///       jb all
///       out 0x12, eax
///       hlt
/// ```
const GUEST: &[u8] = &[
    0xbf, 0x00, 0x00, 0x10, 0x00, 0x69, 0xc0, 0x0d, 0x66, 0x19, 0x00, 0x05, 0x5f, 0xf3, 0x6e, 0x3c,
    0xab, 0x39, 0xef, 0x72, 0xf0, 0xe5, 0x10, 0xa3, 0x00, 0x00, 0x10, 0x00, 0xa3, 0x22, 0x10, 0x00,
    0x00, 0xbb, 0x00, 0x00, 0x00, 0x00, 0x03, 0x1d, 0x00, 0x00, 0x10, 0x00, 0x89, 0xd8, 0xe7, 0x11,
    0x31, 0xc0, 0xbf, 0x00, 0x00, 0x10, 0x00, 0x03, 0x07, 0x83, 0xc7, 0x04, 0x39, 0xef, 0x72, 0xf7,
    0xe7, 0x12, 0xf4,
];

/// Starts the guest, and stops it when it asks what to do, before it has the answer.
fn get_ready(kvm: &Kvm, guest: &mut Guest) -> Result<()> {
    guest.memory.put(CODE, GUEST);
    guest.start_at(kvm, CODE as u64)?;
    let mut regs = guest.vcpu.get_regs()?;
    regs.rbp = FILLED.into();
    guest.vcpu.set_regs(&regs)?;
    match guest.vcpu.run()? {
        VcpuExit::IoIn(0x10, data) => data.fill(0),
        exit => return Err(format!("unexpected exit: {exit:?}").into()),
    }
    guest.end_instruction()
}

/// Has a clone do `request`. Returns its answer, and the sum of its memory.
fn answer(guest: &mut Guest, request: u32) -> Result<[u32; 2]> {
    guest.set_input(request)?;
    Ok([output(guest, 0x11)?, output(guest, 0x12)?])
}

fn output(guest: &mut Guest, port: u16) -> Result<u32> {
    match guest.vcpu.run()? {
        VcpuExit::IoOut(to, data) if to == port => Ok(u32::from_le_bytes(data.try_into()?)),
        exit => Err(format!("unexpected exit: {exit:?}").into()),
    }
}

/// The cost of clones.
#[derive(Debug)]
struct Cost {
    /// To get the guest ready once.
    boot: Duration,
    /// To make a clone, and until it has answered; the mean.
    clone: Duration,
    answer: Duration,
    /// Bytes of this process that no other one has, for each clone after its answer.
    bytes: u64,
    /// Of these, bytes of page tables of the guest's.
    tables: u64,
}

/// Makes `count` clones, has each do a request of its own, and checks that it has seen none of the others'.
fn serve(count: u32) -> Result<Cost> {
    let begin = Instant::now();
    let template = Template::new(MEMORY, get_ready)?;
    let boot = begin.elapsed();
    let (mut clone, mut answer) = (Duration::ZERO, Duration::ZERO);
    let before = private_bytes()?;
    let mut guests = Vec::new();
    for _ in 0..count {
        let begin = Instant::now();
        guests.push(template.clone_guest()?);
        clone += begin.elapsed();
    }
    let mut rest = None;
    for (request, guest) in (1..).zip(&mut guests) {
        let begin = Instant::now();
        let [said, sum] = self::answer(guest, request)?;
        answer += begin.elapsed();
        if said != 2 * request {
            return Err(format!("clone {request} says {said}").into());
        }
        let others = sum.wrapping_sub(request);
        if *rest.get_or_insert(others) != others {
            return Err(format!("clone {request} has memory of another one").into());
        }
    }
    let table_bytes = |guest: &Guest| guest.vm.engine().memory_usage().table_bytes;
    let bytes = private_bytes()?.saturating_sub(before);
    Ok(Cost {
        boot,
        clone: clone / count,
        answer: answer / count,
        bytes: bytes / u64::from(count),
        tables: guests.iter().map(table_bytes).sum::<u64>() / u64::from(count),
    })
}

pub fn main() -> ExitCode {
    let count = std::env::args()
        .nth(1)
        .map_or(Ok(1000), |text| text.parse());
    let cost = match count.map_err(Into::into).and_then(serve) {
        Ok(cost) => cost,
        Err(error) => {
            eprintln!("clones: {error}");
            return ExitCode::FAILURE;
        }
    };
    let ms = |time: Duration| time.as_secs_f64() * 1e3;
    println!(
        "boot {:.2} ms; each clone: made in {:.3} ms, answered {:.3} ms later, {} KiB, of which tables {} KiB",
        ms(cost.boot),
        ms(cost.clone),
        ms(cost.answer),
        cost.bytes >> 10,
        cost.tables >> 10
    );
    ExitCode::SUCCESS
}

#[test]
fn no_clone_sees_what_another_one_writes() {
    let cost = serve(3).unwrap();
    // The memory that a guest has filled, 15 MiB, is the template's.
    assert!(cost.bytes < 8 << 20, "{cost:?}");
}
