//! The machine (platform) for slat's engine in this program. All host pages of guest memory are resident and
//! contiguous.

use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;

use slat::{
    Config, Entries, Format, Gfn, Gpa, HostPage, HostRun, Hva, Level, Pfn, Platform, Region,
    Request, ResolveError, SlotFlags, Stale, TableMeta, Vm, VmId, WaitFor,
};

use crate::frames::{self, Arena};

/// A machine whose host memory has physical addresses equal to its backing addresses. The host maps the memory at
/// `level`.
pub struct Machine {
    level: Level,
    arena: &'static Arena,
}

impl Machine {
    fn page(&self, backing: Hva) -> HostPage {
        HostPage::new(Pfn(backing.0 >> 12), self.level)
    }
}

/// Makes a VM of one address space on such a machine.
pub fn vm<F: Format>(level: Level) -> Arc<Vm<Machine, F>> {
    let machine = Machine {
        level,
        arena: frames::arena(),
    };
    Vm::new(Arc::new(machine), Config::default()).expect("frames for the root")
}

/// Returns the region of memslot `slot` with `pages` pages at `gpa`. The backing addresses equal the guest addresses.
pub fn region(slot: u32, flags: SlotFlags, gpa: u64, pages: u64) -> Region {
    Region::new(slot, Gpa(gpa), pages << 12, Hva(gpa)).with_flags(flags)
}

impl Machine {
    /// Writes fresh metadata for a frame that was just allocated. Returns the frame's number.
    fn fresh(&self, memory: NonNull<u8>) -> Pfn {
        let frame = Pfn(memory.as_ptr() as u64 >> 12);
        // SAFETY: the caller is the only owner of the frame, and so of its metadata.
        unsafe { self.arena.meta(frame).write(TableMeta::new()) };
        frame
    }
}

fn memory(frame: Pfn) -> NonNull<u8> {
    frames::frame_at(frame.hpa().0)
}

// SAFETY:
// - frames and their metadata come from the arena, which stays for ever;
// - no code accesses memory at the addresses that `resolve` returns;
// - no hardware walks these tables, so there is nothing to flush.
unsafe impl Platform for Machine {
    fn alloc_table(&self, _: VmId) -> Option<Pfn> {
        Some(self.fresh(frames::alloc_frame()))
    }

    fn alloc_tables(&self, _: VmId, frames: usize, take: &mut dyn FnMut(Pfn)) {
        frames::alloc_many(frames, &mut |frame| take(self.fresh(frame)));
    }

    fn alloc_root(&self, _: VmId, tables: usize) -> Option<Pfn> {
        let first = self.fresh(frames::alloc_frames(tables));
        for i in 1..tables as u64 {
            self.fresh(memory(first.add(i)));
        }
        Some(first)
    }

    unsafe fn free_table(&self, _: VmId, frame: Pfn) {
        frames::free_frame(memory(frame));
    }

    unsafe fn free_tables(&self, _: VmId, frames: &[Pfn]) {
        frames::free_many(frames.iter().copied().map(memory));
    }

    #[inline]
    fn entries(&self, frame: Pfn) -> NonNull<Entries> {
        frames::entries(frame)
    }

    #[inline]
    fn meta(&self, frame: Pfn) -> NonNull<TableMeta> {
        self.arena.meta(frame)
    }

    fn resolve(&self, request: &Request) -> Result<HostPage, ResolveError> {
        Ok(self.page(request.backing))
    }

    fn resolve_resident(&self, _: VmId, backing: Range<Hva>, found: &mut dyn FnMut(HostRun)) {
        found(HostRun {
            backing: backing.start,
            pages: (backing.end.0 - backing.start.0) >> 12,
            first: self.page(backing.start),
        });
    }

    fn flush(&self, _vm: VmId, _range: Range<Gfn>, _stale: Stale) {}

    fn wait(&self, round: u32, _what: WaitFor) {
        const SPINS: u32 = 100;
        if round < SPINS {
            std::hint::spin_loop();
        } else {
            std::thread::yield_now();
        }
    }
}
