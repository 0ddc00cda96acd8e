//! Measures clones: VMs that begin with the state of another VM and share its memory.

use std::fs::{self, File};
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Instant;

use kvm_ioctls::VcpuExit;

use crate::arch::x86_64::machine::guest::{self, DATA, DEVICE, PAGE};
use crate::arch::x86_64::machine::{
    Api, Failure, Machine, Memory, Pages, Program, RealKvm, Slot, no_device,
};
use crate::compared::{Line, Rows};
use crate::report::{Report, Sample};
use crate::rounds::Bench;
use crate::{Elsewhere, Experiment, Settable};

const NAME: &str = "clone";

pub const EXPERIMENT: Experiment = Experiment {
    name: NAME,
    title: "clones of a VM that is ready",
    explain: "\
A sandbox has a VM for each request, and a VM needs time to get ready: here it fills its memory.
anew: each VM gets ready by itself. clone: one VM has got ready and stopped; each VM is a new one on
its memory, copy on write (a memfd, MAP_PRIVATE), and goes on from there.
together/N: N VMs that exist at the same time. seconds_to_exit: from nothing to the exit by which a
VM says that it serves; the mean. Then each reads all of its memory and writes to 16 pages.
private_bytes: what this process alone uses of the host's memory, for each VM, all that slat keeps
for a VM included. table_bytes: of these, page tables of the guest's.
The bench reads each VM's memory: what another one has written is not there.
Asked for: a clone in half of the time and with a quarter of the memory; one among 1,000 takes no
more than twice as long as one alone.",
    settable: Settable::AllBut(&[]),
    elsewhere: Elsewhere::Nothing,
    run,
    compare,
    rows: Rows::Metrics,
};

const ANEW: &str = "anew";
const CLONE: &str = "clone";
const SECONDS: &str = "seconds_to_exit";
/// The number of pages that each VM writes in the end. From then on, the VM does not share these pages with the
/// template.
const WRITTEN: u64 = 16;
/// The word that fills the memory of the template VM.
const FILL: u32 = 0x51a7_51a7;

fn run(bench: &mut Bench) -> Result<(), Failure> {
    let size = bench.size.pick(1 << 20, 8 << 20, 8 << 20);
    let rounds = bench.size.pick(1, 3, 5);
    let slat = Template::new(&bench.guests.slat, size)?;
    let kvm = match &bench.guests.kvm {
        Some(kvm) => Some(Template::new(kvm, size)?),
        None => None,
    };
    for count in counts(bench) {
        // The variant without sharing is omitted for a thousand VMs, whose memory would not fit into some hosts.
        let variants = match count > 100 {
            true => vec![CLONE],
            false => bench.guests.with_kvm(&[ANEW, CLONE]),
        };
        let case = format!("together/{count}");
        bench.in_turns(&case, rounds, &variants, |bench, variant| {
            match (&bench.guests.kvm, &kvm) {
                (Some(api), Some(template)) if variant == RealKvm::NAME => {
                    together(api, count, Some(template), size)
                }
                _ => together(
                    &bench.guests.slat,
                    count,
                    (variant == CLONE).then_some(&slat),
                    size,
                ),
            }
        })?;
    }
    Ok(())
}

fn counts(bench: &Bench) -> [u32; 3] {
    bench.size.pick([1, 2, 3], [1, 100, 1000], [1, 100, 1000])
}

/// The memory of a VM that is ready to serve: the memory of its system slot and of its data slot.
struct Template {
    system: File,
    data: File,
}

impl Template {
    fn new<A: Api>(api: &A, size: usize) -> Result<Self, Failure> {
        let (mut memory, system) = Memory::in_file(guest::SYSTEM_SIZE, 2 << 20)?;
        guest::load(memory.bytes(), DATA + size as u64);
        let (of_data, data) = Memory::in_file(size, 2 << 20)?;
        let mut machine = Machine::on(api, 1, memory, |_| Ok(()))?;
        machine.set_slot(&Slot::whole(1, DATA, &of_data))?;
        get_ready(&mut machine, size)?;
        Ok(Template { system, data })
    }
}

fn get_ready<A: Api>(machine: &mut Machine<'_, A>, size: usize) -> Result<(), Failure> {
    machine.run(
        &[Program::write_every(DATA, 8, size as u64 / 8, FILL)],
        &no_device,
    )?;
    Ok(())
}

/// Makes `count` VMs, and makes each of them serve. If there is a `template`, the VMs are its clones.
fn together<A: Api>(
    api: &A,
    count: u32,
    template: Option<&Template>,
    size: usize,
) -> Result<Vec<Sample>, Failure> {
    let before = private_bytes()?;
    let begin = Instant::now();
    let mut memories = Vec::new();
    for _ in 0..count {
        memories.push(match template {
            Some(template) => Memory::copy_of(&template.data, size, 2 << 20)?,
            None => Memory::new(size, 2 << 20, Pages::Small)?,
        });
    }
    let mut machines = Vec::new();
    for data in &memories {
        let mut machine = match template {
            Some(template) => {
                let system = Memory::copy_of(&template.system, guest::SYSTEM_SIZE, 2 << 20)?;
                Machine::on(api, 1, system, |_| Ok(()))?
            }
            None => Machine::new(api, 1, DATA + size as u64)?,
        };
        machine.set_slot(&Slot::whole(1, DATA, data))?;
        if template.is_none() {
            get_ready(&mut machine, size)?;
        }
        let exits = AtomicU64::new(0);
        machine.run(&[Program::doorbell(1)], &|_, exit| match exit {
            VcpuExit::MmioWrite(DEVICE, _) => {
                exits.fetch_add(1, Relaxed);
                Ok(())
            }
            exit => no_device(0, exit),
        })?;
        if exits.into_inner() != 1 {
            return Err("a VM did not say that it serves".into());
        }
        machines.push(machine);
    }
    let time = begin.elapsed() / count;
    for (own, machine) in (1..).zip(&mut machines) {
        let pages = size as u64 / PAGE;
        let read = machine.run(&[Program::read(DATA, pages)], &no_device)?;
        if read.registers[0].rsi != pages * u64::from(FILL & 0xff) {
            return Err(format!("VM {own} has other memory than that it was made with").into());
        }
        machine.run(&[Program::write(DATA, WRITTEN, own)], &no_device)?;
    }
    let bytes = private_bytes()?.saturating_sub(before);
    for (own, memory) in (1u32..).zip(&memories) {
        let words = memory.words();
        let first = |page: u64| words[(page * PAGE / 8) as usize].load(Relaxed) as u32;
        if (0..WRITTEN).any(|page| first(page) != own) || first(WRITTEN) != FILL {
            return Err(format!("VM {own} has what another one has written").into());
        }
    }
    let mut samples = vec![
        Sample::seconds(SECONDS, time),
        Sample::count("private_bytes", bytes / u64::from(count)),
    ];
    let tables = |machine: &Machine<'_, A>| Some(machine.engine()?.memory_usage().table_bytes);
    if let Some(tables) = machines.iter().map(tables).sum::<Option<u64>>() {
        samples.push(Sample::count("table_bytes", tables / u64::from(count)));
    }
    Ok(samples)
}

/// Returns the bytes of memory that only this process uses. A page of a private file mapping counts only after the
/// process has written to it.
fn private_bytes() -> Result<u64, Failure> {
    let text = fs::read_to_string("/proc/self/smaps_rollup")?;
    let line = text
        .lines()
        .find_map(|line| line.strip_prefix("Anonymous:"));
    let kib = line.and_then(|line| line.split_whitespace().next());
    let kib = kib.ok_or("/proc/self/smaps_rollup has no line of anonymous memory")?;
    Ok(kib.parse::<u64>()? << 10)
}

fn compare(report: &Report) -> Vec<Line> {
    let mut lines = Vec::new();
    let cases = report.cases(NAME);
    let alone = cases.first().copied().unwrap_or_default();
    for case in cases {
        let line = |metric| Line::compare(report, NAME, case, metric, ANEW, CLONE);
        lines.extend(line(SECONDS).map(|line| line.change_at_most(-0.5)));
        lines.extend(line("private_bytes").map(|line| line.change_at_most(-0.75)));
        lines.extend(line("table_bytes"));
        if line(SECONDS).is_none() {
            let limit = report.value(NAME, alone, CLONE, SECONDS);
            let single = |metric| Line::of(report, NAME, case, metric, CLONE);
            lines.extend(
                single(SECONDS)
                    .map(|line| line.with_limit("one alone", limit).at_most_of_limit(2.0)),
            );
            lines.extend(
                ["private_bytes", "table_bytes"]
                    .into_iter()
                    .filter_map(single),
            );
        }
    }
    lines
}
