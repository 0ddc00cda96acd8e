//! The Linux guests: the files that they boot, and the commands that their shells run.

use std::path::Path;

use crate::Linux;
use crate::arch::x86_64::machine::Failure;
use crate::arch::x86_64::qemu::{Payload, Qemu};

/// The goal for the processor time of a later boot, as a share of the first boot's time. Later boots execute code that
/// slat has already compiled.
pub const AGAIN: f64 = 0.6;

/// The name of the first guest. Its devices are measured, too.
pub const LINUX: &str = "linux";

/// A Linux guest. Its files are among the materials, which `conformance/vmm/materials` prepares.
pub struct Guest {
    pub case: &'static str,
    /// The argument with which `conformance/vmm/materials` prepares the guest's files. Empty for the usual files.
    pub what: &'static str,
    kernel: &'static str,
    initrd: &'static str,
    /// The disk with the guest's system, unless the initrd has all of it.
    system: Option<&'static str>,
    /// The guest's tasks, in the order in which they are run.
    pub works: &'static [Work],
    /// The metrics of the boots after the tasks. Before each of these boots, the guest resets its machine.
    pub again: &'static [&'static str],
    /// The goal for the processor time until the shell is ready, as a share of the time on QEMU's own software CPU. For
    /// later boots, the goal is [`AGAIN`].
    pub boot: f64,
    /// The goal for the processor time of all tasks together, as a share of the time on QEMU's own software CPU.
    pub together: f64,
}

/// A command that the guest's shell runs, and whose processor time is measured.
pub struct Work {
    pub metric: &'static str,
    pub command: &'static str,
    /// The goal for the processor time, as a share of the time on QEMU's own software CPU.
    pub most: f64,
}

const fn work(metric: &'static str, most: f64, command: &'static str) -> Work {
    Work {
        metric,
        command,
        most,
    }
}

const SHELL: &str = "i=0; while [ $i -lt 200000 ]; do i=$((i+1)); done";
const SHA256: &str = "head -c 50000000 /dev/zero | sha256sum >/tmp/sum";
const GZIP: &str =
    "seq 1000000 >/tmp/numbers; gzip -c /tmp/numbers | gunzip -c | cmp - /tmp/numbers";

/// The guests, in the order in which they are measured.
pub const GUESTS: &[Guest] = &[
    Guest {
        case: LINUX,
        what: "",
        // QEMU enters this kernel at Xen's PVH entry point, so the kernel need not be unpacked.
        kernel: "vmlinux",
        initrd: "initrd",
        system: None,
        works: &[
            work("shell_cpu_seconds", 0.6, SHELL),
            work("sha256_cpu_seconds", 0.6, SHA256),
            work("gzip_cpu_seconds", 0.6, GZIP),
        ],
        again: &[],
        boot: 0.7,
        together: 0.6,
    },
    // The tasks of this guest are short, and most of their code is executed for the first time.
    Guest {
        case: "short",
        what: "",
        kernel: "vmlinux",
        initrd: "initrd",
        system: None,
        works: &[
            work(
                "forks_cpu_seconds",
                1.0,
                "i=0; while [ $i -lt 100 ]; do /bin/true; i=$((i+1)); done",
            ),
            work(
                "shell_cpu_seconds",
                1.0,
                "i=0; while [ $i -lt 20000 ]; do i=$((i+1)); done",
            ),
            work(
                "sha256_cpu_seconds",
                1.0,
                "head -c 16777216 /dev/zero | sha256sum >/tmp/sum",
            ),
            work(
                "gzip_cpu_seconds",
                1.0,
                "seq 300000 | head -c 2000000 | gzip -c >/tmp/numbers.gz",
            ),
        ],
        again: &["second_boot_cpu_seconds", "third_boot_cpu_seconds"],
        boot: 0.7,
        together: 1.0,
    },
    Guest {
        case: "i386",
        what: "i386",
        // This kernel unpacks itself, in 32-bit code.
        kernel: "i386/vmlinuz",
        initrd: "i386/initrd",
        system: None,
        works: &[
            work("shell_cpu_seconds", 0.7, SHELL),
            work("sha256_cpu_seconds", 0.7, SHA256),
            work("gzip_cpu_seconds", 0.7, GZIP),
        ],
        again: &[],
        boot: 0.7,
        together: 0.7,
    },
    Guest {
        case: "debian",
        what: "debian",
        kernel: "vmlinux",
        initrd: "debian/initrd",
        system: Some("debian/disk"),
        works: &[
            work(
                "gcc_cpu_seconds",
                0.9,
                "gcc -O2 -o /tmp/crypto crypto.c -lcrypto",
            ),
            // The previous task of the guest has made the program /tmp/crypto.
            work("ecdsa_cpu_seconds", 0.9, "/tmp/crypto ecdsa-p256 2000"),
            work("x25519_cpu_seconds", 0.9, "/tmp/crypto x25519 5000"),
            work("rsa_cpu_seconds", 0.9, "/tmp/crypto rsa-2048 400"),
            work("aes_gcm_cpu_seconds", 0.9, "/tmp/crypto aes-256-gcm 200"),
            work(
                "chacha20_cpu_seconds",
                0.9,
                "/tmp/crypto chacha20-poly1305 150",
            ),
            work("sha256_cpu_seconds", 0.9, "/tmp/crypto sha-256 300"),
            work("python_loops_cpu_seconds", 0.9, "python3 loops.py"),
            work("python_floats_cpu_seconds", 0.3, "python3 floats.py"),
            work("apt_cpu_seconds", 0.9, "apt list >/tmp/list 2>/tmp/said"),
            work(
                "forks_cpu_seconds",
                0.9,
                "i=0; while [ $i -lt 300 ]; do /bin/true; i=$((i+1)); done",
            ),
        ],
        again: &[],
        boot: 0.9,
        together: 0.6,
    },
];

impl Guest {
    /// Returns the names of the guest's files.
    pub fn files(&self) -> impl Iterator<Item = &'static str> {
        [Some(self.kernel), Some(self.initrd), self.system]
            .into_iter()
            .flatten()
    }

    /// Starts the guest. A guest without a disk of its own gets `disk`.
    pub fn start(&self, linux: &Linux, on_slat: bool, disk: &Path) -> Result<Qemu, Failure> {
        let material = |name| linux.materials.join(name);
        let payload = Payload {
            kernel: material(self.kernel),
            initrd: material(self.initrd),
            disk: self.system.map_or_else(|| disk.to_owned(), material),
            // This argument makes the init program start the system on the disk.
            arguments: self.system.map_or("", |_| "system=/dev/vda"),
            reboots: !self.again.is_empty(),
        };
        Qemu::start(linux, on_slat, &payload)
    }
}
