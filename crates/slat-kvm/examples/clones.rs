//! Clones of a running guest, as a sandbox makes one for each request: a guest gets ready once, and each request continues it in a VM
//! of its own. Run it: `cargo run -p slat-kvm --example clones -- 1000`.
//!
//! The guest's memory is a file in memory (memfd). It is not written to once the guest has stopped, and each clone maps it
//! with MAP_PRIVATE: a page is the file's until the clone writes to it, then the host copies it. A clone costs what it changes, and its
//! state: the registers of the vCPU, the interrupt controllers, the timer and the clock, by KVM's calls ([`state`]).

#[path = "clones/state.rs"]
mod state;

use kvm_bindings::kvm_userspace_memory_region;
use slat_kvm::{Kvm, VcpuExit, VcpuFd, VmFd};
use state::State;
use std::error::Error;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd};
use std::process::ExitCode;
use std::time::{Duration, Instant};

type Result<T> = std::result::Result<T, Box<dyn Error + Send + Sync>>;

const MEMORY: usize = 64 << 20;
/// What the guest fills before it is ready.
const FILLED: u32 = 16 << 20;
const CODE: usize = 0x1000;

/// Runs in protected mode, without paging. EBP is the end of what it fills.
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

/// A mapping of a guest's memory.
struct Memory {
    start: *mut u8,
    len: usize,
}

impl Memory {
    /// Maps `file`: MAP_SHARED for the guest that fills it, MAP_PRIVATE for a clone.
    fn map(file: &File, len: usize, sharing: i32) -> io::Result<Self> {
        let rights = libc::PROT_READ | libc::PROT_WRITE;
        let (flags, fd) = (sharing | libc::MAP_NORESERVE, file.as_raw_fd());
        // SAFETY: a new mapping at an address of the kernel's choice.
        let start = unsafe { libc::mmap(std::ptr::null_mut(), len, rights, flags, fd, 0) };
        if start == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        Ok(Memory {
            start: start.cast(),
            len,
        })
    }

    /// Copies `bytes` to `at`. No guest runs.
    fn put(&mut self, at: usize, bytes: &[u8]) {
        assert!(at <= self.len && bytes.len() <= self.len - at);
        // SAFETY: within our mapping; `bytes` is no part of it.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.start.add(at), bytes.len()) };
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: our mapping. No guest runs: vCPUs are dropped before it.
        unsafe { libc::munmap(self.start.cast(), self.len) };
    }
}

/// Makes a file in memory, of `len` bytes.
fn memory_file(len: usize) -> io::Result<File> {
    // SAFETY: the name is a C string.
    let fd = unsafe { libc::memfd_create(c"guest".as_ptr(), libc::MFD_CLOEXEC) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: a new descriptor, which nobody else owns.
    let file = unsafe { File::from_raw_fd(fd) };
    file.set_len(len as u64)?;
    Ok(file)
}

/// A VM with one vCPU. The fields are dropped in this order.
struct Guest {
    vcpu: VcpuFd,
    vm: VmFd,
    memory: Memory,
}

impl Guest {
    fn new(kvm: &Kvm, memory: Memory) -> Result<Self> {
        let vm = kvm.create_vm()?;
        vm.create_irq_chip()?;
        vm.create_pit2(Default::default())?;
        let region = kvm_userspace_memory_region {
            memory_size: memory.len as u64,
            userspace_addr: memory.start as u64,
            ..Default::default()
        };
        // SAFETY: the memory is dropped after the VM, and written by us only before the guest runs.
        unsafe { vm.set_user_memory_region(region)? };
        let vcpu = vm.create_vcpu(0)?;
        Ok(Guest { vcpu, vm, memory })
    }

    /// Makes one that is ready to run from the beginning.
    fn boot(kvm: &Kvm, memory: Memory) -> Result<Self> {
        let mut guest = Self::new(kvm, memory)?;
        guest.memory.put(CODE, GUEST);
        let vcpu = &guest.vcpu;
        vcpu.set_cpuid2(&kvm.get_supported_cpuid(kvm_bindings::KVM_MAX_CPUID_ENTRIES)?)?;
        let (mut regs, mut sregs) = (vcpu.get_regs()?, vcpu.get_sregs()?);
        for segment in [&mut sregs.cs, &mut sregs.ds, &mut sregs.es, &mut sregs.ss] {
            (segment.base, segment.limit) = (0, u32::MAX);
            (segment.g, segment.db) = (1, 1);
        }
        sregs.cr0 |= 1;
        (regs.rip, regs.rbp, regs.rflags) = (CODE as u64, FILLED.into(), 2);
        vcpu.set_sregs(&sregs)?;
        vcpu.set_regs(&regs)?;
        Ok(guest)
    }

    /// Runs the guest until it asks what to do, and stops it before it has the answer.
    fn get_ready(&mut self) -> Result<()> {
        match self.vcpu.run()? {
            VcpuExit::IoIn(0x10, data) => data.fill(0),
            exit => return Err(format!("unexpected exit: {exit:?}").into()),
        }
        // The instruction ends with the next run; that ends before another one.
        self.vcpu.set_kvm_immediate_exit(1);
        let ended = self.vcpu.run().map(|exit| format!("{exit:?}"));
        self.vcpu.set_kvm_immediate_exit(0);
        match ended {
            Err(error) if error.errno() == libc::EINTR => Ok(()),
            other => Err(format!("it should have stopped: {other:?}").into()),
        }
    }

    /// Has the guest, which is ready, do `request`. Returns its answer, and the sum of its memory.
    fn serve(&mut self, request: u32) -> Result<[u32; 2]> {
        let mut regs = self.vcpu.get_regs()?;
        regs.rax = request.into();
        self.vcpu.set_regs(&regs)?;
        Ok([self.output(0x11)?, self.output(0x12)?])
    }

    fn output(&mut self, port: u16) -> Result<u32> {
        match self.vcpu.run()? {
            VcpuExit::IoOut(to, data) if to == port => Ok(u32::from_le_bytes(data.try_into()?)),
            exit => Err(format!("unexpected exit: {exit:?}").into()),
        }
    }
}

/// A guest that has stopped, of which clones are made.
struct Template {
    kvm: Kvm,
    file: File,
    state: State,
}

impl Template {
    /// Boots a guest, and stops it when it is ready.
    fn new() -> Result<Self> {
        let kvm = Kvm::new()?;
        let file = memory_file(MEMORY)?;
        let mut guest = Guest::boot(&kvm, Memory::map(&file, MEMORY, libc::MAP_SHARED)?)?;
        guest.get_ready()?;
        let state = State::of(&guest.vm, &guest.vcpu)?;
        drop(guest);
        Ok(Template { kvm, file, state })
    }

    fn clone_guest(&self) -> Result<Guest> {
        let guest = Guest::new(
            &self.kvm,
            Memory::map(&self.file, MEMORY, libc::MAP_PRIVATE)?,
        )?;
        self.state.give(&guest.vm, &guest.vcpu)?;
        Ok(guest)
    }
}

/// What clones have cost.
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
    let template = Template::new()?;
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
        let [said, sum] = guest.serve(request)?;
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

/// Returns the bytes of memory that this process alone uses. Pages of a file that one has written to are among them.
fn private_bytes() -> Result<u64> {
    let text = std::fs::read_to_string("/proc/self/smaps_rollup")?;
    let line = text.lines().find(|line| line.starts_with("Anonymous:"));
    let kib = line.and_then(|line| line.split_whitespace().nth(1));
    Ok(kib
        .ok_or("smaps_rollup has no line of anonymous memory")?
        .parse::<u64>()?
        << 10)
}

fn main() -> ExitCode {
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
