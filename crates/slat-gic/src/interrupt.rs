//! The state of one interrupt, and the numbers of interrupts.

/// SGIs have the INTIDs below this number.
pub const SGIS: u32 = 16;
/// Private interrupts, SGIs and PPIs, have the INTIDs below this number. SPIs begin here.
pub const PRIVATE: u32 = 32;
/// The first of the INTIDs that say why there is no interrupt (IHI 0069, 2.2; IHI 0048, 3.2.5).
pub const SPECIAL: u32 = 1020;
/// The value that an acknowledgement returns in GICv2 if only the other group's register would return an interrupt.
pub(crate) const OTHER_GROUP: u32 = 1022;
/// The value that an acknowledgement returns if there is no interrupt.
pub const SPURIOUS: u32 = 1023;
/// LPIs have the INTIDs from this number on.
pub const LPIS: u32 = 8192;
/// The bits of a priority that exist. KVM's guests have 32 priorities with GICv2 and with GICv3.
pub(crate) const PRIORITIES: u8 = 0xf8;

/// The group of an interrupt (IHI 0069, 4.6). In GICv3 group 0 is signaled as FIQ, group 1 as IRQ.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Group {
    /// Group 0.
    Zero,
    /// Group 1.
    One,
}

impl Group {
    /// All groups of interrupts.
    pub(crate) const ALL: [Group; 2] = [Group::Zero, Group::One];

    /// Returns the group that a bit of GICD_IGROUPR means.
    pub(crate) fn of(bit: bool) -> Self {
        match bit {
            false => Group::Zero,
            true => Group::One,
        }
    }
}

/// The signal that makes an interrupt pending: an edge or a level (IHI 0069, 1.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Trigger {
    /// The interrupt becomes pending when its line rises. It stays pending until it is acknowledged.
    Edge,
    /// The interrupt is pending while its line is high.
    Level,
}

/// The target vCPU of an interrupt, with the interrupt's group and priority.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    /// The index of the vCPU.
    pub(crate) vcpu: usize,
    pub(crate) group: Group,
    pub(crate) priority: u8,
}

/// The state of one interrupt of any type.
#[derive(Clone, Debug)]
pub(crate) struct Interrupt {
    pub(crate) enabled: bool,
    pub(crate) group: Group,
    pub(crate) priority: u8,
    pub(crate) trigger: Trigger,
    /// Whether the interrupt is pending because of an edge, a message, or a write to GICD_ISPENDR.
    pub(crate) latch: bool,
    /// Whether the interrupt's line is high. Up to date only while the interrupt is level-triggered.
    pub(crate) line: bool,
    pub(crate) active: bool,
    /// GICv2: the vCPUs, by bit, that have generated this SGI.
    pub(crate) sources: u8,
    /// GICv2: the byte of GICD_ITARGETSR. GICv3: the affinity in GICD_IROUTER.
    pub(crate) route: u32,
    /// The index of the target vCPU. `route` names this vCPU, except for an LPI: the LPI's collection determines its
    /// vCPU.
    pub(crate) target: Option<usize>,
    /// The entry of this interrupt in a vCPU's pending set. `None`: the interrupt is in no pending set.
    pub(crate) queued: Option<Place>,
}

impl Interrupt {
    pub(crate) fn new(group: Group, trigger: Trigger, target: Option<usize>) -> Self {
        Interrupt {
            enabled: false,
            group,
            priority: 0,
            trigger,
            latch: false,
            line: false,
            active: false,
            sources: 0,
            route: 0,
            target,
            queued: None,
        }
    }

    /// Whether the interrupt is pending (IHI 0069, 4.1; IHI 0048, 3.2.4). A level-triggered interrupt is pending while
    /// its line is high, or while the latch is set by software.
    pub(crate) fn is_pending(&self) -> bool {
        self.latch || self.trigger == Trigger::Level && self.line
    }

    /// Returns the vCPU, the group and the priority by which the interrupt belongs in a pending set. `None`: the
    /// interrupt belongs in no set. That also holds for an active interrupt, because it cannot be acknowledged again
    /// before it is deactivated.
    pub(crate) fn place(&self) -> Option<Place> {
        let is_ready = self.enabled && self.is_pending() && !self.active;
        let vcpu = self.target.filter(|_| is_ready)?;
        Some(Place {
            vcpu,
            group: self.group,
            priority: self.priority,
        })
    }

    /// Records that a device drives the line of the interrupt.
    pub(crate) fn set_line(&mut self, high: bool) {
        match self.trigger {
            Trigger::Level => self.line = high,
            Trigger::Edge => self.latch |= high,
        }
    }

    /// Clears the pending state. Returns the source of an SGI of GICv2, which stays pending if it has further sources.
    pub(crate) fn acknowledge(&mut self) -> u8 {
        let source = self.sources.trailing_zeros() as u8 & 7;
        self.sources &= self.sources.wrapping_sub(1);
        self.latch = self.sources != 0;
        source
    }
}
