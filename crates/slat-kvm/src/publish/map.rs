//! The answer to `map CELLS [VM]`: the memslots of all VMs, or of one VM, and how each memslot is mapped, in at most
//! `CELLS` cells.
//!
//! ```text
//! names cell 4k 2m 1g …        the names of the values in lines `cell`
//! vm 3 ept tdp                 a VM, by its number, with the format of its tables and its MMU
//! slot 0 7 1048576 8192 140… 1 -
//!                              a memslot: address space, id, first guest-physical address, bytes, host-virtual
//!                              address, flags as KVM_SET_USER_MEMORY_REGION has them, and the address of the slot's
//!                              private memory, or `-`
//! hole 0 4276092928 4096       a part of an address space without memslots: from the first to the last page with an
//!                              entry
//! cells 512                    the pages of each cell of the slot or hole before; the last may have fewer
//! cell 3 12 0 0 …              a cell that is not all zero: its index, and its values (`memory_map`)
//! ```
//!
//! The thread looks up one memslot at a time, and reads one cell at a time. The thread holds no lock in between, so
//! vCPUs and slot changes do not wait for an answer. The answer needs no heap memory. Memslots may be created and
//! deleted meanwhile: a slot that is deleted has empty cells from then on.

use super::vm_from;
use super::writer::{Writer, names, values};
use crate::caps::ADDRESS_SPACES;
use crate::engine::EngineVm;
use crate::memory_map::Cell;
use slat::{Gfn, Gpa};
use slat_host::granule;
use std::fmt::{self, Write as _};
use std::ops::Range;

/// The first word of a request for memory maps.
pub const MAP: &str = "map";
/// The greatest number of cells that a reader may ask for, for each memslot.
pub const MOST_CELLS: u64 = 1024;

/// A reader's request for memory maps.
pub(super) struct Question {
    /// The greatest number of cells for one memslot.
    cells: u64,
    /// The number of the VM about which the reader asks; `None`: all VMs.
    vm: Option<u64>,
}

impl Question {
    /// Parses the words of a request after its first word. `None`: the words are invalid.
    pub(super) fn parse<'a>(mut words: impl Iterator<Item = &'a str>) -> Option<Self> {
        let cells = words.next()?.parse().ok()?;
        let vm = words.next().map(str::parse).transpose().ok()?;
        let known = (1..=MOST_CELLS).contains(&cells) && words.next().is_none();
        known.then_some(Question { cells, vm })
    }
}

/// Writes the answer to a request for memory maps.
pub(super) fn answer(to: &mut Writer<'_>, question: &Question) -> fmt::Result {
    names(to, "cell", &Cell::NAMES)?;
    let mut from = question.vm.unwrap_or(0);
    while let Some((number, vm)) = vm_from(from) {
        if question.vm.is_some_and(|wanted| wanted != number) {
            break;
        }
        writeln!(to, "vm {number} {} {}", vm.format().name(), vm.mmu().name())?;
        for space in 0..ADDRESS_SPACES as usize {
            memory(to, &vm, space, question.cells)?;
        }
        if question.vm.is_some() {
            break;
        }
        from = number + 1;
    }
    Ok(())
}

/// Writes the memslots of an address space, and the holes between them.
fn memory(to: &mut Writer<'_>, vm: &EngineVm, space: usize, cells: u64) -> fmt::Result {
    let mut at = Gfn(0);
    while let Some(slot) = vm.memslot_from(space, at) {
        let gfns = granule().gfn(slot.gpa)..granule().gfn(Gpa(slot.gpa.0 + slot.size));
        hole(to, vm, space, at..gfns.start, cells)?;
        write!(to, "slot")?;
        let hva = slot.backing.0;
        let numbers = [space as u64, slot.slot.into(), slot.gpa.0, slot.size, hva];
        values(to, numbers.into_iter().chain([slot.flags.0.into()]))?;
        match slot.private {
            Some(private) => writeln!(to, " {}", private.0)?,
            None => writeln!(to, " -")?,
        }
        strip(to, vm, space, &gfns, cells)?;
        // The slots may have changed since the last look-up. So a slot that was already listed may end after the end of
        // this slot.
        at = at.max(gfns.end);
    }
    hole(to, vm, space, at..Gfn(u64::MAX), cells)
}

/// Writes a line for the mappings between two memslots, if there are any.
fn hole(
    to: &mut Writer<'_>,
    vm: &EngineVm,
    space: usize,
    gfns: Range<Gfn>,
    cells: u64,
) -> fmt::Result {
    if gfns.is_empty() {
        return Ok(());
    }
    let mut used = gfns.end..gfns.start;
    vm.visit_leaves(space, gfns.clone(), &mut |gfn, level, _| {
        used.start = used.start.min(gfn.max(gfns.start));
        used.end = used
            .end
            .max(Gfn(gfn.0 + granule().pages(level)).min(gfns.end));
    });
    if used.is_empty() {
        return Ok(());
    }
    let bytes = (used.end.0 - used.start.0) << granule().shift();
    writeln!(to, "hole {space} {} {bytes}", granule().gpa(used.start).0)?;
    strip(to, vm, space, &used, cells)
}

/// Writes how `gfns` are mapped, in at most `cells` cells.
fn strip(
    to: &mut Writer<'_>,
    vm: &EngineVm,
    space: usize,
    gfns: &Range<Gfn>,
    cells: u64,
) -> fmt::Result {
    let pages = (gfns.end.0 - gfns.start.0)
        .div_ceil(cells)
        .next_power_of_two();
    writeln!(to, "cells {pages}")?;
    let mut start = gfns.start;
    for index in 0.. {
        let end = Gfn(start.0 + pages).min(gfns.end);
        let cell = Cell::read(vm, space, &(start..end));
        if cell != Cell::default() {
            write!(to, "cell {index}")?;
            values(to, cell.values().into_iter())?;
            to.write_char('\n')?;
        }
        start = end;
        if start >= gfns.end {
            break;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_question_has_a_width_and_may_have_a_vm() {
        let parse = |line: &str| Question::parse(line.split(' ')).map(|it| (it.cells, it.vm));
        assert_eq!(parse("64"), Some((64, None)));
        assert_eq!(parse("1024 7"), Some((1024, Some(7))));
        for line in ["", "0", "1025", "64 x", "64 7 8", "-1"] {
            assert_eq!(parse(line), None, "{line}");
        }
    }
}
