//! The offsets of the registers in each frame, and the widths of accesses to them. Both are KVM's.

/// The register that an access reads or writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Register {
    /// Reads as zero and ignores writes.
    Zero,
    /// Reads as all ones, and ignores writes.
    Ones,
    /// GICD_CTLR, GICD_TYPER, GICD_IIDR, GICD_TYPER2.
    Distributor,
    Identification,
    // These registers have one bit for each interrupt.
    Group,
    SetEnable,
    ClearEnable,
    SetPending,
    ClearPending,
    SetActive,
    ClearActive,
    // These registers have two, eight, eight and 64 bits for each interrupt.
    Configuration,
    Priority,
    Targets,
    Router,
    // Registers of GICv2's SGIs.
    GenerateSgi,
    ClearSgiSources,
    SetSgiSources,
    // Registers of a redistributor.
    Control,
    Implementer,
    Type,
    ConfigurationTable,
    PendingTable,
    InvalidateLpi,
    InvalidateAll,
    // Registers of GICv2's CPU interface.
    CpuControl,
    Mask,
    BinaryPoint,
    AliasedBinaryPoint,
    Acknowledge,
    AliasedAcknowledge,
    End,
    AliasedEnd,
    Running,
    HighestPending,
    AliasedHighestPending,
    ActivePriorities,
    Deactivate,
}

/// Sets of access widths, in bytes: a set is the sum of its widths, which are 1, 4 and 8.
const WORD: usize = 4;
const BYTE_OR_WORD: usize = 1 | 4;
const WORD_OR_DOUBLE: usize = 4 | 8;

/// Registers of one kind, at consecutive offsets.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Region<R> {
    pub(crate) start: u32,
    length: u32,
    /// The number of bits that each interrupt has in these registers. Zero: the registers have no bits for interrupts.
    bits: u32,
    widths: usize,
    pub(crate) register: R,
}

/// The number of INTIDs for which the architecture has registers of SGIs, PPIs and SPIs.
const INTIDS: u32 = 1024;

pub(crate) const fn word<R: Copy>(start: u32, register: R) -> Region<R> {
    words(start, 4, register)
}

pub(crate) const fn words<R: Copy>(start: u32, length: u32, register: R) -> Region<R> {
    Region {
        start,
        length,
        bits: 0,
        widths: WORD,
        register,
    }
}

/// Creates a region of 64-bit registers, whose halves can be accessed, too.
pub(crate) const fn doubles<R: Copy>(start: u32, length: u32, register: R) -> Region<R> {
    Region {
        widths: WORD_OR_DOUBLE,
        ..words(start, length, register)
    }
}

/// Creates a region of registers with `bits` bits for each of `intids` interrupts.
const fn of_interrupts(start: u32, bits: u32, intids: u32, register: Register) -> Region<Register> {
    let widths = match bits {
        8 => BYTE_OR_WORD,
        64 => WORD_OR_DOUBLE,
        _ => WORD,
    };
    Region {
        start,
        length: bits * intids / 8,
        bits,
        widths,
        register,
    }
}

/// GICv2's distributor (IHI 0048, 4.1.2).
pub(crate) const V2_DISTRIBUTOR: [Region<Register>; 14] = [
    words(0x000, 12, Register::Distributor),
    of_interrupts(0x080, 1, INTIDS, Register::Group),
    of_interrupts(0x100, 1, INTIDS, Register::SetEnable),
    of_interrupts(0x180, 1, INTIDS, Register::ClearEnable),
    of_interrupts(0x200, 1, INTIDS, Register::SetPending),
    of_interrupts(0x280, 1, INTIDS, Register::ClearPending),
    of_interrupts(0x300, 1, INTIDS, Register::SetActive),
    of_interrupts(0x380, 1, INTIDS, Register::ClearActive),
    of_interrupts(0x400, 8, INTIDS, Register::Priority),
    of_interrupts(0x800, 8, INTIDS, Register::Targets),
    of_interrupts(0xc00, 2, INTIDS, Register::Configuration),
    word(0xf00, Register::GenerateSgi),
    of_interrupts(0xf10, 8, 16, Register::ClearSgiSources),
    of_interrupts(0xf20, 8, 16, Register::SetSgiSources),
];

/// GICv2's CPU interface as a guest has it: that of a GIC without the security extensions (IHI 0048, 5.5).
pub(crate) const V2_CPU_INTERFACE: [Region<Register>; 14] = [
    word(0x00, Register::CpuControl),
    word(0x04, Register::Mask),
    word(0x08, Register::BinaryPoint),
    word(0x0c, Register::Acknowledge),
    word(0x10, Register::End),
    word(0x14, Register::Running),
    word(0x18, Register::HighestPending),
    word(0x1c, Register::AliasedBinaryPoint),
    word(0x20, Register::AliasedAcknowledge),
    word(0x24, Register::AliasedEnd),
    word(0x28, Register::AliasedHighestPending),
    words(0xd0, 16, Register::ActivePriorities),
    word(0xfc, Register::Implementer),
    word(0x1000, Register::Deactivate),
];

/// GICv3's distributor (IHI 0069, the GICD register map). Private interrupts have no bits here with affinity routing.
pub(crate) const V3_DISTRIBUTOR: [Region<Register>; 15] = [
    words(0x0000, 16, Register::Distributor),
    word(0x0010, Register::Ones),
    of_interrupts(0x0080, 1, INTIDS, Register::Group),
    of_interrupts(0x0100, 1, INTIDS, Register::SetEnable),
    of_interrupts(0x0180, 1, INTIDS, Register::ClearEnable),
    of_interrupts(0x0200, 1, INTIDS, Register::SetPending),
    of_interrupts(0x0280, 1, INTIDS, Register::ClearPending),
    of_interrupts(0x0300, 1, INTIDS, Register::SetActive),
    of_interrupts(0x0380, 1, INTIDS, Register::ClearActive),
    of_interrupts(0x0400, 8, INTIDS, Register::Priority),
    of_interrupts(0x0800, 8, INTIDS, Register::Zero),
    of_interrupts(0x0c00, 2, INTIDS, Register::Configuration),
    of_interrupts(0x0d00, 1, INTIDS, Register::Zero),
    of_interrupts(0x6000, 64, INTIDS, Register::Router),
    words(0xffd0, 48, Register::Identification),
];

/// GICv3's redistributor (IHI 0069, the GICR register map): the frame RD_base, and from 0x10000 on the frame SGI_base.
pub(crate) const V3_REDISTRIBUTOR: [Region<Register>; 23] = [
    word(0x0000, Register::Control),
    word(0x0004, Register::Implementer),
    doubles(0x0008, 8, Register::Type),
    // GICR_STATUSR, GICR_WAKER.
    word(0x0010, Register::Zero),
    word(0x0014, Register::Zero),
    doubles(0x0070, 8, Register::ConfigurationTable),
    doubles(0x0078, 8, Register::PendingTable),
    doubles(0x00a0, 8, Register::InvalidateLpi),
    doubles(0x00b0, 8, Register::InvalidateAll),
    // GICR_SYNCR: never busy.
    word(0x00c0, Register::Zero),
    words(0xffd0, 48, Register::Identification),
    of_interrupts(0x1_0080, 1, 32, Register::Group),
    of_interrupts(0x1_0100, 1, 32, Register::SetEnable),
    of_interrupts(0x1_0180, 1, 32, Register::ClearEnable),
    of_interrupts(0x1_0200, 1, 32, Register::SetPending),
    of_interrupts(0x1_0280, 1, 32, Register::ClearPending),
    of_interrupts(0x1_0300, 1, 32, Register::SetActive),
    of_interrupts(0x1_0380, 1, 32, Register::ClearActive),
    of_interrupts(0x1_0400, 8, 32, Register::Priority),
    of_interrupts(0x1_0c00, 2, 32, Register::Configuration),
    // GICR_IGRPMODR0 and GICR_NSACR, and the word after GICR_NSACR.
    word(0x1_0d00, Register::Zero),
    word(0x1_0e00, Register::Zero),
    word(0x1_0e04, Register::Zero),
];

impl<R> Region<R> {
    /// Whether the registers have bits for interrupts.
    pub(crate) fn is_of_interrupts(&self) -> bool {
        self.bits != 0
    }

    /// Returns the first interrupt whose bits are at `offset`.
    pub(crate) fn intid(&self, offset: u32) -> u32 {
        match self.bits {
            0 => 0,
            bits => (offset - self.start) * 8 / bits,
        }
    }

    /// Whether the registers have 64 bits.
    pub(crate) fn is_double(&self) -> bool {
        self.widths & 8 != 0
    }

    /// Whether an access is aligned, has a width that the registers permit, and concerns an interrupt that exists.
    fn accepts(&self, offset: u32, width: usize, interrupts: u32) -> bool {
        width.is_power_of_two()
            && self.widths & width != 0
            && (offset as usize).is_multiple_of(width)
            && self.intid(offset) < interrupts
    }
}

/// Returns the region that contains the register of an access. `None`: there is no register at this offset, or the
/// register does not permit the access.
pub(crate) fn find<R>(
    regions: &[Region<R>],
    offset: u64,
    width: usize,
    interrupts: u32,
) -> Option<&Region<R>> {
    let offset = u32::try_from(offset).ok()?;
    let contains = |region: &&Region<R>| offset.wrapping_sub(region.start) < region.length;
    let region = regions.iter().find(contains)?;
    region.accepts(offset, width, interrupts).then_some(region)
}

/// Returns `width` bytes of a 64-bit register, starting with the byte at `offset`.
pub(crate) fn part(value: u64, offset: u32, width: usize) -> u64 {
    let shifted = value >> (8 * (offset & 7));
    match width {
        8 => shifted,
        _ => shifted & ((1 << (8 * width)) - 1),
    }
}

/// Returns a 64-bit register after a write of one of its halves, or of all of it.
pub(crate) fn replace(old: u64, offset: u32, width: usize, value: u64) -> u64 {
    let shift = 8 * (offset & 4);
    let mask = match width {
        8 => u64::MAX,
        _ => 0xffff_ffff << shift,
    };
    old & !mask | value << shift & mask
}

/// Returns the bytes of an access as a little-endian number. `None`: the width is not 1, 2, 4 or 8.
pub(crate) fn number(data: &[u8]) -> Option<u64> {
    let mut bytes = [0; 8];
    bytes.get_mut(..data.len())?.copy_from_slice(data);
    matches!(data.len(), 1 | 2 | 4 | 8).then(|| u64::from_le_bytes(bytes))
}

/// Stores a number in the bytes of an access. Bytes after the eighth become zero.
pub(crate) fn store(value: u64, data: &mut [u8]) {
    data.fill(0);
    for (to, from) in data.iter_mut().zip(value.to_le_bytes()) {
        *to = from;
    }
}
