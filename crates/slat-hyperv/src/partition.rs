//! The registers that all virtual processors of a partition share.

use crate::clock::{TscPage, UNIT};
use crate::msr::*;
use crate::{Refused, Writer};

/// A bit of the MSRs HYPERCALL and REFERENCE_TSC: the page that the MSR names is enabled.
const ENABLED: u64 = 1;
/// The bits of the page's address in an MSR that names a page.
const PAGE: u64 = !0xfff;
/// A bit of the MSR CRASH_CTL: the guest has crashed, and the crash parameters (MSRs) describe how.
const CRASH_NOTIFY: u64 = 1 << 63;
/// A bit of the MSR TSC_INVARIANT_CONTROL: CPUID shows the guest that its TSC is invariant.
const EXPOSE_INVARIANT: u64 = 1;
/// A bit of the MSR SYNDBG_OPTIONS: the guest's debugger uses hypercalls.
const DEBUG_BY_HYPERCALLS: u64 = 1 << 2;

/// The work that a write of an MSR leaves to the caller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effect {
    /// The caller need not do anything.
    None,
    /// The reference TSC page has to be written before the guest continues: see [`Partition::begin_page`].
    TscPage,
    /// The guest has crashed. The caller has to tell the VMM.
    Crash,
    /// The guest asks for a reset of the machine. The caller has to tell the VMM.
    Reset,
    /// The guest's debugger has written this MSR. The caller has to tell the VMM.
    Debugger(u32),
}

/// Whether the guest has a reference TSC page, and the page's state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum PageState {
    /// The guest has no reference TSC page.
    #[default]
    Unset,
    /// The reference TSC page has to be written, because the guest has written its address to the MSR.
    NamedByGuest,
    /// The reference TSC page has to be written, because the host has written its address to the MSR, or the clock has
    /// changed.
    ChangedByHost,
    /// A virtual processor is writing the reference TSC page.
    InProgress {
        /// Whether the clock has changed meanwhile, so that the page has to be written again.
        stale: bool,
    },
    /// The reference TSC page shows the reference clock.
    Valid,
    /// The reference TSC page cannot be written, or cannot describe the TSC.
    Broken,
}

/// A reference TSC page that has to be written: the result of [`Partition::begin_page`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DuePage {
    /// The page's guest-physical address.
    pub address: u64,
    /// Whether a valid page must keep its contents. The guest relies on the contents until it ends the emulation of its
    /// TSC.
    pub keeps_contents: bool,
    /// The last sequence of the page, before it is written.
    pub last_sequence: u32,
    before: PageState,
}

/// The registers of the synthetic debugger.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Debugger {
    /// The value of the MSR SYNDBG_CONTROL.
    pub control: u64,
    /// SYNDBG_STATUS: the result of the last operation.
    pub status: u64,
    /// The value of the MSR SYNDBG_SEND_BUFFER.
    pub send_page: u64,
    /// The value of the MSR SYNDBG_RECV_BUFFER.
    pub receive_page: u64,
    /// The value of the MSR SYNDBG_PENDING_BUFFER.
    pub pending_page: u64,
    options: u64,
}

/// The synthetic MSRs that all virtual processors of a partition (a VM) share.
#[derive(Clone, Debug, Default)]
pub struct Partition {
    guest_os_id: u64,
    hypercall: u64,
    reference_tsc: u64,
    page_state: PageState,
    page: TscPage,
    crash: [u64; 5],
    crash_control: u64,
    reenlightenment_control: u64,
    tsc_emulation_control: u64,
    tsc_emulation_status: u64,
    invariant_control: u64,
    /// The synthetic debugger.
    pub debugger: Debugger,
}

impl Partition {
    /// Whether the guest has identified itself, by a write of GUEST_OS_ID. From then on, the guest's hypercalls are
    /// Hyper-V's, not KVM's.
    pub fn is_identified(&self) -> bool {
        self.guest_os_id != 0
    }

    /// Whether the guest has asked to see an invariant TSC.
    pub fn exposes_invariant_tsc(&self) -> bool {
        self.invariant_control & EXPOSE_INVARIANT != 0
    }

    /// Whether the guest's debugger makes hypercalls.
    pub fn debugs_by_hypercalls(&self) -> bool {
        self.debugger.options & DEBUG_BY_HYPERCALLS != 0
    }

    /// Returns the address of the page that has to be filled with the code of a hypercall before `value` is written to
    /// HYPERCALL. `None`: the write needs no page. If the page cannot be written, refuse the write.
    pub fn hypercall_page(&self, value: u64) -> Option<u64> {
        (self.is_identified() && value & ENABLED != 0).then_some(value & PAGE)
    }

    /// Reads a register. `time` returns the time of the reference clock.
    ///
    /// # Errors
    /// The partition has no such register.
    pub fn read(&self, index: u32, time: impl FnOnce(&Self) -> u64) -> Result<u64, Refused> {
        Ok(match index {
            GUEST_OS_ID => self.guest_os_id,
            HYPERCALL => self.hypercall,
            TIME_REF_COUNT => time(self),
            REFERENCE_TSC => self.reference_tsc,
            CRASH_P0..=CRASH_P4 => self.crash[(index - CRASH_P0) as usize],
            CRASH_CTL => self.crash_control,
            RESET => 0,
            REENLIGHTENMENT_CONTROL => self.reenlightenment_control,
            TSC_EMULATION_CONTROL => self.tsc_emulation_control,
            TSC_EMULATION_STATUS => self.tsc_emulation_status,
            TSC_INVARIANT_CONTROL => self.invariant_control,
            SYNDBG_CONTROL => self.debugger.control,
            SYNDBG_STATUS => self.debugger.status,
            SYNDBG_SEND_BUFFER => self.debugger.send_page,
            SYNDBG_RECV_BUFFER => self.debugger.receive_page,
            SYNDBG_PENDING_BUFFER => self.debugger.pending_page,
            SYNDBG_OPTIONS => self.debugger.options,
            _ => return Err(Refused),
        })
    }

    /// Writes a register.
    ///
    /// # Errors
    /// The partition has no such register, it is read-only, or it cannot hold the value.
    pub fn write(&mut self, index: u32, value: u64, by: Writer) -> Result<Effect, Refused> {
        let by_guest = by == Writer::Guest;
        match index {
            GUEST_OS_ID => {
                self.guest_os_id = value;
                if value == 0 {
                    self.hypercall &= !ENABLED;
                }
            }
            // A guest that has not identified itself has no hypercalls, so the write has no effect.
            HYPERCALL if !self.is_identified() => {}
            HYPERCALL => self.hypercall = value,
            REFERENCE_TSC => {
                self.reference_tsc = value;
                self.page_state = match (value & ENABLED != 0, by) {
                    (false, _) => PageState::Unset,
                    (true, Writer::Guest) => PageState::NamedByGuest,
                    (true, Writer::Host) => PageState::ChangedByHost,
                };
                if value & ENABLED != 0 {
                    return Ok(Effect::TscPage);
                }
            }
            CRASH_P0..=CRASH_P4 => self.crash[(index - CRASH_P0) as usize] = value,
            CRASH_CTL if !by_guest => self.crash_control = value & CRASH_NOTIFY,
            CRASH_CTL if value & CRASH_NOTIFY != 0 => return Ok(Effect::Crash),
            CRASH_CTL => {}
            RESET if value == 1 => return Ok(Effect::Reset),
            RESET => {}
            REENLIGHTENMENT_CONTROL => self.reenlightenment_control = value,
            TSC_EMULATION_CONTROL => self.tsc_emulation_control = value,
            TSC_EMULATION_STATUS if by_guest && value != 0 => return Err(Refused),
            TSC_EMULATION_STATUS => self.tsc_emulation_status = value,
            TIME_REF_COUNT if by_guest => return Err(Refused),
            TIME_REF_COUNT => {}
            TSC_INVARIANT_CONTROL if value & !EXPOSE_INVARIANT != 0 => return Err(Refused),
            // The guest cannot revoke its request to see an invariant TSC.
            TSC_INVARIANT_CONTROL if by_guest && self.invariant_control != 0 && value == 0 => {
                return Err(Refused);
            }
            TSC_INVARIANT_CONTROL => self.invariant_control = value,
            SYNDBG_CONTROL => {
                self.debugger.control = value;
                return Ok(Self::to_debugger(index, by));
            }
            SYNDBG_STATUS => self.debugger.status = value,
            SYNDBG_SEND_BUFFER => self.debugger.send_page = value,
            SYNDBG_RECV_BUFFER => self.debugger.receive_page = value,
            SYNDBG_PENDING_BUFFER => {
                self.debugger.pending_page = value;
                return Ok(Self::to_debugger(index, by));
            }
            SYNDBG_OPTIONS => self.debugger.options = value,
            _ => return Err(Refused),
        }
        Ok(Effect::None)
    }

    fn to_debugger(index: u32, by: Writer) -> Effect {
        match by {
            Writer::Guest => Effect::Debugger(index),
            Writer::Host => Effect::None,
        }
    }

    /// Returns the reference clock of a virtual processor whose TSC is `tsc`: the clock of the reference TSC page, or
    /// the machine's clock if that page is not valid.
    pub fn time(&self, tsc: u64, nanoseconds: u64) -> u64 {
        match self.page_state {
            PageState::Valid => self.page.time(tsc),
            _ => nanoseconds / UNIT,
        }
    }

    /// Whether a reference TSC page in `state` must keep its contents: the guest has switched the emulation of its TSC
    /// on, and has not just written the page's address to the MSR.
    fn keeps_page(&self, state: PageState) -> bool {
        state != PageState::NamedByGuest && self.tsc_emulation_control != 0
    }

    /// Notes that the machine's clock, or the relation of a TSC to it, has changed. Call after the change. Returns
    /// whether the reference TSC page has to be written.
    pub fn clock_changed(&mut self) -> bool {
        match self.page_state {
            PageState::Valid if !self.keeps_page(PageState::Valid) => {
                self.page_state = PageState::ChangedByHost;
            }
            PageState::InProgress { .. } => self.page_state = PageState::InProgress { stale: true },
            _ => {}
        }
        self.is_page_due()
    }

    /// Whether the reference TSC page has to be written.
    pub fn is_page_due(&self) -> bool {
        matches!(
            self.page_state,
            PageState::NamedByGuest | PageState::ChangedByHost
        )
    }

    /// Begins to write the reference TSC page, if it has to be written. Until [`end_page`](Self::end_page) no other
    /// virtual processor writes it, and the machine's clock is the reference clock.
    pub fn begin_page(&mut self) -> Option<DuePage> {
        let before = self.page_state;
        if !self.is_page_due() {
            return None;
        }
        self.page_state = PageState::InProgress { stale: false };
        Some(DuePage {
            address: self.reference_tsc & PAGE,
            keeps_contents: self.keeps_page(before),
            last_sequence: self.page.sequence,
            before,
        })
    }

    /// Ends the write of the reference TSC page that [`begin_page`](Self::begin_page) began. Does nothing if the guest
    /// or the host has written the MSR that names the page meanwhile.
    pub fn end_page(&mut self, due: DuePage, outcome: PageOutcome) {
        let PageState::InProgress { stale } = self.page_state else {
            return;
        };
        self.page_state = match outcome {
            PageOutcome::Shows(_) if stale && !due.keeps_contents => PageState::ChangedByHost,
            PageOutcome::Shows(page) => {
                self.page = page;
                PageState::Valid
            }
            PageOutcome::Broken => PageState::Broken,
            PageOutcome::Later => due.before,
        };
    }
}

/// The outcome of an attempt to write the reference TSC page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PageOutcome {
    /// The reference TSC page has this content.
    Shows(TscPage),
    /// The reference TSC page is not in memory, or the TSC is unsuitable for the page. The guest has to read the time
    /// from the MSR instead.
    Broken,
    /// The attempt was interrupted, and has to be repeated.
    Later,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(partition: &mut Partition, index: u32, value: u64) -> Result<Effect, Refused> {
        partition.write(index, value, Writer::Guest)
    }

    fn read(partition: &Partition, index: u32) -> u64 {
        partition.read(index, |_| 5).unwrap()
    }

    #[test]
    fn a_guest_identifies_itself_before_it_gets_hypercalls() {
        let mut partition = Partition::default();
        assert_eq!(partition.hypercall_page(0x5001), None);
        write(&mut partition, HYPERCALL, 0x5001).unwrap();
        assert_eq!(read(&partition, HYPERCALL), 0);
        write(&mut partition, GUEST_OS_ID, 7).unwrap();
        assert_eq!(partition.hypercall_page(0x5001), Some(0x5000));
        assert_eq!(partition.hypercall_page(0x5000), None);
        write(&mut partition, HYPERCALL, 0x5001).unwrap();
        assert!(partition.is_identified());
        write(&mut partition, GUEST_OS_ID, 0).unwrap();
        assert_eq!(
            read(&partition, HYPERCALL),
            0x5000,
            "the page is disabled, its address stays"
        );
    }

    #[test]
    fn some_registers_tell_the_client() {
        let mut partition = Partition::default();
        assert_eq!(write(&mut partition, RESET, 0), Ok(Effect::None));
        assert_eq!(write(&mut partition, RESET, 1), Ok(Effect::Reset));
        write(&mut partition, CRASH_P0 + 3, 9).unwrap();
        assert_eq!(read(&partition, CRASH_P0 + 3), 9);
        assert_eq!(
            write(&mut partition, CRASH_CTL, CRASH_NOTIFY),
            Ok(Effect::Crash)
        );
        assert_eq!(read(&partition, CRASH_CTL), 0);
        partition
            .write(CRASH_CTL, u64::MAX, Writer::Host)
            .expect("the host says what the guest may use");
        assert_eq!(read(&partition, CRASH_CTL), CRASH_NOTIFY);
        let by_guest = write(&mut partition, SYNDBG_CONTROL, 2);
        assert_eq!(by_guest, Ok(Effect::Debugger(SYNDBG_CONTROL)));
        let by_host = partition.write(SYNDBG_PENDING_BUFFER, 2, Writer::Host);
        assert_eq!(by_host, Ok(Effect::None));
    }

    #[test]
    fn read_only_registers_refuse_the_guest() {
        let mut partition = Partition::default();
        for (index, value) in [
            (TIME_REF_COUNT, 1),
            (TSC_EMULATION_STATUS, 1),
            (TSC_INVARIANT_CONTROL, 3),
        ] {
            assert_eq!(write(&mut partition, index, value), Err(Refused));
        }
        assert_eq!(
            partition.write(TIME_REF_COUNT, 1, Writer::Host),
            Ok(Effect::None)
        );
        write(&mut partition, TSC_INVARIANT_CONTROL, 1).unwrap();
        assert!(partition.exposes_invariant_tsc());
        assert_eq!(
            write(&mut partition, TSC_INVARIANT_CONTROL, 0),
            Err(Refused)
        );
        let by_host = partition.write(TSC_INVARIANT_CONTROL, 0, Writer::Host);
        assert_eq!(by_host, Ok(Effect::None));
        assert_eq!(
            write(&mut partition, 0x4000_00f0, 0),
            Err(Refused),
            "guest idle"
        );
    }

    fn page() -> TscPage {
        TscPage::new(1 << 31, 1, 0, 0).unwrap()
    }

    #[test]
    fn the_page_is_the_clock_once_it_is_written() {
        let mut partition = Partition::default();
        assert!(!partition.clock_changed() && partition.begin_page().is_none());
        assert_eq!(
            write(&mut partition, REFERENCE_TSC, 0x3001),
            Ok(Effect::TscPage)
        );
        let due = partition.begin_page().unwrap();
        assert_eq!((due.address, due.keeps_contents), (0x3000, false));
        assert_eq!(partition.begin_page(), None, "one writes it at a time");
        assert_eq!(partition.time(1_000_000, 55_500), 555);
        partition.end_page(due, PageOutcome::Shows(page()));
        assert_eq!(partition.time(1_000_000, 55_500).abs_diff(10_000) / 2, 0);
        assert!(partition.clock_changed() && partition.is_page_due());
        let again = partition.begin_page().unwrap();
        partition.end_page(again, PageOutcome::Later);
        assert!(partition.is_page_due());
        let again = partition.begin_page().unwrap();
        partition.end_page(again, PageOutcome::Broken);
        assert!(!partition.clock_changed() && !partition.is_page_due());
    }

    #[test]
    fn another_page_meanwhile_is_written_next() {
        let mut partition = Partition::default();
        write(&mut partition, REFERENCE_TSC, 0x3001).unwrap();
        let due = partition.begin_page().unwrap();
        write(&mut partition, REFERENCE_TSC, 0x4001).unwrap();
        partition.end_page(due, PageOutcome::Shows(page()));
        assert_eq!(partition.begin_page().unwrap().address, 0x4000);
    }

    #[test]
    fn a_page_is_written_again_if_the_clock_changes_meanwhile() {
        let mut partition = Partition::default();
        write(&mut partition, REFERENCE_TSC, 0x3001).unwrap();
        let due = partition.begin_page().unwrap();
        assert!(!partition.clock_changed(), "whoever writes it will see");
        partition.end_page(due, PageOutcome::Shows(page()));
        assert!(partition.is_page_due());
    }

    #[test]
    fn a_guest_whose_tsc_is_emulated_keeps_its_page() {
        let mut partition = Partition::default();
        write(&mut partition, REFERENCE_TSC, 0x3001).unwrap();
        let due = partition.begin_page().unwrap();
        partition.end_page(due, PageOutcome::Shows(page()));
        write(&mut partition, TSC_EMULATION_CONTROL, 1).unwrap();
        assert!(!partition.clock_changed());
        // After a migration, the host writes the page's address to the MSR again.
        partition
            .write(REFERENCE_TSC, 0x3001, Writer::Host)
            .unwrap();
        assert!(partition.begin_page().unwrap().keeps_contents);
        write(&mut partition, REFERENCE_TSC, 0x3001).unwrap();
        assert!(!partition.begin_page().unwrap().keeps_contents);
    }
}
