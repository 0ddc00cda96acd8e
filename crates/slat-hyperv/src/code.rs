//! The numbers of hypercalls.

#![allow(missing_docs)]
pub const FLUSH_SPACE: u16 = 0x02;
pub const FLUSH_LIST: u16 = 0x03;
pub const NOTIFY_LONG_SPIN_WAIT: u16 = 0x08;
pub const SEND_IPI: u16 = 0x0b;
pub const FLUSH_SPACE_EX: u16 = 0x13;
pub const FLUSH_LIST_EX: u16 = 0x14;
pub const SEND_IPI_EX: u16 = 0x15;
pub const POST_MESSAGE: u16 = 0x5c;
pub const SIGNAL_EVENT: u16 = 0x5d;
pub const POST_DEBUG_DATA: u16 = 0x69;
pub const RETRIEVE_DEBUG_DATA: u16 = 0x6a;
pub const RESET_DEBUG_SESSION: u16 = 0x6b;
/// HvExtCallQueryCapabilities, followed by the last of the calls whose existence it may report.
pub const EXTENDED_FIRST: u16 = 0x8001;
pub const EXTENDED_LAST: u16 = 0x8041;
