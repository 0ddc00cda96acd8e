//! The architectural state of one CPU.

/// The bits of RFLAGS.
#[allow(missing_docs)]
pub mod flags {
    pub const CF: u64 = 1;
    pub const PF: u64 = 1 << 2;
    pub const AF: u64 = 1 << 4;
    pub const ZF: u64 = 1 << 6;
    pub const SF: u64 = 1 << 7;
    pub const TF: u64 = 1 << 8;
    pub const IF: u64 = 1 << 9;
    pub const DF: u64 = 1 << 10;
    pub const OF: u64 = 1 << 11;
    pub const IOPL: u64 = 3 << 12;
    pub const NT: u64 = 1 << 14;
    pub const RF: u64 = 1 << 16;
    pub const VM: u64 = 1 << 17;
    pub const AC: u64 = 1 << 18;
    pub const VIF: u64 = 1 << 19;
    pub const VIP: u64 = 1 << 20;
    pub const ID: u64 = 1 << 21;
    /// The six arithmetic flags.
    pub const ARITHMETIC: u64 = CF | PF | AF | ZF | SF | OF;
    /// Bit 1 of RFLAGS always reads as one.
    pub const ALWAYS: u64 = 2;
}

/// The bits of control registers and EFER.
#[allow(missing_docs)]
pub mod control {
    pub const CR0_PE: u64 = 1;
    pub const CR0_MP: u64 = 1 << 1;
    pub const CR0_EM: u64 = 1 << 2;
    pub const CR0_TS: u64 = 1 << 3;
    pub const CR0_ET: u64 = 1 << 4;
    pub const CR0_NE: u64 = 1 << 5;
    pub const CR0_WP: u64 = 1 << 16;
    pub const CR0_AM: u64 = 1 << 18;
    pub const CR0_NW: u64 = 1 << 29;
    pub const CR0_CD: u64 = 1 << 30;
    pub const CR0_PG: u64 = 1 << 31;
    /// The bits of CR0 that exist.
    pub const CR0_KNOWN: u64 = CR0_PE
        | CR0_MP
        | CR0_EM
        | CR0_TS
        | CR0_ET
        | CR0_NE
        | CR0_WP
        | CR0_AM
        | CR0_NW
        | CR0_CD
        | CR0_PG;
    pub const CR4_VME: u64 = 1;
    pub const CR4_PVI: u64 = 1 << 1;
    pub const CR4_TSD: u64 = 1 << 2;
    pub const CR4_DE: u64 = 1 << 3;
    pub const CR4_PSE: u64 = 1 << 4;
    pub const CR4_PAE: u64 = 1 << 5;
    pub const CR4_MCE: u64 = 1 << 6;
    pub const CR4_PGE: u64 = 1 << 7;
    pub const CR4_OSFXSR: u64 = 1 << 9;
    pub const CR4_OSXMMEXCPT: u64 = 1 << 10;
    pub const CR4_UMIP: u64 = 1 << 11;
    pub const CR4_LA57: u64 = 1 << 12;
    pub const CR4_FSGSBASE: u64 = 1 << 16;
    pub const CR4_PCIDE: u64 = 1 << 17;
    pub const CR4_OSXSAVE: u64 = 1 << 18;
    pub const CR4_SMEP: u64 = 1 << 20;
    pub const CR4_SMAP: u64 = 1 << 21;
    pub const CR4_PKE: u64 = 1 << 22;
    pub const EFER_SCE: u64 = 1;
    pub const EFER_LME: u64 = 1 << 8;
    pub const EFER_LMA: u64 = 1 << 10;
    pub const EFER_NXE: u64 = 1 << 11;
    pub const EFER_SVME: u64 = 1 << 12;
    pub const EFER_FFXSR: u64 = 1 << 14;
    pub const EFER_AIBRSE: u64 = 1 << 21;
    /// The bits of EFER that exist.
    pub const EFER_KNOWN: u64 =
        EFER_SCE | EFER_LME | EFER_LMA | EFER_NXE | EFER_SVME | EFER_FFXSR | EFER_AIBRSE;
}

/// Whether a value of the PAT contains only valid memory types (SDM volume 3, table 12-10).
pub fn is_pat(value: u64) -> bool {
    let types = value.to_le_bytes();
    types.iter().all(|kind| matches!(kind, 0 | 1 | 4..=7))
}

/// The state components of the XSAVE feature set, as bits of XCR0.
pub mod xcr0 {
    /// The x87 registers. This bit is always set.
    pub const X87: u64 = 1;
    /// The XMM registers and MXCSR.
    pub const SSE: u64 = 1 << 1;
    /// The upper halves of the YMM registers.
    pub const AVX: u64 = 1 << 2;
    /// The register PKRU.
    pub const PKRU: u64 = 1 << 9;
    /// All components that this CPU can have. It has [`AVX`] only if the host has AVX.
    pub const ALL: u64 = X87 | SSE | AVX | PKRU;

    /// Whether `value` is valid for XCR0 on a CPU with these `components` (SDM volume 1, "Enabling the XSAVE Feature
    /// Set").
    pub const fn is_valid(value: u64, components: u64) -> bool {
        value & !components == 0 && value & X87 != 0 && value & (SSE | AVX) != AVX
    }
}

/// A segment register with its hidden part.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Segment {
    /// The segment's selector.
    pub selector: u16,
    /// The segment's base address.
    pub base: u64,
    /// The limit in bytes, with the granularity bit applied.
    pub limit: u32,
    /// The access rights, as in the high half of a descriptor shifted right by 8: type (bits 0–3), S (4), DPL (5–6), P
    /// (7), AVL (12), L (13), D/B (14), G (15). Bit 16 means that the segment is unusable.
    pub rights: u32,
}

impl Segment {
    /// The bit of `rights` that marks an unusable segment.
    pub const UNUSABLE: u32 = 1 << 16;

    /// Makes a segment as in real mode: the base is 16 times the selector.
    pub const fn real(selector: u16, rights: u32) -> Self {
        Self {
            selector,
            base: (selector as u64) << 4,
            limit: 0xffff,
            rights,
        }
    }
    /// Returns the type field (4 bits).
    pub const fn kind(&self) -> u32 {
        self.rights & 15
    }
    /// Returns the descriptor privilege level.
    pub const fn dpl(&self) -> u8 {
        (self.rights >> 5 & 3) as u8
    }
    /// Returns the L bit, which is set for 64-bit code.
    pub const fn long(&self) -> bool {
        self.rights & 1 << 13 != 0
    }
    /// Returns the D/B bit, which is set for a default size of 32 bits.
    pub const fn big(&self) -> bool {
        self.rights & 1 << 14 != 0
    }
    /// Whether the segment is usable and present.
    pub const fn usable(&self) -> bool {
        self.rights & (Self::UNUSABLE | 1 << 7) == 1 << 7
    }
}

/// The register GDTR or IDTR.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Table {
    /// The linear address of the table.
    pub base: u64,
    /// The offset of the table's last byte.
    pub limit: u16,
}

/// An 80-bit x87 register.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct F80 {
    /// The 64-bit significand, with an explicit integer bit. It is also the MMX register.
    pub mantissa: u64,
    /// The sign (bit 15) and the exponent.
    pub exponent: u16,
}

/// An exception with its error code.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Exception {
    /// The exception's vector.
    pub vector: u8,
    /// The error code, for vectors that push an error code.
    pub error: Option<u32>,
}

/// The greatest number of NMIs that can be pending. As in KVM, further NMIs are lost.
pub const MAX_NMIS: u8 = 2;

/// The pending events, and the state that delays their delivery.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Events {
    /// An exception to deliver before the next instruction.
    pub exception: Option<Exception>,
    /// An external interrupt that is delivered before the next instruction, even if IF is clear.
    pub interrupt: Option<u8>,
    /// The number of NMIs that are delivered as soon as NMIs are not blocked. It is at most [`MAX_NMIS`].
    pub nmis: u8,
    /// Whether an NMI was delivered and no IRET has followed.
    pub nmi_blocked: bool,
    /// Whether the last instruction was STI. If so, no interrupt is accepted before the next instruction is done.
    pub sti_shadow: bool,
    /// Whether the last instruction was MOV SS or POP SS.
    pub mov_ss_shadow: bool,
    /// Whether an SMI is pending. It is accepted as soon as the CPU is not in system-management mode.
    pub smi: bool,
    /// Whether the CPU is in system-management mode: after an SMI and before RSM.
    pub smm: bool,
    /// In system-management mode: whether NMIs were blocked before the SMI. If so, they stay blocked after RSM.
    pub smm_inside_nmi: bool,
    /// Whether GIF is 0, after CLGI or a #VMEXIT. If so, no interrupt, NMI or SMI is accepted before STGI.
    pub gif_clear: bool,
    /// The DR6 bits of debug traps (breakpoints that were hit, single step) of the last instruction. The traps are
    /// taken before the next instruction.
    pub debug: u64,
}

impl Events {
    /// Whether an NMI is delivered before the next instruction. An NMI is not delivered in the shadow of STI, so it
    /// cannot come between `sti` and `hlt`. The manual does not require that (SDM volume 3, 7.8.3), but KVM's guests
    /// rely on it.
    pub fn takes_nmi(&self) -> bool {
        self.nmis != 0
            && !self.nmi_blocked
            && !self.mov_ss_shadow
            && !self.sti_shadow
            && !self.gif_clear
    }

    /// Whether an SMI is accepted before the next instruction. An exception or an acknowledged interrupt may be
    /// delivered before the SMI.
    pub fn takes_smi(&self) -> bool {
        self.smi && !self.smm && !self.gif_clear
    }
}

/// All state that a guest program can read or a VMM can set. It is complete while the CPU does not run.
#[derive(Clone, Debug, PartialEq)]
#[allow(missing_docs)]
#[repr(C)]
pub struct State {
    /// RAX, RCX, RDX, RBX, RSP, RBP, RSI, RDI, R8 to R15.
    pub gpr: [u64; 16],
    pub rip: u64,
    pub rflags: u64,
    pub es: Segment,
    pub cs: Segment,
    pub ss: Segment,
    pub ds: Segment,
    pub fs: Segment,
    pub gs: Segment,
    pub ldtr: Segment,
    pub tr: Segment,
    pub gdtr: Table,
    pub idtr: Table,
    pub cr0: u64,
    pub cr2: u64,
    pub cr3: u64,
    /// The PDPTEs of PAE paging, as read by the last load of CR3, or by the last change of paging bits in CR0 and CR4.
    pub pdptes: [u64; 4],
    pub cr4: u64,
    pub cr8: u64,
    pub efer: u64,
    pub xcr0: u64,
    pub pkru: u32,
    pub dr: [u64; 4],
    pub dr6: u64,
    pub dr7: u64,
    pub xmm: [u128; 16],
    /// Bits 255:128 of the YMM registers, whose lower halves are `xmm`.
    pub ymm_high: [u128; 16],
    pub mxcsr: u32,
    /// The x87 registers in physical order. ST(i) is `st[(top + i) & 7]`, where top is bits 11–13 of `fsw`.
    pub st: [F80; 8],
    pub fcw: u16,
    pub fsw: u16,
    /// One bit for each physical x87 register, as in FXSAVE's tag word: 1 means that the register is in use.
    pub ftw: u8,
    pub fop: u16,
    pub fip: u64,
    pub fdp: u64,
    pub star: u64,
    pub lstar: u64,
    pub cstar: u64,
    pub sfmask: u64,
    pub kernel_gs_base: u64,
    pub sysenter_cs: u64,
    pub sysenter_esp: u64,
    pub sysenter_eip: u64,
    pub tsc_aux: u64,
    pub pat: u64,
    /// The MSR VM_CR of SVM.
    pub vm_cr: u64,
    /// The MSR VM_HSAVE_PA of SVM.
    pub vm_hsave_pa: u64,
    /// The MSR TSC_RATIO of SVM: the rate of a nested guest's time-stamp counter, with 32 fraction bits.
    pub tsc_ratio: u64,
    /// The address at which SMRAM begins.
    pub smbase: u64,
    pub events: Events,
}

/// The initial value of MXCSR.
pub const MXCSR_INIT: u32 = 0x1f80;
/// The bits of MXCSR that exist on every CPU.
pub const MXCSR_MASK: u32 = 0xffff;
/// MXCSR.MM of AMD's CPUs. If it is set, memory operands of SSE instructions need not be aligned, except in moves that
/// require alignment.
pub const MXCSR_MM: u32 = 1 << 17;

impl State {
    /// Returns the state after RESET.
    pub fn reset() -> Self {
        let data = |selector| Segment::real(selector, 0x93);
        let mut cs = Segment::real(0xf000, 0x9b);
        cs.base = 0xffff_0000;
        Self {
            gpr: [0, 0, 0x600, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
            rip: 0xfff0,
            rflags: flags::ALWAYS,
            es: data(0),
            cs,
            ss: data(0),
            ds: data(0),
            fs: data(0),
            gs: data(0),
            ldtr: Segment {
                selector: 0,
                base: 0,
                limit: 0xffff,
                rights: 0x82,
            },
            tr: Segment {
                selector: 0,
                base: 0,
                limit: 0xffff,
                rights: 0x8b,
            },
            gdtr: Table {
                base: 0,
                limit: 0xffff,
            },
            idtr: Table {
                base: 0,
                limit: 0xffff,
            },
            cr0: 0x6000_0010,
            cr2: 0,
            cr3: 0,
            pdptes: [0; 4],
            cr4: 0,
            cr8: 0,
            efer: 0,
            xcr0: 1,
            pkru: 0,
            dr: [0; 4],
            dr6: 0xffff_0ff0,
            dr7: 0x400,
            xmm: [0; 16],
            ymm_high: [0; 16],
            mxcsr: 0x1f80,
            st: [F80::default(); 8],
            fcw: 0x40,
            fsw: 0,
            ftw: 0xff,
            fop: 0,
            fip: 0,
            fdp: 0,
            star: 0,
            lstar: 0,
            cstar: 0,
            sfmask: 0,
            kernel_gs_base: 0,
            sysenter_cs: 0,
            sysenter_esp: 0,
            sysenter_eip: 0,
            tsc_aux: 0,
            pat: 0x0007_0406_0007_0406,
            vm_cr: 0,
            vm_hsave_pa: 0,
            tsc_ratio: 1 << 32,
            smbase: 0x3_0000,
            events: Events::default(),
        }
    }

    /// Changes the state as INIT does (SDM volume 3, table 11-1; where the manual does not say, as in KVM). The result
    /// is the state after RESET, except that the x87, SSE and extended state, XCR0, the cache bits of CR0 and most MSRs
    /// keep their values. `signature` is the processor's signature in CPUID leaf 1.
    pub fn init(&mut self, signature: Option<u32>) {
        const CACHES: u64 = control::CR0_CD | control::CR0_NW;
        let reset = State::reset();
        let mut gpr = reset.gpr;
        if let Some(signature) = signature {
            gpr[2] = signature.into();
        }
        *self = State {
            gpr,
            cr0: reset.cr0 & !CACHES | self.cr0 & CACHES,
            xcr0: self.xcr0,
            pkru: self.pkru,
            xmm: self.xmm,
            ymm_high: self.ymm_high,
            mxcsr: self.mxcsr,
            st: self.st,
            fcw: self.fcw,
            fsw: self.fsw,
            ftw: self.ftw,
            fop: self.fop,
            fip: self.fip,
            fdp: self.fdp,
            star: self.star,
            lstar: self.lstar,
            cstar: self.cstar,
            sfmask: self.sfmask,
            kernel_gs_base: self.kernel_gs_base,
            tsc_aux: self.tsc_aux,
            pat: self.pat,
            vm_cr: self.vm_cr,
            vm_hsave_pa: self.vm_hsave_pa,
            tsc_ratio: self.tsc_ratio,
            smbase: self.smbase,
            ..reset
        };
    }

    /// Returns the x87 and SSE state as FXSAVE64 writes it.
    pub fn to_fxsave(&self) -> [u8; 512] {
        let mut image = [0; 512];
        let mut put = |at: usize, bytes: &[u8]| image[at..at + bytes.len()].copy_from_slice(bytes);
        put(0, &self.fcw.to_le_bytes());
        put(2, &self.fsw.to_le_bytes());
        put(4, &[self.ftw]);
        put(6, &self.fop.to_le_bytes());
        put(8, &self.fip.to_le_bytes());
        put(16, &self.fdp.to_le_bytes());
        put(24, &self.mxcsr.to_le_bytes());
        put(28, &MXCSR_MASK.to_le_bytes());
        for i in 0..8 {
            let st = self.st[self.physical(i)];
            put(32 + 16 * i, &st.mantissa.to_le_bytes());
            put(40 + 16 * i, &st.exponent.to_le_bytes());
        }
        for (i, xmm) in self.xmm.iter().enumerate() {
            put(160 + 16 * i, &xmm.to_le_bytes());
        }
        image
    }

    /// Loads the x87 and SSE state from an image in the format of FXSAVE64. Ignores reserved bits of MXCSR.
    pub fn set_fxsave(&mut self, image: &[u8; 512]) {
        self.set_fxsave_x87(image);
        self.mxcsr = u32::from_le_bytes(bytes(image, 24)) & (MXCSR_MASK | MXCSR_MM);
        for i in 0..16 {
            self.xmm[i] = u128::from_le_bytes(bytes(image, 160 + 16 * i));
        }
    }

    /// Loads only the x87 part of an FXSAVE64 image.
    pub fn set_fxsave_x87(&mut self, image: &[u8; 512]) {
        self.fcw = u16::from_le_bytes(bytes(image, 0)) & 0x1f3f | 0x40;
        // Leave out the error summary and busy bits, which follow from the exceptions that are set and not masked.
        self.fsw = u16::from_le_bytes(bytes(image, 2)) & !0x8080;
        if self.fsw & !self.fcw & 0x3f != 0 {
            self.fsw |= 0x8080;
        }
        self.ftw = image[4];
        self.fop = u16::from_le_bytes(bytes(image, 6)) & 0x7ff;
        self.fip = u64::from_le_bytes(bytes(image, 8));
        self.fdp = u64::from_le_bytes(bytes(image, 16));
        for i in 0..8 {
            let at = self.physical(i);
            self.st[at].mantissa = u64::from_le_bytes(bytes(image, 32 + 16 * i));
            self.st[at].exponent = u16::from_le_bytes(bytes(image, 40 + 16 * i));
        }
    }

    /// Puts the x87 component into its initial state: sets the control, status and tag words as FNINIT does, and clears
    /// the registers.
    pub fn initialize_x87(&mut self) {
        self.st = [F80::default(); 8];
        (self.fcw, self.fsw, self.ftw, self.fop) = (0x37f, 0, 0, 0);
        (self.fip, self.fdp) = (0, 0);
    }

    /// Whether the x87 component is in its initial state.
    pub fn x87_is_initial(&self) -> bool {
        self.fcw == 0x37f
            && (self.fsw, self.ftw, self.fop) == (0, 0, 0)
            && (self.fip, self.fdp) == (0, 0)
            && self.st == [F80::default(); 8]
    }

    #[inline(always)]
    pub(crate) fn physical(&self, i: usize) -> usize {
        (usize::from(self.fsw >> 11) + i) & 7
    }
}

impl Default for State {
    fn default() -> Self {
        Self::reset()
    }
}

fn bytes<const N: usize>(image: &[u8], at: usize) -> [u8; N] {
    let mut out = [0; N];
    out.copy_from_slice(&image[at..at + N]);
    out
}

/// Returns the canonical address with the same low 48 bits as `address` (the same low 57 bits if CR4.LA57 is set).
pub(crate) fn made_canonical(cr4: u64, address: u64) -> u64 {
    let shift = match cr4 & control::CR4_LA57 {
        0 => 16,
        _ => 7,
    };
    ((address << shift) as i64 >> shift) as u64
}
