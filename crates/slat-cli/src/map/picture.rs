//! Draws memory as lines of text. Each memslot has one strip for each kind of page that it contains. A strip has one
//! character for each cell, which is a run of pages.

use std::fmt::Write as _;

use slat::SlotFlags;
use slat_kvm::memory_map::Cell;

use super::Process;
use super::text::{Part, Slot, Vm, total};

/// The legend of the characters.
pub const LEGEND: &str = ". no page of the cell   + some   # all";

/// Returns the picture of one refresh.
pub fn of(process: &Process, vms: &[Vm]) -> String {
    let mut text = format!("{}\n{LEGEND}\n", whose(process));
    for line in vms.iter().flat_map(lines) {
        let _ = writeln!(text, "{line}");
    }
    text
}

/// Returns a heading that names the process.
pub fn whose(process: &Process) -> String {
    format!("memory of process {} ({})", process.pid, process.command)
}

/// Returns a heading that names the VM.
pub fn title(vm: &Vm) -> String {
    format!("VM {}: {}, {}", vm.number, vm.format, vm.mmu)
}

/// Returns the lines that show the memory of a VM.
pub fn lines(vm: &Vm) -> Vec<String> {
    let mut lines = vec![String::new(), title(vm)];
    for part in &vm.parts {
        lines.push(String::new());
        lines.push(format!(
            "{}   a cell is {}",
            name(part),
            bytes(part.cell_pages * slat::PAGE_SIZE)
        ));
        lines.extend(strips(part));
    }
    let total = total(&vm.parts).values();
    let [small, mega, giga, ..] = total;
    let leaves = [small, mega >> 9, giga >> 18];
    lines.push(String::new());
    lines.push(format!(
        "leaves: {} of 4 KiB, {} of 2 MiB, {} of 1 GiB",
        leaves[0], leaves[1], leaves[2]
    ));
    let rest = Cell::NAMES.into_iter().zip(total).skip(leaves.len());
    let rest = rest.filter(|(_, pages)| *pages != 0);
    let rest: Vec<_> = rest
        .map(|(name, pages)| format!("{pages} {name}"))
        .collect();
    if !rest.is_empty() {
        lines.push(format!("pages: {}", rest.join(", ")));
    }
    lines
}

/// Returns a name for a memslot, or for a part of the address space that has no memslot.
pub fn name(part: &Part) -> String {
    let space = match part.space {
        0 => String::new(),
        space => format!(" of address space {space}"),
    };
    let last = part.gpa + (part.size - 1);
    let at = format!("{:#x}-{last:#x} ({})", part.gpa, bytes(part.size));
    match &part.slot {
        None => format!("no memslot{space}: {at}"),
        Some(slot) => {
            let flags = flags(slot);
            let flags: String = flags.iter().map(|flag| format!(" {flag}")).collect();
            format!(
                "memslot {}{space}: {at} at hva {:#x}{flags}",
                slot.id, slot.hva
            )
        }
    }
}

/// Returns the words for the flags of a memslot.
pub fn flags(slot: &Slot) -> Vec<&'static str> {
    let words = [
        (slot.flags.has(SlotFlags::READONLY), "read-only"),
        (slot.flags.has(SlotFlags::LOG_DIRTY_PAGES), "logging"),
        (slot.private.is_some(), "guest_memfd"),
    ];
    let set = words.into_iter().filter(|(set, _)| *set);
    set.map(|(_, word)| word).collect()
}

/// Draws one strip for each kind of page that the part contains.
fn strips(part: &Part) -> Vec<String> {
    let pages = part.size.div_ceil(slat::PAGE_SIZE);
    let totals = Cell::NAMES
        .into_iter()
        .zip(part.total().values())
        .enumerate();
    let seen = totals.filter(|(_, (_, total))| *total != 0);
    let mut lines: Vec<_> = seen
        .map(|(kind, (name, total))| {
            let cells = part.cells.iter().zip(0u64..).map(|(cell, index)| {
                let full = (pages - index * part.cell_pages).min(part.cell_pages);
                match cell.values()[kind] {
                    0 => '.',
                    pages if pages < full => '+',
                    _ => '#',
                }
            });
            let strip: String = cells.collect();
            format!("  {name:<10}{strip}  {total} of {pages} pages")
        })
        .collect();
    if lines.is_empty() {
        lines.push("  nothing is mapped".to_owned());
    }
    lines
}

/// Formats a number of bytes in the largest unit that gives a whole number.
fn bytes(bytes: u64) -> String {
    let units = ["TiB", "GiB", "MiB", "KiB"]
        .into_iter()
        .zip([40, 30, 20, 10]);
    let mut exact = units.filter(|(_, bits)| bytes != 0 && bytes.is_multiple_of(1 << bits));
    match exact.next() {
        Some((unit, bits)) => format!("{} {unit}", bytes >> bits),
        None => format!("{bytes} bytes"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::map::text::{question, tests::TEXT};

    #[test]
    fn a_memslot_is_drawn_kind_by_kind() {
        let vms = question(64, None).parse(TEXT).unwrap();
        let text = vms.iter().flat_map(lines).collect::<Vec<_>>().join("\n");
        let expected = "
VM 0: ept, tdp

memslot 3: 0x1000-0x4fff (16 KiB) at hva 0x7f0000001000 logging   a cell is 8 KiB
  4k        .#  2 of 4 pages
  protected .+  1 of 4 pages
  dirty     .+  1 of 4 pages
  accessed  .#  2 of 4 pages

no memslot: 0xfee00000-0xfee00fff (4 KiB)   a cell is 4 KiB
  mmio      #  1 of 1 pages

leaves: 2 of 4 KiB, 0 of 2 MiB, 0 of 1 GiB
pages: 1 mmio, 1 protected, 1 dirty, 2 accessed

VM 2: npt, direct

memslot 0 of address space 1: 0x0-0xfff (4 KiB) at hva 0x1000 read-only guest_memfd   a cell is 4 KiB
  nothing is mapped

leaves: 0 of 4 KiB, 0 of 2 MiB, 0 of 1 GiB";
        assert_eq!(text, expected);
    }

    #[test]
    fn sizes_are_in_the_largest_unit_that_divides_them() {
        let sizes = [4096, 1 << 20, 3 << 30, (1 << 30) + 4096, 7].map(bytes);
        assert_eq!(sizes, ["4 KiB", "1 MiB", "3 GiB", "1048580 KiB", "7 bytes"]);
    }
}
