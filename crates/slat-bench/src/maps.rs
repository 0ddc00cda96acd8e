//! Reads how a guest's memory is mapped, before or after a phase of an experiment.

use std::ops::Range;

use slat::Gfn;
use slat_kvm::engine::EngineVm;
use slat_kvm::memory_map::Cell;

/// The number of 4 KiB pages in a [`Cell`] of a [`PageMap`]. A cell covers 2 MiB.
pub const CELL: u64 = 512;
/// The maximum number of cells in a map. So many cells cover 1 GiB.
const CELLS: u64 = 512;

/// A map of guest memory, read from the VM's tables.
#[derive(Clone, Debug)]
pub struct PageMap {
    /// The experiment's name: `prefetch`, …
    pub experiment: &'static str,
    /// The case of the experiment. `/` separates the parts of its name.
    pub case: String,
    /// The variant of the case: a policy, an implementation, `kvm`.
    pub variant: &'static str,
    /// The phase of the experiment before or after which the map was read.
    pub phase: &'static str,
    /// One cell for each 2 MiB of the guest's memory.
    pub cells: Vec<Cell>,
}

/// The maps of an experiment. Later rounds repeat the first round, so only the first map of each phase is kept.
pub(crate) struct Maps {
    experiment: &'static str,
    pub(crate) taken: Vec<PageMap>,
}

impl Maps {
    pub(crate) fn new(experiment: &'static str) -> Self {
        Maps {
            experiment,
            taken: Vec::new(),
        }
    }

    /// Reads the map of the guest memory at `gpas` from the tables, but at most 1 GiB. Does nothing on a real KVM,
    /// whose tables cannot be read.
    pub(crate) fn take(
        &mut self,
        case: &str,
        variant: &'static str,
        phase: &'static str,
        engine: Option<&EngineVm>,
        gpas: Range<u64>,
    ) {
        let known = |map: &PageMap| (&*map.case, map.variant, map.phase) == (case, variant, phase);
        let Some(engine) = engine.filter(|_| !self.taken.iter().any(known)) else {
            return;
        };
        let end = gpas.end.min(gpas.start + CELLS * CELL * slat::PAGE_SIZE);
        let gpas = gpas.start..end;
        self.taken.push(PageMap {
            experiment: self.experiment,
            case: case.to_owned(),
            variant,
            phase,
            cells: cells(engine, &gpas),
        });
    }
}

fn cells(engine: &EngineVm, gpas: &Range<u64>) -> Vec<Cell> {
    let frames = gpas.start / slat::PAGE_SIZE..gpas.end.div_ceil(slat::PAGE_SIZE);
    let starts = frames.clone().step_by(CELL as usize);
    let cell = |start| Gfn(start)..Gfn((start + CELL).min(frames.end));
    starts
        .map(|start| Cell::read(engine, 0, &cell(start)))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Size;
    use crate::experiments::split;

    fn split() -> crate::Report {
        crate::run(&[&split::EXPERIMENT], Size::Tiny).unwrap()
    }

    #[test]
    fn a_leaf_counts_in_every_cell_that_it_covers() {
        let report = split();
        let mut maps = report.maps("split");
        let map = maps.find(|map| (&*map.case, map.phase) == ("split/1g", "before"));
        let map = map.unwrap();
        assert_eq!(map.cells.len(), 512);
        assert!(map.cells.iter().all(|cell| cell.by_level == [0, 0, CELL]));
    }

    #[test]
    fn a_log_that_begins_protects_every_page() {
        let report = split();
        let protected = |phase: &str| -> u64 {
            let mut maps = report.maps("split");
            let map = maps.find(|map| (&*map.case, map.phase) == ("enable/thp", phase));
            map.unwrap().cells.iter().map(|cell| cell.protected).sum()
        };
        assert_eq!(protected("before"), 0);
        assert_eq!(protected("after"), 8 * CELL);
    }
}
