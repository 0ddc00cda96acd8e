//! The virtual machine control block (VMCB): a page of guest memory that consists of a control area and a save area
//! (AMD64 volume 2, appendix B).

use super::event::Event;
use crate::state::{Segment, State, Table, control::*, flags, made_canonical};

/// The size of a VMCB in bytes.
pub const VMCB_BYTES: usize = 4096;
/// The size in bytes of the part of the control area that this CPU uses.
pub(crate) const CONTROL_BYTES: usize = 0x100;
/// The offset of the save area in a VMCB.
pub(crate) const SAVE_OFFSET: usize = 0x400;
/// The size in bytes of the part of the save area that this CPU uses.
pub(crate) const SAVE_BYTES: usize = 0x2a0;

/// Offsets of fields in the control area.
mod at {
    pub const PAUSE_THRESHOLD: usize = 0x3c;
    pub const PAUSE_COUNT: usize = 0x3e;
    pub const IOPM_BASE: usize = 0x40;
    pub const MSRPM_BASE: usize = 0x48;
    pub const TSC_OFFSET: usize = 0x50;
    pub const ASID: usize = 0x58;
    pub const TLB_CONTROL: usize = 0x5c;
    pub const VIRTUAL_INTERRUPT: usize = 0x60;
    pub const VIRTUAL_VECTOR: usize = 0x64;
    pub const INTERRUPT_SHADOW: usize = 0x68;
    pub const EXIT_CODE: usize = 0x70;
    pub const EXIT_INFO_1: usize = 0x78;
    pub const EXIT_INFO_2: usize = 0x80;
    pub const EXIT_INT_INFO: usize = 0x88;
    pub const NESTED_PAGING: usize = 0x90;
    pub const EVENT_INJECTION: usize = 0xa8;
    pub const NESTED_CR3: usize = 0xb0;
    pub const VIRTUAL_EXTENSIONS: usize = 0xb8;
    pub const NEXT_RIP: usize = 0xc8;
}

/// Offsets of fields in the save area.
mod at_save {
    pub const ES: usize = 0;
    pub const CS: usize = 0x10;
    pub const SS: usize = 0x20;
    pub const DS: usize = 0x30;
    pub const FS: usize = 0x40;
    pub const GS: usize = 0x50;
    pub const GDTR: usize = 0x60;
    pub const LDTR: usize = 0x70;
    pub const IDTR: usize = 0x80;
    pub const TR: usize = 0x90;
    pub const CPL: usize = 0xcb;
    pub const EFER: usize = 0xd0;
    pub const CR4: usize = 0x148;
    pub const CR3: usize = 0x150;
    pub const CR0: usize = 0x158;
    pub const DR7: usize = 0x160;
    pub const DR6: usize = 0x168;
    pub const RFLAGS: usize = 0x170;
    pub const RIP: usize = 0x178;
    pub const RSP: usize = 0x1d8;
    pub const RAX: usize = 0x1f8;
    pub const STAR: usize = 0x200;
    pub const LSTAR: usize = 0x208;
    pub const CSTAR: usize = 0x210;
    pub const SFMASK: usize = 0x218;
    pub const KERNEL_GS_BASE: usize = 0x220;
    pub const SYSENTER_CS: usize = 0x228;
    pub const SYSENTER_ESP: usize = 0x230;
    pub const SYSENTER_EIP: usize = 0x238;
    pub const CR2: usize = 0x240;
    pub const G_PAT: usize = 0x268;
}

/// Bits of the field with virtual interrupts.
pub(crate) mod virtual_interrupt {
    pub const TPR: u64 = 0xff;
    pub const IRQ: u64 = 1 << 8;
    pub const GIF: u64 = 1 << 9;
    pub const NMI: u64 = 1 << 11;
    pub const NMI_MASK: u64 = 1 << 12;
    pub const PRIORITY_SHIFT: u32 = 16;
    pub const IGNORE_TPR: u64 = 1 << 20;
    pub const MASKING: u64 = 1 << 24;
    pub const GIF_ENABLE: u64 = 1 << 25;
    pub const NMI_ENABLE: u64 = 1 << 26;
    /// The bits that enable x2AVIC (30) and AVIC (31), which this CPU does not have.
    pub const NOT_OFFERED: u64 = 1 << 30 | 1 << 31;
}

fn get<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    std::array::from_fn(|i| bytes[at + i])
}

fn get32(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(get(bytes, at))
}

fn get64(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(get(bytes, at))
}

fn put64(bytes: &mut [u8], at: usize, value: u64) {
    bytes[at..at + 8].copy_from_slice(&value.to_le_bytes());
}

/// A copy of the control area, which VMRUN has read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Control([u8; CONTROL_BYTES]);

impl Control {
    pub(crate) const fn new(bytes: [u8; CONTROL_BYTES]) -> Self {
        Control(bytes)
    }

    pub(crate) fn bytes(&self) -> &[u8; CONTROL_BYTES] {
        &self.0
    }

    /// Whether the hypervisor intercepts exit code `code`. The intercept vectors have one bit for each code below 0xc0,
    /// in ascending order.
    pub(crate) fn intercepts(&self, code: u64) -> bool {
        let code = code as usize;
        get32(&self.0, code / 32 * 4) >> (code % 32) & 1 != 0
    }

    pub(crate) fn pause_filter(&self) -> (u16, u16) {
        let word = |at| u16::from_le_bytes(get(&self.0, at));
        (word(at::PAUSE_COUNT), word(at::PAUSE_THRESHOLD))
    }

    /// Returns the guest-physical address of the I/O permission map.
    pub(crate) fn io_map(&self) -> u64 {
        get64(&self.0, at::IOPM_BASE) & !0xfff
    }

    /// Returns the guest-physical address of the MSR permission map.
    pub(crate) fn msr_map(&self) -> u64 {
        get64(&self.0, at::MSRPM_BASE) & !0xfff
    }

    pub(crate) fn tsc_offset(&self) -> u64 {
        get64(&self.0, at::TSC_OFFSET)
    }

    pub(crate) fn asid(&self) -> u32 {
        get32(&self.0, at::ASID)
    }

    pub(crate) fn tlb_control(&self) -> u8 {
        self.0[at::TLB_CONTROL]
    }

    /// Returns the field that contains V_TPR, V_IRQ, V_GIF and similar bits: see [`virtual_interrupt`].
    pub(crate) fn virtual_interrupt(&self) -> u64 {
        get32(&self.0, at::VIRTUAL_INTERRUPT).into()
    }

    /// Sets the bits of `mask` in the virtual-interrupt field to those of `value`.
    pub(crate) fn set_virtual_interrupt(&mut self, mask: u64, value: u64) {
        let new = (self.virtual_interrupt() & !mask | value & mask) as u32;
        self.0[at::VIRTUAL_INTERRUPT..][..4].copy_from_slice(&new.to_le_bytes());
    }

    pub(crate) fn virtual_vector(&self) -> u8 {
        self.0[at::VIRTUAL_VECTOR]
    }

    pub(crate) fn interrupt_shadow(&self) -> bool {
        self.0[at::INTERRUPT_SHADOW] & 1 != 0
    }

    /// Whether nested paging is enabled (NP_ENABLE).
    pub(crate) fn nested_paging(&self) -> bool {
        get64(&self.0, at::NESTED_PAGING) & 1 != 0
    }

    /// Whether the nested-paging field enables a feature that this CPU does not have: SEV, SEV-ES, GMET, shadow stacks,
    /// VTE.
    pub(crate) fn has_unknown_paging(&self) -> bool {
        get64(&self.0, at::NESTED_PAGING) & !1 & 0x3f != 0
    }

    pub(crate) fn nested_cr3(&self) -> u64 {
        get64(&self.0, at::NESTED_CR3)
    }

    /// Whether the guest's VMLOAD and VMSAVE run without a #VMEXIT, with guest-physical addresses of the guest.
    pub(crate) fn virtual_vmload(&self) -> bool {
        get64(&self.0, at::VIRTUAL_EXTENSIONS) & 1 << 1 != 0
    }

    /// Returns the field EVENTINJ: the event that VMRUN injects.
    pub(crate) fn event(&self) -> Event {
        Event(get64(&self.0, at::EVENT_INJECTION))
    }

    pub(crate) fn next_rip(&self) -> u64 {
        get64(&self.0, at::NEXT_RIP)
    }

    pub(crate) fn set_next_rip(&mut self, rip: u64) {
        put64(&mut self.0, at::NEXT_RIP, rip);
    }

    /// Clears EVENTINJ.V. Call after the CPU has read the event.
    pub(crate) fn take_event(&mut self) {
        put64(&mut self.0, at::EVENT_INJECTION, 0);
    }

    /// Sets the fields that a #VMEXIT writes.
    pub(crate) fn put_exit(&mut self, exit: &VmExit, shadow: bool) {
        put64(&mut self.0, at::INTERRUPT_SHADOW, shadow.into());
        put64(&mut self.0, at::EXIT_CODE, exit.code);
        put64(&mut self.0, at::EXIT_INFO_1, exit.info_1);
        put64(&mut self.0, at::EXIT_INFO_2, exit.info_2);
        put64(&mut self.0, at::EXIT_INT_INFO, exit.int_info);
        put64(&mut self.0, at::NEXT_RIP, exit.next_rip);
    }

    /// The parts of the control area that a #VMEXIT writes to the VMCB. The first part has virtual interrupts,
    /// interrupt shadow and exit fields; the second is EVENTINJ; the third is nRIP.
    pub(crate) const STORED: [std::ops::Range<usize>; 3] = [
        at::VIRTUAL_INTERRUPT..at::NESTED_PAGING,
        at::EVENT_INJECTION..at::EVENT_INJECTION + 8,
        at::NEXT_RIP..at::NEXT_RIP + 8,
    ];

    /// The part of the control area that VMRUN writes if the guest's state is invalid.
    pub(crate) const EXIT: std::ops::Range<usize> = at::EXIT_CODE..at::EXIT_INT_INFO;
}

/// A #VMEXIT, with the values that it writes to the control area.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct VmExit {
    pub(crate) code: u64,
    pub(crate) info_1: u64,
    pub(crate) info_2: u64,
    /// The field EXITINTINFO: the event whose delivery the #VMEXIT has interrupted.
    pub(crate) int_info: u64,
    /// nRIP; 0 if the exit has no nRIP.
    pub(crate) next_rip: u64,
}

/// A copy of the save area of a VMCB.
#[derive(Clone, Debug)]
pub(crate) struct Save(pub(crate) [u8; SAVE_BYTES]);

/// Returns the access rights of a segment in the format of a VMCB: 12 bits of the descriptor. An unusable segment
/// becomes a segment that is not present.
fn attributes(segment: &Segment) -> u16 {
    let present = u32::from(segment.usable()) << 7;
    (segment.rights & 0x7f | present | segment.rights >> 4 & 0xf00) as u16
}

fn rights(attributes: u16) -> u32 {
    let attributes = u32::from(attributes);
    let unusable = match attributes & 1 << 7 {
        0 => Segment::UNUSABLE,
        _ => 0,
    };
    attributes & 0xff | (attributes & 0xf00) << 4 | unusable
}

impl Save {
    fn segment(&self, at: usize) -> Segment {
        Segment {
            selector: u16::from_le_bytes(get(&self.0, at)),
            base: get64(&self.0, at + 8),
            limit: get32(&self.0, at + 4),
            rights: rights(u16::from_le_bytes(get(&self.0, at + 2))),
        }
    }

    fn put_segment(&mut self, at: usize, segment: &Segment) {
        self.0[at..at + 2].copy_from_slice(&segment.selector.to_le_bytes());
        self.0[at + 2..at + 4].copy_from_slice(&attributes(segment).to_le_bytes());
        self.0[at + 4..at + 8].copy_from_slice(&segment.limit.to_le_bytes());
        put64(&mut self.0, at + 8, segment.base);
    }

    fn table(&self, at: usize) -> Table {
        Table {
            limit: get32(&self.0, at + 4) as u16,
            base: get64(&self.0, at + 8),
        }
    }

    fn put_table(&mut self, at: usize, table: &Table) {
        self.0[at + 4..at + 8].copy_from_slice(&u32::from(table.limit).to_le_bytes());
        put64(&mut self.0, at + 8, table.base);
    }

    /// The parts of the save area that a #VMEXIT writes: the fields of [`Registers`].
    pub(crate) const STORED: [std::ops::Range<usize>; 9] = [
        at_save::ES..at_save::FS,
        at_save::GDTR..at_save::LDTR,
        at_save::IDTR..at_save::TR,
        at_save::CPL..at_save::CPL + 1,
        at_save::EFER..at_save::EFER + 8,
        at_save::CR4..at_save::RIP + 8,
        at_save::RSP..at_save::RSP + 8,
        at_save::RAX..at_save::RAX + 8,
        at_save::CR2..at_save::CR2 + 8,
    ];

    /// The parts of the save area that VMSAVE writes.
    pub(crate) const VMSAVE: [std::ops::Range<usize>; 4] = [
        at_save::FS..at_save::GDTR,
        at_save::LDTR..at_save::IDTR,
        at_save::TR..at_save::TR + 0x10,
        at_save::STAR..at_save::CR2,
    ];

    /// Copies the registers that VMSAVE writes from `state` to this save area.
    pub(crate) fn save_rest(&mut self, state: &State) {
        self.put_segment(at_save::FS, &state.fs);
        self.put_segment(at_save::GS, &state.gs);
        self.put_segment(at_save::LDTR, &state.ldtr);
        self.put_segment(at_save::TR, &state.tr);
        for (at, value) in [
            (at_save::STAR, state.star),
            (at_save::LSTAR, state.lstar),
            (at_save::CSTAR, state.cstar),
            (at_save::SFMASK, state.sfmask),
            (at_save::KERNEL_GS_BASE, state.kernel_gs_base),
            (at_save::SYSENTER_CS, state.sysenter_cs),
            (at_save::SYSENTER_ESP, state.sysenter_esp),
            (at_save::SYSENTER_EIP, state.sysenter_eip),
        ] {
            put64(&mut self.0, at, value);
        }
    }

    /// Copies the registers that VMLOAD loads from this save area to `state`. Makes addresses canonical, because the
    /// CPU stores only canonical addresses.
    pub(crate) fn load_rest(&self, state: &mut State) {
        let cr4 = state.cr4;
        let canonical = |address| made_canonical(cr4, address);
        let segment = |at| {
            let segment = self.segment(at);
            Segment {
                base: canonical(segment.base),
                ..segment
            }
        };
        state.fs = segment(at_save::FS);
        state.gs = segment(at_save::GS);
        state.ldtr = segment(at_save::LDTR);
        state.tr = segment(at_save::TR);
        let get = |at| get64(&self.0, at);
        state.star = get(at_save::STAR);
        state.lstar = canonical(get(at_save::LSTAR));
        state.cstar = canonical(get(at_save::CSTAR));
        state.sfmask = get(at_save::SFMASK) & 0xffff_ffff;
        state.kernel_gs_base = canonical(get(at_save::KERNEL_GS_BASE));
        state.sysenter_cs = get(at_save::SYSENTER_CS) & 0xffff_ffff;
        state.sysenter_esp = get(at_save::SYSENTER_ESP) & 0xffff_ffff;
        state.sysenter_eip = get(at_save::SYSENTER_EIP) & 0xffff_ffff;
    }
}

/// The registers that VMRUN and #VMEXIT exchange.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Registers {
    pub(crate) es: Segment,
    pub(crate) cs: Segment,
    pub(crate) ss: Segment,
    pub(crate) ds: Segment,
    pub(crate) gdtr: Table,
    pub(crate) idtr: Table,
    pub(crate) cpl: u8,
    pub(crate) efer: u64,
    pub(crate) cr0: u64,
    pub(crate) cr2: u64,
    pub(crate) cr3: u64,
    pub(crate) cr4: u64,
    pub(crate) dr6: u64,
    pub(crate) dr7: u64,
    pub(crate) rflags: u64,
    pub(crate) rip: u64,
    pub(crate) rsp: u64,
    pub(crate) rax: u64,
    pub(crate) pat: u64,
}

impl Registers {
    /// Returns the registers in a save area.
    pub(crate) fn read(save: &Save) -> Self {
        let get = |at| get64(&save.0, at);
        Registers {
            es: save.segment(at_save::ES),
            cs: save.segment(at_save::CS),
            ss: save.segment(at_save::SS),
            ds: save.segment(at_save::DS),
            gdtr: save.table(at_save::GDTR),
            idtr: save.table(at_save::IDTR),
            cpl: save.0[at_save::CPL] & 3,
            efer: get(at_save::EFER),
            cr0: get(at_save::CR0),
            cr2: get(at_save::CR2),
            cr3: get(at_save::CR3),
            cr4: get(at_save::CR4),
            dr6: get(at_save::DR6),
            dr7: get(at_save::DR7),
            rflags: get(at_save::RFLAGS),
            rip: get(at_save::RIP),
            rsp: get(at_save::RSP),
            rax: get(at_save::RAX),
            pat: get(at_save::G_PAT),
        }
    }

    /// Writes the registers to a save area. The PAT is not among the parts in [`Save::STORED`], because the guest has
    /// its own PAT only with nested paging.
    pub(crate) fn write(&self, save: &mut Save) {
        save.put_segment(at_save::ES, &self.es);
        save.put_segment(at_save::CS, &self.cs);
        save.put_segment(at_save::SS, &self.ss);
        save.put_segment(at_save::DS, &self.ds);
        save.put_table(at_save::GDTR, &self.gdtr);
        save.put_table(at_save::IDTR, &self.idtr);
        save.0[at_save::CPL] = self.cpl;
        for (at, value) in [
            (at_save::EFER, self.efer),
            (at_save::CR0, self.cr0),
            (at_save::CR2, self.cr2),
            (at_save::CR3, self.cr3),
            (at_save::CR4, self.cr4),
            (at_save::DR6, self.dr6),
            (at_save::DR7, self.dr7),
            (at_save::RFLAGS, self.rflags),
            (at_save::RIP, self.rip),
            (at_save::RSP, self.rsp),
            (at_save::RAX, self.rax),
            (at_save::G_PAT, self.pat),
        ] {
            put64(&mut save.0, at, value);
        }
    }

    /// Returns the registers in `state`, whose RFLAGS must contain the current arithmetic flags. `cpl` is the privilege
    /// level.
    pub(crate) fn of(state: &State, cpl: u8) -> Self {
        Registers {
            es: state.es,
            cs: state.cs,
            ss: state.ss,
            ds: state.ds,
            gdtr: state.gdtr,
            idtr: state.idtr,
            cpl,
            efer: state.efer,
            cr0: state.cr0,
            cr2: state.cr2,
            cr3: state.cr3,
            cr4: state.cr4,
            dr6: state.dr6,
            dr7: state.dr7,
            rflags: state.rflags,
            rip: state.rip,
            rsp: state.gpr[4],
            rax: state.gpr[0],
            pat: state.pat,
        }
    }

    /// Loads these registers into `state`, except for the PAT. The privilege level is the DPL of SS, as everywhere in
    /// this CPU.
    pub(crate) fn load(&self, state: &mut State) {
        state.es = self.es;
        state.cs = self.cs;
        state.ss = self.ss;
        state.ss.rights = self.ss.rights & !(3 << 5) | u32::from(self.cpl) << 5;
        state.ds = self.ds;
        state.gdtr = self.gdtr;
        state.idtr = self.idtr;
        let pages = self.cr0 & CR0_PG != 0;
        let long = pages && self.efer & EFER_LME != 0;
        state.efer = self.efer & !EFER_LMA | if long { EFER_LMA } else { 0 };
        state.cr0 = self.cr0 & CR0_KNOWN | CR0_ET;
        state.cr2 = self.cr2;
        state.cr3 = self.cr3;
        state.cr4 = self.cr4;
        state.dr6 = self.dr6 & 0xe00f | crate::watch::DR6_ONES;
        state.dr7 = self.dr7 & !0xd800 | 0x400;
        state.rflags = self.rflags & LOADED_FLAGS | flags::ALWAYS;
        state.rip = self.rip;
        state.gpr[4] = self.rsp;
        state.gpr[0] = self.rax;
    }

    /// Returns the registers with canonical segment and table addresses, as VMRUN loads them (15.5.1).
    pub(crate) fn canonicalized(mut self) -> Self {
        for base in [
            &mut self.es.base,
            &mut self.cs.base,
            &mut self.ss.base,
            &mut self.ds.base,
            &mut self.gdtr.base,
            &mut self.idtr.base,
        ] {
            *base = made_canonical(self.cr4, *base);
        }
        self
    }

    /// Whether these registers enable PAE paging.
    pub(crate) fn pae_paging(&self) -> bool {
        self.cr0 & CR0_PG != 0 && self.cr4 & CR4_PAE != 0 && self.efer & EFER_LME == 0
    }
}

/// The bits of RFLAGS that exist on this CPU.
const LOADED_FLAGS: u64 = 0x3f_7fd5;

/// The offset of G_PAT in the save area.
pub(crate) const G_PAT: std::ops::Range<usize> = at_save::G_PAT..at_save::G_PAT + 8;
