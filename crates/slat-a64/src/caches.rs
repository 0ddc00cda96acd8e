//! The caches of a processor: translations and decoded code. Also the debugger's probes: while a probe watches data,
//! data accesses do not use cached translations.

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
    /// Compiled code compares two counters to learn whether what it remembers is out of date. `edition` rises whenever
    /// translations or decoded code are dropped, `code_edition` only when decoded code is dropped.
    pub(crate) edition: u64,
    pub(crate) code_edition: u64,
    pub(crate) probes: Probes,
    /// ISR_EL1: the interrupts that are pending.
    pub(crate) pending: u64,
    /// The invalidation by the last instruction, if other processors have to carry it out, too.
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

    /// Drops the translations or the decoded code that a guest instruction invalidates. This processor or another
    /// processor has executed the instruction.
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

    /// Drops the translations that depend on system register `name`. Call after a write of the register.
    pub(crate) fn register_written(&mut self, system: &Values, name: SystemName) {
        let is = |row: Row| row.register().name == name;
        // While the ASID stays the same, nothing is dropped: a guest that changes the tables of an ASID must execute
        // TLBI.
        if is(TTBR0) || is(TTBR1) || is(TCR) {
            self.edition += u64::from(self.tlb.switch(asid(system)));
        }
        // The value of these registers determines what a cached translation allows. The debug registers (op0 is 2)
        // determine which pages may be cached: pages with a watchpoint are not.
        if is(SCTLR) || is(TCR) || is(MAIR) || name.parts()[0] == 2 {
            self.tlb.flush();
            self.edition += 1;
        }
    }

    /// Drops all translations and all decoded code.
    pub(crate) fn flush(&mut self) {
        self.edition += 1;
        self.code_edition += 1;
        self.tlb.flush();
        self.code.flush();
    }
}
