//! The layout of guest memory, and the parts from which the tests make random addresses, values, control blocks and
//! code.

use kvm_bindings::{kvm_segment, kvm_sregs};
use slat_model::Rng;

pub const PAGE: u64 = 0x1000;

/// The memslots: number, address, size in bytes, and offset of their memory. The second slot is beside the first. The
/// third is read-only. After the third comes a device. The fourth contains the memory of the first slot, with its
/// control block, tables and code, a second time. The last slot is in the address space of system management mode.
pub const SLOTS: [(u32, u64, u64, u64); 5] = [
    (0, 0, 0x4_0000, 0),
    (1, 0x4_0000, 0x2_0000, 0x4_0000),
    (2, READ_ONLY, 0x1_0000, READ_ONLY),
    (3, AGAIN, 0x4_0000, 0),
    (1 << 16, 0, 0x4_0000, 0),
];
pub const READ_ONLY: u64 = 0x6_0000;
pub const DEVICE: u64 = 0x7_0000;
pub const AGAIN: u64 = 0x8_0000;
/// The size of the memory in bytes.
pub const MEMORY: u64 = 0x8_0000;
const MAPPED: u64 = 0xc_0000;

pub const CODE: u64 = 0x8000;
pub const L2: u64 = 0x9000;
pub const STACK: u64 = 0xa800;
pub const HOST_SAVE: u64 = 0xb000;
pub const VMCB: u64 = 0xc000;
pub const VMCB_AGAIN: u64 = 0xd000;
pub const IO_MAP: u64 = 0x10000;
pub const MSR_MAP: u64 = 0x14000;
/// The descriptor tables of both the hypervisor and its guest: a GDT with a few segments, and an IDT with gates to
/// [`L2`].
pub const GDT: u64 = 0x18000;
pub const IDT: u64 = 0x19000;
/// The page tables of three hierarchies: the hypervisor's own, its guest's, and the nested tables. Each hierarchy has
/// tables for all paging modes.
pub const OWN: u64 = 0x20000;
pub const GUESTS: u64 = 0x28000;
pub const NESTED: u64 = 0x30000;
/// The address at which a vCPU begins to execute in system management mode.
pub const MANAGEMENT: u64 = 0x38000;
/// The data of which the hypervisor copies all or a part to the nested tables.
pub const STAGED: u64 = 0x39000;
/// The number of pages of a hierarchy: the root, the next table, a directory and a table of PAE paging; a directory and
/// a table of 32-bit paging.
pub const HIERARCHY_PAGES: u64 = 6;

/// The pages from which random addresses are chosen.
const PLACES: [u64; 24] = [
    0,
    CODE,
    L2,
    HOST_SAVE,
    VMCB,
    VMCB_AGAIN,
    GDT,
    IDT,
    OWN,
    OWN + 4 * PAGE,
    GUESTS,
    GUESTS + 3 * PAGE,
    GUESTS + 4 * PAGE,
    NESTED,
    NESTED + PAGE,
    NESTED + 2 * PAGE,
    NESTED + 3 * PAGE,
    NESTED + 4 * PAGE,
    0x3_f000,
    0x4_0000,
    READ_ONLY - PAGE,
    READ_ONLY,
    DEVICE - PAGE,
    DEVICE,
];

/// Returns the address of a page that the tests use, or sometimes of another page.
pub fn place(random: &mut Rng) -> u64 {
    let page = random.pick(&PLACES);
    match random.below(16) {
        0 => AGAIN + page % (MAPPED - AGAIN),
        1 => random.pick(&[MAPPED, 1 << 31, 1 << 32, 1 << 47, 1 << 51, 1 << 52]),
        2 => random
            .pick(&[0, 1_u64 << 63])
            .wrapping_sub(random.below(5) * PAGE),
        _ => page,
    }
}

/// Returns a new value for a field that had the value `old`.
pub fn value(random: &mut Rng, old: u64) -> u64 {
    match random.below(6) {
        0 => random.word(),
        1 => 1 << random.below(64),
        2 => !0 << random.below(64),
        3 => place(random) + random.below(2) * random.below(PAGE),
        _ => old ^ 1 << random.below(64),
    }
}

/// The paging mode in which a CPU runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    Real,
    Flat,
    Paging32,
    Pae,
    Long,
}

impl Mode {
    pub const ALL: [Mode; 5] = [
        Mode::Real,
        Mode::Flat,
        Mode::Paging32,
        Mode::Pae,
        Mode::Long,
    ];

    pub fn random(random: &mut Rng) -> Self {
        match random.below(3) {
            0 => random.pick(&Mode::ALL),
            _ => Mode::Long,
        }
    }

    pub fn cr0(self) -> u64 {
        match self {
            Mode::Real => 0x10,
            Mode::Flat => 0x11,
            _ => 0x8001_0011,
        }
    }

    pub fn cr4(self) -> u64 {
        match self {
            Mode::Pae | Mode::Long => 0x620,
            _ => 0x610,
        }
    }

    /// Returns EFER for this mode: SVME, and in long mode also LME, LMA and NXE.
    pub fn efer(self) -> u64 {
        match self {
            Mode::Long => 0x1d00,
            _ => 0x1000,
        }
    }

    /// Returns the root of this mode's tables in a hierarchy.
    pub fn root(self, hierarchy: u64) -> u64 {
        match self {
            Mode::Long => hierarchy,
            Mode::Pae => hierarchy + PAGE,
            _ => hierarchy + 4 * PAGE,
        }
    }

    pub fn segment(self, code: bool) -> kvm_segment {
        let is_real = self == Mode::Real;
        kvm_segment {
            selector: if is_real { 0 } else { 8 },
            limit: if is_real { 0xffff } else { u32::MAX },
            type_: if code { 11 } else { 3 },
            present: 1,
            s: 1,
            l: (code && self == Mode::Long).into(),
            db: (!(is_real || code && self == Mode::Long)).into(),
            g: (!is_real).into(),
            ..Default::default()
        }
    }

    /// Sets the registers of a hypervisor for this mode.
    pub fn set(self, sregs: &mut kvm_sregs) {
        (sregs.cr0, sregs.cr4, sregs.efer) = (self.cr0(), self.cr4(), self.efer());
        sregs.cr3 = self.root(OWN);
        sregs.cs = self.segment(true);
        let data = self.segment(false);
        (sregs.ds, sregs.es, sregs.ss) = (data, data, data);
        (sregs.gdt.base, sregs.gdt.limit) = (GDT, 0xfff);
        (sregs.idt.base, sregs.idt.limit) = (if self == Mode::Real { 0 } else { IDT }, 0xfff);
    }
}

/// Returns the contents of a hierarchy at `at`. Its tables map each page to itself, with all rights.
pub fn hierarchy(at: u64) -> Vec<u8> {
    const ALL: u64 = 0x67;
    let mut bytes = vec![0; (HIERARCHY_PAGES * PAGE) as usize];
    let mut put = |page: u64, index: u64, size: u64, entry: u64| {
        let at = (page * PAGE + index * size) as usize;
        bytes[at..at + size as usize].copy_from_slice(&entry.to_le_bytes()[..size as usize]);
    };
    put(0, 0, 8, (at + PAGE) | ALL);
    // The entries of a PAE root have no bits for rights.
    put(1, 0, 8, (at + 2 * PAGE) | 1);
    put(2, 0, 8, (at + 3 * PAGE) | ALL);
    put(4, 0, 4, (at + 5 * PAGE) | ALL);
    for page in 0..MAPPED / PAGE {
        put(3, page, 8, (page * PAGE) | ALL);
        put(5, page, 4, (page * PAGE) | ALL);
    }
    bytes
}

/// The code of a hypervisor: it contains VMRUN, and ends with HLT.
pub const HYPERVISORS: [&[u8]; 7] = [
    // vmrun; hlt
    b"\x0f\x01\xd8\xf4",
    // rep movsb; vmrun; hlt: the first instruction copies staged data to the nested tables.
    b"\xf3\xa4\x0f\x01\xd8\xf4",
    // clgi; vmload; vmrun; vmsave; stgi; hlt
    b"\x0f\x01\xdd\x0f\x01\xda\x0f\x01\xd8\x0f\x01\xdb\x0f\x01\xdc\xf4",
    // vmrun; vmrun; hlt
    b"\x0f\x01\xd8\x0f\x01\xd8\xf4",
    // vmrun; rep movsb; invlpga; vmrun; hlt
    b"\x0f\x01\xd8\xf3\xa4\x0f\x01\xdf\x0f\x01\xd8\xf4",
    // vmsave; vmrun; hlt: vmsave stores to the control block of vmrun
    b"\x0f\x01\xdb\x0f\x01\xd8\xf4",
    // mov [rdi], eax; vmrun; mov [rdi], eax; vmrun; hlt
    b"\x89\x07\x0f\x01\xd8\x89\x07\x0f\x01\xd8\xf4",
];

/// The code of the handler of SMIs.
pub const MANAGERS: [&[u8]; 4] = [
    // rsm
    b"\x0f\xaa",
    // vmrun; rsm
    b"\x0f\x01\xd8\x0f\xaa",
    // vmload; stgi; rsm
    b"\x0f\x01\xda\x0f\x01\xdc\x0f\xaa",
    // rep movsb; rsm
    b"\xf3\xa4\x0f\xaa",
];

/// The parts from which the nested guest's code is made. Each part is valid code in 32-bit and 64-bit mode, and some
/// other code in 16-bit mode.
const PARTS: [&[u8]; 22] = [
    b"\x0f\x01\xd9",             // vmmcall
    b"\xf4",                     // hlt
    b"\x89\x07",                 // mov [rdi], eax
    b"\x8b\x06",                 // mov eax, [rsi]
    b"\xf3\xa4",                 // rep movsb
    b"\xf3\xab",                 // rep stosd
    b"\xf0\x0f\xb1\x0f",         // lock cmpxchg [rdi], ecx
    b"\xff\xe7",                 // jmp rdi
    b"\xff\xd6",                 // call rsi
    b"\x50\x58",                 // push; pop
    b"\xcc",                     // int3
    b"\xcd\x80",                 // int 0x80
    b"\x0f\x0b",                 // ud2
    b"\x0f\x01\xd8",             // vmrun
    b"\x0f\x01\xda",             // vmload
    b"\x0f\x01\xdb",             // vmsave
    b"\x0f\x01\xdd",             // clgi
    b"\x0f\x01\x3f",             // invlpg [rdi]
    b"\x0f\x20\xd8\x0f\x22\xd8", // mov rax, cr3; mov cr3, rax
    b"\x0f\x22\xd8",             // mov cr3, rax
    b"\x0f\x30",                 // wrmsr
    b"\xe4\x10\xe7\x20\x6e\xec", // in, out, outs
];

/// Returns code of a guest.
pub fn guest_code(random: &mut Rng) -> Vec<u8> {
    let mut code = Vec::new();
    for _ in 0..random.below(6) {
        match random.below(8) {
            0 => code.extend((0..random.below(6)).map(|_| random.word() as u8)),
            _ => code.extend(random.pick(&PARTS)),
        }
    }
    code.extend(b"\x0f\x01\xd9\xf4");
    code
}
