//! Checks that after a stream its descriptors are closed, its threads have ended, and its memory is freed.

use std::collections::BTreeSet;
use std::fs;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// The time for which slat's own threads may still hold an object after the stream has closed it.
pub(crate) const SOON: Duration = Duration::from_secs(10);

/// The number of streams after which the process has allocated all that it keeps: buffers, stacks, the allocator's
/// pools.
const WARM: u64 = 128;
/// The number of bytes by which resident memory may grow after the first [`WARM`] streams, for other reasons.
const SLACK: u64 = 64 << 20;
/// The number of bytes that each stream may add, because libFuzzer keeps some inputs.
const PER_STREAM: u64 = 16 << 10;
/// The number of streams between two checks of resident memory.
const EVERY: u64 = 64;

static STREAMS: AtomicU64 = AtomicU64::new(0);
static BASELINE: AtomicU64 = AtomicU64::new(0);

/// The process's descriptors and memory before a stream.
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
    // The directory also lists the descriptor by which it is being read. When that descriptor's link is read, the
    // descriptor is already closed, or its link leads to the directory.
    links
        .filter(|link| !link.contains("/proc/") && !link.ends_with(' '))
        .collect()
}

/// Returns the number of resident bytes of this process.
pub fn resident() -> u64 {
    let statm = fs::read_to_string("/proc/self/statm").expect("Linux has /proc/self/statm");
    let pages = statm
        .split(' ')
        .nth(1)
        .and_then(|pages| pages.parse::<u64>().ok());
    pages.expect("the second number is the resident pages") * 4096
}

impl Before {
    /// Records the state of the process before a stream.
    pub fn a_stream() -> Self {
        Before {
            descriptors: descriptors(),
        }
    }

    /// Panics if a descriptor, a thread or memory of the stream still exists. Call when the stream has ended.
    pub fn check(self) {
        let left =
            || -> Vec<_> { (descriptors().difference(&self.descriptors).cloned()).collect() };
        // If one of slat's own threads is the last to drop a VM, that thread closes the VM's descriptors a little
        // later.
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

/// Checks that none of slat's own threads, which serve the whole process, exists twice. Call after the stream's threads
/// have been joined.
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
