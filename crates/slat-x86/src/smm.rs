//! System-management mode (SMM): how an SMI changes the registers, which registers it saves, and how RSM restores them
//! (AMD64 volume 2, chapter 10; SDM volume 3, chapter "System Management Mode").
//!
//! The CPU neither enters nor leaves SMM by itself. It ends its run with [`Exit::Smi`](crate::Exit) or
//! [`Exit::Rsm`](crate::Exit). The caller then copies the saved registers between the CPU and SMRAM, and makes the
//! machine use the address space with or without SMRAM. To enter SMM, call [`State::smram`], then [`Cpu::enter_smm`].
//! To leave SMM, call [`Cpu::leave_smm`].
//!
//! As in KVM, the saved data lack some that the manuals describe: neither an I/O instruction nor a HLT can be
//! restarted, so an SMI ends a halt, and RSM continues after the HLT. As in KVM, the shadow of STI and MOV SS is stored
//! in a byte that the manuals reserve.

use crate::Cpu;
use crate::state::{Segment, State, Table, control::*, flags};
use crate::watch::{DR6_BS, DR6_ONES};

/// The size of the saved registers in bytes.
pub const SMRAM_BYTES: usize = 512;
/// The offset of the saved registers from SMBASE, the beginning of SMRAM.
pub const SMRAM_OFFSET: u64 = 0xfe00;
/// The offset of the handler's first instruction from SMBASE.
const HANDLER: u64 = 0x8000;

/// The revision identifier in the 32-bit map. Its low byte identifies the map. Bit 17 says that RSM loads SMBASE; bit
/// 16 is clear, because I/O instructions are not restarted.
const REVISION_32: u32 = 0x2_0000;
/// The revision identifier in the 64-bit map.
const REVISION_64: u32 = 0x2_0064;

/// The bits of RFLAGS that RSM loads.
const RFLAGS: u64 = 0x3f_7fd5;

const SHADOW_MOV_SS: u8 = 1;
const SHADOW_STI: u8 = 2;

/// The layout of the saved registers in SMRAM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SmramMap {
    /// The map of a CPU without long mode, which is that of Intel's P6.
    Bits32,
    /// The map of a CPU with long mode, which is AMD's.
    Bits64,
}

/// The error of RSM if SMRAM contains registers that no CPU can have. The CPU then shuts down.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BadSmram;

/// The saved registers, as they are in SMRAM.
struct Image([u8; SMRAM_BYTES]);

/// The offsets of segment registers and tables in the 64-bit map: of selector, attributes (rights), limit and base,
/// which follow one another.
mod at64 {
    pub const ES_TO_GS: [usize; 6] = [0x00, 0x10, 0x20, 0x30, 0x40, 0x50];
    pub const GDTR: usize = 0x60;
    pub const LDTR: usize = 0x70;
    pub const IDTR: usize = 0x80;
    pub const TR: usize = 0x90;
    pub const SHADOW: usize = 0xcb;
    pub const EFER: usize = 0xd0;
    /// KVM's fields: whether the SMI has interrupted a nested guest, and in the next field the address of the nested
    /// guest's control block (VMCB).
    pub const NESTED_GUEST: usize = 0xd8;
    pub const NESTED_VMCB: usize = 0xe0;
    pub const REVISION: usize = 0xfc;
    pub const SMBASE: usize = 0x100;
    pub const CR4: usize = 0x148;
    pub const CR3: usize = 0x150;
    pub const CR0: usize = 0x158;
    pub const DR7: usize = 0x160;
    pub const DR6: usize = 0x168;
    pub const RFLAGS: usize = 0x170;
    pub const RIP: usize = 0x178;
    /// The general registers, from R15 to RAX.
    pub const GPR: usize = 0x180;
}

/// The offsets of segment registers and tables (rights, limit, base), and of selectors, in the 32-bit map.
mod at32 {
    pub const SMBASE: usize = 0xf8;
    pub const REVISION: usize = 0xfc;
    pub const CR4: usize = 0x114;
    pub const SHADOW: usize = 0x11a;
    pub const IDTR: usize = 0x150;
    pub const TR: usize = 0x15c;
    pub const GDTR: usize = 0x16c;
    pub const LDTR: usize = 0x178;
    pub const ES_TO_GS: [usize; 6] = [0x184, 0x190, 0x19c, 0x12c, 0x138, 0x144];
    pub const ES_TO_GS_SELECTORS: [usize; 6] = [0x1a8, 0x1ac, 0x1b0, 0x1b4, 0x1b8, 0x1bc];
    pub const LDTR_SELECTOR: usize = 0x1c0;
    pub const TR_SELECTOR: usize = 0x1c4;
    pub const DR7: usize = 0x1c8;
    pub const DR6: usize = 0x1cc;
    /// The general registers, from EAX to EDI.
    pub const GPR: usize = 0x1d0;
    pub const EIP: usize = 0x1f0;
    pub const EFLAGS: usize = 0x1f4;
    pub const CR3: usize = 0x1f8;
    pub const CR0: usize = 0x1fc;
}

/// Returns the rights of a segment as both maps store them. An unusable segment becomes a segment that is not present.
fn saved_rights(segment: &Segment) -> u32 {
    let present = u32::from(segment.usable()) << 7;
    segment.rights & 0xf07f | present
}

fn loaded_rights(saved: u32) -> u32 {
    let unusable = match saved & 1 << 7 {
        0 => Segment::UNUSABLE,
        _ => 0,
    };
    saved & 0xf0ff | unusable
}

impl Image {
    fn put<const N: usize>(&mut self, at: usize, bytes: [u8; N]) {
        self.0[at..at + N].copy_from_slice(&bytes);
    }

    fn put32(&mut self, at: usize, value: u64) {
        self.put(at, (value as u32).to_le_bytes());
    }

    fn put64(&mut self, at: usize, value: u64) {
        self.put(at, value.to_le_bytes());
    }

    fn get<const N: usize>(&self, at: usize) -> [u8; N] {
        std::array::from_fn(|i| self.0[at + i])
    }

    fn get16(&self, at: usize) -> u16 {
        u16::from_le_bytes(self.get(at))
    }

    fn get32(&self, at: usize) -> u64 {
        u32::from_le_bytes(self.get(at)).into()
    }

    fn get64(&self, at: usize) -> u64 {
        u64::from_le_bytes(self.get(at))
    }

    fn put_segment64(&mut self, at: usize, segment: &Segment) {
        self.put(at, segment.selector.to_le_bytes());
        self.put(at + 2, (saved_rights(segment) as u16).to_le_bytes());
        self.put(at + 4, segment.limit.to_le_bytes());
        self.put64(at + 8, segment.base);
    }

    fn segment64(&self, at: usize) -> Segment {
        Segment {
            selector: self.get16(at),
            base: self.get64(at + 8),
            limit: self.get32(at + 4) as u32,
            rights: loaded_rights(self.get16(at + 2).into()),
        }
    }

    fn put_table64(&mut self, at: usize, table: &Table) {
        self.put32(at + 4, table.limit.into());
        self.put64(at + 8, table.base);
    }

    fn table64(&self, at: usize) -> Table {
        Table {
            limit: self.get16(at + 4),
            base: self.get64(at + 8),
        }
    }

    fn put_segment32(&mut self, at: usize, selector: usize, segment: &Segment) {
        self.put32(selector, segment.selector.into());
        self.put32(at, u64::from(saved_rights(segment)) << 8);
        self.put32(at + 4, segment.limit.into());
        self.put32(at + 8, segment.base);
    }

    fn segment32(&self, at: usize, selector: usize) -> Segment {
        Segment {
            selector: self.get16(selector),
            base: self.get32(at + 8),
            limit: self.get32(at + 4) as u32,
            rights: loaded_rights(self.get32(at) as u32 >> 8),
        }
    }

    fn put_table32(&mut self, at: usize, table: &Table) {
        self.put32(at + 4, table.limit.into());
        self.put32(at + 8, table.base);
    }

    fn table32(&self, at: usize) -> Table {
        Table {
            limit: self.get16(at + 4),
            base: self.get32(at + 8),
        }
    }
}

impl State {
    fn es_to_gs(&self) -> [&Segment; 6] {
        [&self.es, &self.cs, &self.ss, &self.ds, &self.fs, &self.gs]
    }

    fn es_to_gs_mut(&mut self) -> [&mut Segment; 6] {
        [
            &mut self.es,
            &mut self.cs,
            &mut self.ss,
            &mut self.ds,
            &mut self.fs,
            &mut self.gs,
        ]
    }

    /// Returns the registers that an SMI saves, as the bytes of SMRAM from SMBASE + [`SMRAM_OFFSET`] on. Bytes that KVM
    /// does not write are 0.
    pub fn smram(&self, map: SmramMap) -> [u8; SMRAM_BYTES] {
        let mut image = Image([0; SMRAM_BYTES]);
        match map {
            SmramMap::Bits32 => self.save32(&mut image),
            SmramMap::Bits64 => self.save64(&mut image),
        }
        image.0
    }

    fn shadow(&self) -> u8 {
        let mov_ss = u8::from(self.events.mov_ss_shadow) * SHADOW_MOV_SS;
        let sti = u8::from(self.events.sti_shadow) * SHADOW_STI;
        mov_ss | sti
    }

    fn set_shadow(&mut self, shadow: u8) {
        self.events.mov_ss_shadow = shadow & SHADOW_MOV_SS != 0;
        self.events.sti_shadow = shadow & SHADOW_STI != 0;
    }

    fn save64(&self, image: &mut Image) {
        use at64::*;
        for (at, segment) in ES_TO_GS.into_iter().zip(self.es_to_gs()) {
            image.put_segment64(at, segment);
        }
        image.put_segment64(LDTR, &self.ldtr);
        image.put_segment64(TR, &self.tr);
        image.put_table64(GDTR, &self.gdtr);
        image.put_table64(IDTR, &self.idtr);
        image.put(SHADOW, [self.shadow()]);
        image.put64(EFER, self.efer);
        image.put32(REVISION, REVISION_64.into());
        image.put32(SMBASE, self.smbase);
        image.put64(CR4, self.cr4);
        image.put64(CR3, self.cr3);
        image.put64(CR0, self.cr0);
        image.put64(DR7, self.dr7);
        image.put64(DR6, self.dr6);
        image.put64(at64::RFLAGS, self.rflags);
        image.put64(RIP, self.rip);
        for (i, value) in self.gpr.iter().rev().enumerate() {
            image.put64(GPR + 8 * i, *value);
        }
    }

    /// Loads the registers that [`save64`](Self::save64) has saved. The caller sets EFER.LMA.
    fn load64(&mut self, image: &Image) {
        use at64::*;
        for (at, segment) in ES_TO_GS.into_iter().zip(self.es_to_gs_mut()) {
            *segment = image.segment64(at);
        }
        self.ldtr = image.segment64(LDTR);
        self.tr = image.segment64(TR);
        self.gdtr = image.table64(GDTR);
        self.idtr = image.table64(IDTR);
        self.set_shadow(image.0[SHADOW]);
        self.efer = image.get64(EFER);
        self.smbase = image.get32(SMBASE);
        self.cr4 = image.get64(CR4);
        self.cr3 = image.get64(CR3);
        self.cr0 = image.get64(CR0);
        self.dr7 = image.get64(DR7);
        self.dr6 = image.get64(DR6);
        self.rflags = image.get64(at64::RFLAGS);
        self.rip = image.get64(RIP);
        for (i, value) in self.gpr.iter_mut().rev().enumerate() {
            *value = image.get64(GPR + 8 * i);
        }
    }

    fn save32(&self, image: &mut Image) {
        use at32::*;
        let selectors = ES_TO_GS_SELECTORS.into_iter();
        for ((at, selector), segment) in ES_TO_GS.into_iter().zip(selectors).zip(self.es_to_gs()) {
            image.put_segment32(at, selector, segment);
        }
        image.put_segment32(LDTR, LDTR_SELECTOR, &self.ldtr);
        image.put_segment32(TR, TR_SELECTOR, &self.tr);
        image.put_table32(GDTR, &self.gdtr);
        image.put_table32(IDTR, &self.idtr);
        image.put(SHADOW, [self.shadow()]);
        image.put32(REVISION, REVISION_32.into());
        image.put32(SMBASE, self.smbase);
        image.put32(CR4, self.cr4);
        image.put32(CR3, self.cr3);
        image.put32(CR0, self.cr0);
        image.put32(DR7, self.dr7);
        image.put32(DR6, self.dr6);
        image.put32(EFLAGS, self.rflags);
        image.put32(EIP, self.rip);
        for (i, value) in self.gpr[..8].iter().enumerate() {
            image.put32(GPR + 4 * i, *value);
        }
    }

    /// Loads the registers that [`save32`](Self::save32) has saved.
    fn load32(&mut self, image: &Image) {
        use at32::*;
        let selectors = ES_TO_GS_SELECTORS.into_iter();
        for ((at, selector), segment) in
            (ES_TO_GS.into_iter().zip(selectors)).zip(self.es_to_gs_mut())
        {
            *segment = image.segment32(at, selector);
        }
        self.ldtr = image.segment32(LDTR, LDTR_SELECTOR);
        self.tr = image.segment32(TR, TR_SELECTOR);
        self.gdtr = image.table32(GDTR);
        self.idtr = image.table32(IDTR);
        self.set_shadow(image.0[SHADOW]);
        self.smbase = image.get32(SMBASE);
        self.cr4 = image.get32(CR4);
        self.cr3 = image.get32(CR3);
        self.cr0 = image.get32(CR0);
        self.dr7 = image.get32(DR7);
        self.dr6 = image.get32(DR6);
        self.rflags = image.get32(EFLAGS);
        self.rip = image.get32(EIP);
        for (i, value) in self.gpr[..8].iter_mut().enumerate() {
            *value = image.get32(GPR + 4 * i);
        }
    }

    /// Changes the registers as an SMI does: real mode with segment limits of 4 GiB, RIP at [`HANDLER`], and interrupts
    /// and NMIs disabled. As in KVM, CS has the type of a data segment, and the IDT is empty.
    fn enter_smm(&mut self) {
        let data = Segment {
            selector: 0,
            base: 0,
            limit: u32::MAX,
            rights: 0x8093,
        };
        for segment in self.es_to_gs_mut() {
            *segment = data;
        }
        self.cs.selector = (self.smbase >> 4) as u16;
        self.cs.base = self.smbase;
        self.rip = HANDLER;
        self.rflags = flags::ALWAYS;
        self.cr0 &= !(CR0_PE | CR0_EM | CR0_TS | CR0_PG);
        self.cr4 = 0;
        self.efer = 0;
        self.dr7 = 0x400;
        self.idtr = Table::default();
        let events = &mut self.events;
        events.smi = false;
        events.smm = true;
        events.smm_inside_nmi = events.nmi_blocked;
        events.nmi_blocked = true;
        events.sti_shadow = false;
        events.mov_ss_shadow = false;
    }

    /// Whether PAE paging is enabled, so that the CPU has PDPTEs.
    fn pae_paging(&self) -> bool {
        self.cr0 & CR0_PG != 0 && self.cr4 & CR4_PAE != 0 && self.efer & EFER_LMA == 0
    }
}

/// Returns the address of the control block (VMCB) of the nested guest that an SMI has interrupted. `None`: there was
/// no nested guest, or the map is the 32-bit map, which does not store this address.
pub fn interrupted_vmcb(map: SmramMap, smram: &[u8; SMRAM_BYTES]) -> Option<u64> {
    let image = Image(*smram);
    let is_nested = map == SmramMap::Bits64 && image.get64(at64::NESTED_GUEST) != 0;
    is_nested.then(|| image.get64(at64::NESTED_VMCB))
}

impl Cpu {
    /// Returns the data that an SMI saves: the [registers](State::smram), and whether they belong to a nested guest.
    /// The caller must also keep the state of guest mode ([`saved_vmcb`](Self::saved_vmcb)), because
    /// [`enter_smm`](Self::enter_smm) ends guest mode.
    pub fn smram(&self, map: SmramMap) -> [u8; SMRAM_BYTES] {
        let mut image = Image(self.state.smram(map));
        if let Some(vmcb) = self.vmcb().filter(|_| map == SmramMap::Bits64) {
            image.put64(at64::NESTED_GUEST, 1);
            image.put64(at64::NESTED_VMCB, vmcb);
        }
        image.0
    }

    /// Makes an SMI pending. The CPU accepts it before the next instruction or, if the CPU is in SMM, after RSM.
    pub fn inject_smi(&mut self) {
        self.state.events.smi = true;
        self.slow = true;
    }

    /// Enters SMM. Call after [`Exit::Smi`](crate::Exit), when the result of [`State::smram`] is in SMRAM. From the
    /// next run on, the machine must translate in the address space of SMM.
    pub fn enter_smm(&mut self) {
        self.state.enter_smm();
        self.svm.suspend();
        self.flush_tlb();
    }

    /// Leaves SMM as RSM does, with the registers that were saved in SMRAM. Call after [`Exit::Rsm`](crate::Exit), when
    /// the machine translates in the ordinary address space again. `read_pdptes` reads the PDPTEs at a CR3.
    ///
    /// # Errors
    /// [`BadSmram`] for registers that no CPU can have, or if `read_pdptes` returns `None`. Then nothing has changed.
    pub fn leave_smm(
        &mut self,
        map: SmramMap,
        smram: &[u8; SMRAM_BYTES],
        read_pdptes: impl FnOnce(u64) -> Option<[u64; 4]>,
    ) -> Result<(), BadSmram> {
        let mut state = self.state.clone();
        let events = &mut state.events;
        events.nmi_blocked = events.smm_inside_nmi;
        (events.smm, events.smm_inside_nmi) = (false, false);
        match map {
            SmramMap::Bits32 => state.load32(&Image(*smram)),
            SmramMap::Bits64 => state.load64(&Image(*smram)),
        }
        self.settle(&mut state)?;
        if state.pae_paging() {
            state.pdptes = read_pdptes(state.cr3)
                .filter(|entries| self.features.valid_pdptes(entries))
                .ok_or(BadSmram)?;
        }
        self.state = state;
        self.flush_tlb();
        if self.requests.debugger.single_step {
            self.trap(DR6_BS);
        }
        Ok(())
    }

    /// Checks the registers that RSM loads, as the instructions do that load these registers. Sets the bits that are
    /// always set.
    fn settle(&self, state: &mut State) -> Result<(), BadSmram> {
        let State {
            cr0,
            cr3,
            cr4,
            efer,
            dr6,
            dr7,
            ..
        } = *state;
        let features = &self.features;
        let pages = cr0 & CR0_PG != 0;
        let long = pages && efer & EFER_LME != 0;
        let bad = cr0 >> 32 != 0
            || pages && cr0 & CR0_PE == 0
            || cr0 & CR0_NW != 0 && cr0 & CR0_CD == 0
            || cr3 & features.beyond_physical() != 0
            || cr4 & !features.cr4 != 0
            || long && cr4 & CR4_PAE == 0
            || !long && cr4 & CR4_PCIDE != 0
            || efer & !(features.efer | EFER_LMA) != 0
            || (dr6 | dr7) >> 32 != 0;
        if bad {
            return Err(BadSmram);
        }
        state.cr0 = cr0 & CR0_KNOWN | CR0_ET;
        state.efer = efer & !EFER_LMA | if long { EFER_LMA } else { 0 };
        state.dr6 = dr6 & 0xe00f | DR6_ONES;
        state.dr7 = dr7 & !0xd800 | 0x400;
        state.rflags = state.rflags & RFLAGS | flags::ALWAYS;
        Ok(())
    }
}

#[cfg(test)]
mod tests;
