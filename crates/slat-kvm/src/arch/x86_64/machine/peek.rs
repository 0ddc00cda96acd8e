//! Reads guest memory for profiles. A read changes nothing and does not wait: it causes no fault, sets no accessed
//! flag, and makes no host page resident. So memory can be read only if the second level maps it at this moment.

use super::VcpuMachine;
use super::mmu::{guest_paging, unpaged};
use crate::engine::EngineVcpu;
use slat::guest_walk::{GuestPaging, GuestTables, walk};
use slat::{Access, Gpa, PAGE_SIZE};
use slat_x86::Cpu;
use slat_x86::state::control;

/// Guest memory at the virtual addresses of a vCPU.
pub(super) struct Peek<'a> {
    memory: Memory<'a>,
    /// The parameters for a walk of the guest's tables. `None`: paging is off.
    paging: Option<GuestPaging>,
    /// The last page that was read: its guest-virtual and its host address.
    last: Option<(u64, u64)>,
}

/// Guest memory at the physical addresses of a vCPU.
struct Memory<'a>(&'a EngineVcpu);

/// The error of a read: the memory is not mapped at this moment.
struct NotMapped;

impl VcpuMachine {
    /// Returns the memory at the virtual addresses of `cpu`, which is this vCPU's CPU, with supervisor rights. Call
    /// inside the engine's reader section. `None`: a nested guest runs, whose tables are not walked.
    pub(super) fn peek(&self, cpu: &Cpu) -> Option<Peek<'_>> {
        let paging = cpu.client_paging();
        let is_paged = paging.cr0 & control::CR0_PG != 0;
        paging.nested.is_none().then(|| Peek {
            memory: Memory(&self.memory.engine),
            paging: is_paged.then(|| guest_paging(&paging, self.physical_bits)),
            last: None,
        })
    }
}

impl Peek<'_> {
    /// Reads the word of `size` (4 or 8) bytes at `gva`. `None`: the word cannot be read now, or `gva` is no multiple
    /// of `size`.
    pub(super) fn word(&mut self, gva: u64, size: usize) -> Option<u64> {
        if !gva.is_multiple_of(size as u64) {
            return None;
        }
        let page = gva & !(PAGE_SIZE - 1);
        let host = match self.last {
            Some((last, host)) if last == page => host,
            _ => self.host_page(page)?,
        };
        self.last = Some((page, host));
        load(host + gva % PAGE_SIZE, size).ok()
    }

    /// Returns the host address of the page at `gva`.
    fn host_page(&mut self, gva: u64) -> Option<u64> {
        let page = match &self.paging {
            None => unpaged(gva),
            Some(paging) => walk(&mut self.memory, paging, gva, Access::Read).ok()?,
        };
        self.memory.host_page(page.gpa).ok()
    }
}

impl Memory<'_> {
    fn host_page(&self, gpa: Gpa) -> Result<u64, NotMapped> {
        let mapping = self.0.lookup(gpa.gfn());
        mapping.map(|mapping| mapping.pfn.hpa().0).ok_or(NotMapped)
    }
}

impl GuestTables for Memory<'_> {
    type Error = NotMapped;

    fn read(&mut self, gpa: Gpa, size: usize) -> Result<u64, NotMapped> {
        load(self.host_page(gpa)? + gpa.0 % PAGE_SIZE, size)
    }

    /// Returns success but changes nothing. The walk calls this method to set accessed flags.
    fn compare_exchange(&mut self, _: Gpa, _: usize, _: u64, _: u64) -> Result<bool, NotMapped> {
        Ok(true)
    }
}

/// Reads the aligned word of `size` (4 or 8) bytes at the host address of guest memory.
fn load(host: u64, size: usize) -> Result<u64, NotMapped> {
    // SAFETY: the access is guarded. The address is that of a page that the engine maps. If the client has unmapped the
    // page since, the read fails. If the client has mapped another page there, the read returns a wrong word, which
    // only makes a sample wrong.
    let word = unsafe {
        match size {
            4 => slat_guard::load(host as *const u32).map(u64::from),
            _ => slat_guard::load(host as *const u64),
        }
    };
    word.map_err(|_| NotMapped)
}
