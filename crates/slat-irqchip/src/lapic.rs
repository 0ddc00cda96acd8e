//! The local APIC of one vCPU: registers, priorities, timer. The local APIC knows nothing of other vCPUs. Work outside
//! the APIC is returned as an [`Effect`], which the VM carries out.
//!
//! These parts are implemented: xAPIC (memory) and x2APIC (MSR) modes, interrupts of every delivery mode, the LVT timer
//! in all three modes, and an 8259 or an NMI through LINT0. These parts are not implemented: the error bits of the
//! error status register; the thermal and performance LVTs, which are only stored.

use crate::apic_map::{Address, Logical};
use crate::message::{DeliveryMode, Message};

/// A bit of APIC_BASE: the APIC's processor is the bootstrap processor.
pub const BASE_BSP: u64 = 1 << 8;
/// A bit of APIC_BASE: the APIC is in x2APIC mode.
pub const BASE_X2APIC: u64 = 1 << 10;
/// A bit of APIC_BASE: the APIC is enabled.
pub const BASE_ENABLE: u64 = 1 << 11;
/// The address of the APIC page after reset.
pub const DEFAULT_BASE: u64 = 0xfee0_0000;

/// Register offsets in the APIC page.
pub mod reg {
    #![allow(missing_docs)]
    pub const ID: u32 = 0x20;
    pub const VERSION: u32 = 0x30;
    pub const TPR: u32 = 0x80;
    pub const PPR: u32 = 0xa0;
    pub const EOI: u32 = 0xb0;
    pub const LDR: u32 = 0xd0;
    pub const DFR: u32 = 0xe0;
    pub const SVR: u32 = 0xf0;
    pub const ISR: u32 = 0x100;
    pub const TMR: u32 = 0x180;
    pub const IRR: u32 = 0x200;
    pub const ESR: u32 = 0x280;
    pub const LVT_CMCI: u32 = 0x2f0;
    pub const ICR: u32 = 0x300;
    pub const ICR2: u32 = 0x310;
    pub const LVT_TIMER: u32 = 0x320;
    pub const LVT_LINT0: u32 = 0x350;
    pub const LVT_LINT1: u32 = 0x360;
    pub const LVT_ERROR: u32 = 0x370;
    pub const TIMER_INITIAL: u32 = 0x380;
    pub const TIMER_CURRENT: u32 = 0x390;
    pub const TIMER_DIVIDE: u32 = 0x3e0;
    pub const SELF_IPI: u32 = 0x3f0;
}

const LVT_MASKED: u32 = 1 << 16;
/// Delivery mode ExtINT in an LVT entry: an 8259 supplies the vector.
const LVT_EXTINT: u32 = 7 << 8;
const SVR_ENABLED: u32 = 1 << 8;
/// Bits that must be 0 in an x2APIC's ICR.
const X2APIC_ICR_RESERVED: u64 = 0xfff3_2000;
/// The shortest period of the timer in nanoseconds: KVM's `min_timer_period_us`.
const MIN_PERIOD: u64 = 200_000;
/// The largest number by which the divide register divides the timer's clock.
pub const MAX_DIVISOR: u64 = 128;
/// The number of registers of the APIC page.
pub const REGISTERS: usize = 64;
/// The value of the version register: version 0x14 with six LVT entries.
const VERSION: u32 = 0x14 | 5 << 16;

/// The work that a register write leaves to the caller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effect {
    /// The caller need not do anything.
    None,
    /// Send an interrupt to other vCPUs.
    Send(Message),
    /// [`Lapic::address`] may have changed.
    Address,
    /// The timer has a new deadline, or none: see [`Lapic::deadline`]. If the old deadline had already passed, the
    /// timer's interrupt is pending now.
    Timer,
    /// The guest has ended (EOI) the interrupt with this vector. `true`: the interrupt was level-triggered.
    Eoi(u8, bool),
}

/// The result of sending an interrupt to an APIC.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Request {
    /// The APIC is disabled, so it drops the interrupt.
    Refused,
    /// The vector was pending already: the guest will see one interrupt for both.
    Merged,
    /// The vector is pending now.
    Pending,
}

/// The error of a refused MSR access: the guest gets #GP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Refused;

const X2APIC_MODE: u64 = BASE_ENABLE | BASE_X2APIC;

/// Returns the bits of APIC_BASE that determine the APIC's mode (disabled, xAPIC or x2APIC).
fn mode(base: u64) -> u64 {
    base & (BASE_ENABLE | BASE_X2APIC)
}

/// Checks a new value of the APIC_BASE MSR. The VMM may restore any valid value. If `from_guest` is true, the
/// processor's rules for changes of the mode apply, too (SDM volume 3, "x2APIC State Transitions").
///
/// # Errors
/// Reserved bits are set, a disabled APIC is in x2APIC mode, or hardware refuses the change of mode.
pub fn check_base(old: u64, new: u64, from_guest: bool) -> Result<(), Refused> {
    let reserved = new & !(0x000f_ffff_ffff_f000 | BASE_BSP | BASE_ENABLE | BASE_X2APIC) != 0;
    // x2APIC mode can only be left for the disabled state, and can only be entered from enabled xAPIC mode.
    let refused = match (mode(old), mode(new)) {
        (_, BASE_X2APIC) => true,
        (X2APIC_MODE, BASE_ENABLE) | (0, X2APIC_MODE) => from_guest,
        _ => false,
    };
    match reserved || refused {
        true => Err(Refused),
        false => Ok(()),
    }
}

/// The state of one local APIC.
#[derive(Clone, Debug)]
pub struct Lapic {
    regs: [u32; REGISTERS],
    base: u64,
    x2apic_id: u32,
    /// The time at which the timer was started, in nanoseconds of the VM's clock.
    started: u64,
    /// The time at which the timer ends. `None`: the timer does not run.
    deadline: Option<u64>,
    tsc_deadline: u64,
    tsc_khz: u64,
    /// The length of a bus cycle, the timer's unit, in nanoseconds.
    bus_cycle_ns: u64,
}

impl Lapic {
    /// Makes the APIC of the vCPU with this id, in its state after reset.
    pub fn new(id: u32, bootstrap: bool, tsc_khz: u64) -> Self {
        let mut lapic = Lapic {
            regs: [0; REGISTERS],
            base: DEFAULT_BASE | BASE_ENABLE | if bootstrap { BASE_BSP } else { 0 },
            x2apic_id: id,
            started: 0,
            deadline: None,
            tsc_deadline: 0,
            tsc_khz,
            bus_cycle_ns: 1,
        };
        lapic.set(reg::ID, lapic.id_register());
        lapic.reset();
        lapic
    }

    /// Resets all registers except APIC_BASE and the id, as INIT does.
    pub fn reset(&mut self) {
        let id = self.get(reg::ID);
        self.regs = [0; REGISTERS];
        self.set(reg::ID, id);
        self.set(reg::VERSION, VERSION);
        self.set(reg::DFR, u32::MAX);
        self.set(reg::SVR, 0xff);
        for lvt in (reg::LVT_TIMER..=reg::LVT_ERROR).step_by(16) {
            self.set(lvt, LVT_MASKED);
        }
        if self.x2apic() {
            self.set(reg::LDR, self.x2apic_ldr());
        }
        self.deadline = None;
        self.tsc_deadline = 0;
    }

    /// Whether an 8259's interrupt line reaches the CPU: through LINT0, or directly if the APIC is disabled.
    pub fn accepts_external(&self) -> bool {
        let lint0 = self.get(reg::LVT_LINT0);
        self.base & BASE_ENABLE == 0
            || lint0 & LVT_MASKED == 0 && DeliveryMode::of(lint0) == DeliveryMode::ExtInt
    }

    /// Whether a pulse of LINT0 is an NMI. Guests whose watchdog uses the PIT program LINT0 like this.
    pub fn lint0_is_nmi(&self) -> bool {
        let lint0 = self.get(reg::LVT_LINT0);
        self.base & BASE_ENABLE != 0
            && lint0 & LVT_MASKED == 0
            && DeliveryMode::of(lint0) == DeliveryMode::Nmi
    }

    /// Opens LINT0 for the interrupts of an 8259, as firmware would. KVM does that after the reset of the
    /// bootstrap processor.
    pub fn accept_external(&mut self) {
        self.set(reg::LVT_LINT0, LVT_EXTINT);
    }

    fn get(&self, offset: u32) -> u32 {
        self.regs[(offset >> 4) as usize]
    }

    fn set(&mut self, offset: u32, value: u32) {
        self.regs[(offset >> 4) as usize] = value;
    }

    fn id_register(&self) -> u32 {
        if self.x2apic() {
            self.x2apic_id
        } else {
            self.x2apic_id << 24
        }
    }

    fn x2apic_ldr(&self) -> u32 {
        (self.x2apic_id >> 4) << 16 | 1 << (self.x2apic_id & 15)
    }

    /// Returns the value of the APIC_BASE MSR.
    pub fn base(&self) -> u64 {
        self.base
    }

    /// Writes the APIC_BASE MSR.
    ///
    /// # Errors
    /// Reserved bits are set, or hardware refuses the change of mode.
    pub fn set_base(&mut self, base: u64, from_guest: bool) -> Result<(), Refused> {
        check_base(self.base, base, from_guest)?;
        let (old, new) = (mode(self.base), mode(base));
        self.base = base;
        if old != new {
            self.set(reg::ID, self.id_register());
            if self.x2apic() {
                self.set(reg::LDR, self.x2apic_ldr());
            }
        }
        Ok(())
    }

    /// Whether `gpa` is in the page that APIC_BASE names, although this page does not contain the APIC's registers now.
    pub fn is_hole(&self, gpa: u64) -> bool {
        self.page().is_none() && gpa & !0xfff == self.base & 0x000f_ffff_ffff_f000
    }

    /// Whether the APIC is in x2APIC mode, in which its registers are MSRs.
    pub fn x2apic(&self) -> bool {
        self.base & BASE_X2APIC != 0
    }

    /// Returns the physical address of the page with the APIC's registers. `None`: the APIC is not in xAPIC mode, so no
    /// page contains them.
    pub fn page(&self) -> Option<u64> {
        (self.base & (BASE_ENABLE | BASE_X2APIC) == BASE_ENABLE)
            .then_some(self.base & 0x000f_ffff_ffff_f000)
    }

    /// Whether the APIC is enabled, by its base and by its spurious-interrupt vector register.
    pub fn software_enabled(&self) -> bool {
        self.base & BASE_ENABLE != 0 && self.get(reg::SVR) & SVR_ENABLED != 0
    }

    /// Returns the task priority in the form of CR8.
    pub fn cr8(&self) -> u64 {
        u64::from(self.get(reg::TPR) >> 4 & 15)
    }

    /// Sets the task priority through CR8.
    pub fn set_cr8(&mut self, cr8: u64) {
        self.set(reg::TPR, (cr8 as u32 & 15) << 4);
    }

    /// Reads a register of the APIC page. `now` is the time in nanoseconds of the VM's clock.
    pub fn read(&self, offset: u32, now: u64) -> u32 {
        match offset & 0xff0 {
            reg::PPR => self.ppr(),
            reg::TIMER_CURRENT => self.timer_current(now),
            reg::EOI | reg::SELF_IPI => 0,
            offset if offset < 0x400 => self.get(offset),
            _ => 0,
        }
    }

    /// Writes a register of the APIC page.
    pub fn write(&mut self, offset: u32, value: u32, now: u64) -> Effect {
        match offset & 0xff0 {
            offset @ (reg::ID | reg::LDR | reg::DFR) if !self.x2apic() => {
                self.set(
                    offset,
                    match offset {
                        reg::DFR => value | 0x0fff_ffff,
                        _ => value & 0xff00_0000,
                    },
                );
                return Effect::Address;
            }
            reg::TPR => self.set(reg::TPR, value & 0xff),
            reg::EOI => return self.eoi(),
            reg::SVR => {
                self.set(reg::SVR, value & 0x3ff);
                if value & SVR_ENABLED == 0 {
                    for lvt in (reg::LVT_TIMER..=reg::LVT_ERROR).step_by(16) {
                        self.set(lvt, self.get(lvt) | LVT_MASKED);
                    }
                }
                return Effect::Address;
            }
            reg::ESR => self.set(reg::ESR, 0),
            reg::ICR => {
                let low = value & !(1 << 12);
                self.set(reg::ICR, low);
                let high = self.get(reg::ICR2);
                let destination = if self.x2apic() { high } else { high >> 24 };
                return Effect::Send(Message::from_icr(low, destination, self.x2apic()));
            }
            reg::ICR2 => self.set(
                reg::ICR2,
                if self.x2apic() {
                    value
                } else {
                    value & 0xff00_0000
                },
            ),
            reg::LVT_TIMER => {
                self.tick(now);
                let by_tsc = self.tsc_deadline_mode();
                self.set_lvt(reg::LVT_TIMER, value, 0x7_10ff);
                if self.tsc_deadline_mode() != by_tsc {
                    self.set(reg::TIMER_INITIAL, 0);
                    self.deadline = None;
                    self.tsc_deadline = 0;
                    return Effect::Timer;
                }
            }
            offset @ (0x330 | 0x340) => self.set_lvt(offset, value, 0x1_17ff),
            offset @ (reg::LVT_LINT0 | reg::LVT_LINT1) => self.set_lvt(offset, value, 0x1_f7ff),
            reg::LVT_ERROR => self.set_lvt(reg::LVT_ERROR, value, 0x1_10ff),
            reg::TIMER_INITIAL if !self.tsc_deadline_mode() => {
                // If the old count has ended by now, the timer's interrupt becomes pending, although no thread has
                // looked at the timer since.
                self.tick(now);
                self.set(reg::TIMER_INITIAL, value);
                self.started = now;
                self.deadline = (value != 0).then(|| now.saturating_add(self.period()));
                return Effect::Timer;
            }
            reg::TIMER_DIVIDE => {
                self.tick(now);
                let count = self.timer_current(now);
                self.set(reg::TIMER_DIVIDE, value & 0xb);
                if self.deadline.is_some() && !self.tsc_deadline_mode() {
                    // The count continues from its current value, at the new speed.
                    let left = u64::from(count) * self.count_ns();
                    self.deadline = Some(now.saturating_add(left));
                    return Effect::Timer;
                }
            }
            reg::SELF_IPI if self.x2apic() => {
                let low = value & 0xff | 1 << 18 | 1 << 14;
                return Effect::Send(Message::from_icr(low, 0, true));
            }
            _ => {}
        }
        Effect::None
    }

    fn set_lvt(&mut self, offset: u32, value: u32, mask: u32) {
        let masked = if self.software_enabled() {
            0
        } else {
            LVT_MASKED
        };
        self.set(offset, value & mask | masked);
    }

    /// Reads an x2APIC register by MSR number.
    ///
    /// # Errors
    /// The APIC is not in x2APIC mode, or the register does not exist or cannot be read.
    pub fn read_msr(&self, msr: u32, now: u64) -> Result<u64, Refused> {
        if !self.x2apic() {
            return Err(Refused);
        }
        let offset = (msr - 0x800) << 4;
        match offset {
            reg::ICR => Ok(self.icr()),
            reg::ID
            | reg::VERSION
            | reg::TPR
            | reg::PPR
            | reg::LDR
            | reg::SVR
            | reg::ISR..=0x270
            | reg::ESR
            | reg::LVT_TIMER..=reg::TIMER_CURRENT
            | reg::TIMER_DIVIDE => Ok(self.read(offset, now).into()),
            _ => Err(Refused),
        }
    }

    /// Writes an x2APIC register by MSR number.
    ///
    /// # Errors
    /// The APIC is not in x2APIC mode; or the register does not exist or cannot be written; or reserved bits are set.
    pub fn write_msr(&mut self, msr: u32, value: u64, now: u64) -> Result<Effect, Refused> {
        if !self.x2apic() {
            return Err(Refused);
        }
        let offset = (msr - 0x800) << 4;
        if offset != reg::ICR && value >> 32 != 0 {
            return Err(Refused);
        }
        match offset {
            reg::ICR => self.write_icr(value, now),
            reg::EOI | reg::ESR if value != 0 => Err(Refused),
            // Only the vector of the self-IPI register may be set (SDM volume 3, 12.12.11).
            reg::SELF_IPI if value & !0xff != 0 => Err(Refused),
            reg::TPR
            | reg::EOI
            | reg::SVR
            | reg::ESR
            | reg::LVT_TIMER..=reg::TIMER_INITIAL
            | reg::TIMER_DIVIDE
            | reg::SELF_IPI => Ok(self.write(offset, value as u32, now)),
            _ => Err(Refused),
        }
    }

    fn icr(&self) -> u64 {
        u64::from(self.get(reg::ICR)) | u64::from(self.get(reg::ICR2)) << 32
    }

    fn write_icr(&mut self, value: u64, now: u64) -> Result<Effect, Refused> {
        if value & X2APIC_ICR_RESERVED != 0 {
            return Err(Refused);
        }
        self.set(reg::ICR2, (value >> 32) as u32);
        Ok(self.write(reg::ICR, value as u32, now))
    }

    /// Reads ICR or TPR by Hyper-V's MSR for the register, in any mode of the APIC.
    ///
    /// # Errors
    /// The register has no such MSR, or cannot be read.
    pub fn read_synthetic(&self, offset: u32, now: u64) -> Result<u64, Refused> {
        match offset {
            reg::ICR => Ok(self.icr()),
            reg::TPR => Ok(self.read(offset, now).into()),
            _ => Err(Refused),
        }
    }

    /// Writes EOI, ICR or TPR by Hyper-V's MSR for the register, in any mode of the APIC. The upper half of the MSR for
    /// ICR is ICR2.
    ///
    /// # Errors
    /// The register has no such MSR, or the value has reserved bits.
    pub fn write_synthetic(
        &mut self,
        offset: u32,
        value: u64,
        now: u64,
    ) -> Result<Effect, Refused> {
        match offset {
            reg::ICR => self.write_icr(value, now),
            reg::EOI | reg::TPR if value >> 32 == 0 => Ok(self.write(offset, value as u32, now)),
            _ => Err(Refused),
        }
    }

    fn bit(vector: u8) -> (u32, u32) {
        (u32::from(vector >> 5) << 4, 1 << (vector & 31))
    }

    fn highest(&self, array: u32) -> Option<u8> {
        (0..8u32).rev().find_map(|word| {
            let bits = self.get(array + (word << 4));
            (bits != 0).then(|| (word * 32 + 31 - bits.leading_zeros()) as u8)
        })
    }

    fn ppr(&self) -> u32 {
        let tpr = self.get(reg::TPR);
        let isr = self.highest(reg::ISR).map_or(0, u32::from);
        if tpr >> 4 >= isr >> 4 {
            tpr & 0xff
        } else {
            isr & 0xf0
        }
    }

    /// Makes the interrupt with this vector pending (IRR). `level` says whether it is level-triggered.
    pub fn request(&mut self, vector: u8, level: bool) -> Request {
        if !self.software_enabled() {
            return Request::Refused;
        }
        let (offset, bit) = Self::bit(vector);
        let pending = self.get(reg::IRR + offset);
        self.set(reg::IRR + offset, pending | bit);
        let tmr = self.get(reg::TMR + offset);
        self.set(
            reg::TMR + offset,
            if level { tmr | bit } else { tmr & !bit },
        );
        match pending & bit {
            0 => Request::Pending,
            _ => Request::Merged,
        }
    }

    /// Returns the interrupt with the highest priority that may be delivered now.
    pub fn pending(&self) -> Option<u8> {
        if !self.software_enabled() {
            return None;
        }
        self.highest(reg::IRR)
            .filter(|&vector| u32::from(vector) >> 4 > self.ppr() >> 4)
    }

    /// Moves the interrupt with this vector from requested (IRR) to in service (ISR).
    pub fn accept(&mut self, vector: u8) {
        let (offset, bit) = Self::bit(vector);
        self.set(reg::IRR + offset, self.get(reg::IRR + offset) & !bit);
        self.set(reg::ISR + offset, self.get(reg::ISR + offset) | bit);
    }

    /// Removes the requested interrupt with this vector and ends it at once. Call instead of [`accept`](Self::accept)
    /// for an interrupt whose source needs no EOI.
    pub fn accept_ended(&mut self, vector: u8) {
        let (offset, bit) = Self::bit(vector);
        self.set(reg::IRR + offset, self.get(reg::IRR + offset) & !bit);
    }

    /// Whether the guest may end the interrupt in service without an exit: no other interrupt is pending, and no I/O
    /// APIC waits for the EOI.
    pub fn may_end_silently(&self) -> bool {
        let edge = |vector| {
            let (offset, bit) = Self::bit(vector);
            self.get(reg::TMR + offset) & bit == 0
        };
        self.highest(reg::IRR).is_none() && self.highest(reg::ISR).is_some_and(edge)
    }

    /// Sets the frequency of the guest's TSC, for deadlines set from now on.
    pub fn set_tsc_khz(&mut self, khz: u64) {
        self.tsc_khz = khz;
    }

    /// Sets the length of a bus cycle, which is the timer's unit. The default is 1 ns. Call before the guest runs. The
    /// longest count, [`u32::MAX`] with [`MAX_DIVISOR`], has to fit 64 bits.
    pub fn set_bus_cycle(&mut self, nanoseconds: u64) {
        self.bus_cycle_ns = nanoseconds;
    }

    fn eoi(&mut self) -> Effect {
        let Some(vector) = self.highest(reg::ISR) else {
            return Effect::None;
        };
        let (offset, bit) = Self::bit(vector);
        self.set(reg::ISR + offset, self.get(reg::ISR + offset) & !bit);
        Effect::Eoi(vector, self.get(reg::TMR + offset) & bit != 0)
    }

    /// Returns the address by which messages find this APIC now. `None` while it is disabled: no message finds it.
    pub fn address(&self) -> Option<Address> {
        if self.base & BASE_ENABLE == 0 {
            return None;
        }
        let logical = match self.get(reg::DFR) >> 28 {
            _ if self.x2apic() => Logical::X2apic,
            // A logical id finds only APICs that software has enabled.
            _ if !self.software_enabled() => Logical::None,
            0xf => Logical::Flat((self.get(reg::LDR) >> 24) as u8),
            0 => Logical::Cluster((self.get(reg::LDR) >> 24) as u8),
            _ => Logical::None,
        };
        let id = match self.x2apic() {
            true => self.x2apic_id,
            // A guest in xAPIC mode may have given its APIC another id than its vCPU's.
            false => self.get(reg::ID) >> 24,
        };
        Some(Address {
            id,
            logical,
            enabled: self.software_enabled(),
        })
    }

    fn divisor(&self) -> u64 {
        let divide = self.get(reg::TIMER_DIVIDE);
        let shift = ((divide & 3 | divide >> 1 & 4) + 1) & 7;
        1 << shift
    }

    /// Returns the length in nanoseconds of one step of the timer's count.
    fn count_ns(&self) -> u64 {
        self.divisor() * self.bus_cycle_ns
    }

    fn is_periodic(&self) -> bool {
        self.get(reg::LVT_TIMER) >> 17 & 3 == 1
    }

    /// Returns the length in nanoseconds of one full count. A periodic count is at least [`MIN_PERIOD`] long.
    fn period(&self) -> u64 {
        match u64::from(self.get(reg::TIMER_INITIAL)) * self.count_ns() {
            0 => 0,
            period if self.is_periodic() => period.max(MIN_PERIOD),
            period => period,
        }
    }

    fn timer_current(&self, now: u64) -> u32 {
        if self.tsc_deadline_mode() {
            return 0;
        }
        self.deadline.map_or(0, |deadline| {
            (deadline.saturating_sub(now) / self.count_ns()) as u32
        })
    }

    fn tsc_deadline_mode(&self) -> bool {
        self.get(reg::LVT_TIMER) >> 17 & 3 == 2
    }

    /// Returns the value of the TSC_DEADLINE MSR.
    pub fn tsc_deadline(&self) -> u64 {
        self.tsc_deadline
    }

    /// Writes the TSC_DEADLINE MSR. `tsc` is the guest's counter at `now`.
    pub fn set_tsc_deadline(&mut self, value: u64, tsc: u64, now: u64) -> Effect {
        if !self.tsc_deadline_mode() {
            return Effect::None;
        }
        self.tick(now);
        self.tsc_deadline = value;
        self.deadline = (value != 0).then(|| {
            let cycles = u128::from(value.saturating_sub(tsc));
            let wait = cycles * 1_000_000 / u128::from(self.tsc_khz.max(1));
            now.saturating_add(u64::try_from(wait).unwrap_or(u64::MAX))
        });
        // The new deadline may already have passed.
        self.tick(now);
        Effect::Timer
    }

    /// Returns the time at which the caller has to call [`tick`](Self::tick) next. `None`: the timer has no deadline.
    pub fn deadline(&self) -> Option<u64> {
        self.deadline
    }

    /// If the timer's deadline is at or before `now`, makes the timer's interrupt pending, unless the LVT entry masks
    /// it.
    pub fn tick(&mut self, now: u64) {
        let Some(deadline) = self.deadline.filter(|&deadline| deadline <= now) else {
            return;
        };
        let lvt = self.get(reg::LVT_TIMER);
        let period = self.period();
        let periodic = self.is_periodic() && period != 0;
        self.tsc_deadline = 0;
        // Periods that were missed cause no interrupt: the next deadline is after `now`.
        self.deadline = periodic.then(|| {
            let missed = (now - deadline) / period;
            deadline.saturating_add(period.saturating_mul(missed + 1))
        });
        if lvt & LVT_MASKED == 0 {
            self.request(lvt as u8, false);
        }
    }

    /// Returns the registers in the layout of the APIC page, 16 bytes apart, in the form that
    /// [`restore`](Self::restore) takes.
    pub fn save(&self, now: u64) -> [u32; REGISTERS] {
        let mut registers = self.regs;
        registers[(reg::TIMER_CURRENT >> 4) as usize] = self.timer_current(now);
        registers[(reg::PPR >> 4) as usize] = self.ppr();
        registers
    }

    /// Sets all registers. The timer continues from its current count. A TSC deadline is not among the registers: as in
    /// KVM, a deadline stays until the timer's mode changes.
    pub fn restore(&mut self, registers: &[u32; REGISTERS], now: u64) {
        let by_tsc = self.tsc_deadline_mode();
        self.regs = *registers;
        let current = u64::from(self.get(reg::TIMER_CURRENT));
        self.set(reg::VERSION, VERSION);
        if self.x2apic() {
            self.set(reg::ID, self.id_register());
            self.set(reg::LDR, self.x2apic_ldr());
        }
        if by_tsc && self.tsc_deadline_mode() {
            return;
        }
        self.tsc_deadline = 0;
        // A periodic timer that was saved at the end of its count begins a new count; any other timer fires.
        let period = self.period();
        let left = match current * self.count_ns() {
            0 if self.is_periodic() => period,
            left => left.min(period),
        };
        self.deadline =
            (period != 0 && !self.tsc_deadline_mode()).then(|| now.saturating_add(left));
    }
}

#[cfg(test)]
mod tests;
