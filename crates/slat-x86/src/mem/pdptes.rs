//! The PDPTEs of PAE paging (page-directory-pointer-table entries).

use crate::Cpu;
use crate::flow::Break;
use crate::state::control::{CR0_PG, CR4_PAE};

impl Cpu {
    /// Whether PAE paging is in use.
    pub(crate) fn pae_paging(&self) -> bool {
        let state = &self.state;
        state.cr0 & CR0_PG != 0 && state.cr4 & CR4_PAE != 0 && !self.long_mode()
    }

    /// Reads the PDPTEs at CR3. Raises #GP(0) if a present entry has a reserved bit set, or if they are not in memory.
    pub(crate) fn load_pdptes(&mut self, cr3: u64) -> Result<[u64; 4], Break> {
        // With nested paging, each walk reads the PDPTEs from memory (AMD64 volume 2, 15.25.10). So this function does
        // not read them.
        match self.svm.nested_paging() {
            Some(_) => Ok([0; 4]),
            None => self.read_pdptes(cr3),
        }
    }

    /// Reads the PDPTEs from memory, even with nested paging.
    pub(crate) fn read_pdptes(&mut self, cr3: u64) -> Result<[u64; 4], Break> {
        let gpa = cr3 & 0xffff_ffe0;
        let mut bytes = [0; 32];
        if !self.read_physical(gpa, &mut bytes)? {
            return Err(self.gp());
        }
        let mut pdptes = [0; 4];
        for (pdpte, bytes) in pdptes.iter_mut().zip(bytes.as_chunks().0) {
            *pdpte = u64::from_le_bytes(*bytes);
        }
        match self.features.valid_pdptes(&pdptes) {
            true => Ok(pdptes),
            false => Err(self.gp()),
        }
    }
}
