//! The virtual machine control block (AMD64 APM volume 2, appendix B), and the guest it describes.

use core::mem::offset_of;

use metal_x86::guest;

/// The block. Fields without a name here are zero.
#[repr(C, align(4096))]
pub struct Vmcb {
    pub control: Control,
    pub save: Save,
    _unused: [u8; 0x990],
}

/// The control area: table B-1.
#[repr(C)]
pub struct Control {
    /// The intercepts of accesses to control registers, of accesses to debug registers, and of exceptions.
    intercept_registers: [u32; 3],
    intercept: [u32; 2],
    _iopm_msrpm: [u8; 0x3c],
    _tsc_offset: u64,
    asid: u32,
    pub tlb_control: u32,
    virtual_interrupt: u64,
    _interrupt_shadow: u64,
    pub exit_code: u64,
    pub exit_info_1: u64,
    pub exit_info_2: u64,
    _exit_interrupt: u64,
    nested: u64,
    _avic_to_injection: [u64; 3],
    pub nested_cr3: u64,
    _rest: [u8; 0x400 - 0xb8],
}

/// The state-save area: table B-2.
#[repr(C)]
pub struct Save {
    /// The segments ES, CS, SS, DS, FS, GS, GDTR, LDTR, IDTR, TR.
    segments: [Segment; 10],
    _to_efer: [u8; 0x30],
    efer: u64,
    _to_cr4: [u8; 0x70],
    cr4: u64,
    cr3: u64,
    cr0: u64,
    _dr7_dr6: [u64; 2],
    rflags: u64,
    pub rip: u64,
    _to_rax: [u8; 0x78],
    pub rax: u64,
    _to_pat: [u8; 0x68],
    pat: u64,
}

#[derive(Clone, Copy)]
#[repr(C)]
struct Segment {
    selector: u16,
    attributes: u16,
    limit: u32,
    base: u64,
}

const _: () = {
    assert!(size_of::<Vmcb>() == 4096);
    assert!(offset_of!(Control, asid) == 0x58);
    assert!(offset_of!(Control, exit_code) == 0x70);
    assert!(offset_of!(Control, nested) == 0x90);
    assert!(offset_of!(Control, nested_cr3) == 0xb0);
    assert!(offset_of!(Vmcb, save) == 0x400);
    assert!(offset_of!(Save, efer) == 0xd0);
    assert!(offset_of!(Save, cr4) == 0x148);
    assert!(offset_of!(Save, cr0) == 0x158);
    assert!(offset_of!(Save, rip) == 0x178);
    assert!(offset_of!(Save, rax) == 0x1f8);
    assert!(offset_of!(Save, pat) == 0x268);
};

impl Vmcb {
    /// TLB_CONTROL: nothing is flushed at the next VMRUN.
    pub const KEEP_TLB: u32 = 0;
    /// TLB_CONTROL: all translations are flushed at the next VMRUN.
    pub const FLUSH_TLB: u32 = 1;

    /// Makes the block of a guest with 32-bit code in flat segments: in protected mode without paging, in nested
    /// tables; or, if it is `shadowed`, in compatibility mode, in shadow tables.
    pub fn for_guest(shadowed: bool) -> Self {
        const INTR: u32 = 1 << 0;
        const HLT: u32 = 1 << 24;
        const INVLPG: u32 = 1 << 25;
        const SHUTDOWN: u32 = 1 << 31;
        const VMRUN: u32 = 1 << 0;
        const VMMCALL: u32 = 1 << 1;
        /// The host's IF, not the guest's, masks interrupts (V_INTR_MASKING).
        const HOST_IF_MASKS: u64 = 1 << 24;
        const NESTED_PAGING: u64 = 1 << 0;
        const CR3_WRITE: u32 = 1 << 19;
        const PAGE_FAULT: u32 = 1 << 14;
        const SVME: u64 = 1 << 12; // VMRUN requires it
        const NXE_LMA_LME: u64 = 0xd00;
        const PG_WP: u64 = 0x8001_0000;
        const PAE: u64 = 1 << 5;
        const CODE32: u16 = 0xc9b;
        const DATA32: u16 = 0xc93;
        const LDT: u16 = 0x082;
        const BUSY_TSS: u16 = 0x08b;

        let flat = |attributes| Segment {
            selector: 8,
            attributes,
            limit: u32::MAX,
            base: 0,
        };
        let mut segments = [flat(DATA32); 10];
        segments[1] = flat(CODE32);
        segments[7] = flat(LDT);
        segments[9] = flat(BUSY_TSS);
        // SAFETY: all fields are integers, which may be zero.
        let mut vmcb: Vmcb = unsafe { core::mem::zeroed() };
        vmcb.control.intercept = [INTR | HLT | SHUTDOWN, VMRUN | VMMCALL];
        vmcb.control.asid = 1;
        vmcb.control.virtual_interrupt = HOST_IF_MASKS;
        vmcb.save.segments = segments;
        vmcb.save.efer = SVME;
        vmcb.save.cr0 = guest::CR0;
        match shadowed {
            false => vmcb.control.nested = NESTED_PAGING,
            true => {
                vmcb.control.intercept_registers = [CR3_WRITE, 0, PAGE_FAULT];
                vmcb.control.intercept[0] |= INVLPG;
                vmcb.save.efer |= NXE_LMA_LME;
                vmcb.save.cr4 = PAE;
                vmcb.save.cr0 |= PG_WP;
            }
        }
        vmcb.save.rflags = 2;
        vmcb.save.pat = 0x0007_0406_0007_0406;
        vmcb
    }

    /// Makes the guest's addresses be translated from the table at `root` on.
    pub fn set_root(&mut self, shadowed: bool, root: u64) {
        match shadowed {
            false => self.control.nested_cr3 = root,
            true => self.save.cr3 = root,
        }
    }
}
