//! Reads a trace file, during or after the recording, even if the recorded process was killed.

use crate::clock::{Moment, Scale};
use crate::layout::*;
use std::fs::File;
use std::io;
use std::mem::offset_of;
use std::ops::Range;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::sync::atomic::{Ordering::Acquire, fence};

/// A tracepoint, as the trace file describes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Point {
    /// The system to which the tracepoint belongs: `kvm`, `kvmmmu` or `slat`.
    pub system: String,
    /// The tracepoint's name.
    pub name: String,
    /// The tracepoint's fields: names, and their positions among a record's values.
    fields: Vec<(String, Range<usize>)>,
}

/// A record: one event at a tracepoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Event {
    /// The time of the event: nanoseconds of `CLOCK_MONOTONIC`.
    pub ns: u64,
    /// The tracepoint: an index into [`Trace::points`].
    pub point: usize,
    /// The VM and the vCPU that the thread ran. `None`: the thread ran no vCPU.
    pub vcpu: Option<(u16, u32)>,
    values: [u8; crate::points::VALUES],
}

/// The trace records of one thread.
#[derive(Clone, Debug)]
pub struct Thread {
    /// The thread's id.
    pub tid: u32,
    /// The thread's name, if it is one of slat's own threads; otherwise empty.
    pub name: String,
    /// The records that were not overwritten, in the order of their times.
    pub events: Vec<Event>,
    /// The number of records ever written, by tracepoint.
    pub counts: Vec<u64>,
    /// The number of records that were overwritten.
    pub dropped: u64,
}

/// The content of a trace file.
#[derive(Clone, Debug)]
pub struct Trace {
    /// The process's id.
    pub pid: u32,
    /// The tracepoints that the file describes.
    pub points: Vec<Point>,
    /// The tracepoints that were recorded: one bit for each tracepoint, by its number.
    selected: u64,
    /// The threads, in the order of their first records.
    pub threads: Vec<Thread>,
    /// The number of records that were lost because their thread found no ring.
    pub lost: u64,
}

impl Point {
    /// Parses a line of the file's text. Each line describes a tracepoint.
    fn parse(line: &str) -> Option<Self> {
        let mut words = line.split(' ');
        let (system, name) = words.next()?.split_once(':')?;
        let field = |word: &str| {
            let (name, place) = word.split_once(':')?;
            let (offset, size) = place.split_once(':')?;
            let (offset, size): (usize, usize) = (offset.parse().ok()?, size.parse().ok()?);
            let fits = size <= 8 && offset.checked_add(size)? <= crate::points::VALUES;
            fits.then(|| (name.to_owned(), offset..offset + size))
        };
        Some(Point {
            system: system.to_owned(),
            name: name.to_owned(),
            fields: words.map(field).collect::<Option<_>>()?,
        })
    }
}

impl Trace {
    /// Reads the file at `path`.
    ///
    /// # Errors
    /// A message for the user.
    pub fn read(path: &Path) -> Result<Self, String> {
        // Without `O_NONBLOCK`, opening a pipe would wait for a writer.
        let opened = (File::options().read(true).custom_flags(libc::O_NONBLOCK)).open(path);
        let read = opened.and_then(|file| Source(file).trace());
        read.map_err(|error| format!("{}: {error}", path.display()))
    }

    /// Returns the index of the tracepoint called `name`.
    pub fn point(&self, name: &str) -> Option<usize> {
        self.points.iter().position(|point| point.name == name)
    }

    /// Whether the tracepoint with this index was recorded.
    pub fn records(&self, point: usize) -> bool {
        self.selected >> point & 1 != 0
    }

    /// Returns the number of records of the tracepoint called `name` ever written.
    pub fn count(&self, name: &str) -> u64 {
        let point = self.point(name);
        point.map_or(0, |point| {
            let counts = self.threads.iter().map(|thread| thread.counts[point]);
            counts.fold(0, u64::saturating_add)
        })
    }

    /// Returns the value of a field of a record. `None`: the tracepoint has no field of this name.
    pub fn value(&self, event: &Event, field: &str) -> Option<u64> {
        let fields = &self.points[event.point].fields;
        let (_, place) = fields.iter().find(|(name, _)| name == field)?;
        Some(event.number(place))
    }

    /// Returns the names and values of all fields of a record.
    pub fn values<'t>(&'t self, event: &'t Event) -> impl Iterator<Item = (&'t str, u64)> {
        let fields = self.points[event.point].fields.iter();
        fields.map(|(name, place)| (name.as_str(), event.number(place)))
    }
}

impl Event {
    fn number(&self, place: &Range<usize>) -> u64 {
        let mut bytes = [0; 8];
        bytes[..place.len()].copy_from_slice(&self.values[place.clone()]);
        u64::from_le_bytes(bytes)
    }
}

struct Source(File);

fn invalid(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"))
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes"))
}

impl Source {
    fn bytes(&self, at: u64, len: usize) -> io::Result<Vec<u8>> {
        let mut bytes = vec![0; len];
        self.0.read_exact_at(&mut bytes, at)?;
        Ok(bytes)
    }

    fn trace(&self) -> io::Result<Trace> {
        if !self.0.metadata()?.is_file() {
            return Err(invalid("is no file"));
        }
        let begin = |len| {
            (self.bytes(0, len)).map_err(|error| match error.kind() {
                io::ErrorKind::UnexpectedEof => invalid("is no trace of slat"),
                _ => error,
            })
        };
        const _: () = assert!(offset_of!(Header, magic) == 0);
        if u64_at(&begin(size_of::<u64>())?, 0) != MAGIC {
            return Err(invalid("is no trace of slat"));
        }
        // The process stores the magic number after the rest of the header.
        fence(Acquire);
        let header = begin(HEADER_BYTES)?;
        if u32_at(&header, offset_of!(Header, version)) != VERSION {
            return Err(invalid("is a trace of another version of slat"));
        }
        let text_bytes = u64_at(&header, offset_of!(Header, text_bytes)) as usize;
        let text = header[TEXT_AT..].get(..text_bytes);
        let text = text.and_then(|text| str::from_utf8(text).ok());
        let points = text.map(|text| text.lines().map(Point::parse).collect());
        let points: Option<Vec<_>> = points.flatten();
        let points = points.filter(|points| points.len() <= MOST_POINTS);
        let points = points.ok_or_else(|| invalid("describes no tracepoints"))?;
        let moment = |at| Moment {
            cycles: u64_at(&header, at),
            ns: u64_at(&header, at + 8),
        };
        let (start, latest) = (offset_of!(Header, start), offset_of!(Header, latest));
        let scale = Scale::new(moment(start), moment(latest));
        let ring_bytes = u64_at(&header, offset_of!(Header, ring_bytes));
        let claimed = u64_at(&header, offset_of!(Header, claimed));
        let end = claimed.checked_mul(ring_bytes);
        let end = end.and_then(|bytes| bytes.checked_add(HEADER_BYTES as u64));
        if capacity(ring_bytes) == 0 || end.is_none_or(|end| self.ends_before(end)) {
            return Err(invalid("is shorter than it says"));
        }
        let ring = |index| {
            let at = HEADER_BYTES as u64 + index * ring_bytes;
            self.thread(at, capacity(ring_bytes), &points, scale)
        };
        Ok(Trace {
            pid: u32_at(&header, offset_of!(Header, pid)),
            selected: u64_at(&header, offset_of!(Header, selected)),
            lost: u64_at(&header, offset_of!(Header, lost)),
            threads: (0..claimed).map(ring).collect::<io::Result<_>>()?,
            points,
        })
    }

    fn ends_before(&self, end: u64) -> bool {
        self.0.metadata().is_ok_and(|known| known.len() < end)
    }

    /// Reads the ring that begins at the offset `at` of the file.
    fn thread(&self, at: u64, capacity: u64, points: &[Point], scale: Scale) -> io::Result<Thread> {
        let header = self.bytes(at, RING_HEADER_BYTES)?;
        let head_at = offset_of!(Ring, head);
        let head = u64_at(&header, head_at);
        let records_at = at + RING_HEADER_BYTES as u64;
        let bytes = self.bytes(records_at, (head.min(capacity) as usize) * RECORD_BYTES)?;
        // The thread may have overwritten records after they were counted, and may be overwriting another one now. The
        // thread raises the head before it overwrites the next record.
        fence(Acquire);
        let now = u64_at(&self.bytes(at + head_at as u64, size_of::<u64>())?, 0);
        let first = (now.max(head).saturating_add(1))
            .saturating_sub(capacity)
            .min(head);
        let events = (first..head).map(|number| {
            let at = (number % capacity) as usize * RECORD_BYTES;
            event(&bytes[at..at + RECORD_BYTES], points.len(), scale)
        });
        let counts = offset_of!(Ring, counts);
        let name = offset_of!(Ring, name);
        let name = header[name..name + 16].split(|byte| *byte == 0).next();
        Ok(Thread {
            tid: u32_at(&header, offset_of!(Ring, tid)),
            name: String::from_utf8_lossy(name.unwrap_or_default()).into_owned(),
            events: events.collect::<io::Result<_>>()?,
            counts: (0..points.len())
                .map(|point| u64_at(&header, counts + 8 * point))
                .collect(),
            dropped: first,
        })
    }
}

/// Decodes a record.
fn event(bytes: &[u8], points: usize, scale: Scale) -> io::Result<Event> {
    let numbers = u64_at(bytes, offset_of!(Record, point));
    let point = numbers as u16 as usize;
    if point >= points {
        return Err(invalid("has a record of an unknown tracepoint"));
    }
    let (vm, vcpu) = ((numbers >> 16) as u16, (numbers >> 32) as u32);
    let values = &bytes[offset_of!(Record, values)..];
    Ok(Event {
        ns: scale.ns(u64_at(bytes, offset_of!(Record, cycles))),
        point,
        vcpu: (vcpu != NO_VCPU).then_some((vm, vcpu)),
        values: values.try_into().expect("the values are the rest"),
    })
}
