//! A guest that fills its memory, and the snapshot of it: the memory, then the vCPU's registers.

use super::{Result, set_slot};
use kvm_bindings::{kvm_regs, kvm_sregs};
use slat_kvm::{Kvm, VcpuExit};
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use vmm_sys_util::tempfile::TempFile;

/// Runs in protected mode, without paging. EBP is the size of memory.
///
/// ```text
///       mov edi, 0x100000
/// fill: imul eax, eax, 0x19660d      ; all memory from 1 MiB gets computed words
///       add eax, 0x3c6ef35f
///       stosd
///       cmp edi, ebp
///       jb fill
///       hlt                          ; the snapshot is taken here
///       xor eax, eax
///       mov edi, 0x100000
/// part: mov ecx, 0x10000             ; of each 8 MiB, 256 KiB become running sums
/// word: add eax, [edi]
///       mov [edi], eax
///       add edi, 4
///       dec ecx
///       jnz word
///       add edi, 0x7c0000
///       cmp edi, ebp
///       jb part
///       out 0x10, eax                ; the first output
///       xor eax, eax
///       mov edi, 0x100000
/// all:  rol eax, 1                   ; a checksum of all memory
///       add eax, [edi]
///       add edi, 4
///       cmp edi, ebp
///       jb all
///       out 0x11, eax                ; the result
///       hlt
/// ```
const GUEST: &[u8] = &[
    0xbf, 0x00, 0x00, 0x10, 0x00, 0x69, 0xc0, 0x0d, 0x66, 0x19, 0x00, 0x05, 0x5f, 0xf3, 0x6e, 0x3c,
    0xab, 0x39, 0xef, 0x72, 0xf0, 0xf4, 0x31, 0xc0, 0xbf, 0x00, 0x00, 0x10, 0x00, 0xb9, 0x00, 0x00,
    0x01, 0x00, 0x03, 0x07, 0x89, 0x07, 0x83, 0xc7, 0x04, 0x49, 0x75, 0xf6, 0x81, 0xc7, 0x00, 0x00,
    0x7c, 0x00, 0x39, 0xef, 0x72, 0xe7, 0xe7, 0x10, 0x31, 0xc0, 0xbf, 0x00, 0x00, 0x10, 0x00, 0xd1,
    0xc0, 0x03, 0x07, 0x83, 0xc7, 0x04, 0x39, 0xef, 0x72, 0xf5, 0xe7, 0x11, 0xf4,
];
const CODE: usize = 0x1000;

/// The registers of the vCPU, which follow the memory in the snapshot.
#[derive(Default)]
#[repr(C)]
pub struct Registers {
    pub regs: kvm_regs,
    pub sregs: kvm_sregs,
}

impl Registers {
    pub fn bytes(&mut self) -> &mut [u8] {
        // SAFETY: integers only, of any value, without padding between them.
        unsafe { std::slice::from_raw_parts_mut((&raw mut *self).cast(), size_of::<Self>()) }
    }
}

/// Anonymous memory for a guest.
pub struct Memory {
    pub start: *mut u8,
    pub len: usize,
}

// SAFETY: plain memory, whose contents are reached by unsafe functions only.
unsafe impl Sync for Memory {}

impl Memory {
    pub fn new(len: usize) -> io::Result<Self> {
        let (rights, flags) = (
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
        );
        // SAFETY: a new mapping at an address of the kernel's choice.
        let start = unsafe { libc::mmap(std::ptr::null_mut(), len, rights, flags, -1, 0) };
        if start == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        Ok(Memory {
            start: start.cast(),
            len,
        })
    }

    /// # Safety
    /// Nothing else, and no guest, accesses these bytes while the slice is used.
    #[allow(clippy::mut_from_ref, reason = "the caller promises it")]
    pub unsafe fn bytes(&self, from: usize, len: usize) -> &mut [u8] {
        assert!(from <= self.len && len <= self.len - from);
        // SAFETY: within our mapping, and the caller promises the rest.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(from), len) }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: our mapping. No guest runs: vCPUs are created after the memory and dropped before it.
        unsafe { libc::munmap(self.start.cast(), self.len) };
    }
}

/// Runs a guest that fills its memory, and returns the snapshot: a file without a name.
pub fn take(size: usize) -> Result<File> {
    let memory = Memory::new(size)?;
    // SAFETY: no guest runs yet.
    unsafe { memory.bytes(CODE, GUEST.len()) }.copy_from_slice(GUEST);
    let vm = Kvm::new()?.create_vm()?;
    set_slot(&vm, &memory, None)?;
    let mut vcpu = vm.create_vcpu(0)?;
    let mut registers = Registers {
        regs: vcpu.get_regs()?,
        sregs: vcpu.get_sregs()?,
    };
    let Registers { regs, sregs } = &mut registers;
    for segment in [&mut sregs.cs, &mut sregs.ds, &mut sregs.es, &mut sregs.ss] {
        (segment.base, segment.limit) = (0, u32::MAX);
        (segment.g, segment.db) = (1, 1);
    }
    sregs.cr0 |= 1;
    (regs.rip, regs.rbp, regs.rflags) = (CODE as u64, size as u64, 2);
    vcpu.set_sregs(sregs)?;
    vcpu.set_regs(regs)?;
    match vcpu.run()? {
        VcpuExit::Hlt => {}
        exit => return Err(format!("unexpected exit: {exit:?}").into()),
    }
    (registers.regs, registers.sregs) = (vcpu.get_regs()?, vcpu.get_sregs()?);
    let file = TempFile::new()?.into_file();
    // SAFETY: the guest has stopped.
    file.write_all_at(unsafe { memory.bytes(0, size) }, 0)?;
    file.write_all_at(registers.bytes(), size as u64)?;
    Ok(file)
}
