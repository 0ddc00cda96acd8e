//! The caches of a processor: translations and decoded code. Also the debugger's probes: while a probe watches data,
//! accesses to data do not use cached translations.

use crate::code::Code;
use crate::insn::SystemName;
use crate::memory::Invalidation;
use crate::probes::Probes;
use crate::registers::{MAIR, Row, SCTLR, TCR, TTBR0, TTBR1, Values};
use crate::stage1::regime::asid;
use crate::tlb::Tlb;

pub(crate) struct Caches {
    pub(crate) tlb: Tlb,
    pub(crate) code: Code,
    /// Two counters by which compiled code learns that its remembered facts are out of date. The first one is raised
    /// whenever translations or decoded code are dropped, the second one only when decoded code is dropped.
    pub(crate) edition: u64,
    pub(crate) code_edition: u64,
    pub(crate) probes: Probes,
    /// ISR_EL1: the interrupts that are pending.
    pub(crate) pending: u64,
    /// The invalidation by the last instruction that other processors have to carry out, too.
    pub(crate) shared: Option<Invalidation>,
}

impl Caches {
    pub(crate) fn new() -> Self {
        Self {
            tlb: Tlb::new(),
            code: Code::new(),
            edition: 1,
            code_edition: 1,
            probes: Probes::default(),
            pending: 0,
            shared: None,
        }
    }

    /// Drops the translations or the code that an instruction invalidates. The instruction was executed here or on
    /// another processor.
    pub(crate) fn invalidate(&mut self, invalidation: Invalidation) {
        self.edition += 1;
        if matches!(invalidation, Invalidation::Code | Invalidation::CodeLine(_)) {
            self.code_edition += 1;
        }
        match invalidation {
            Invalidation::All => self.tlb.flush(),
            Invalidation::Space(space) => self.tlb.forget(space),
            Invalidation::Page { address, space } => self.tlb.drop_page(address, space),
            Invalidation::Code => self.code.flush(),
            Invalidation::CodeLine(at) => self.code.drop_line(at),
        }
    }

    /// Drops the translations that depend on a system register, which was written.
    pub(crate) fn register_written(&mut self, system: &Values, name: SystemName) {
        let is = |row: Row| row.register().name == name;
        // The tables may change under their ASID with TLBI alone.
        if is(TTBR0) || is(TTBR1) || is(TCR) {
            self.edition += u64::from(self.tlb.switch(asid(system)));
        }
        // Watchpoints, too: op0 of debug registers is 2.
        if is(SCTLR) || is(TCR) || is(MAIR) || name.parts()[0] == 2 {
            self.tlb.flush();
            self.edition += 1;
        }
    }

    /// Drops everything.
    pub(crate) fn flush(&mut self) {
        self.edition += 1;
        self.code_edition += 1;
        self.tlb.flush();
        self.code.flush();
    }
}
