//! Why an access to memory fails: either stage 1 refuses it, and EL1 takes an abort; or the machine below stage 1
//! refuses it, and the embedder handles that.

/// The kind of an access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Right {
    /// Reads data.
    Read,
    /// Writes data, or reads data that is written next.
    Write,
    /// Fetches instructions.
    Execute,
}

/// The reason why an access to memory or a fetch fails, for ESR_EL1 and FAR_EL1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Abort {
    /// The virtual address of the access.
    pub address: u64,
    /// The fault status code: the kind of the fault, and its level. See [`status`].
    pub status: u8,
    /// WnR: the refused access is a write, or belongs to a cache maintenance instruction.
    pub is_write: bool,
    /// CM: the access belongs to a cache maintenance or address translation instruction.
    pub is_maintenance: bool,
}

/// Fault status codes (DDI 0487, ISS encoding for an exception from a Data Abort). Where the comment says so, the level
/// of the walk is added.
pub mod status {
    /// Address size fault; the level of the table walk is added to this code.
    pub const ADDRESS_SIZE: u8 = 0b00_0000;
    /// Translation fault; the level of the table walk is added to this code.
    pub const TRANSLATION: u8 = 0b00_0100;
    /// Access flag fault; the level of the table walk is added to this code.
    pub const ACCESS_FLAG: u8 = 0b00_1000;
    /// Permission fault; the level of the table walk is added to this code.
    pub const PERMISSION: u8 = 0b00_1100;
    /// Synchronous External abort, not on a walk.
    pub const EXTERNAL: u8 = 0b01_0000;
    /// Synchronous External abort on a walk; a level is added.
    pub const EXTERNAL_WALK: u8 = 0b01_0100;
    /// Alignment fault.
    pub const ALIGNMENT: u8 = 0b10_0001;
    /// Debug exception.
    pub const DEBUG: u8 = 0b10_0010;
}

/// An access that the machine below stage 1 refuses. The embedder handles it. EL1 does not see the failure, unless the
/// embedder makes EL1 take an abort ([`State::take_stop`](crate::State::take_stop)).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stage2<E> {
    /// The virtual address of the access, which FAR_EL2 reports.
    pub address: u64,
    /// The intermediate physical address that the machine refuses: the address of the access itself, or of a stage 1
    /// descriptor that the walk reads or writes.
    pub ipa: u64,
    /// The right that was refused. If the access to a stage 1 descriptor was refused: the right to read the descriptor,
    /// or to write a flag into it.
    pub right: Right,
    /// WnR: whether the instruction writes or maintains a cache, even if another of its accesses was refused.
    pub is_write: bool,
    /// S1PTW: `ipa` is the address of a stage 1 descriptor.
    pub is_walk: bool,
    /// The access is a fetch.
    pub is_fetch: bool,
    /// The level of the refused stage 1 descriptor; 0 if `is_walk` is false.
    pub level: u8,
    /// CM: the access belongs to a cache maintenance or address translation instruction.
    pub is_maintenance: bool,
    /// Why the embedder's [`Hypervisor`](crate::Hypervisor) refused the access.
    pub reason: E,
}

impl<E> Stage2<E> {
    /// Returns the synchronous External abort that EL1 takes if no memory and no device is at the address.
    pub fn external(&self) -> Abort {
        Abort {
            address: self.address,
            status: match self.is_walk {
                true => status::EXTERNAL_WALK | self.level,
                false => status::EXTERNAL,
            },
            is_write: self.is_write,
            is_maintenance: self.is_maintenance,
        }
    }
}

/// The reason why an access fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault<E> {
    /// EL1 takes an abort.
    Stage1(Abort),
    /// The machine below stage 1 refuses the access.
    Stage2(Stage2<E>),
}
