//! A small VMM that runs on the kernel's KVM or on slat: `tiny_vmm --backend kvm` or `tiny_vmm --backend slat`.
//!
//! The same source serves both: the macro below is expanded once with kvm-ioctls' types and once with slat-kvm's. A
//! program that uses one of the two only has `use kvm_ioctls::…` or `use slat_kvm::…` instead.
//!
//! The guest is real-mode code: it reads a byte from port 0x10, adds the value of a device register, writes the sum to
//! port 0x11 and to the device register, and halts.
#![cfg(target_arch = "x86_64")]

use std::process::ExitCode;

/// ```text
/// mov dx, 0x10
/// in al, dx
/// mov bx, 0x8000        ; the address of a device: no memory
/// add al, [bx]
/// inc dx
/// out dx, al
/// mov [bx], al
/// hlt
/// ```
const GUEST: &[u8] = &[
    0xba, 0x10, 0x00, 0xec, 0xbb, 0x00, 0x80, 0x02, 0x07, 0x42, 0xee, 0x88, 0x07, 0xf4,
];
const CODE: u64 = 0x1000;
const MEMORY: usize = 0x4000;

macro_rules! vmm {
    ($backend:ident) => {
        pub fn run() -> Result<Vec<String>, Box<dyn std::error::Error>> {
            use kvm_bindings::kvm_userspace_memory_region;
            use $backend::{Kvm, VcpuExit};

            let kvm = Kvm::new()?;
            let vm = kvm.create_vm()?;
            let mut memory = crate::Memory::new(crate::MEMORY)?;
            memory.bytes()[crate::CODE as usize..][..crate::GUEST.len()]
                .copy_from_slice(crate::GUEST);
            let region = kvm_userspace_memory_region {
                slot: 0,
                flags: 0,
                guest_phys_addr: 0,
                memory_size: crate::MEMORY as u64,
                userspace_addr: memory.address(),
            };
            // SAFETY: the memory outlives the VM, and is read only while the guest does not run.
            unsafe { vm.set_user_memory_region(region)? };

            let mut vcpu = vm.create_vcpu(0)?;
            let mut sregs = vcpu.get_sregs()?;
            for segment in [&mut sregs.cs, &mut sregs.ds, &mut sregs.ss] {
                segment.base = 0;
                segment.selector = 0;
            }
            vcpu.set_sregs(&sregs)?;
            let mut regs = vcpu.get_regs()?;
            regs.rip = crate::CODE;
            regs.rflags = 2;
            vcpu.set_regs(&regs)?;

            let mut log = Vec::new();
            loop {
                match vcpu.run()? {
                    VcpuExit::IoIn(port, data) => {
                        data[0] = 40;
                        log.push(format!("in  port {port:#x}"));
                    }
                    VcpuExit::IoOut(port, data) => {
                        log.push(format!("out port {port:#x}: {}", data[0]))
                    }
                    VcpuExit::MmioRead(address, data) => {
                        data[0] = 2;
                        log.push(format!("read  {address:#x}"));
                    }
                    VcpuExit::MmioWrite(address, data) => {
                        log.push(format!("write {address:#x}: {}", data[0]));
                    }
                    VcpuExit::Hlt => {
                        log.push("halted".into());
                        return Ok(log);
                    }
                    exit => return Err(format!("unexpected exit: {exit:?}").into()),
                }
            }
        }
    };
}

mod on_kvm {
    vmm!(kvm_ioctls);
}

mod on_slat {
    vmm!(slat_kvm);
}

/// Anonymous memory for a guest.
struct Memory {
    start: *mut u8,
    len: usize,
}

impl Memory {
    fn new(len: usize) -> std::io::Result<Self> {
        // SAFETY: a new mapping at an address of the kernel's choice.
        let start = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                len,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
                -1,
                0,
            )
        };
        if start == libc::MAP_FAILED {
            return Err(std::io::Error::last_os_error());
        }
        Ok(Memory {
            start: start.cast(),
            len,
        })
    }

    fn address(&self) -> u64 {
        self.start as u64
    }

    fn bytes(&mut self) -> &mut [u8] {
        // SAFETY: our mapping, `len` bytes; no guest runs while the slice is used.
        unsafe { std::slice::from_raw_parts_mut(self.start, self.len) }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: our mapping. No guest runs: vCPUs are created after the memory and dropped before it.
        unsafe { libc::munmap(self.start.cast(), self.len) };
    }
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let result = match words[..] {
        [] | ["--backend", "slat"] => on_slat::run(),
        ["--backend", "kvm"] => on_kvm::run(),
        _ => {
            eprintln!("usage: tiny_vmm [--backend kvm|slat]");
            return ExitCode::from(2);
        }
    };
    match result {
        Ok(log) => {
            println!("{}", log.join("\n"));
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("tiny_vmm: {error}");
            ExitCode::FAILURE
        }
    }
}
