//! A small VMM that runs on the kernel's KVM or on slat: `tiny_vmm --backend kvm` or `tiny_vmm --backend slat`.
//!
//! The same source serves both: the macro below is expanded once with kvm-ioctls' types and once with slat-kvm's. A
//! program that uses one of the two only has `use kvm_ioctls::…` or `use slat_kvm::…` instead.
//!
//! The guest reads a byte of a device, writes a sum to the device, and ends. What differs between the processors, the
//! guest's code and the vCPU's first registers, is in a file for each.

#[cfg_attr(target_arch = "aarch64", path = "tiny_vmm/aarch64.rs")]
#[cfg_attr(target_arch = "x86_64", path = "tiny_vmm/x86_64.rs")]
#[macro_use]
mod guest;

use std::process::ExitCode;

const MEMORY: usize = 0x4000;

macro_rules! vmm {
    ($backend:ident) => {
        pub fn run() -> Result<Vec<String>, Box<dyn std::error::Error>> {
            use kvm_bindings::{KVM_SYSTEM_EVENT_SHUTDOWN, kvm_userspace_memory_region};
            use $backend::{Kvm, VcpuExit};

            let kvm = Kvm::new()?;
            let vm = kvm.create_vm()?;
            let mut memory = crate::Memory::new(crate::MEMORY)?;
            memory.bytes()[crate::guest::CODE as usize..][..crate::guest::CODE_BYTES.len()]
                .copy_from_slice(crate::guest::CODE_BYTES);
            let region = kvm_userspace_memory_region {
                slot: 0,
                flags: 0,
                guest_phys_addr: 0,
                memory_size: crate::MEMORY as u64,
                userspace_addr: memory.address(),
            };
            // SAFETY: the memory outlives the VM, and is read only while the guest does not run.
            unsafe { vm.set_user_memory_region(region)? };

            let mut vcpu = create_vcpu!(vm);
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
                    VcpuExit::SystemEvent(KVM_SYSTEM_EVENT_SHUTDOWN, _) => {
                        log.push("switched off".into());
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

#[cfg(test)]
mod tests {
    #[test]
    fn the_guest_uses_its_device_and_ends() {
        assert_eq!(crate::on_slat::run().unwrap(), crate::guest::LOG);
    }
}
