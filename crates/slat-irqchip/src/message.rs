//! Interrupt messages, which an ICR write, an MSI or an entry of an I/O APIC sends to local APICs.

/// The delivery mode of an interrupt (SDM volume 3, 12.6.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeliveryMode {
    /// The message delivers its vector to each destination.
    Fixed,
    /// The message delivers its vector to one of the destinations.
    LowestPriority,
    /// A system management interrupt.
    Smi,
    /// A reserved mode: the message is not delivered.
    Reserved,
    /// A non-maskable interrupt; there is no vector.
    Nmi,
    /// Resets the destinations.
    Init,
    /// Starts the destinations at the page that the vector gives.
    StartUp,
    /// The vector comes from the 8259 pair.
    ExtInt,
}

impl DeliveryMode {
    /// Decodes the three bits at bit 8 of ICR, MSI data, I/O APIC entries and LVT entries.
    pub fn of(low: u32) -> Self {
        match low >> 8 & 7 {
            0 => DeliveryMode::Fixed,
            1 => DeliveryMode::LowestPriority,
            2 => DeliveryMode::Smi,
            3 => DeliveryMode::Reserved,
            4 => DeliveryMode::Nmi,
            5 => DeliveryMode::Init,
            6 => DeliveryMode::StartUp,
            _ => DeliveryMode::ExtInt,
        }
    }
}

/// The local APICs to which a message goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Destination {
    /// Only the APIC that sends the message.
    Sender,
    /// Every APIC.
    All,
    /// Every APIC except the sender's.
    Others,
    /// The APIC with this id.
    Physical(u32),
    /// The APICs whose logical id matches this one (SDM volume 3, 12.6.2.2 and 12.12.10).
    Logical(u32),
}

impl Destination {
    /// Decodes a destination field. An id of all ones is a broadcast. The sender determines the id's width: 8 bits for
    /// an APIC in xAPIC mode, an I/O APIC or an MSI, 32 bits for x2APIC mode.
    pub fn new(id: u32, logical: bool, broadcast: u32) -> Self {
        match logical {
            _ if id == broadcast => Destination::All,
            true => Destination::Logical(id),
            false => Destination::Physical(id),
        }
    }
}

/// The width of the destinations of MSIs (`KVM_CAP_X2APIC_API`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum MsiIds {
    /// Destinations have eight bits.
    #[default]
    Eight,
    /// Destinations have 32 bits: bits 40 to 63 of the address are bits 8 to 31 of the destination.
    ThirtyTwo {
        /// Whether 0xffff_ffff is the broadcast. Then 0xff reaches only APICs in xAPIC mode that have the id 0xff.
        wide_broadcast: bool,
    },
}

/// A message that delivers an interrupt to local APICs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Message {
    /// The vector; the page number for [`DeliveryMode::StartUp`].
    pub vector: u8,
    /// The delivery mode.
    pub mode: DeliveryMode,
    /// Whether the interrupt is level-triggered: then the local APIC reports the interrupt's EOI to I/O APICs.
    pub level: bool,
    /// Whether the message is an interrupt. If false, the message only deasserts a level.
    pub assert: bool,
    /// The local APICs to which the message goes.
    pub destination: Destination,
}

/// Logical destination mode, in the low word of ICR and I/O APIC entries.
const LOGICAL: u32 = 1 << 11;
const ASSERT: u32 = 1 << 14;
const LEVEL: u32 = 1 << 15;
/// Logical destination mode, in the address of an MSI.
const MSI_LOGICAL: u32 = 1 << 2;
/// The redirection hint, in the address of an MSI.
const REDIRECTION_HINT: u32 = 1 << 3;
/// The 8-bit destination that names all APICs.
pub(crate) const BROADCAST: u32 = 0xff;
/// The destination that names all APICs in x2APIC mode.
pub(crate) const X2APIC_BROADCAST: u32 = u32::MAX;

impl Message {
    /// Decodes a write of the ICR (SDM volume 3, 12.6.1). `destination` is 8 bits wide in xAPIC
    /// mode, 32 in x2APIC mode.
    pub(crate) fn from_icr(low: u32, destination: u32, x2apic: bool) -> Self {
        let broadcast = if x2apic { X2APIC_BROADCAST } else { BROADCAST };
        Message {
            vector: low as u8,
            mode: DeliveryMode::of(low),
            level: low & LEVEL != 0,
            assert: low & ASSERT != 0,
            destination: match low >> 18 & 3 {
                0 => Destination::new(destination, low & LOGICAL != 0, broadcast),
                1 => Destination::Sender,
                2 => Destination::All,
                _ => Destination::Others,
            },
        }
    }

    /// Decodes an MSI: a write of `data` to `address` (SDM volume 3, 12.11). As in KVM, an MSI that deasserts a level
    /// counts as an interrupt, and an MSI with the redirection hint goes to one of its destinations.
    pub fn from_msi(address: u64, data: u32, ids: MsiIds) -> Self {
        let low = address as u32;
        let high = match ids {
            MsiIds::Eight => 0,
            MsiIds::ThirtyTwo { .. } => (address >> 32) as u32 & !0xff,
        };
        let broadcast = match ids {
            MsiIds::ThirtyTwo { wide_broadcast } if wide_broadcast => X2APIC_BROADCAST,
            _ => BROADCAST,
        };
        let mode = match DeliveryMode::of(data) {
            DeliveryMode::Fixed if low & REDIRECTION_HINT != 0 => DeliveryMode::LowestPriority,
            mode => mode,
        };
        Message {
            vector: data as u8,
            mode,
            level: data & LEVEL != 0,
            assert: true,
            destination: Destination::new(
                low >> 12 & 0xff | high,
                low & MSI_LOGICAL != 0,
                broadcast,
            ),
        }
    }
}
