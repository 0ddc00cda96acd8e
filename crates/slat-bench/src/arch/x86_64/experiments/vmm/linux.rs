//! Measures Linux guests under an unmodified QEMU: their boot, and the tasks that they run afterwards.

use std::fs::File;
use std::io::Write;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use super::NAME;
use super::guests::{AGAIN, GUESTS, Guest, LINUX};
use crate::Linux;
use crate::arch::x86_64::machine::{Api, Failure, Slat};
use crate::arch::x86_64::qemu::{self, Qemu, TemporaryFile};
use crate::compared::Line;
use crate::report::{Report, Sample, Unit};
use crate::rounds::Bench;

const BOOT: &str = "boot_cpu_seconds";
/// The metric for all tasks together, in processor seconds.
const WORKS: &str = "works_cpu_seconds";
const IDLE: &str = "idle_share_of_core";
const READ: &str = "read_bytes_per_s";
/// The variant on QEMU's own software CPU.
const TCG: &str = "tcg";

/// The time to wait after the boot, because the guest is still busy then.
const SETTLING: Duration = Duration::from_secs(5);

pub fn run(bench: &mut Bench) -> Result<(), Failure> {
    let Some(linux) = bench.others.linux.clone() else {
        bench.note_missing(
            "vmm: Linux was not measured: --materials DIR names its kernel and its initrd, which conformance/vmm/materials (in slat's sources) prepares.".to_owned(),
        );
        return Ok(());
    };
    let disk = Disk::new(bench.size.pick(1, 512, 2048))?;
    for guest in GUESTS {
        match look_for(guest, &linux) {
            Ok(version) => bench.note(format!("tcg is that of {version}.")),
            Err(why) => {
                bench.note_missing(format!("vmm: {} was not measured: {why}.", guest.case));
                continue;
            }
        }
        let (rounds, idle) = (bench.size.pick(1, 3, 5), bench.size.pick(1, 10, 30));
        bench.in_turns(guest.case, rounds, &[TCG, Slat::NAME], |bench, variant| {
            let mut qemu = guest.start(&linux, variant == Slat::NAME, &disk.file.0)?;
            let mut samples = Vec::new();
            // A guest takes minutes, so each sample is printed when it is measured.
            let mut add = |sample| {
                bench.show(guest.case, variant, &sample);
                samples.push(sample);
            };
            work(guest, &mut qemu, &mut add)?;
            if guest.case == LINUX {
                devices(&mut qemu, Duration::from_secs(idle), &disk, &mut add)?;
            }
            Ok(samples)
        })?;
    }
    Ok(())
}

/// Returns the version of QEMU, if QEMU and all files of the guest exist. Otherwise the error names the missing file,
/// and says how to get it.
fn look_for(guest: &Guest, linux: &Linux) -> Result<String, String> {
    let directory = linux.materials.display();
    let command = [
        "conformance/vmm/materials",
        &directory.to_string(),
        guest.what,
    ]
    .join(" ");
    let remedy = format!("`{}` (in slat's sources) prepares it", command.trim_end());
    let Some(version) = qemu::version() else {
        return Err(format!("there is no QEMU here; {remedy}"));
    };
    match guest
        .files()
        .find(|name| !linux.materials.join(name).is_file())
    {
        Some(name) => Err(format!("{directory} has no {name}; {remedy}")),
        None => Ok(version),
    }
}

/// Measures the first boot, the tasks, and the later boots. Calls `add` with each sample.
fn work(guest: &Guest, qemu: &mut Qemu, add: &mut dyn FnMut(Sample)) -> Result<(), Failure> {
    qemu.boot()?;
    add(Sample::seconds(BOOT, qemu.cpu_time()?));
    thread::sleep(SETTLING);
    let mut all = Duration::ZERO;
    for work in guest.works {
        let before = qemu.cpu_time()?;
        qemu.run(work.command)?;
        let used = qemu.cpu_time()? - before;
        add(Sample::seconds(work.metric, used));
        all += used;
    }
    add(Sample::seconds(WORKS, all));
    for metric in guest.again {
        let before = qemu.cpu_time()?;
        qemu.reboot()?;
        add(Sample::seconds(metric, qemu.cpu_time()? - before));
    }
    Ok(())
}

/// Measures how much processor time the idle guest uses in `time`. Then measures the guest's reads of `disk`. Calls
/// `add` with each sample.
fn devices(
    qemu: &mut Qemu,
    time: Duration,
    disk: &Disk,
    add: &mut dyn FnMut(Sample),
) -> Result<(), Failure> {
    let (began, before) = (Instant::now(), qemu.cpu_time()?);
    thread::sleep(time);
    let used = qemu.cpu_time()? - before;
    let share = used.as_secs_f64() / began.elapsed().as_secs_f64();
    add(Sample::new(IDLE, Unit::Share, share));
    let read = qemu.run("dd if=/dev/vda of=/dev/null bs=1M iflag=direct status=none")?;
    let speed = disk.bytes as f64 / read.as_secs_f64();
    add(Sample::new(READ, Unit::PerSecond, speed));
    Ok(())
}

/// Returns the comparisons of all guests, in the order in which they are measured.
pub fn compare(report: &Report) -> Vec<Line> {
    let mut lines = Vec::new();
    for guest in GUESTS {
        let line = |metric| Line::compare(report, NAME, guest.case, metric, TCG, Slat::NAME);
        let most = |metric, most: f64| Some(line(metric)?.change_at_most(most - 1.0));
        lines.extend(most(BOOT, guest.boot));
        lines.extend(
            guest
                .works
                .iter()
                .filter_map(|work| most(work.metric, work.most)),
        );
        lines.extend(most(WORKS, guest.together));
        let first = report.value(NAME, guest.case, Slat::NAME, BOOT);
        let again = guest.again.iter().filter_map(|metric| line(metric));
        lines.extend(again.map(|line| line.with_limit(BOOT, first).at_most_of_limit(AGAIN)));
        lines.extend(line(IDLE).map(|line| line.at_most(0.005)));
        lines.extend(line(READ).map(|line| line.at_least(200e6)));
    }
    lines
}

/// A file on the host that is a guest's disk. The host has the file's contents in its page cache.
struct Disk {
    file: TemporaryFile,
    bytes: u64,
}

impl Disk {
    fn new(mebibytes: u64) -> Result<Self, Failure> {
        let file = TemporaryFile::new("disk")?;
        write(&file.0, mebibytes).map_err(|e| format!("{}: {e}", file.0.display()))?;
        Ok(Disk {
            file,
            bytes: mebibytes << 20,
        })
    }
}

fn write(path: &Path, mebibytes: u64) -> std::io::Result<()> {
    let mut file = File::create(path)?;
    // The contents have no holes and no zero blocks, because QEMU may treat these specially.
    let block: Vec<u8> = (0..1 << 20)
        .map(|index: u32| (index >> 4) as u8 | 1)
        .collect();
    (0..mebibytes).try_for_each(|_| file.write_all(&block))
}
