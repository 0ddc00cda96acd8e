//! Streams: sequences of faults of a vCPU at pages near each other. They decide how many pages around it a fault looks
//! at for prefetch, and which faults look.
//!
//! A fault within [`Stream::NEAR`] pages, in either direction, of the last window of a stream continues that stream.
//! Any other fault begins a new stream, which replaces the stream that was continued longest ago. A vCPU has several
//! streams because a copy of memory, for example, makes two.
//!
//! A look that asks the platform may cost as much as ten faults. So after each look in vain, a smaller share of the
//! faults look, down to one in 64 ([`Pause`]). A look is in vain if it maps nothing, as when the guest uses memory for
//! the first time. The first look of a stream is also in vain if no later fault continues the stream, as when the
//! guest's accesses are scattered.

use core::mem::take;
use core::ops::Range;

use crate::addr::{Gfn, Granule};
use crate::platform::HostRun;
use crate::policy::Prefetch;
use crate::vm::Sequence;

/// The streams of recent faults of a vCPU, for prefetching.
#[derive(Default)]
pub(super) struct Streams {
    streams: [Stream; Self::NUMBER],
    /// The index of the stream to which the last fault belongs.
    current: usize,
    /// The number of calls of [`Streams::fault`] so far.
    faults: u64,
    /// Decides whether the first fault of a new stream looks for resident pages.
    first_looks: Pause,
}

/// A stream of faults at pages near each other. A page is a guest frame, or with the shadow MMU a virtual page.
pub(super) struct Stream {
    /// The window at which the last fault of the stream looked; if that fault did not look, only its page.
    window: Range<Gfn>,
    /// The number of pages in the adaptive window. Below [`Self::OPEN`], the window is not open yet, and faults do not
    /// look.
    size: u64,
    looked: Looked,
    /// Decides which later faults of the stream look for resident pages.
    pause: Pause,
    /// The resident pages that the platform has reported in the last window and around it.
    pub(super) resident: Option<Resident>,
    /// The value of [`Streams::faults`] at the last fault of the stream.
    last: u64,
}

/// Whether a fault of a stream has looked for resident pages, and whether that was useful.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Looked {
    /// No fault of the stream has searched its window for pages to prefetch.
    Never,
    /// A fault has searched its window for pages to prefetch, and no fault has continued the stream since.
    Once,
    /// A fault has searched its window for pages to prefetch, and a fault has continued the stream since.
    Rightly,
}

/// A run of resident pages, which the platform reported after `sequence` was read. Only one vCPU uses the run, and only
/// as long as `sequence` is current: like any fault, it checks the sequence when it installs a leaf
/// ([`crate::vm::InProgress::holds`]). So the run becomes stale when memory of a slot is invalidated, when memory is
/// converted between private and shared, or when a slot is deleted, moved or changed.
#[derive(Clone, Copy)]
pub(super) struct Resident {
    pub(super) sequence: Sequence,
    pub(super) run: HostRun,
}

/// Decides which faults look for resident pages, depending on the number of searches that found no page to map.
#[derive(Default)]
struct Pause {
    /// The number of consecutive searches that found no page to map, up to [`Self::LONGEST`].
    in_vain: u32,
    /// The number of faults that still must not look before the next look.
    left: u32,
}

impl Pause {
    /// The longest pause is 2^`LONGEST` - 1 faults.
    const LONGEST: u32 = 6;

    /// Returns whether the current fault may look; otherwise counts it as one fault of the pause.
    fn is_over(&mut self) -> bool {
        let is_over = self.left == 0;
        match is_over {
            true => self.begin(),
            false => self.left -= 1,
        }
        is_over
    }

    /// Call when it is known whether a look was in vain. Begins the next pause.
    fn learn(&mut self, in_vain: bool) {
        self.in_vain = match in_vain {
            true => (self.in_vain + 1).min(Self::LONGEST),
            false => 0,
        };
        self.begin();
    }

    fn begin(&mut self) {
        self.left = (1 << self.in_vain) - 1;
    }
}

impl Default for Stream {
    /// Returns an unused stream, which no fault continues.
    fn default() -> Self {
        Stream {
            window: Gfn(u64::MAX)..Gfn(u64::MAX),
            size: 1,
            looked: Looked::Never,
            pause: Pause::default(),
            resident: None,
            last: 0,
        }
    }
}

impl Stream {
    /// The size at which the adaptive window opens. The size begins at 1 page and doubles with each fault, so the
    /// window opens at the stream's fifth fault. Before that a stream may end soon, and a look would cost more than the
    /// faults that it saves.
    const OPEN: u64 = 16;
    /// The largest number of pages in the adaptive window: the number of entries of a 4 KiB table. Larger tables have
    /// more entries, so with any granule one table maps the window.
    const MOST: u64 = Granule::Kib4.entries() as u64;
    /// The distance in pages within which a fault continues a stream. It is above 1 because a guest may use, for
    /// example, only every second or every eighth page.
    const NEAR: u64 = 8;

    fn is_near(&self, page: Gfn) -> bool {
        let start = self.window.start.0.saturating_sub(Self::NEAR);
        let end = self.window.end.0.saturating_add(Self::NEAR);
        (start..end).contains(&page.0)
    }
}

impl Streams {
    const NUMBER: usize = 4;

    /// Call after a fault that mapped `page`. Returns the aligned window around the page if the fault is to look; then
    /// the caller must look, and call [`Self::looked`]. `None`: the fault does not look.
    pub(super) fn fault(&mut self, page: Gfn, policy: Prefetch) -> Option<Range<Gfn>> {
        self.faults += 1;
        if !self.continue_at(page) {
            self.begin();
        }
        let stream = &mut self.streams[self.current];
        stream.last = self.faults;
        let size = match policy {
            Prefetch::Off => 0,
            Prefetch::Window(pages) => Prefetch::window(pages),
            Prefetch::Adaptive if stream.size < Stream::OPEN => 0,
            Prefetch::Adaptive => stream.size,
        };
        let pause = match stream.looked {
            Looked::Never => &mut self.first_looks,
            Looked::Once | Looked::Rightly => &mut stream.pause,
        };
        if size <= 1 || !pause.is_over() {
            stream.window = page..page.add(1);
            return None;
        }
        if stream.looked == Looked::Never {
            stream.looked = Looked::Once;
        }
        let start = Gfn(page.0 & !(size - 1));
        stream.window = start..start.add(size);
        Some(stream.window.clone())
    }

    /// Continues the stream near `page`. Returns `false` if there is no such stream.
    fn continue_at(&mut self, page: Gfn) -> bool {
        let is_near = |stream: &Stream| stream.is_near(page);
        let Some(at) = self.streams.iter().position(is_near) else {
            return false;
        };
        self.current = at;
        let stream = &mut self.streams[at];
        if stream.looked == Looked::Once {
            stream.looked = Looked::Rightly;
            self.first_looks.learn(false);
        }
        if stream.size < Stream::OPEN {
            stream.size *= 2;
        }
        true
    }

    /// Begins a stream of faults, in the place of the stream that was continued longest ago.
    fn begin(&mut self) {
        let last = |at: &usize| self.streams[*at].last;
        self.current = (0..Self::NUMBER).min_by_key(last).unwrap_or(0);
        if take(self.current()).looked == Looked::Once {
            self.first_looks.learn(true);
        }
    }

    /// Returns the stream to which the last fault belongs.
    pub(super) fn current(&mut self) -> &mut Stream {
        &mut self.streams[self.current]
    }

    /// Call after the last fault has looked at its window and mapped `installed` pages.
    pub(super) fn looked(&mut self, installed: u64) {
        let stream = self.current();
        stream.pause.learn(installed == 0);
        stream.size = match installed {
            0 => Stream::OPEN,
            _ => (stream.size * 2).min(Stream::MOST),
        };
    }
}

#[cfg(test)]
mod tests {
    use std::vec::Vec;

    use super::*;

    /// Makes a fault at each of `pages`, as if all memory were resident. Returns the size of each fault's window.
    fn mapped(streams: &mut Streams, policy: Prefetch, pages: &[u64]) -> Vec<u64> {
        let mut sizes = Vec::new();
        for page in pages {
            let window = streams.fault(Gfn(*page), policy);
            if let Some(window) = &window {
                assert!(window.contains(&Gfn(*page)));
                streams.looked(1);
            }
            sizes.push(window.map_or(1, |window| window.end.0 - window.start.0));
        }
        sizes
    }

    #[test]
    fn the_adaptive_window_doubles_in_a_stream_and_a_jump_begins_another() {
        let mut streams = Streams::default();
        let mut sizes = |pages: &[u64]| mapped(&mut streams, Prefetch::Adaptive, pages);
        assert_eq!(sizes(&[0, 1, 2, 3, 4, 16, 32]), [1, 1, 1, 1, 16, 32, 64]);
        assert_eq!(sizes(&[64, 128, 256, 512]), [128, 256, 512, 512]);
        // A second stream, with descending pages, alternates with the first stream, which continues.
        let turns = [9007, 1024, 9006, 1536, 9005, 2048, 9004, 2560, 9003];
        assert_eq!(sizes(&turns), [1, 512, 1, 512, 1, 512, 1, 512, 16]);
        assert_eq!(sizes(&[8991, 3072]), [32, 512]);
    }

    #[test]
    fn each_of_as_many_streams_as_are_remembered_goes_on() {
        let mut streams = Streams::default();
        for round in 0..4 {
            for stream in 0..Streams::NUMBER as u64 {
                let page = (stream << 20) + round * 8;
                assert_eq!(mapped(&mut streams, Prefetch::Window(8), &[page]), [8]);
            }
        }
        assert_eq!(streams.first_looks.in_vain, 0);
    }

    #[test]
    fn windows_without_anything_to_map_are_looked_at_less_and_less() {
        let mut streams = Streams::default();
        let mut looks = 0;
        for page in 0..640 {
            if streams.fault(Gfn(page), Prefetch::Window(8)).is_some() {
                looks += 1;
                streams.looked(0);
            }
        }
        assert!((10..20).contains(&looks), "{looks} looks");
        streams.current().pause.left = 0;
        assert_eq!(
            mapped(&mut streams, Prefetch::Window(8), &[640, 648]),
            [8, 8]
        );
    }

    #[test]
    fn faults_at_random_look_less_and_less_until_a_stream_goes_on() {
        let mut streams = Streams::default();
        let pages: Vec<u64> = (1..640).map(|n| n << 20).collect();
        let sizes = mapped(&mut streams, Prefetch::Window(8), &pages);
        let looks = sizes.iter().filter(|size| **size > 1).count();
        assert!((10..24).contains(&looks), "{looks} looks");
        // Now let the next fault look. Its stream continues, so its look was not in vain, and the pauses end.
        streams.first_looks.left = 0;
        assert_eq!(
            mapped(&mut streams, Prefetch::Window(8), &[0, 8, 1 << 40]),
            [8, 8, 8]
        );
    }
}
