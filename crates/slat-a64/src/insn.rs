//! Decoded instructions.
//!
//! An [`Insn`] describes an instruction and its operands. Instructions that differ only in the form of an operand are
//! one variant: an addition has an [`Operand`], an access an [`Address`]. Register number 31 is the zero register,
//! unless the variant says that it is the stack pointer.

use crate::simd::Simd;
use crate::width::Width;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Shift {
    Lsl,
    Lsr,
    Asr,
    Ror,
}

/// A register value that is truncated to `bits` bits, extended to 64 bits, and shifted to the left.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Extend {
    pub(crate) bits: u8,
    pub(crate) is_signed: bool,
    pub(crate) shift: u8,
}

/// The second operand of an addition or logical operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Operand {
    Immediate(u64),
    Shifted { rm: u8, shift: Shift, amount: u8 },
    Extended { rm: u8, extend: Extend },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Logic {
    And,
    Orr,
    Eor,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum MoveWide {
    /// MOVN and MOVZ: the register becomes the whole value.
    Set,
    /// MOVK: the 16 bits at `shift` become the value; the other bits stay.
    Keep { shift: u8 },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Bitfield {
    Signed,
    Insert,
    Unsigned,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum OneSource {
    Rbit,
    /// REV16, REV32, REV: reverses the bytes within each group of this many bits.
    Rev {
        bits: u8,
    },
    Clz,
    Cls,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TwoSource {
    Udiv,
    Sdiv,
    Shift(Shift),
    /// CRC32 and CRC32C of this many bits.
    Crc {
        bits: u8,
        castagnoli: bool,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ThreeSource {
    Madd,
    Msub,
    /// SMADDL, SMSUBL, UMADDL, UMSUBL.
    Long {
        is_signed: bool,
        subtracts: bool,
    },
    /// SMULH, UMULH.
    High {
        is_signed: bool,
    },
}

/// CSEL, CSINC, CSINV, CSNEG: what happens to the second operand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Otherwise {
    Same,
    Increment,
    Invert,
    Negate,
}

/// The address of an access. The base may be the stack pointer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Address {
    Offset {
        rn: u8,
        offset: i32,
    },
    /// Pre-index: the base register becomes the accessed address.
    Pre {
        rn: u8,
        offset: i32,
    },
    /// Post-index: the base register is the accessed address, and the offset is added to it afterwards.
    Post {
        rn: u8,
        offset: i32,
    },
    Indexed {
        rn: u8,
        rm: u8,
        extend: Extend,
    },
    /// An offset from the instruction's address.
    Literal {
        offset: i32,
    },
}

/// The base register of structure accesses, and the value that is added to the base after the access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Base {
    pub(crate) rn: u8,
    pub(crate) after: After,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum After {
    Nothing,
    /// The added value is the number of bytes accessed.
    Bytes,
    Register(u8),
}

/// How an access is ordered with other accesses (DDI 0487, B2.3).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Order {
    /// Load-acquire, or load-acquirePC: later accesses happen after this access.
    pub acquire: bool,
    /// Store-release: earlier accesses happen before this access.
    pub release: bool,
}

/// How a loaded value is extended to fill an integer register.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Loaded {
    ZeroExtended,
    SignExtended(Width),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Transfer {
    Load(Loaded),
    Store,
    LoadVector,
    StoreVector,
}

/// An atomic operation on memory (LSE), which returns the old value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum AtomicOp {
    Add,
    Clear,
    Xor,
    Set,
    SignedMax,
    SignedMin,
    UnsignedMax,
    UnsignedMin,
    Swap,
}

/// The hints that have an effect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Hint {
    Yield,
    Wfe,
    Wfi,
    Sev,
    Sevl,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Barrier {
    /// DMB and DSB. Barriers that order only some kinds of accesses are executed as full fences, too.
    Memory,
    Isb,
    /// SB: no later instruction is executed speculatively.
    Speculation,
}

/// The name of a system register or system instruction: op0, op1, CRn, CRm, op2, packed into 16 bits as in MRS.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct SystemName(pub u16);

impl SystemName {
    /// Makes a name of op0, op1, CRn, CRm, op2.
    pub const fn new(op0: u16, op1: u16, crn: u16, crm: u16, op2: u16) -> Self {
        Self(op0 << 14 | op1 << 11 | crn << 7 | crm << 3 | op2)
    }
    /// Returns op0, op1, CRn, CRm, op2.
    pub const fn parts(self) -> [u16; 5] {
        let n = self.0;
        [n >> 14, n >> 11 & 7, n >> 7 & 15, n >> 3 & 15, n & 7]
    }
}

impl core::fmt::Debug for SystemName {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        let [op0, op1, crn, crm, op2] = self.parts();
        write!(f, "s{op0}_{op1}_c{crn}_c{crm}_{op2}")
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Call {
    Svc,
    Hvc,
    Smc,
    Brk,
    Hlt,
    /// DCPS1 to DCPS3, which are UNDEFINED outside of debug state.
    Dcps,
}

/// A decoded instruction.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Insn {
    /// ADR, ADRP.
    Adr {
        rd: u8,
        page: bool,
        offset: i32,
    },
    /// ADD, SUB, ADDS, SUBS. `sp` says for rd and for rn whether number 31 is the stack pointer.
    AddSub {
        width: Width,
        subtracts: bool,
        sets: bool,
        sp: [bool; 2],
        rd: u8,
        rn: u8,
        operand: Operand,
    },
    /// ADC, SBC, ADCS, SBCS.
    Carry {
        width: Width,
        subtracts: bool,
        sets: bool,
        rd: u8,
        rn: u8,
        rm: u8,
    },
    /// AND, ORR, EOR, ANDS, and their forms with an inverted operand. `sp` says whether number 31 as rd is the stack
    /// pointer.
    Logic {
        width: Width,
        op: Logic,
        inverts: bool,
        sets: bool,
        sp: bool,
        rd: u8,
        rn: u8,
        operand: Operand,
    },
    MoveWide {
        width: Width,
        kind: MoveWide,
        rd: u8,
        value: u64,
    },
    Bitfield {
        width: Width,
        kind: Bitfield,
        rd: u8,
        rn: u8,
        immr: u8,
        imms: u8,
    },
    Extract {
        width: Width,
        rd: u8,
        rn: u8,
        rm: u8,
        lsb: u8,
    },
    OneSource {
        width: Width,
        op: OneSource,
        rd: u8,
        rn: u8,
    },
    TwoSource {
        width: Width,
        op: TwoSource,
        rd: u8,
        rn: u8,
        rm: u8,
    },
    ThreeSource {
        width: Width,
        op: ThreeSource,
        rd: u8,
        rn: u8,
        rm: u8,
        ra: u8,
    },
    Select {
        width: Width,
        otherwise: Otherwise,
        condition: u8,
        rd: u8,
        rn: u8,
        rm: u8,
    },
    /// CCMN, CCMP.
    ConditionalCompare {
        width: Width,
        subtracts: bool,
        condition: u8,
        nzcv: u8,
        rn: u8,
        operand: Operand,
    },
    /// RMIF.
    RotateIntoFlags {
        rn: u8,
        amount: u8,
        mask: u8,
    },
    /// SETF8, SETF16.
    SetFlags {
        rn: u8,
        bits: u8,
    },
    /// CFINV.
    InvertCarry,
    /// AXFLAG, XAFLAG.
    ConvertFlags {
        to_arm: bool,
    },

    Branch {
        links: bool,
        offset: i32,
    },
    BranchIf {
        condition: u8,
        offset: i32,
    },
    /// CBZ, CBNZ.
    CompareBranch {
        width: Width,
        if_zero: bool,
        rt: u8,
        offset: i32,
    },
    /// TBZ, TBNZ.
    TestBranch {
        bit: u8,
        if_zero: bool,
        rt: u8,
        offset: i32,
    },
    /// BR, BLR, RET.
    BranchRegister {
        links: bool,
        rn: u8,
    },
    Eret,
    Call {
        call: Call,
        immediate: u16,
    },

    Nop,
    Hint(Hint),
    /// CLREX.
    ClearExclusive,
    Barrier(Barrier),
    /// MSR (immediate): writes a field of PSTATE.
    SetPstate {
        op1: u8,
        op2: u8,
        value: u8,
    },
    ReadSystem {
        name: SystemName,
        rt: u8,
    },
    WriteSystem {
        name: SystemName,
        rt: u8,
    },
    /// SYS, or SYSL if `reads` is set.
    SystemInstruction {
        name: SystemName,
        rt: u8,
        reads: bool,
    },

    /// A load or store of one register. The size is the logarithm of the number of bytes.
    Access {
        transfer: Transfer,
        size: u8,
        address: Address,
        rt: u8,
        unprivileged: bool,
    },
    /// A load or store of two registers.
    Pair {
        transfer: Transfer,
        size: u8,
        address: Address,
        rt: u8,
        rt2: u8,
    },
    /// PRFM, a prefetch, which has no effect on this CPU.
    Prefetch,
    /// LDAR, STLR, LDLAR, STLLR, LDAPR, LDAPUR, STLUR.
    Ordered {
        transfer: Transfer,
        size: u8,
        rn: u8,
        offset: i16,
        rt: u8,
    },
    LoadExclusive {
        size: u8,
        pair: bool,
        acquire: bool,
        rn: u8,
        rt: u8,
        rt2: u8,
    },
    StoreExclusive {
        size: u8,
        pair: bool,
        release: bool,
        rn: u8,
        rs: u8,
        rt: u8,
        rt2: u8,
    },
    Atomic {
        op: AtomicOp,
        size: u8,
        order: Order,
        rs: u8,
        rn: u8,
        rt: u8,
    },
    /// CAS, CASP.
    CompareSwap {
        size: u8,
        pair: bool,
        order: Order,
        rs: u8,
        rn: u8,
        rt: u8,
    },

    /// Floating-point and Advanced SIMD instructions.
    Simd(Simd),
    /// LD1 to LD4 and ST1 to ST4 of whole registers. `groups` groups of `elements` consecutive registers are accessed.
    Structures {
        loads: bool,
        size: u8,
        full: bool,
        groups: u8,
        elements: u8,
        base: Base,
        rt: u8,
    },
    /// LD1 to LD4 and ST1 to ST4 of one lane in each of `elements` registers.
    Lane {
        loads: bool,
        size: u8,
        lane: u8,
        elements: u8,
        base: Base,
        rt: u8,
    },
    /// LD1R to LD4R: each loaded element is copied to all lanes of its register.
    Replicate {
        size: u8,
        full: bool,
        elements: u8,
        base: Base,
        rt: u8,
    },
}

impl Insn {
    /// Whether CPACR_EL1 can trap the instruction, other than as an access to FPCR or FPSR.
    #[inline(always)]
    pub(crate) fn uses_vectors(&self) -> bool {
        match self {
            Insn::Access { transfer, .. } | Insn::Pair { transfer, .. } => {
                matches!(transfer, Transfer::LoadVector | Transfer::StoreVector)
            }
            Insn::Simd(_)
            | Insn::Structures { .. }
            | Insn::Lane { .. }
            | Insn::Replicate { .. } => true,
            _ => false,
        }
    }
}
