//! Probes: breakpoints, watchpoints and single steps that are invisible to the guest and to a debugger of KVM's API
//! ([`Debugger`](crate::Debugger)). They end the run with [`Exit::Probe`](crate::Exit::Probe), and change no register.
//!
//! Probes use the same checks as the debug registers (module `debug`): a page with a data probe is not entered into the
//! TLB, and a code probe makes the CPU check each block for breakpoints. Probes, the guest's breakpoints, and the
//! debugger's breakpoints may have the same addresses. The probe then ends the run first, and the breakpoints take
//! effect in the next run.
//!
//! A code probe ends the run before its instruction; [`Cpu::pass_probe`](crate::Cpu::pass_probe) lets the next run
//! execute the instruction. A data probe and a step end the run after the instruction.

use crate::machine::{Access, ProbeHit, ProbeKind};

/// Added to the DR6 bits of an instruction's traps if the instruction has hit a data probe.
const DATA: u64 = 1 << 32;
/// Added to the DR6 bits of an instruction's traps if the instruction was single-stepped for the probes.
const STEP: u64 = 1 << 33;

/// One probe: a range of linear addresses, and the kind of access to them that ends the run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Probe {
    /// The kind of access that ends the run.
    pub kind: ProbeKind,
    /// The first linear address that the probe watches.
    pub first: u64,
    /// The number of bytes. A code probe has one byte.
    pub bytes: u64,
}

/// The probes of a CPU.
#[derive(Default)]
pub(crate) struct Probes {
    list: Vec<Probe>,
    /// Whether the run ends after each instruction.
    pub(crate) steps: bool,
    /// The linear address of an instruction at which code probes do not end the run, once.
    pub(crate) passed: Option<u64>,
    /// The access with which the current instruction has hit a data probe.
    access: Option<(ProbeKind, u64)>,
    /// The hit that will end the run before the next instruction.
    pub(crate) hit: Option<ProbeHit>,
}

impl Probes {
    pub(crate) fn new(list: Vec<Probe>, steps: bool) -> Self {
        Self {
            list,
            steps,
            ..Self::default()
        }
    }

    pub(crate) fn has_code(&self) -> bool {
        self.list.iter().any(|it| it.kind == ProbeKind::Execute)
    }

    pub(crate) fn has_data(&self) -> bool {
        self.list.iter().any(|it| it.kind != ProbeKind::Execute)
    }

    /// Whether a code probe is in the `len` bytes at `lin`.
    pub(crate) fn has_code_in(&self, lin: u64, len: u64) -> bool {
        let mut code = (self.list.iter()).filter(|probe| probe.kind == ProbeKind::Execute);
        code.any(|probe| probe.first.wrapping_sub(lin) < len)
    }

    /// Returns the first data probe that shares a byte with the `len` bytes at `lin`.
    fn data_in(&self, lin: u64, len: u64, access: Option<Access>) -> Option<&Probe> {
        self.list.iter().find(|probe| {
            let meant = match (probe.kind, access) {
                (ProbeKind::Execute, _) => false,
                (ProbeKind::Access, _) | (_, None) => true,
                (ProbeKind::Write, Some(access)) => access == Access::Write,
                (ProbeKind::Read, Some(access)) => access != Access::Write,
            };
            let overlaps =
                lin.wrapping_sub(probe.first) < probe.bytes || probe.first.wrapping_sub(lin) < len;
            meant && overlaps
        })
    }

    /// Whether the page of `lin` has bytes that a data probe watches.
    pub(crate) fn watch_page(&self, lin: u64) -> bool {
        self.data_in(lin & !0xfff, 0x1000, None).is_some()
    }

    /// Call before an access. If a data probe watches it, records the access and returns [`DATA`], for `Cpu::trap`;
    /// else returns 0.
    pub(crate) fn accessed(&mut self, lin: u64, len: u64, access: Access) -> u64 {
        let Some(&Probe { kind, first, .. }) = self.data_in(lin, len, Some(access)) else {
            return 0;
        };
        // `at` becomes the first byte that is in both the access and the probe.
        let at = match first.wrapping_sub(lin) < len {
            true => first,
            false => lin,
        };
        self.access = Some((kind, at));
        DATA
    }

    /// Returns [`STEP`] if the probes single-step, else 0.
    pub(crate) fn step(&self) -> u64 {
        if self.steps { STEP } else { 0 }
    }

    /// Takes the bits [`DATA`] and [`STEP`] from the trap bits of an instruction: records their hit, and returns the
    /// other bits.
    pub(crate) fn trap(&mut self, hits: u64) -> u64 {
        if hits & DATA != 0 {
            let access = self.access.take();
            self.hit = access.map(|(kind, at)| ProbeHit::Data(kind, at));
        } else if hits & STEP != 0 {
            // A hit of a data probe by the same instruction remains the reason of the exit.
            self.hit.get_or_insert(ProbeHit::Step);
        }
        hits & !(DATA | STEP)
    }
}
