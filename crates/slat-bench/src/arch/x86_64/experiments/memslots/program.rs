//! Measures the cases of [`crate::experiments::memslots`] in a KVM program. While a guest runs, the program changes
//! memslots, or calls madvise on the guest's memory. The measurement is the time for which the program waits, on slat
//! and on a real KVM.

use std::ops::Range;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use kvm_ioctls::VcpuExit;

use crate::arch::x86_64::machine::guest::{DATA, PAGE, Turns, wait_until};
use crate::arch::x86_64::machine::{Api, Failure, Machine, Memory, Program, Slot, Slots};
use crate::experiments::memslots::Case;
use crate::experiments::memslots::layout::{Layout, gpa};
use crate::report::median;

/// The value that the guest writes to its pages.
const VALUE: u32 = 0x51a7;
const WORDS: usize = PAGE as usize / 8;

fn slot(layout: Layout, memory: &Memory, index: u64) -> Slot<'_> {
    let pages = layout.slot(index);
    Slot {
        id: index as u32 + 1,
        flags: 0,
        gpa: gpa(pages.start),
        memory,
        offset: pages.start * PAGE,
        size: (pages.end - pages.start) * PAGE,
    }
}

/// Returns the pages whose contents are checked. In the case `Setup`, only the last 16 MiB are checked: if the KVM is
/// an interpreter, its guest needs seconds to write all pages.
fn checked(case: Case, layout: &Layout) -> Range<u64> {
    let area = layout.area();
    match case {
        Case::Setup => area.start.max(area.end - 4096)..area.end,
        _ => area,
    }
}

/// Measures an operation of `case` in seconds: the median of as many samples as `budget` allows.
///
/// # Errors
/// KVM's errors. It is also an error if the guest did not do its work.
pub(super) fn measure<A: Api>(
    api: &A,
    case: Case,
    layout: Layout,
    memory: &Memory,
    budget: Duration,
) -> Result<f64, Failure> {
    // The addresses after the memslots are free, for the memslot that moves.
    let mut machine = Machine::new(api, 1, DATA + 2 * layout.pages() * PAGE)?;
    machine.touch_system()?;
    let began = Instant::now();
    for index in 0..layout.slots() {
        machine.set_slot(&slot(layout, memory, index))?;
    }
    let setup = began.elapsed();

    let words = gpa(0);
    let [first, second] = layout.halves();
    let area = checked(case, &layout);
    let (all, half) = (area.end - area.start, first.end - first.start);
    let turns = |a: u64, b: u64, pages| Program::turns(a, b, pages, VALUE, words);
    let program = match case {
        Case::Map => turns(gpa(first.start), gpa(second.start), half),
        Case::Unmap | Case::Unmap2m => turns(gpa(first.start), gpa(second.start), 1),
        Case::Rw => turns(gpa(area.start), gpa(area.start) + PAGE / 2, all),
        Case::MoveActive | Case::MoveInactive => {
            let written = layout.written(case == Case::MoveActive);
            Program::hammer(
                gpa(written.start),
                written.end - written.start,
                VALUE,
                words,
            )
        }
        // The guest writes once to each checked page.
        Case::Setup => turns(gpa(area.start), gpa(area.start), all),
    };
    let host = Host {
        case,
        layout,
        memory,
        turns: Turns::new(memory.words()),
    };
    // While the memslot is deleted, writes to it are MMIO, which the program ignores.
    let gone = slot(layout, memory, layout.moved());
    let gone = gone.gpa..gone.gpa + gone.size;
    let device = |_, exit: VcpuExit<'_>| match exit {
        VcpuExit::MmioWrite(address, _) if gone.contains(&address) => Ok(()),
        exit => Err(format!("unexpected exit {exit:?}").into()),
    };
    let (ran, times) = machine.run_beside(&[program], &device, |slots| {
        let result = host.run(slots, budget);
        host.turns.stop();
        result
    })?;
    let passes = ran.registers[0].rsi;
    let operations = times.len();
    if passes < host.passes() * operations as u64 {
        return Err(format!("{operations} operations, but {passes} passes of the guest").into());
    }
    Ok(match case {
        Case::Setup => setup.as_secs_f64(),
        // Guest and host take turns. If one of them loses its processor during a sample, the sample is meaningless, so
        // the median is used.
        _ => median(&times),
    })
}

struct Host<'m> {
    case: Case,
    layout: Layout,
    memory: &'m Memory,
    turns: Turns<'m>,
}

impl<'m> Host<'m> {
    /// Returns how many times, at least, the guest must have written its pages in one operation.
    fn passes(&self) -> u64 {
        match self.case {
            Case::MoveActive | Case::MoveInactive | Case::Setup => 0,
            _ => 2,
        }
    }

    fn run<A: Api>(&self, slots: &Slots<'_, 'm, A>, budget: Duration) -> Result<Vec<f64>, Failure> {
        if matches!(self.case, Case::MoveActive | Case::MoveInactive) {
            let page = self.layout.written(self.case == Case::MoveActive).start;
            let word = &self.memory.words()[page as usize * WORDS];
            word.store(0, Relaxed);
            wait_until(|| word.load(Relaxed) != 0)?;
        }
        let began = Instant::now();
        let mut times = Vec::new();
        while times.is_empty() || self.case != Case::Setup && began.elapsed() < budget {
            let operation = Instant::now();
            self.operation(slots)?;
            times.push(operation.elapsed().as_secs_f64());
        }
        Ok(times)
    }

    fn operation<A: Api>(&self, slots: &Slots<'_, 'm, A>) -> Result<(), Failure> {
        let [first, second] = self.layout.halves();
        let chunk = match self.case {
            Case::Unmap => 1,
            Case::Unmap2m => 512,
            _ => u64::MAX >> 1,
        };
        let discard = |half: &Range<u64>| {
            self.layout
                .pieces(half.clone(), chunk)
                .try_for_each(|piece| self.memory.discard(piece.start * PAGE..piece.end * PAGE))
        };
        match self.case {
            Case::Map => {
                discard(&second)?;
                self.turns.pass()?;
                discard(&first)?;
                self.turns.pass()
            }
            Case::Unmap | Case::Unmap2m => {
                self.turns.pass()?;
                discard(&first)?;
                self.turns.pass()?;
                Ok(discard(&second)?)
            }
            Case::Rw => {
                self.turns.pass()?;
                self.check(0)?;
                self.turns.pass()?;
                self.check(WORDS / 2)
            }
            Case::MoveActive | Case::MoveInactive => {
                let home = slot(self.layout, self.memory, self.layout.moved());
                slots.set_slot(&Slot {
                    gpa: gpa(self.layout.destination()),
                    ..home
                })?;
                slots.set_slot(&home)
            }
            Case::Setup => {
                self.turns.pass()?;
                self.check(0)
            }
        }
    }

    /// Checks that the guest has written to every checked page at offset `word`, and clears these words.
    fn check(&self, word: usize) -> Result<(), Failure> {
        let words = self.memory.words();
        for page in checked(self.case, &self.layout) {
            let found = words[page as usize * WORDS + word].swap(0, Relaxed);
            if found != u64::from(VALUE) {
                return Err(format!("page {page} holds {found:#x}").into());
            }
        }
        Ok(())
    }
}
