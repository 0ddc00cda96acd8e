//! The system registers that the processor holds, in a table (DDI 0487, D17.2).

use crate::insn::SystemName;

/// The exception levels that may access a register.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Rights {
    /// EL0 and EL1 may read and write.
    All,
    /// EL0 may read; EL1 may read and write.
    El0Reads,
    /// EL1 may read and write.
    El1,
    /// EL1 may read.
    El1Reads,
}

/// A system register.
pub(crate) struct Register {
    pub(crate) name: SystemName,
    pub(crate) rights: Rights,
    /// The value after reset. A register without writable bits always has this value.
    pub(crate) reset: u64,
    /// The bits that writes by the guest or the embedder can change.
    pub(crate) writable: u64,
}

const fn row(
    [op0, op1, crn, crm, op2]: [u16; 5],
    rights: Rights,
    reset: u64,
    writable: u64,
) -> Register {
    Register {
        name: SystemName::new(op0, op1, crn, crm, op2),
        rights,
        reset,
        writable,
    }
}

/// Returns the table row of a register of breakpoint or watchpoint `n`. `op2` is 4 to 7: DBGBVR, DBGBCR, DBGWVR,
/// DBGWCR.
const fn breakpoint(n: u16, op2: u16, writable: u64) -> Register {
    let reset = if op2 == 5 { CONTROL_BAS } else { 0 };
    row([2, 0, 0, n, op2], Rights::El1, reset, writable)
}

const ALL: u64 = u64::MAX;

/// The number of breakpoints.
pub const BREAKPOINTS: usize = 6;
/// The number of watchpoints.
pub const WATCHPOINTS: usize = 4;
/// The number of breakpoints that can match contexts: those with the highest numbers.
pub(crate) const CONTEXT_BREAKPOINTS: usize = 2;
/// DBGBCR_EL1: E, PMC, HMC, SSC, LBN, BT, and BAS, which is all ones without AArch32. DBGWCR_EL1: E, PAC, LSC, BAS,
/// HMC, SSC, LBN, WT, MASK.
const CONTROL_WRITABLE: u64 = 0x00ff_e007;
const CONTROL_BAS: u64 = 0xf << 5;
const WATCH_WRITABLE: u64 = 0x1f1f_ffff;

/// MDSCR_EL1: SS, KDE, MDE. TDCC and HDE have no effect, because there is no communication channel and no Debug state.
pub(crate) const MDSCR_SS: u64 = 1 << 0;
pub(crate) const MDSCR_KDE: u64 = 1 << 13;
pub(crate) const MDSCR_MDE: u64 = 1 << 15;
const MDSCR_WRITABLE: u64 = MDSCR_SS | MDSCR_KDE | MDSCR_MDE | 1 << 12 | 1 << 14;
/// Bits of OSLSR_EL1: the OS lock exists; the OS lock is locked.
const OSLSR_EXISTS: u64 = 1 << 3;
pub(crate) const OSLSR_LOCKED: u64 = 1 << 1;

/// SCTLR_EL1: M, A, C, SA, SA0, UMA, I, DZE, UCT, nTWI, nTWE, WXN, SPAN, UCI.
pub(crate) const SCTLR_M: u64 = 1 << 0;
pub(crate) const SCTLR_A: u64 = 1 << 1;
pub(crate) const SCTLR_SA: u64 = 1 << 3;
pub(crate) const SCTLR_SA0: u64 = 1 << 4;
pub(crate) const SCTLR_I: u64 = 1 << 12;
pub(crate) const SCTLR_WXN: u64 = 1 << 19;
pub(crate) const SCTLR_UMA: u64 = 1 << 9;
pub(crate) const SCTLR_DZE: u64 = 1 << 14;
pub(crate) const SCTLR_UCT: u64 = 1 << 15;
pub(crate) const SCTLR_NTWI: u64 = 1 << 16;
pub(crate) const SCTLR_NTWE: u64 = 1 << 18;
pub(crate) const SCTLR_SPAN: u64 = 1 << 23;
pub(crate) const SCTLR_UCI: u64 = 1 << 26;
const SCTLR_WRITABLE: u64 = 0x1f
    | SCTLR_UMA
    | SCTLR_I
    | SCTLR_DZE
    | SCTLR_UCT
    | SCTLR_NTWI
    | SCTLR_NTWE
    | SCTLR_WXN
    | SCTLR_SPAN
    | SCTLR_UCI;
/// The bits of SCTLR_EL1 that are 1 because their extensions are missing: EOS, TSCXT, EIS, nTLSMD and LSMAOE.
const SCTLR_ONES: u64 = 1 << 11 | 1 << 20 | 1 << 22 | 1 << 28 | 1 << 29;

pub(crate) const CPACR_FPEN_SHIFT: u32 = 20;

/// TCR_EL1: A1, IPS, AS, HA, HD.
pub(crate) const TCR_A1: u64 = 1 << 22;
pub(crate) const TCR_IPS_SHIFT: u32 = 32;
pub(crate) const TCR_AS: u64 = 1 << 36;
pub(crate) const TCR_HA: u64 = 1 << 39;
pub(crate) const TCR_HD: u64 = 1 << 40;

/// The table of registers, sorted by name: op0, op1, CRn, CRm, op2.
pub(crate) const REGISTERS: &[Register] = &[
    // MDCCINT_EL1.
    row([2, 0, 0, 2, 0], Rights::El1, 0, 0),
    // MDSCR_EL1.
    row([2, 0, 0, 2, 2], Rights::El1, 0, MDSCR_WRITABLE),
    breakpoint(0, 4, !3),
    breakpoint(0, 5, CONTROL_WRITABLE),
    breakpoint(1, 4, !3),
    breakpoint(1, 5, CONTROL_WRITABLE),
    breakpoint(2, 4, !3),
    breakpoint(2, 5, CONTROL_WRITABLE),
    breakpoint(3, 4, !3),
    breakpoint(3, 5, CONTROL_WRITABLE),
    // Breakpoints 4 and 5 can hold a context instead of an address, so all bits of their values are writable.
    breakpoint(4, 4, ALL),
    breakpoint(4, 5, CONTROL_WRITABLE),
    breakpoint(5, 4, ALL),
    breakpoint(5, 5, CONTROL_WRITABLE),
    breakpoint(0, 6, !3),
    breakpoint(0, 7, WATCH_WRITABLE),
    breakpoint(1, 6, !3),
    breakpoint(1, 7, WATCH_WRITABLE),
    breakpoint(2, 6, !3),
    breakpoint(2, 7, WATCH_WRITABLE),
    breakpoint(3, 6, !3),
    breakpoint(3, 7, WATCH_WRITABLE),
    // OSLSR_EL1. The guest changes the OS lock by OSLAR_EL1; the embedder restores the lock by this register.
    row(
        [2, 0, 1, 1, 4],
        Rights::El1Reads,
        OSLSR_EXISTS | OSLSR_LOCKED,
        OSLSR_LOCKED,
    ),
    // OSDLR_EL1.
    row([2, 0, 1, 3, 4], Rights::El1, 0, 0),
    // DBGPRCR_EL1.
    row([2, 0, 1, 4, 4], Rights::El1, 0, 0),
    // The identification registers from here on describe the instructions that this crate implements. The registers
    // about memory belong to the machine. This is MIDR_EL1.
    row([3, 0, 0, 0, 0], Rights::El1Reads, 0x000f_0000, 0),
    // REVIDR_EL1.
    row([3, 0, 0, 0, 6], Rights::El1Reads, 0, 0),
    // EL0 and EL1 in AArch64, FP16, Advanced SIMD with FP16, DIT. CSV2 and CSV3 say that EL0 uses no translation of
    // EL1, not even speculatively, so Linux needs no separate tables for EL0. ID_AA64PFR0.
    row([3, 0, 0, 4, 0], Rights::El1Reads, 0x1101_0000_0011_0011, 0),
    // ID_AA64PFR1.
    row([3, 0, 0, 4, 1], Rights::El1Reads, 0, 0),
    // Breakpoints and watchpoints.
    // ID_AA64DFR0.
    row(
        [3, 0, 0, 5, 0],
        Rights::El1Reads,
        6 | (BREAKPOINTS as u64 - 1) << 12
            | (WATCHPOINTS as u64 - 1) << 20
            | (CONTEXT_BREAKPOINTS as u64 - 1) << 28,
        0,
    ),
    // CRC32, LSE, RDM, DotProd, FlagM2.
    // ID_AA64ISAR0.
    row([3, 0, 0, 6, 0], Rights::El1Reads, 0x0020_1000_1021_0000, 0),
    // DPB, LRCPC2, FRINTTS, SB.
    // ID_AA64ISAR1.
    row([3, 0, 0, 6, 1], Rights::El1Reads, 0x0000_0011_0020_0001, 0),
    // ID_AA64ISAR2.
    row([3, 0, 0, 6, 2], Rights::El1Reads, 0, 0),
    // 48-bit addresses, 16-bit ASIDs, all granules.
    // ID_AA64MMFR0.
    row([3, 0, 0, 7, 0], Rights::El1Reads, 0x0000_0000_0010_0025, 0),
    // HAFDBS with dirty state, HPDS, PAN with AT S1E1RP.
    // ID_AA64MMFR1.
    row([3, 0, 0, 7, 1], Rights::El1Reads, 0x0000_0000_0020_1002, 0),
    // CnP.
    // ID_AA64MMFR2.
    row([3, 0, 0, 7, 2], Rights::El1Reads, 1, 0),
    // SCTLR_EL1.
    row(
        [3, 0, 1, 0, 0],
        Rights::El1,
        SCTLR_ONES | SCTLR_SPAN,
        SCTLR_WRITABLE,
    ),
    // ACTLR_EL1.
    row([3, 0, 1, 0, 1], Rights::El1, 0, 0),
    // CPACR_EL1.
    row([3, 0, 1, 0, 2], Rights::El1, 0, 3 << CPACR_FPEN_SHIFT),
    // TTBR0_EL1.
    row([3, 0, 2, 0, 0], Rights::El1, 0, ALL),
    // TTBR1_EL1.
    row([3, 0, 2, 0, 1], Rights::El1, 0, ALL),
    // T0SZ to TG1, IPS, AS, TBI, HA, HD, HPD.
    // TCR_EL1.
    row([3, 0, 2, 0, 2], Rights::El1, 0, 0x0000_07f7_ffff_ffbf),
    // SPSR_EL1.
    row([3, 0, 4, 0, 0], Rights::El1, 0, 0xf170_03df),
    // ELR_EL1.
    row([3, 0, 4, 0, 1], Rights::El1, 0, ALL),
    // AFSR0_EL1.
    row([3, 0, 5, 1, 0], Rights::El1, 0, 0),
    // AFSR1_EL1.
    row([3, 0, 5, 1, 1], Rights::El1, 0, 0),
    // ESR_EL1.
    row([3, 0, 5, 2, 0], Rights::El1, 0, 0xffff_ffff),
    // FAR_EL1.
    row([3, 0, 6, 0, 0], Rights::El1, 0, ALL),
    // PAR_EL1.
    row([3, 0, 7, 4, 0], Rights::El1, 0, ALL),
    // MAIR_EL1.
    row([3, 0, 10, 2, 0], Rights::El1, 0, ALL),
    // AMAIR_EL1.
    row([3, 0, 10, 3, 0], Rights::El1, 0, 0),
    // VBAR_EL1.
    row([3, 0, 12, 0, 0], Rights::El1, 0, !0x7ff),
    // CONTEXTIDR_EL1.
    row([3, 0, 13, 0, 1], Rights::El1, 0, 0xffff_ffff),
    // TPIDR_EL1.
    row([3, 0, 13, 0, 4], Rights::El1, 0, ALL),
    // EL0PCTEN, EL0VCTEN, EVNTEN, EVNTDIR, EVNTI, EL0VTEN, EL0PTEN.
    // CNTKCTL_EL1.
    row([3, 0, 14, 1, 0], Rights::El1, 0, 0x3ff),
    // CTR_EL0. Lines of 64 bytes, also for exclusive accesses; a physically indexed instruction cache. The guest must
    // execute IC after writing code (DIC is clear), but need not clean the data cache before (IDC is set). SCTLR_EL1
    // may trap EL0's reads.
    row([3, 3, 0, 0, 1], Rights::El1Reads, 0x9444_c004, 0),
    // TPIDR_EL0.
    row([3, 3, 13, 0, 2], Rights::All, 0, ALL),
    // TPIDRRO_EL0.
    row([3, 3, 13, 0, 3], Rights::El0Reads, 0, ALL),
];

/// The index of a system register in [`REGISTERS`].
#[derive(Clone, Copy)]
pub(crate) struct Row(usize);

impl Row {
    /// Returns the index of a register that must be in the table.
    const fn of([op0, op1, crn, crm, op2]: [u16; 5]) -> Self {
        let name = SystemName::new(op0, op1, crn, crm, op2);
        let mut row = 0;
        while REGISTERS[row].name.0 != name.0 {
            row += 1;
        }
        Row(row)
    }
    /// Returns the indices of the value and the control of a breakpoint.
    pub(crate) fn breakpoint(n: usize) -> [Self; 2] {
        const FIRST: Row = Row::of([2, 0, 0, 0, 4]);
        [Row(FIRST.0 + 2 * n), Row(FIRST.0 + 2 * n + 1)]
    }
    /// Returns the indices of the value and the control of a watchpoint.
    pub(crate) fn watchpoint(n: usize) -> [Self; 2] {
        const FIRST: Row = Row::of([2, 0, 0, 0, 6]);
        [Row(FIRST.0 + 2 * n), Row(FIRST.0 + 2 * n + 1)]
    }
    pub(crate) fn register(self) -> &'static Register {
        &REGISTERS[self.0]
    }
}

pub(crate) const MDSCR: Row = Row::of([2, 0, 0, 2, 2]);
pub(crate) const OSLSR: Row = Row::of([2, 0, 1, 1, 4]);
pub(crate) const SCTLR: Row = Row::of([3, 0, 1, 0, 0]);
pub(crate) const TTBR0: Row = Row::of([3, 0, 2, 0, 0]);
pub(crate) const TTBR1: Row = Row::of([3, 0, 2, 0, 1]);
pub(crate) const TCR: Row = Row::of([3, 0, 2, 0, 2]);
pub(crate) const PAR: Row = Row::of([3, 0, 7, 4, 0]);
pub(crate) const MAIR: Row = Row::of([3, 0, 10, 2, 0]);
pub(crate) const CNTKCTL: Row = Row::of([3, 0, 14, 1, 0]);
pub(crate) const CONTEXTIDR: Row = Row::of([3, 0, 13, 0, 1]);
pub(crate) const CTR: Row = Row::of([3, 3, 0, 0, 1]);
pub(crate) const CPACR: Row = Row::of([3, 0, 1, 0, 2]);
pub(crate) const SPSR: Row = Row::of([3, 0, 4, 0, 0]);
pub(crate) const ELR: Row = Row::of([3, 0, 4, 0, 1]);
pub(crate) const ESR: Row = Row::of([3, 0, 5, 2, 0]);
pub(crate) const FAR: Row = Row::of([3, 0, 6, 0, 0]);
pub(crate) const VBAR: Row = Row::of([3, 0, 12, 0, 0]);

/// A hash table from names to rows, so that an access need not search [`REGISTERS`]. A name's row is at index
/// [`place`], or in the next free element if that one is occupied. [`NO_ROW`] marks a free element.
const ROWS: [u8; PLACES] = {
    assert!(REGISTERS.len() < NO_ROW as usize && REGISTERS.len() < PLACES / 2);
    let mut rows = [NO_ROW; PLACES];
    let mut row = 0;
    while row < REGISTERS.len() {
        let mut at = place(REGISTERS[row].name);
        while rows[at] != NO_ROW {
            at = (at + 1) % PLACES;
        }
        rows[at] = row as u8;
        row += 1;
    }
    rows
};
const PLACES: usize = 256;
const NO_ROW: u8 = u8::MAX;

/// Returns the first index in [`ROWS`] to try for a name.
const fn place(name: SystemName) -> usize {
    (name.0.wrapping_mul(0x9e37) >> 8) as usize
}

/// Returns the row of a register, or `None` if the table does not have it.
pub(crate) fn find(name: SystemName) -> Option<Row> {
    let mut at = place(name);
    loop {
        match ROWS[at] {
            NO_ROW => return None,
            row if REGISTERS[usize::from(row)].name == name => return Some(Row(row.into())),
            _ => at = (at + 1) % PLACES,
        }
    }
}

/// Returns the names of the system registers that the processor holds.
pub fn system_registers() -> impl Iterator<Item = SystemName> {
    REGISTERS.iter().map(|register| register.name)
}

/// Whether the processor holds this register, and some of its bits are writable.
pub fn is_writable(name: SystemName) -> bool {
    find(name).is_some_and(|row| row.register().writable != 0)
}

/// The values of the registers of [`REGISTERS`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Values([u64; REGISTERS.len()]);

impl Values {
    /// Returns the values of all system registers after reset.
    pub(crate) fn reset() -> Self {
        Self(core::array::from_fn(|n| REGISTERS[n].reset))
    }
    pub(crate) fn get(&self, row: Row) -> u64 {
        self.0[row.0]
    }
    /// Sets all bits of a register, including those that the guest cannot write.
    pub(crate) fn set(&mut self, row: Row, value: u64) {
        self.0[row.0] = value;
    }
    /// Writes the writable bits of a register.
    pub(crate) fn write(&mut self, row: Row, value: u64) {
        let writable = row.register().writable;
        self.set(row, self.get(row) & !writable | value & writable);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_register_is_found_and_no_other() {
        for (n, register) in REGISTERS.iter().enumerate() {
            assert_eq!(find(register.name).map(|row| row.0), Some(n));
        }
        let found = (0..=u16::MAX).filter(|name| find(SystemName(*name)).is_some());
        assert_eq!(found.count(), REGISTERS.len());
    }
}
