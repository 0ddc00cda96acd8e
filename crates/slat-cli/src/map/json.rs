//! Formats one refresh of `slat map` as JSON: memslots, cells (with the number of 4 KiB pages of each kind), and the
//! sums of cells.

use serde_json::{Map, Value, json};
use slat_kvm::memory_map::Cell;

use super::Process;
use super::picture::flags;
use super::text::{Part, Vm, total};

/// Returns the mappings of a process's VMs at one refresh, as JSON text.
pub fn of(process: &Process, vms: &[Vm]) -> String {
    let vms: Vec<_> = vms.iter().map(vm).collect();
    let value = json!({ "pid": process.pid, "command": process.command, "vms": vms });
    format!("{value:#}\n")
}

fn vm(vm: &Vm) -> Value {
    let parts = |slots: bool| {
        let wanted = vm.parts.iter().filter(|part| part.slot.is_some() == slots);
        wanted.map(part).collect::<Vec<_>>()
    };
    json!({
        "vm": vm.number,
        "format": vm.format,
        "mmu": vm.mmu,
        "slots": parts(true),
        "holes": parts(false),
        "total": pages(&total(&vm.parts)),
    })
}

fn part(part: &Part) -> Value {
    let mut members = json!({
        "space": part.space,
        "gpa": part.gpa,
        "size": part.size,
        "cell_pages": part.cell_pages,
        "cells": part.cells.iter().map(pages).collect::<Vec<_>>(),
        "total": pages(&part.total()),
    });
    if let Some(slot) = &part.slot {
        members["slot"] = slot.id.into();
        members["hva"] = slot.hva.into();
        members["flags"] = flags(slot).into();
        members["private_hva"] = slot.private.into();
    }
    members
}

/// Returns the number of pages of each kind in a cell. Leaves out kinds without a page.
fn pages(cell: &Cell) -> Value {
    let all = Cell::NAMES.into_iter().zip(cell.values());
    let some = all.filter(|(_, pages)| *pages != 0);
    Value::Object(Map::from_iter(
        some.map(|(name, pages)| (name.to_owned(), pages.into())),
    ))
}
