//! Converts a trace to Perfetto's format, which <https://ui.perfetto.dev> opens. Each thread has a track. On the track,
//! the activities of the thread's vCPU are slices, and all other records are instants with their fields.
//!
//! The types below are the necessary messages of `protos/perfetto/trace/trace.proto`, with the field numbers of that
//! file.

use std::collections::HashSet;

use prost::Message;
use slat_trace::read::{Event, Thread, Trace};

use super::summary::reason;

/// `perfetto.protos.Trace`, the message of a whole file. Several such messages, one after another, are also a valid
/// file.
#[derive(Clone, PartialEq, Message)]
struct Packets {
    #[prost(message, repeated, tag = "1")]
    packet: Vec<TracePacket>,
}

#[derive(Clone, PartialEq, Message)]
struct TracePacket {
    /// The time of the event in nanoseconds.
    #[prost(uint64, optional, tag = "8")]
    timestamp: Option<u64>,
    #[prost(uint32, tag = "10")]
    trusted_packet_sequence_id: u32,
    #[prost(message, optional, tag = "11")]
    track_event: Option<TrackEvent>,
    #[prost(message, optional, tag = "60")]
    track_descriptor: Option<TrackDescriptor>,
}

#[derive(Clone, PartialEq, Message)]
struct TrackEvent {
    #[prost(message, repeated, tag = "4")]
    debug_annotations: Vec<DebugAnnotation>,
    #[prost(enumeration = "Type", tag = "9")]
    r#type: i32,
    #[prost(uint64, tag = "11")]
    track_uuid: u64,
    #[prost(string, repeated, tag = "22")]
    categories: Vec<String>,
    #[prost(string, tag = "23")]
    name: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, prost::Enumeration)]
#[repr(i32)]
enum Type {
    Unspecified = 0,
    SliceBegin = 1,
    SliceEnd = 2,
    Instant = 3,
}

#[derive(Clone, PartialEq, Message)]
struct DebugAnnotation {
    #[prost(string, tag = "10")]
    name: String,
    #[prost(oneof = "Value", tags = "3, 7")]
    value: Option<Value>,
}

#[derive(Clone, PartialEq, prost::Oneof)]
enum Value {
    #[prost(uint64, tag = "3")]
    Uint(u64),
    /// A value that the UI shows in hexadecimal.
    #[prost(uint64, tag = "7")]
    Pointer(u64),
}

#[derive(Clone, PartialEq, Message)]
struct TrackDescriptor {
    #[prost(uint64, tag = "1")]
    uuid: u64,
    #[prost(message, optional, tag = "3")]
    process: Option<ProcessDescriptor>,
    #[prost(message, optional, tag = "4")]
    thread: Option<ThreadDescriptor>,
}

#[derive(Clone, PartialEq, Message)]
struct ProcessDescriptor {
    #[prost(int32, tag = "1")]
    pid: i32,
    #[prost(string, tag = "6")]
    process_name: String,
}

#[derive(Clone, PartialEq, Message)]
struct ThreadDescriptor {
    #[prost(int32, tag = "1")]
    pid: i32,
    #[prost(int32, tag = "2")]
    tid: i32,
    #[prost(string, tag = "5")]
    thread_name: String,
}

/// The number of the process's track. The tracks of its threads have the next numbers.
const PROCESS: u64 = 1;

/// The names of the fields that the UI shows in hexadecimal: addresses and frame numbers.
const HEXADECIMAL: &[&str] = &[
    "rip",
    "guest_rip",
    "vcpu_pc",
    "r0",
    "gpa",
    "val",
    "fault_address",
    "error_code",
    "start",
    "end",
    "gfn",
    "pfn",
    "sptep",
    "old_spte",
    "new_spte",
    "spte",
    "cr2_or_gpa",
    "addr",
    "address",
    "data",
    "info1",
    "base_gfn",
    "userspace_addr",
    "hva",
    "port",
    "role",
];

/// Returns the content of the file for Perfetto.
pub fn of(trace: &Trace) -> Vec<u8> {
    let mut out = Vec::new();
    describe(
        &mut out,
        TrackDescriptor {
            uuid: PROCESS,
            process: Some(ProcessDescriptor {
                pid: trace.pid as i32,
                process_name: format!("slat {}", trace.pid),
            }),
            thread: None,
        },
    );
    for (thread, uuid) in trace.threads.iter().zip(PROCESS + 1..) {
        describe(
            &mut out,
            TrackDescriptor {
                uuid,
                process: None,
                thread: Some(ThreadDescriptor {
                    pid: trace.pid as i32,
                    tid: thread.tid as i32,
                    thread_name: name_of(thread),
                }),
            },
        );
        let mut track = Track {
            trace,
            uuid,
            open: Vec::new(),
            out: &mut out,
        };
        thread.events.iter().for_each(|event| track.add(event));
    }
    out
}

/// Returns the name of a thread's track. If the thread has run a vCPU, this is the vCPU's name.
fn name_of(thread: &Thread) -> String {
    let ran: HashSet<_> = thread
        .events
        .iter()
        .filter_map(|event| event.vcpu)
        .collect();
    match (ran.iter().next(), ran.len()) {
        (Some((vm, vcpu)), 1) => format!("VM {vm} vCPU {vcpu}"),
        (Some(_), vcpus) => format!("{vcpus} vCPUs"),
        (None, _) if thread.name.is_empty() => format!("thread {}", thread.tid),
        (None, _) => thread.name.clone(),
    }
}

fn describe(out: &mut Vec<u8>, track: TrackDescriptor) {
    write(
        out,
        TracePacket {
            track_descriptor: Some(track),
            ..packet()
        },
    );
}

fn packet() -> TracePacket {
    TracePacket {
        trusted_packet_sequence_id: 1,
        ..TracePacket::default()
    }
}

fn write(out: &mut Vec<u8>, packet: TracePacket) {
    let packet = vec![packet];
    let written = Packets { packet }.encode(out);
    written.expect("a vector has space");
}

/// A thread's track.
struct Track<'t> {
    trace: &'t Trace,
    uuid: u64,
    /// The slices that have begun and have not ended yet.
    open: Vec<Slice>,
    out: &'t mut Vec<u8>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Slice {
    /// What the vCPU's thread does: it runs the guest, handles an exit, or is in the client. The end of such a slice is
    /// the beginning of the next one.
    Vcpu,
    /// A flush. The slice is within a slice of the vCPU, or on the track of a thread that runs no vCPU.
    Flush,
}

impl Track<'_> {
    fn add(&mut self, event: &Event) {
        let point = &self.trace.points[event.point];
        match point.name.as_str() {
            "kvm_entry" => self.follow("guest", event),
            "kvm_exit" => {
                let reason = reason(self.trace, event);
                self.follow(&reason, event);
            }
            "kvm_userspace_exit" => self.follow("client", event),
            "flush_begin" => self.begin(Slice::Flush, "flush", event),
            "flush_end" => self.end(Slice::Flush, event),
            name => self.put(Type::Instant, name, event),
        }
    }

    /// Ends the vCPU's current activity, and begins the activity called `name`.
    fn follow(&mut self, name: &str, event: &Event) {
        self.end(Slice::Vcpu, event);
        self.begin(Slice::Vcpu, name, event);
    }

    fn begin(&mut self, slice: Slice, name: &str, event: &Event) {
        self.open.push(slice);
        self.put(Type::SliceBegin, name, event);
    }

    /// Ends `slice` and the slices within it. Does nothing if the record of the slice's beginning was overwritten.
    fn end(&mut self, slice: Slice, event: &Event) {
        let Some(at) = self.open.iter().rposition(|open| *open == slice) else {
            return;
        };
        for _ in self.open.drain(at..) {
            let end = TrackEvent {
                r#type: Type::SliceEnd.into(),
                track_uuid: self.uuid,
                ..TrackEvent::default()
            };
            write(self.out, at_time(event, end));
        }
    }

    fn put(&mut self, kind: Type, name: &str, event: &Event) {
        let values = self.trace.values(event);
        let track_event = TrackEvent {
            debug_annotations: values
                .map(|(name, value)| annotation(name, value))
                .collect(),
            r#type: kind.into(),
            track_uuid: self.uuid,
            categories: vec![self.trace.points[event.point].system.clone()],
            name: name.to_owned(),
        };
        write(self.out, at_time(event, track_event));
    }
}

fn at_time(event: &Event, track_event: TrackEvent) -> TracePacket {
    TracePacket {
        timestamp: Some(event.ns),
        track_event: Some(track_event),
        ..packet()
    }
}

fn annotation(name: &str, value: u64) -> DebugAnnotation {
    DebugAnnotation {
        name: name.to_owned(),
        value: Some(match HEXADECIMAL.contains(&name) {
            true => Value::Pointer(value),
            false => Value::Uint(value),
        }),
    }
}
