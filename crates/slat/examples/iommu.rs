//! A guest with a device of its own. The CPU walks tables of one format, and the IOMMU walks tables of another format
//! for the device. Both sets of tables are made of the same memslots, by one platform, so they map the same memory.
//!
//! A device cannot fault and wait. So its tables map every page before it starts, and its pages stay resident. The
//! CPU's tables map a page when the guest first accesses it. Here the CPU is RISC-V's and walks Sv48x4; the RISC-V
//! IOMMU walks Sv39x4. Run it: `cargo run -p slat --example iommu`.

#[path = "plain_memory/cpu.rs"]
mod cpu;
mod plain_memory;
#[path = "plain_memory/relocate.rs"]
mod relocate;

use std::error::Error;
use std::fmt::Write;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use cpu::Cpu;
use plain_memory::PlainMemory;
use relocate::relocate;
use slat::format::{Sv39x4, Sv48x4};
use slat::{
    Config, DirtyLogMethod, Gpa, Hpa, Hva, PAGE_SIZE, Pfn, Region, Setting, SlotFlags, Stop, Vcpu,
    Vm,
};

const SLOT: u32 = 0;
const RAM: Gpa = Gpa(0x8000_0000);
const PAGES: u64 = 256;

/// The memory of a guest: one VM has the tables for the CPU, another has the tables for the device.
struct Guest {
    cpu: Arc<Vm<PlainMemory, Sv48x4>>,
    device: Arc<Vm<PlainMemory, Sv39x4>>,
    /// A vCPU that fills the device's tables. It runs no guest.
    filler: Vcpu<PlainMemory, Sv39x4>,
}

impl Guest {
    fn new(host: &Arc<PlainMemory>) -> Result<Self, Box<dyn Error>> {
        let device = Vm::new(host.clone(), Config::default())?;
        // If a page were write-protected for the dirty log, the device would fault, and it cannot wait. So the log uses
        // the dirty bits that the IOMMU sets.
        device.set_policy(Setting::DirtyLog(DirtyLogMethod::DirtyBit));
        Ok(Guest {
            cpu: Vm::new(host.clone(), Config::default())?,
            filler: device.create_vcpu()?,
            device,
        })
    }

    /// Maps all of guest memory for the device.
    fn fill(&mut self) -> Result<(), Stop> {
        let mut next = RAM;
        let end = Gpa(RAM.0 + PAGES * PAGE_SIZE);
        while next < end {
            next.0 += self.filler.hardware_prefault(next..end)?;
        }
        Ok(())
    }

    /// Adds guest memory, or changes its flags.
    fn set_memory(&mut self, flags: SlotFlags) -> Result<(), Box<dyn Error>> {
        let region = Region::new(SLOT, RAM, PAGES * PAGE_SIZE, Hva(0)).with_flags(flags);
        self.cpu.set_memory_region(0, &region)?;
        self.device.set_memory_region(0, &region)?;
        Ok(self.fill()?)
    }

    /// Removes guest memory. When this returns, neither the CPU nor the device can access it.
    fn remove_memory(&self) -> Result<(), Box<dyn Error>> {
        self.device.remove_memory_region(0, SLOT)?;
        Ok(self.cpu.remove_memory_region(0, SLOT)?)
    }

    /// Moves the page at `backing` to another frame. Call only while the device is idle, because a device cannot wait
    /// until its page is mapped again.
    fn relocate(&mut self, backing: Hva) -> Result<(Pfn, Pfn), Box<dyn Error>> {
        let page = backing..Hva(backing.0 + PAGE_SIZE);
        let invalidations = (
            self.cpu.invalidate(page.clone()),
            self.device.invalidate(page),
        );
        let moved = relocate(self.cpu.platform(), backing);
        drop(invalidations);
        self.fill()?;
        moved.ok_or("no frame is free".into())
    }

    /// Returns the number of pages written since the last call: by the guest's CPU, by its device, and by either.
    fn dirty(&self) -> Result<[u32; 3], Box<dyn Error>> {
        let mut logs = [[0; PAGES as usize / 64]; 2];
        self.cpu.get_dirty_log(0, SLOT, &mut logs[0])?;
        self.device.get_dirty_log(0, SLOT, &mut logs[1])?;
        let [cpu, device] = logs;
        let both = std::array::from_fn(|i| cpu[i] | device[i]);
        Ok([cpu, device, both].map(|log| log.iter().map(|word| word.count_ones()).sum()))
    }
}

/// A device that accesses memory through an IOMMU. The IOMMU sets accessed and dirty bits (the RISC-V IOMMU
/// specification: `GADE`). This IOMMU caches nothing; if it had an IOTLB, [`slat::Platform::flush`] would flush it.
struct Device {
    host: Arc<PlainMemory>,
    root: Pfn,
}

impl Device {
    /// Writes the word at `gpa` as the device does: the IOMMU walks the tables, and the engine is not called. `None`:
    /// the tables do not allow the write.
    fn write(&self, gpa: Gpa, value: u64) -> Option<()> {
        const VALID: u64 = 1 << 0;
        const WRITE: u64 = 1 << 2;
        const RIGHTS: u64 = 7 << 1;
        const USED_AND_WRITTEN: u64 = 3 << 6;

        let mut table = self.root;
        for level in (0..3).rev() {
            let shift = 12 + 9 * level;
            // The root consists of four consecutive tables, so its index has two bits more.
            let indices = if level == 2 { 2048 } else { 512 };
            let index = (gpa.0 >> shift) % indices;
            let word = self.host.word(Hpa(table.hpa().0 + index * 8));
            let entry = word.load(Relaxed);
            if entry & VALID == 0 {
                return None;
            }
            let frame = entry >> 10 & ((1 << 44) - 1);
            if entry & RIGHTS == 0 {
                table = Pfn(frame);
                continue;
            }
            if entry & WRITE == 0 {
                return None;
            }
            word.fetch_or(USED_AND_WRITTEN, Relaxed);
            let page = (frame << 12) + gpa.0 % (1 << shift);
            self.host.word(Hpa(page)).store(value, Relaxed);
            return Some(());
        }
        None
    }
}

fn run(out: &mut impl Write) -> Result<(), Box<dyn Error>> {
    let host = Arc::new(PlainMemory::new(512, PAGES as usize));
    let mut guest = Guest::new(&host)?;
    guest.set_memory(SlotFlags::default())?;
    let mut cpu = Cpu::new(&guest.cpu)?;
    let device = Device {
        host: host.clone(),
        root: guest.device.root(0).ok_or("its tables have one root")?,
    };
    let mapped = [guest.cpu.stats().pages_4k, guest.device.stats().pages_4k];
    writeln!(
        out,
        "mapped for the CPU {}, for the device {}",
        mapped[0], mapped[1]
    )?;

    let packet = Gpa(RAM.0 + 3 * PAGE_SIZE);
    device
        .write(packet, 0xda7a)
        .ok_or("all memory is the device's")?;
    writeln!(out, "the device has written {:#x}", cpu.load(packet)?)?;

    let (old, new) = guest.relocate(Hva(3 * PAGE_SIZE))?;
    device.write(packet, 0xda7b).ok_or("it is mapped again")?;
    let value = cpu.load(packet)?;
    writeln!(out, "{old:?} -> {new:?}, where it has written {value:#x}")?;

    guest.set_memory(SlotFlags::LOG_DIRTY_PAGES)?;
    let before = cpu.stats();
    for page in 0..20 {
        cpu.store(Gpa(RAM.0 + page * PAGE_SIZE), page)?;
    }
    for page in 10..30 {
        let gpa = Gpa(RAM.0 + page * PAGE_SIZE);
        device.write(gpa, page).ok_or("a log refuses nothing")?;
    }
    let [by_cpu, by_device, together] = guest.dirty()?;
    let faults = cpu.stats().since(&before).pf_taken;
    writeln!(
        out,
        "dirty by the CPU {by_cpu} (after {faults} faults), by the device {by_device}, together {together}"
    )?;

    guest.remove_memory()?;
    let refused = device.write(packet, 0).is_none();
    writeln!(
        out,
        "memory is removed: a write of the device's is refused: {refused}"
    )?;
    guest.cpu.audit()?;
    guest.device.audit()?;
    Ok(())
}

fn main() -> Result<(), Box<dyn Error>> {
    let mut out = String::new();
    let result = run(&mut out);
    print!("{out}");
    result
}

#[test]
fn the_readme_shows_what_it_prints() {
    let mut out = String::new();
    run(&mut out).unwrap();
    assert!(include_str!("../README.md").contains(&out), "{out}");
}
