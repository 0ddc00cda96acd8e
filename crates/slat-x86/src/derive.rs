//! State that is derived from the architectural state: mode, CPL, TLB table, and the validity of translations.

use crate::Cpu;
use crate::cpu::CR3;
use crate::features::has_avx;
use crate::machine::GuestFlush;
use crate::mode;
use crate::state::{Segment, control, flags, xcr0};

/// Whether a change of CR0, CR3, CR4 or EFER invalidates translations, or changes the rules for translations. A change
/// of only CR0.TS, as in each task switch, does not.
fn invalidates(before: &[u64; 4], now: &[u64; 4]) -> bool {
    use control::*;
    let paging = [
        CR0_PG | CR0_WP,
        u64::MAX,
        CR4_PSE | CR4_PAE | CR4_PGE | CR4_LA57 | CR4_PCIDE | CR4_SMEP | CR4_SMAP | CR4_PKE,
        EFER_LMA | EFER_NXE,
    ];
    (before.iter().zip(now).zip(paging)).any(|((before, now), bits)| (before ^ now) & bits != 0)
}

impl Cpu {
    /// Call after an instruction has changed the state. Calls [`derive`](Self::derive), and tells the machine if the
    /// guest has invalidated translations.
    pub(crate) fn refresh(&mut self) {
        if self.derive() {
            self.tell_flush(GuestFlush::All);
        }
    }

    /// Call after the VMM or an instruction has changed the state. Computes mode, CPL and TLB table. If registers on
    /// which translations depend have changed, flushes the translations and returns `true`.
    pub(crate) fn derive(&mut self) -> bool {
        let state = &self.state;
        let long = state.efer & control::EFER_LMA != 0;
        let bits = match (long && state.cs.long(), state.cs.big()) {
            (true, _) => mode::BITS_64,
            (false, true) if self.is_flat() => mode::FLAT_32,
            (false, true) => mode::BITS_32,
            (false, false) => mode::BITS_16,
        };
        let mut mode = bits;
        if state.cr0 & control::CR0_EM != 0 || state.cr4 & control::CR4_OSFXSR == 0 {
            mode |= mode::NO_SSE;
        }
        if state.cr0 & control::CR0_EM != 0 {
            mode |= mode::NO_X87;
        }
        if state.cr0 & control::CR0_TS != 0 {
            mode |= mode::TASK_SWITCHED;
        }
        const AVX: u64 = xcr0::SSE | xcr0::AVX;
        if state.cr4 & control::CR4_OSXSAVE == 0 || state.xcr0 & AVX != AVX || !has_avx() {
            mode |= mode::NO_AVX;
        }
        if self.has_paragraphs() {
            mode |= mode::NO_AVX | mode::NO_VEX;
        }
        self.cpl = match (
            state.cr0 & control::CR0_PE != 0,
            state.rflags & flags::VM != 0,
        ) {
            (false, _) => 0,
            (true, true) => 3,
            (true, false) => state.ss.dpl(),
        };
        if self.cpl == 3 {
            mode |= mode::USER;
        }
        self.mode = mode;
        self.code.clock.enter(self.cpl == 3);
        self.update_table();
        let before = self.paging_registers;
        self.see_registers();
        let flushes = invalidates(&before, &self.paging_registers);
        if flushes {
            self.flush_other();
        }
        self.update_watch();
        self.slow = true;
        flushes
    }

    /// Call after the registers of another world (guest or nested guest) were loaded. Keeps the translations of that
    /// world, unless its hypervisor has changed registers on which they depend. (The TLB stores access rights, which
    /// depend on such registers; a processor's TLB stores the flags of page-table entries.)
    pub(crate) fn enter_world(&mut self) {
        let mut before = self.svm.noted_registers();
        self.see_registers();
        // A change of CR3 alone makes this function drop no translation: as on a processor, the hypervisor has to ask
        // for a flush.
        before[CR3] = self.paging_registers[CR3];
        let is_outdated = invalidates(&before, &self.paging_registers);
        self.derive();
        self.code.clock.flush();
        let space = self.space();
        match is_outdated {
            true => self.tlb().flush_world(space),
            false => self.tlb().enter_world(space),
        }
    }

    /// Whether ES, CS, SS and DS are flat, so that offsets are linear addresses. Call only outside 64-bit mode.
    fn is_flat(&self) -> bool {
        let state = &self.state;
        let is_flat = |segment: &Segment| {
            let expands_down = segment.rights & 0x1c == 0x14;
            segment.base == 0 && segment.limit == u32::MAX && segment.usable() && !expands_down
        };
        let segments = [&state.es, &state.cs, &state.ss, &state.ds];
        self.protected()
            && !self.virtual_8086()
            && state.ss.big()
            && segments.into_iter().all(is_flat)
    }

    /// Call after an instruction has loaded ES or DS.
    pub(crate) fn data_segment_loaded(&mut self) {
        let was_flat = self.mode & mode::BITS == mode::FLAT_32;
        if !self.is_64() && self.is_flat() != was_flat {
            self.refresh();
        }
    }
}
