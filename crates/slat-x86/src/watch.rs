//! The breakpoints of the debug registers (SDM volume 3, "Debug Registers").

/// The bits of DR6 that always read as one.
pub(crate) const DR6_ONES: u64 = 0xffff_0ff0;
/// The bits B0 to B3 of DR6: the breakpoint with this number was hit.
pub(crate) const DR6_HITS: u64 = 15;
/// The bit BD of DR6: a debug register was accessed while DR7.GD was set.
pub(crate) const DR6_BD: u64 = 1 << 13;
/// The bit BS of DR6: the trap was a single step.
pub(crate) const DR6_BS: u64 = 1 << 14;
/// The bit BT of DR6: a switch to a task whose TSS has the debug trap flag has caused the trap.
pub(crate) const DR6_BT: u64 = 1 << 15;
/// The bit GD (general detect) of DR7.
pub(crate) const DR7_GD: u64 = 1 << 13;

/// The requests of a debugger outside the guest.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Debugger {
    /// Whether the run ends after every instruction, as by a trap.
    pub single_step: bool,
    /// Whether the run ends at INT3, before the instruction, as by a fault.
    pub software_breakpoints: bool,
    /// Breakpoints that replace the guest's own. `None`: the guest's own are used.
    pub breakpoints: Option<Breakpoints>,
}

impl Debugger {
    /// Whether every #DB ends the run, even one that the guest has caused.
    pub(crate) fn claims_debug(&self) -> bool {
        self.single_step || self.breakpoints.is_some()
    }
}

/// A set of breakpoints, in the format of DR0 to DR3 and DR7.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Breakpoints {
    /// DR0–DR3.
    pub addresses: [u64; 4],
    /// DR7.
    pub control: u64,
}

/// The values of a breakpoint's R/W field: the kind of access that it watches.
pub(crate) mod kind {
    pub const EXECUTE: u64 = 0;
    pub const WRITE: u64 = 1;
    /// A port access, if CR4.DE is set. Otherwise the field is undefined.
    pub const PORT: u64 = 2;
    pub const READ_WRITE: u64 = 3;
}

impl Breakpoints {
    /// Returns the enabled breakpoints: the index, R/W field, first address, and number of bytes of each.
    pub(crate) fn enabled(&self) -> impl Iterator<Item = (usize, u64, u64, u64)> + '_ {
        (0..4).filter_map(|i| {
            let field = self.control >> (16 + 4 * i);
            let bytes = [1, 2, 8, 4][(field >> 2 & 3) as usize];
            let first = self.addresses[i] & !(bytes - 1);
            (self.control >> (2 * i) & 3 != 0).then_some((i, field & 3, first, bytes))
        })
    }

    pub(crate) fn any(&self, kinds: &[u64]) -> bool {
        self.enabled().any(|(_, kind, ..)| kinds.contains(&kind))
    }

    /// Returns the DR6 bits of the breakpoints with one of these kinds that share a byte with the `len` bytes at `at`.
    pub(crate) fn hits(&self, kinds: &[u64], at: u64, len: u64) -> u64 {
        self.enabled()
            .filter(|(_, kind, first, bytes)| {
                let overlaps = at.wrapping_sub(*first) < *bytes || first.wrapping_sub(at) < len;
                kinds.contains(kind) && overlaps
            })
            .fold(0, |hits, (i, ..)| hits | 1 << i)
    }
}

/// The breakpoints in effect, the kinds of these breakpoints, and their hits.
#[derive(Default)]
pub(crate) struct Watch {
    pub(crate) breakpoints: Breakpoints,
    pub(crate) code: bool,
    pub(crate) data: bool,
    pub(crate) ports: bool,
    /// Whether the instruction at RIP accesses watched bytes, so that it must be executed again in a block of its own.
    pub(crate) alone: bool,
    /// Whether the current block has only one instruction, so that hits of watchpoints are collected in `hits`.
    pub(crate) collects: bool,
    /// The DR6 bits of the watchpoints that the current instruction has hit.
    pub(crate) hits: u64,
    /// Whether the current instruction traps at its end: TF was set at its start, or a debugger single-steps.
    pub(crate) steps: bool,
    /// For the last INT3 that the debugger has claimed: its address, and the address after it.
    pub(crate) int3: Option<(u64, u64)>,
}
