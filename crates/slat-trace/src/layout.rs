//! The layout of a file: a header, a text that describes the tracepoints, then rings of one size.
//! Numbers are little-endian.
//!
//! The text has a line for each tracepoint, `SYSTEM:NAME FIELD:OFFSET:SIZE ...`. In records, the number of a tracepoint
//! is the number of its line. So a reader knows the tracepoints of the version of slat that wrote the file.

use crate::points::{POINTS, VALUES};
use std::fmt::Write as _;
use std::mem::offset_of;
use std::sync::atomic::{AtomicU32, AtomicU64};

pub(crate) const MAGIC: u64 = u64::from_le_bytes(*b"slatrace");
pub(crate) const VERSION: u32 = 1;

/// The number of bytes in the file before the first ring.
pub(crate) const HEADER_BYTES: usize = 16 << 10;
/// The offset in the file of the text that describes the tracepoints.
pub(crate) const TEXT_AT: usize = 512;
/// The size of a ring's header in bytes. The ring's records follow the header.
pub(crate) const RING_HEADER_BYTES: usize = 4096;
/// The greatest number of tracepoints that a file can have: the number of bits of `selected`.
pub(crate) const MOST_POINTS: usize = u64::BITS as usize;
pub(crate) const RECORD_BYTES: usize = size_of::<Record>();

/// The header of the file.
#[repr(C)]
pub(crate) struct Header {
    /// [`MAGIC`], stored last when the file is made.
    pub(crate) magic: AtomicU64,
    pub(crate) version: AtomicU32,
    pub(crate) pid: AtomicU32,
    /// The size of a ring in bytes, including its header.
    pub(crate) ring_bytes: AtomicU64,
    pub(crate) text_bytes: AtomicU64,
    /// The tracepoints that are recorded: one bit for each tracepoint, by its number.
    pub(crate) selected: AtomicU64,
    /// The number of rings that threads can claim, counted from ring 0.
    pub(crate) allocated: AtomicU64,
    /// The number of rings that threads have claimed.
    pub(crate) claimed: AtomicU64,
    /// The number of records that were lost because their thread found no ring.
    pub(crate) lost: AtomicU64,
    /// The values of the processor's counter and of `CLOCK_MONOTONIC` when recording began. `latest` has their values
    /// at a later moment.
    pub(crate) start: [AtomicU64; 2],
    pub(crate) latest: [AtomicU64; 2],
}

/// The header of a ring.
#[repr(C)]
pub(crate) struct Ring {
    /// The number of records that were ever written to the ring. The ring has the newest of them.
    pub(crate) head: AtomicU64,
    /// The index in the ring of the record that is to be written next.
    pub(crate) next: AtomicU64,
    /// The id of the thread that writes to the ring.
    pub(crate) tid: AtomicU32,
    /// The beginning of the thread's name, if the thread is slat's own; otherwise zeroes.
    pub(crate) name: [AtomicU64; 2],
    /// The number of records ever written, by tracepoint.
    pub(crate) counts: [AtomicU64; MOST_POINTS],
}

/// A record: one event at a tracepoint.
#[repr(C, align(64))]
pub(crate) struct Record {
    /// The processor's counter (x86's time-stamp counter, or Arm's virtual counter) at the time of the event.
    pub(crate) cycles: u64,
    /// The tracepoint: the number of its line in the text.
    pub(crate) point: u16,
    /// The number of the VM of `vcpu`.
    pub(crate) vm: u16,
    /// The vCPU that the thread ran, or [`NO_VCPU`].
    pub(crate) vcpu: u32,
    pub(crate) values: [u8; VALUES],
}

pub(crate) const NO_VCPU: u32 = u32::MAX;

const _: () = assert!(size_of::<Header>() <= TEXT_AT);
const _: () = assert!(size_of::<Ring>() <= RING_HEADER_BYTES);
const _: () = assert!(RECORD_BYTES == 64 && offset_of!(Record, values) == 16);

/// Returns the number of records that fit into a ring of `ring_bytes` bytes.
pub(crate) fn capacity(ring_bytes: u64) -> u64 {
    ring_bytes.saturating_sub(RING_HEADER_BYTES as u64) / RECORD_BYTES as u64
}

/// Returns the text that describes the tracepoints.
pub(crate) fn text() -> String {
    let mut text = String::new();
    for point in POINTS {
        // Writing to a string does not fail.
        let _ = write!(text, "{}:{}", point.system, point.name);
        for field in point.fields {
            let _ = write!(text, " {}:{}:{}", field.name, field.offset, field.size);
        }
        text.push('\n');
    }
    text
}
