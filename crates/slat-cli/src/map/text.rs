//! Parses a process's reply to `slat map`. `publish/map.rs` of `slat_kvm` defines the reply's form.

use slat::SlotFlags;
use slat_kvm::memory_map::Cell;
use slat_kvm::publish::MAP;

use crate::processes::Question;

/// A live VM.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Vm {
    /// The number of VMs that the process had created before this VM.
    pub number: u64,
    /// The format of the VM's tables.
    pub format: String,
    /// The MMU that makes the VM's tables.
    pub mmu: String,
    /// The VM's memslots, and the gaps between memslots that have page-table entries. The order is by address space,
    /// then by address.
    pub parts: Vec<Part>,
}

/// A part of an address space: a memslot, or a gap between memslots.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part {
    /// The number of the address space that contains the part.
    pub space: u64,
    /// The first guest-physical address of the part.
    pub gpa: u64,
    /// The size of the part in bytes.
    pub size: u64,
    /// The memslot, if the part has one.
    pub slot: Option<Slot>,
    /// The number of 4 KiB pages of each cell.
    pub cell_pages: u64,
    /// The cells of the part, each with its number of pages of each kind.
    pub cells: Vec<Cell>,
}

/// A memslot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Slot {
    /// The id that the VMM gave to the memslot.
    pub id: u64,
    /// The host-virtual address of the memslot's first byte.
    pub hva: u64,
    /// The memslot's flags.
    pub flags: SlotFlags,
    /// The host-virtual address of the memslot's private memory.
    pub private: Option<u64>,
}

impl Part {
    /// Returns the sum of the part's cells.
    pub fn total(&self) -> Cell {
        total(std::slice::from_ref(self))
    }
}

/// Returns the sum of all cells of `parts`.
pub fn total(parts: &[Part]) -> Cell {
    let mut sums = Cell::default().values();
    for cell in parts.iter().flat_map(|part| &part.cells) {
        for (sum, value) in sums.iter_mut().zip(cell.values()) {
            *sum += value;
        }
    }
    Cell::from_values(sums)
}

/// Returns the question for the mappings of VM number `vm`, or of all VMs.
pub fn question(cells: u64, vm: Option<u64>) -> Question<Vec<Vm>> {
    let vm = vm.map(|vm| format!(" {vm}")).unwrap_or_default();
    Question {
        words: format!("{MAP} {cells}{vm}"),
        read,
    }
}

/// Parses the lines of a reply. `None`: a line does not have the expected form.
fn read(lines: &[&str]) -> Option<Vec<Vm>> {
    let mut vms: Vec<Vm> = Vec::new();
    for line in lines {
        let (word, rest) = line.split_once(' ')?;
        let words: Vec<_> = rest.split(' ').collect();
        let parts = vms.last_mut().map(|vm| &mut vm.parts);
        match (word, &words[..]) {
            ("names", ["cell", names @ ..]) if *names == Cell::NAMES => {}
            ("vm", [number, format, mmu]) => vms.push(Vm {
                number: number.parse().ok()?,
                format: (*format).to_owned(),
                mmu: (*mmu).to_owned(),
                parts: Vec::new(),
            }),
            ("slot", [space, id, gpa, size, hva, flags, private]) => {
                let slot = Slot {
                    id: id.parse().ok()?,
                    hva: hva.parse().ok()?,
                    flags: SlotFlags(flags.parse().ok()?),
                    private: match *private {
                        "-" => None,
                        address => Some(address.parse().ok()?),
                    },
                };
                parts?.push(part([space, gpa, size], Some(slot))?);
            }
            ("hole", [space, gpa, size]) => parts?.push(part([space, gpa, size], None)?),
            ("cells", [pages]) => {
                let part = parts?.last_mut()?;
                part.cell_pages = pages.parse().ok().filter(|pages| *pages > 0)?;
                let cells = part
                    .size
                    .div_ceil(slat::PAGE_SIZE)
                    .div_ceil(part.cell_pages);
                part.cells = vec![Cell::default(); cells.try_into().ok()?];
            }
            ("cell", [index, values @ ..]) => {
                let index: usize = index.parse().ok()?;
                let values: Option<Vec<u64>> =
                    values.iter().map(|value| value.parse().ok()).collect();
                let values = values?.try_into().ok()?;
                *parts?.last_mut()?.cells.get_mut(index)? = Cell::from_values(values);
            }
            _ => return None,
        }
    }
    Some(vms)
}

/// Makes a part without cells. `numbers` has its address space, its address and its size.
fn part(numbers: [&str; 3], slot: Option<Slot>) -> Option<Part> {
    let [space, gpa, size] = numbers.map(|number| number.parse().ok());
    Some(Part {
        space: space?,
        gpa: gpa?,
        size: size?,
        slot,
        cell_pages: 1,
        cells: Vec::new(),
    })
}

#[cfg(test)]
pub mod tests {
    use super::*;

    /// A reply with two VMs. The first VM has a memslot, and MMIO entries of a device.
    pub const TEXT: &str = "slat 1\nnames cell 4k 2m 1g mmio nx protected dirty accessed private\nvm 0 ept tdp\n\
        slot 0 3 4096 16384 139637976731648 1 -\ncells 2\ncell 1 2 0 0 0 0 1 1 2 0\nhole 0 4276092928 4096\ncells 1\n\
        cell 0 0 0 0 1 0 0 0 0 0\nvm 2 npt direct\nslot 1 0 0 4096 4096 2 8192\ncells 1\nend\n";

    #[test]
    fn an_answer_is_read() {
        let vms = question(64, None).parse(TEXT).unwrap();
        assert_eq!((vms[0].number, vms[1].number), (0, 2));
        let [slot, hole] = &vms[0].parts[..] else {
            panic!("{vms:?}")
        };
        assert_eq!(slot.cells.len(), 2);
        assert_eq!(slot.cells[0], Cell::default());
        assert_eq!(
            (slot.cells[1].by_level, slot.cells[1].accessed),
            ([2, 0, 0], 2)
        );
        assert_eq!((hole.slot.as_ref(), hole.total().mmio), (None, 1));
        assert_eq!(total(&vms[0].parts).values(), [2, 0, 0, 1, 0, 1, 1, 2, 0]);
        let slot = vms[1].parts[0].slot.as_ref().unwrap();
        assert_eq!(
            (slot.private, slot.flags),
            (Some(8192), SlotFlags::READONLY)
        );
    }

    #[test]
    fn half_an_answer_is_none() {
        for cut in 7..TEXT.len() - 1 {
            let error = question(64, None).parse(&TEXT[..cut]).unwrap_err();
            assert!(error.contains("part of an answer"), "{cut}: {error}");
        }
        for (good, bad) in [
            ("cell 1 2", "cell 2 2"),
            ("cells 2", "cells 0"),
            ("vm 0", "vm x"),
            (" 4k", " 8k"),
        ] {
            assert!(question(64, None).parse(&TEXT.replace(good, bad)).is_err());
        }
    }
}
