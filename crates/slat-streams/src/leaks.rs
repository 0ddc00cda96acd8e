//! Descriptors, threads and memory: what a stream must give back.

use crate::ioctls::SOON;
use std::collections::BTreeSet;
use std::fs;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

/// Streams after which the process has what it keeps for good: buffers, stacks, the allocator's pools.
const WARM: u64 = 128;
/// Bytes by which resident memory may exceed what it was then, for reasons of its own.
const SLACK: u64 = 32 << 20;
/// Bytes that a stream may leave behind on top: libFuzzer keeps some inputs.
const PER_STREAM: u64 = 16 << 10;
/// Streams between two looks at resident memory.
const EVERY: u64 = 64;

static STREAMS: AtomicU64 = AtomicU64::new(0);
static BASELINE: AtomicU64 = AtomicU64::new(0);

/// What the process had before a stream.
#[derive(Debug)]
pub struct Before {
    descriptors: BTreeSet<String>,
}

fn descriptors() -> BTreeSet<String> {
    let names = fs::read_dir("/proc/self/fd").expect("Linux has /proc/self/fd");
    let links = names.flatten().map(|entry| {
        let link = fs::read_link(entry.path()).unwrap_or_default();
        format!("{} {}", entry.file_name().display(), link.display())
    });
    // The descriptor that reads the directory is not there any more when its link is looked up, or shows the directory.
    links
        .filter(|link| !link.contains("/proc/") && !link.ends_with(' '))
        .collect()
}

/// Bytes of memory that are resident.
pub fn resident() -> u64 {
    let statm = fs::read_to_string("/proc/self/statm").expect("Linux has /proc/self/statm");
    let pages = statm
        .split(' ')
        .nth(1)
        .and_then(|pages| pages.parse::<u64>().ok());
    pages.expect("the second number is the resident pages") * 4096
}

impl Before {
    /// Looks.
    pub fn a_stream() -> Self {
        Before {
            descriptors: descriptors(),
        }
    }

    /// Panics if a stream that has ended left something over.
    pub fn check(self) {
        let left =
            || -> Vec<_> { (descriptors().difference(&self.descriptors).cloned()).collect() };
        // A VM that a thread of slat's own dropped last gives its descriptors back on that thread.
        let begin = Instant::now();
        while !left().is_empty() {
            let left = left();
            assert!(
                begin.elapsed() < SOON || left.is_empty(),
                "descriptors are left over: {left:?}"
            );
            std::thread::yield_now();
        }
        check_threads();
        let streams = STREAMS.fetch_add(1, Ordering::Relaxed) + 1;
        if streams == WARM {
            BASELINE.store(resident(), Ordering::Relaxed);
        } else if streams > WARM && streams.is_multiple_of(EVERY) {
            let (now, then) = (resident(), BASELINE.load(Ordering::Relaxed));
            let allowed = then + SLACK + (streams - WARM) * PER_STREAM;
            assert!(
                now < allowed,
                "resident memory grew from {then} to {now} bytes in {streams} streams"
            );
        }
    }
}

/// slat's own threads serve the whole process: there is one of each. Those of a stream have been joined.
fn check_threads() {
    let mut seen = BTreeSet::new();
    for task in fs::read_dir("/proc/self/task")
        .expect("Linux has /proc/self/task")
        .flatten()
    {
        let name = fs::read_to_string(task.path().join("comm")).unwrap_or_default();
        let ours = name.starts_with("slat-");
        assert!(
            !ours || seen.insert(name.clone()),
            "there are two threads {name}"
        );
    }
}
