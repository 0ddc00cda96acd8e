//! Measures dirty logs: bitmaps compared with rings, and the methods to detect writes.

mod methods;

use std::io;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use kvm_bindings::{
    KVM_CAP_DIRTY_LOG_RING, KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2, KVM_DIRTY_LOG_MANUAL_PROTECT_ENABLE,
    KVM_MEM_LOG_DIRTY_PAGES, kvm_dirty_gfn, kvm_enable_cap,
};

use slat_kvm::notify;

use crate::arch::x86_64::machine::guest::{DATA, PAGE};
use crate::arch::x86_64::machine::{
    Failure, Machine, Memory, Pages, Program, Slat, Slot, no_device, thread_time,
};
use crate::compared::{Line, Rows};
use crate::report::{Report, Sample, Unit};
use crate::rounds::Bench;
use crate::{Elsewhere, Experiment, Settable};

const NAME: &str = "dirty";

pub const EXPERIMENT: Experiment = Experiment {
    name: NAME,
    title: "the dirty log: a bitmap for each slot, or a ring for each vCPU",
    explain: "\
A guest writes to every page of a logged slot, as in a migration's last rounds: CPU time for a page.
get: the client learns which pages were written. slat: KVM_GET_DIRTY_LOG, and the numbers of the
bits that are set. ring: it collects the entries of the vCPU's ring, which has one for each page.
clear: the next write to each page is recorded again. slat: KVM_CLEAR_DIRTY_LOG. ring: reset rings.
redirty: the guest writes to every page again, with its own instructions: a fault records each page.
harvest-few, harvest-all: a log is got, and its pages are logged again, after 16 pages were written,
or all; write: the guest writes to every page again; by the policy dirty_log. write-protect: each
write faults. dirty-bit: a harvest looks at all leaves. buffer: the walker notes each page.
end: the log ends, the guest writes again, on 2 MiB pages of the host's. recover: huge leaves come
back in place (KVM since 6.13). zap: the tables are zapped, and faults bring huge leaves back.",
    settable: Settable::AllBut(&["huge_pages", "dirty_log"]),
    elsewhere: Elsewhere::Nothing,
    run,
    compare,
    rows: Rows::Metrics,
};

const NS_PER_PAGE: &str = "ns_per_page";
const BITMAP: &str = "slat";
const RING: &str = "ring";

/// The case that measures the end of dirty logging; then its variants, and its second metric.
const END: &str = "end";
const RECOVER: &str = "recover";
const ZAP: &str = "zap";
const FAULTS: &str = "faults";

#[derive(Clone, Copy, PartialEq, Eq)]
enum Case {
    Get,
    Clear,
    Redirty,
}

const CASES: [(Case, &str); 3] = [
    (Case::Get, "get"),
    (Case::Clear, "clear"),
    (Case::Redirty, "redirty"),
];

/// The number of entries in a ring: KVM's maximum. The ring has an entry for every page, so it is never full.
const ENTRIES: usize = 1 << 16;

fn run(bench: &mut Bench) -> Result<(), Failure> {
    let rounds = bench.size.pick(1, 9, 15);
    let pages: u64 = bench.size.pick(1 << 10, 1 << 15, 60 << 10);
    let memory = Memory::new((pages * PAGE) as usize, 2 << 20, Pages::Small)?;
    memory.populate()?;
    for (case, name) in CASES {
        bench.in_turns(name, rounds, &[BITMAP, RING], |bench, variant| {
            let time = match variant {
                BITMAP => bitmap(&bench.guests.slat, &memory, case)?,
                _ => ring(&bench.guests.slat, &memory, case)?,
            };
            let ns = time.as_secs_f64() * 1e9 / pages as f64;
            Ok(vec![Sample::new(NS_PER_PAGE, Unit::Nanoseconds, ns)])
        })?;
    }
    methods::run(bench, &memory, rounds)?;
    drop(memory);
    let memory = Memory::new((pages * PAGE) as usize, 2 << 20, Pages::Huge)?;
    memory.populate()?;
    bench.in_turns(END, rounds, &[RECOVER, ZAP], |bench, variant| {
        let (time, faults) = end(&bench.guests.slat, &memory, variant == RECOVER)?;
        let ns = time.as_secs_f64() * 1e9 / pages as f64;
        Ok(vec![
            Sample::new(NS_PER_PAGE, Unit::Nanoseconds, ns),
            Sample::new(FAULTS, Unit::Count, faults as f64),
        ])
    })
}

fn pages(memory: &Memory) -> u64 {
    memory.size() as u64 / PAGE
}

fn logged(memory: &Memory) -> Slot<'_> {
    Slot {
        flags: KVM_MEM_LOG_DIRTY_PAGES,
        ..Slot::whole(1, DATA, memory)
    }
}

/// Runs the guest, which writes to every page. Returns the processor time.
fn write(machine: &mut Machine<'_, Slat>, memory: &Memory) -> Result<Duration, Failure> {
    let program = Program::write(DATA, pages(memory), 1);
    Ok(machine.run(&[program], &no_device)?.cpu)
}

/// Checks that every page was reported once. `told` has the number of reports and the sum of the reported page numbers.
fn expect_all(memory: &Memory, told: (u64, u64)) -> Result<(), Failure> {
    let pages = pages(memory);
    match told == (pages, pages * (pages - 1) / 2) {
        true => Ok(()),
        false => Err(format!("{} of {pages} pages were told, or others", told.0).into()),
    }
}

fn cap(cap: u32, arg: u64) -> kvm_enable_cap {
    kvm_enable_cap {
        cap,
        args: [arg, 0, 0, 0],
        ..Default::default()
    }
}

fn bitmap(slat: &Slat, memory: &Memory, case: Case) -> Result<Duration, Failure> {
    let mut machine = Machine::new(slat, 1, DATA + memory.size() as u64)?;
    machine.vm().enable_cap(&cap(
        KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2,
        KVM_DIRTY_LOG_MANUAL_PROTECT_ENABLE.into(),
    ))?;
    machine.touch_system()?;
    machine.set_slot(&logged(memory))?;
    write(&mut machine, memory)?;

    let began = thread_time();
    let bitmap = machine.vm().get_dirty_log(1, memory.size())?;
    let mut told = (0, 0);
    for (word, index) in bitmap.iter().zip(0..) {
        let mut left = *word;
        while left != 0 {
            told = (
                told.0 + 1,
                told.1 + index * 64 + u64::from(left.trailing_zeros()),
            );
            left &= left - 1;
        }
    }
    let got = thread_time() - began;
    expect_all(memory, told)?;

    let began = thread_time();
    let pages = u32::try_from(pages(memory))?;
    machine.vm().clear_dirty_log(1, 0, pages, &bitmap)?;
    let cleared = thread_time() - began;

    let before = machine.vm().engine().stats();
    let redirtied = write(&mut machine, memory)?;
    let dirty = machine.vm().engine().stats().since(&before).dirty_pages;
    if dirty != u64::from(pages) {
        return Err(format!("{dirty} of {pages} pages were dirtied again").into());
    }
    Ok(match case {
        Case::Get => got,
        Case::Clear => cleared,
        Case::Redirty => redirtied,
    })
}

fn ring(slat: &Slat, memory: &Memory, case: Case) -> Result<Duration, Failure> {
    let bytes = (ENTRIES * size_of::<kvm_dirty_gfn>()) as u64;
    let mut machine = Machine::prepared(slat, 1, DATA + memory.size() as u64, |vm| {
        Ok(vm.enable_cap(&cap(KVM_CAP_DIRTY_LOG_RING, bytes))?)
    })?;
    let mut ring = Ring::map(machine.vcpu(0))?;
    machine.touch_system()?;
    machine.set_slot(&logged(memory))?;
    write(&mut machine, memory)?;

    let began = thread_time();
    let told = ring.collect();
    let got = thread_time() - began;
    expect_all(memory, told)?;

    let began = thread_time();
    let reset = machine.vm().reset_dirty_rings()?;
    let cleared = thread_time() - began;
    if u64::from(reset) != pages(memory) {
        return Err(format!("{reset} entries were reset of {}", pages(memory)).into());
    }

    let redirtied = write(&mut machine, memory)?;
    expect_all(memory, ring.collect())?;
    Ok(match case {
        Case::Get => got,
        Case::Clear => cleared,
        Case::Redirty => redirtied,
    })
}

/// Ends dirty logging after the guest has written to all of the memory. Then the guest writes to all of the memory
/// again. Returns the processor time of both steps, and the number of faults. If `recover` is false, huge leaves are
/// not restored in place.
fn end(slat: &Slat, memory: &Memory, recover: bool) -> Result<(Duration, u64), Failure> {
    let mut machine = Machine::new(slat, 1, DATA + memory.size() as u64)?;
    machine.touch_system()?;
    machine.set_slot(&logged(memory))?;
    write(&mut machine, memory)?;

    let before = machine.vm().engine().stats();
    let began = thread_time();
    let slot = Slot::whole(1, DATA, memory);
    if recover {
        machine.set_slot(&slot)?;
    } else {
        machine.set_policy("huge_pages", "off")?;
        machine.set_slot(&slot)?;
        machine.set_policy("huge_pages", "on")?;
        let Range { start, end } = memory.addresses();
        notify::around(start as usize..end as usize, || ());
    }
    let ended = thread_time() - began;
    let written = write(&mut machine, memory)?;
    let faults = machine.vm().engine().stats().since(&before).pf_taken;
    Ok((ended + written, faults))
}

/// Flags of a dirty-ring entry (Documentation/virt/kvm/api.rst, 8.29): the vCPU sets DIRTY when it fills the entry; the
/// VMM sets RESET when it has harvested the entry.
const KVM_DIRTY_GFN_F_DIRTY: u32 = 1 << 0;
const KVM_DIRTY_GFN_F_RESET: u32 = 1 << 1;

/// The VMM's view of a vCPU's ring: an array of `struct kvm_dirty_gfn`.
struct Ring {
    entries: NonNull<Entry>,
    /// The number of the next ring entry to harvest. It counts on beyond the end of the array; its index is the
    /// remainder.
    next: usize,
}

#[repr(C)]
struct Entry {
    flags: AtomicU32,
    slot: AtomicU32,
    offset: AtomicU64,
}

const _: () = assert!(size_of::<Entry>() == size_of::<kvm_dirty_gfn>());

impl Ring {
    fn map(vcpu: &impl AsRawFd) -> io::Result<Self> {
        // SAFETY: the call makes a new mapping of the vCPU's ring, at an address of the kernel's choice.
        let memory = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                ENTRIES * size_of::<Entry>(),
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED,
                vcpu.as_raw_fd(),
                slat_kvm::dirty::ring_offset() as libc::off_t,
            )
        };
        if memory == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        Ok(Ring {
            entries: NonNull::new(memory.cast()).expect("a mapping is not at 0"),
            next: 0,
        })
    }

    /// Harvests all filled entries. Returns their number, and the sum of their page numbers.
    fn collect(&mut self) -> (u64, u64) {
        // SAFETY: `map` has mapped the memory with this length. The vCPU and KVM change ring entries only as atomics,
        // for which every bit pattern is valid.
        let entries = unsafe { std::slice::from_raw_parts(self.entries.as_ptr(), ENTRIES) };
        let mut told = (0, 0);
        loop {
            let entry = &entries[self.next % ENTRIES];
            if entry.flags.load(Ordering::Acquire) != KVM_DIRTY_GFN_F_DIRTY {
                return told;
            }
            assert_eq!(entry.slot.load(Ordering::Relaxed), 1);
            told = (told.0 + 1, told.1 + entry.offset.load(Ordering::Relaxed));
            entry.flags.store(KVM_DIRTY_GFN_F_RESET, Ordering::Release);
            self.next += 1;
        }
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        // SAFETY: `map` has mapped the memory with this length, and no reference into it exists any more.
        unsafe { libc::munmap(self.entries.as_ptr().cast(), ENTRIES * size_of::<Entry>()) };
    }
}

fn compare(report: &Report) -> Vec<Line> {
    let logs = CASES
        .iter()
        .filter_map(|(_, name)| Line::compare(report, NAME, name, NS_PER_PAGE, BITMAP, RING));
    let ends = [NS_PER_PAGE, FAULTS]
        .into_iter()
        .filter_map(|metric| Line::compare(report, NAME, END, metric, RECOVER, ZAP));
    logs.chain(methods::compare(report)).chain(ends).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Size;
    use slat_host::mappings::{Thp, thp_mode};

    #[test]
    fn bitmap_and_ring_tell_every_page_that_was_written() {
        // `run` itself checks how many pages are reported.
        let report = crate::run(&[&EXPERIMENT], Size::Tiny).unwrap();
        for (_, case) in CASES {
            for variant in [BITMAP, RING] {
                assert!(report.value(NAME, case, variant, NS_PER_PAGE).unwrap() > 0.0);
            }
        }
        methods::check(&report);
        let faults = |variant| report.value(NAME, END, variant, FAULTS).unwrap();
        assert!(faults(RECOVER) < faults(ZAP) || thp_mode() == Thp::Never);
    }
}
