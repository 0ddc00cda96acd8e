//! Events in the format of VMCB fields: EVENTINJ and EXITINTINFO (AMD64 volume 2, 15.20 and 15.7.2).

use crate::source::Source;
use crate::state::Exception;
use crate::vector;

const VALID: u64 = 1 << 31;
const ERROR_VALID: u64 = 1 << 11;

/// The kind of an event in a VMCB.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EventKind {
    /// An external interrupt, or a virtual interrupt.
    Interrupt,
    /// A non-maskable interrupt.
    Nmi,
    /// An exception.
    Exception,
    /// A software interrupt: INT n.
    Software,
}

/// An event in the format of EVENTINJ: vector, kind, and error code.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Event(pub(crate) u64);

impl Event {
    /// Makes an event in this format from an event that the CPU is about to deliver.
    pub(crate) fn new(vector: u8, error: Option<u32>, source: Source) -> Self {
        let kind = match source {
            Source::Interrupt => 0,
            Source::Nmi => 2,
            Source::External | Source::Fault | Source::SoftwareException => 3,
            Source::Software => 4,
        };
        let error = error.map_or(0, |error| ERROR_VALID | u64::from(error) << 32);
        Event(VALID | kind << 8 | u64::from(vector) | error)
    }

    /// Whether the valid bit is set: whether there is an event.
    pub(crate) fn is_valid(self) -> bool {
        self.0 & VALID != 0
    }

    /// Returns the vector. For an NMI, returns 2 whatever the field contains.
    pub fn vector(self) -> u8 {
        match self.kind() {
            Some(EventKind::Nmi) => vector::NMI,
            _ => self.0 as u8,
        }
    }

    /// Returns the error code, if the event has one.
    pub fn error(self) -> Option<u32> {
        (self.0 & ERROR_VALID != 0).then_some((self.0 >> 32) as u32)
    }

    /// Returns the kind of the event; `None` for a reserved kind.
    pub fn kind(self) -> Option<EventKind> {
        match self.0 >> 8 & 7 {
            0 => Some(EventKind::Interrupt),
            2 => Some(EventKind::Nmi),
            3 => Some(EventKind::Exception),
            4 => Some(EventKind::Software),
            _ => None,
        }
    }

    /// Whether VMRUN can inject the event: its kind is valid, and the vector of an exception is less than 32 and not 2
    /// (NMI).
    pub(crate) fn is_injectable(self) -> bool {
        match self.kind() {
            None => false,
            Some(EventKind::Exception) => self.vector() < 32 && self.vector() != vector::NMI,
            Some(_) => true,
        }
    }

    /// Returns the event as an exception.
    pub(crate) fn exception(self) -> Exception {
        Exception {
            vector: self.vector(),
            error: self.error(),
        }
    }
}
