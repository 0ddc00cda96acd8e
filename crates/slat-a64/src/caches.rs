//! What a processor keeps: translations, and decoded code.

use crate::code::Code;
use crate::memory::Invalidation;
use crate::tlb::Tlb;

pub(crate) struct Caches {
    pub(crate) tlb: Tlb,
    pub(crate) code: Code,
    /// What the last instruction has invalidated for other processors, too.
    pub(crate) shared: Option<Invalidation>,
}

impl Caches {
    pub(crate) fn new() -> Self {
        Self {
            tlb: Tlb::new(),
            code: Code::new(),
            shared: None,
        }
    }

    /// Drops what an instruction, here or on another processor, invalidates.
    pub(crate) fn invalidate(&mut self, invalidation: Invalidation) {
        match invalidation {
            Invalidation::All => self.tlb.flush(),
            Invalidation::Space(space) => self.tlb.forget(space),
            Invalidation::Page { address, space } => self.tlb.drop_page(address, space),
            Invalidation::Code => self.code.flush(),
            Invalidation::CodeLine(at) => self.code.drop_line(at),
        }
    }

    /// Drops everything.
    pub(crate) fn flush(&mut self) {
        self.tlb.flush();
        self.code.flush();
    }
}
