//! A guest with one vCPU, its memory, and copies of both: the guest stops once, and each clone goes on from there.
//!
//! The guest's memory is a file in memory (memfd). It is not written to once the guest has stopped, and each clone
//! maps it with MAP_PRIVATE: a page is the file's until the clone writes to it, then the host copies it. A clone costs
//! what it changes, and its state: the registers of the vCPU, the interrupt controllers, the timer and the clock, by
//! KVM's calls ([`State`]).

use super::Result;
use super::state::State;
use kvm_bindings::kvm_userspace_memory_region;
use slat_kvm::{Kvm, VcpuFd, VmFd};
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd};

/// A mapping of a guest's memory.
pub struct Memory {
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
    pub fn put(&mut self, at: usize, bytes: &[u8]) {
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
pub struct Guest {
    pub vcpu: VcpuFd,
    pub vm: VmFd,
    pub memory: Memory,
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

    /// Makes the vCPU begin at `entry` in protected mode, without paging: all addresses are physical.
    pub fn start_at(&mut self, kvm: &Kvm, entry: u64) -> Result<()> {
        let vcpu = &self.vcpu;
        vcpu.set_cpuid2(&kvm.get_supported_cpuid(kvm_bindings::KVM_MAX_CPUID_ENTRIES)?)?;
        let (mut regs, mut sregs) = (vcpu.get_regs()?, vcpu.get_sregs()?);
        for segment in [&mut sregs.cs, &mut sregs.ds, &mut sregs.es, &mut sregs.ss] {
            (segment.base, segment.limit) = (0, u32::MAX);
            (segment.g, segment.db) = (1, 1);
        }
        sregs.cr0 |= 1;
        (regs.rip, regs.rflags) = (entry, 2);
        vcpu.set_sregs(&sregs)?;
        vcpu.set_regs(&regs)?;
        Ok(())
    }

    /// Ends the instruction that has read a port, and stops before the next one.
    pub fn end_instruction(&mut self) -> Result<()> {
        self.vcpu.set_kvm_immediate_exit(1);
        let ended = self.vcpu.run().map(|exit| format!("{exit:?}"));
        self.vcpu.set_kvm_immediate_exit(0);
        match ended {
            Err(error) if error.errno() == libc::EINTR => Ok(()),
            other => Err(format!("it should have stopped: {other:?}").into()),
        }
    }

    /// Makes `value` the result, in EAX, of the instruction that last read a port. That instruction has ended.
    pub fn set_input(&mut self, value: u32) -> Result<()> {
        let mut regs = self.vcpu.get_regs()?;
        regs.rax = value.into();
        self.vcpu.set_regs(&regs)?;
        Ok(())
    }
}

/// A guest that has stopped, of which clones are made.
pub struct Template {
    kvm: Kvm,
    file: File,
    len: usize,
    state: State,
}

impl Template {
    /// Makes a guest with `len` bytes of memory, and has `get_ready` start it and stop it where clones are to go on.
    pub fn new(len: usize, get_ready: impl FnOnce(&Kvm, &mut Guest) -> Result<()>) -> Result<Self> {
        let kvm = Kvm::new()?;
        let file = memory_file(len)?;
        let mut guest = Guest::new(&kvm, Memory::map(&file, len, libc::MAP_SHARED)?)?;
        get_ready(&kvm, &mut guest)?;
        let state = State::of(&guest.vm, &guest.vcpu)?;
        drop(guest);
        Ok(Template {
            kvm,
            file,
            len,
            state,
        })
    }

    pub fn clone_guest(&self) -> Result<Guest> {
        let memory = Memory::map(&self.file, self.len, libc::MAP_PRIVATE)?;
        let guest = Guest::new(&self.kvm, memory)?;
        self.state.give(&guest.vm, &guest.vcpu)?;
        Ok(guest)
    }
}

/// Returns the bytes of memory that this process alone uses. Pages of a file that one has written to are among them.
pub fn private_bytes() -> Result<u64> {
    let text = std::fs::read_to_string("/proc/self/smaps_rollup")?;
    let line = text.lines().find(|line| line.starts_with("Anonymous:"));
    let kib = line.and_then(|line| line.split_whitespace().nth(1));
    Ok(kib
        .ok_or("smaps_rollup has no line of anonymous memory")?
        .parse::<u64>()?
        << 10)
}
