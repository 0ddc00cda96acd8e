//! Linux under an unmodified QEMU.

use std::fs::File;
use std::io::Write;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use crate::Linux;
use crate::machine::{Api, Failure, Slat};
use crate::qemu::{self, Qemu, TemporaryFile};
use crate::report::{Sample, Unit};
use crate::rounds::Bench;

pub const CASE: &str = "linux";
pub const BOOT: &str = "boot_cpu_seconds";
/// What the guest's shell works on, and its processor time.
pub const WORKS: [(&str, &str); 3] = [
    (
        "shell_cpu_seconds",
        "i=0; while [ $i -lt 200000 ]; do i=$((i+1)); done",
    ),
    (
        "sha256_cpu_seconds",
        "head -c 50000000 /dev/zero | sha256sum >/tmp/sum",
    ),
    (
        "gzip_cpu_seconds",
        "seq 1000000 >/tmp/numbers; gzip -c /tmp/numbers | gunzip -c | cmp - /tmp/numbers",
    ),
];
/// All of these.
pub const WORK: &str = "works_cpu_seconds";
pub const IDLE: &str = "idle_share_of_core";
pub const READ: &str = "read_bytes_per_s";
/// QEMU's own software CPU.
pub const TCG: &str = "tcg";

/// Time for which a guest still works after it has booted.
const SETTLING: Duration = Duration::from_secs(5);

pub fn run(bench: &mut Bench) -> Result<(), Failure> {
    let Some(linux) = bench.others.linux.clone() else {
        bench.note(
            "vmm: Linux was not measured: --materials DIR names its kernel and its initrd, which conformance/vmm/materials (in slat's sources) prepares.".to_owned(),
        );
        return Ok(());
    };
    if let Err(why) = look_for(&linux) {
        bench.note(format!("vmm: Linux was not measured: {why}."));
        return Ok(());
    }
    let (rounds, idle) = (bench.size.pick(1, 3, 5), bench.size.pick(1, 10, 30));
    let disk = Disk::new(bench.size.pick(1, 512, 2048))?;
    bench.in_turns(CASE, rounds, &[TCG, Slat::NAME], |_, variant| {
        let mut qemu = Qemu::start(&linux, variant == Slat::NAME, &disk.file.0)?;
        qemu.boot()?;
        let booted = qemu.cpu_time()?;
        thread::sleep(SETTLING);
        let mut samples = vec![Sample::seconds(BOOT, booted)];
        let mut all = Duration::ZERO;
        for (metric, command) in WORKS {
            let before = qemu.cpu_time()?;
            qemu.run(command)?;
            let used = qemu.cpu_time()? - before;
            samples.push(Sample::seconds(metric, used));
            all += used;
        }
        samples.push(Sample::seconds(WORK, all));
        let share = idle_share(&qemu, Duration::from_secs(idle))?;
        let read = qemu.run("dd if=/dev/vda of=/dev/null bs=1M iflag=direct status=none")?;
        samples.extend([
            Sample::new(IDLE, Unit::Share, share),
            Sample::new(
                READ,
                Unit::PerSecond,
                disk.bytes as f64 / read.as_secs_f64(),
            ),
        ]);
        Ok(samples)
    })
}

/// Returns which file is missing, and how to get it.
fn look_for(linux: &Linux) -> Result<(), String> {
    let directory = linux.materials.display();
    let remedy = format!("`conformance/vmm/materials {directory}` (in slat's sources) prepares it");
    if !qemu::is_installed() {
        return Err(format!("there is no QEMU here; {remedy}"));
    }
    for name in ["vmlinux", "initrd"] {
        if !linux.materials.join(name).is_file() {
            return Err(format!("{directory} has no {name}; {remedy}"));
        }
    }
    Ok(())
}

fn idle_share(qemu: &Qemu, time: Duration) -> Result<f64, Failure> {
    let (began, before) = (Instant::now(), qemu.cpu_time()?);
    thread::sleep(time);
    let used = qemu.cpu_time()? - before;
    Ok(used.as_secs_f64() / began.elapsed().as_secs_f64())
}

/// A file of the host's, in its page cache.
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
    // Without holes and zeroes, which QEMU may treat specially.
    let block: Vec<u8> = (0..1 << 20)
        .map(|index: u32| (index >> 4) as u8 | 1)
        .collect();
    (0..mebibytes).try_for_each(|_| file.write_all(&block))
}
