//! Linux as a guest, started as the x86/HVM direct boot ABI (PVH) says: an ELF file that has a note
//! with its 32-bit entry.

use super::Result;
use super::guest::Guest;
use object::elf::{FileHeader64, PT_LOAD};
use object::endian::LittleEndian;
use object::read::elf::{FileHeader as _, ProgramHeader as _};
use slat_kvm::Kvm;

/// The addresses of the boot information, the command line, and the initrd's description. They are below the kernel, in
/// memory that nothing else uses.
const START_INFO: u64 = 0x1000;
const MODULE: u64 = 0x2000;
const MEMORY_MAP: u64 = 0x3000;
const COMMAND_LINE: u64 = 0x4000;

/// XEN_HVM_START_MAGIC_VALUE.
const MAGIC: u32 = 0x336e_c578;
/// XEN_ELFNOTE_PHYS32_ENTRY.
const ENTRY_NOTE: u32 = 18;
/// XEN_HVM_MEMMAP_TYPE_RAM.
const RAM: u32 = 1;
/// Memory that a PC has below its video memory, and where the memory after the BIOS starts.
const LOW_END: u64 = 0x9_f000;
const HIGH_START: u64 = 0x10_0000;

/// Puts `kernel` (vmlinux) and `initrd` into the memory of `guest`, `len` bytes, and makes its vCPU
/// begin with the kernel.
pub fn load(
    kvm: &Kvm,
    guest: &mut Guest,
    len: usize,
    kernel: &[u8],
    initrd: &[u8],
    command_line: &str,
) -> Result<()> {
    let header = FileHeader64::<LittleEndian>::parse(kernel)?;
    let endian = header.endian()?;
    let mut entry = None;
    for segment in header.program_headers(endian, kernel)? {
        if segment.p_type(endian) == PT_LOAD {
            let bytes = segment
                .data(endian, kernel)
                .map_err(|()| "a segment is cut off")?;
            guest.memory.put(segment.p_paddr(endian) as usize, bytes);
        }
        let Some(mut notes) = segment.notes(endian, kernel)? else {
            continue;
        };
        while let Some(note) = notes.next()? {
            if note.name() == b"Xen" && note.n_type(endian).0 == ENTRY_NOTE {
                let address = note
                    .desc()
                    .first_chunk()
                    .ok_or("the note of the entry is short")?;
                entry = Some(u32::from_le_bytes(*address));
            }
        }
    }
    let entry = entry.ok_or("the kernel has no PVH entry: it must be a vmlinux with CONFIG_PVH")?;
    let initrd_at = (len - initrd.len()) & !0xfff;
    guest.memory.put(initrd_at, initrd);
    guest
        .memory
        .put(COMMAND_LINE as usize, command_line.as_bytes());
    guest
        .memory
        .put(COMMAND_LINE as usize + command_line.len(), &[0]);
    let module = [initrd_at as u64, initrd.len() as u64, 0, 0];
    guest.memory.put(MODULE as usize, &words(&module));
    let map = [(0, LOW_END), (HIGH_START, len as u64 - HIGH_START)];
    let map = map.map(|(start, bytes)| words(&[start, bytes, RAM.into()]));
    guest.memory.put(MEMORY_MAP as usize, &map.concat());
    let both = |low: u32, high: u32| u64::from(low) | u64::from(high) << 32;
    let info = [
        both(MAGIC, 1),
        // No flags; one module.
        both(0, 1),
        MODULE,
        COMMAND_LINE,
        // No ACPI tables.
        0,
        MEMORY_MAP,
        both(map.len() as u32, 0),
    ];
    guest.memory.put(START_INFO as usize, &words(&info));
    guest.start_at(kvm, entry.into())?;
    let mut regs = guest.vcpu.get_regs()?;
    regs.rbx = START_INFO;
    guest.vcpu.set_regs(&regs)?;
    Ok(())
}

fn words(words: &[u64]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

/// Returns an initrd with `files`: names, modes, contents. The kernel unpacks what follows it, too.
pub fn archive(files: &[(&str, u32, &[u8])]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for (name, mode, contents) in files.iter().chain([&("TRAILER!!!", 0, &[][..])]) {
        let (size, name_size) = (contents.len(), name.len() + 1);
        // inode, mode, uid, gid, links, time, size, device, device of a node, length of the name, checksum.
        let fields = [
            0,
            *mode as usize,
            0,
            0,
            1,
            0,
            size,
            0,
            0,
            0,
            0,
            name_size,
            0,
        ];
        bytes.extend(b"070701");
        bytes.extend(fields.map(|field| format!("{field:08x}")).concat().bytes());
        bytes.extend(name.bytes());
        bytes.push(0);
        bytes.resize(bytes.len().next_multiple_of(4), 0);
        bytes.extend(*contents);
        bytes.resize(bytes.len().next_multiple_of(4), 0);
    }
    bytes
}
