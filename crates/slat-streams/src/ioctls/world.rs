//! The world of a stream of requests: KVM objects with their descriptors, and the memory of the guests.

use crate::memory::{Guarded, PAGE, Reserved, fill, first_touched};
use slat_kvm::ioctl::{Answer, Object};
use slat_model::Rng;
use std::ops::Range;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The number of pages of guest memory.
pub const PAGES: usize = 256;
/// The number of bytes of inaccessible address space after the guest memory. It is large, because a slot may be far
/// larger than its memory.
const BEYOND: usize = 1 << 40;
/// The maximum number of objects of one kind. When one more is added, the oldest object is closed.
const MOST: usize = 4;

/// An object of KVM's API and its descriptor.
#[derive(Debug)]
pub struct Handle {
    /// The object to which the descriptor refers.
    pub object: Object,
    /// The object's descriptor. Other lanes may use it, so it is closed only when the last lane has dropped this
    /// handle.
    pub fd: OwnedFd,
    /// The client's mapping of a vCPU.
    pub mapped: Option<Reserved>,
    /// Whether a lane runs the vCPU. A second lane must not run it at the same time, because it would wait for the vCPU
    /// and miss its own kick.
    pub runs: AtomicBool,
}

/// Maps a vCPU's descriptor, as a client does. `None`: the object is not a vCPU.
fn map_vcpu(object: &Object, fd: &OwnedFd) -> Option<Reserved> {
    let Object::Vcpu(vcpu) = object else {
        return None;
    };
    // SAFETY: all-zero is a valid `stat`, and the call fills in the struct.
    let len = unsafe {
        let mut stat: libc::stat = std::mem::zeroed();
        assert_eq!(libc::fstat(fd.as_raw_fd(), &mut stat), 0);
        stat.st_size as usize
    };
    let rights = libc::PROT_READ | libc::PROT_WRITE;
    vcpu.check_mapping(0, len, rights, libc::MAP_SHARED)
        .expect("the whole of it can be mapped");
    // SAFETY: the mapping is new, and `complete_mapping` replaces one page of it, the coalesced ring.
    unsafe {
        let start = libc::mmap(
            std::ptr::null_mut(),
            len,
            rights,
            libc::MAP_SHARED,
            fd.as_raw_fd(),
            0,
        );
        assert_ne!(start, libc::MAP_FAILED);
        let start = start as usize;
        vcpu.complete_mapping(start, len, 0)
            .expect("room for a mapping");
        Some(Reserved::owning(start..start + len))
    }
}

/// The handles of one kind of object, which all lanes use.
#[derive(Debug, Default)]
pub struct Handles(Mutex<Vec<Arc<Handle>>>);

impl Handles {
    fn lock(&self) -> MutexGuard<'_, Vec<Arc<Handle>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns one of the handles.
    pub fn pick(&self, rng: &mut Rng) -> Option<Arc<Handle>> {
        let handles = self.lock();
        let index = rng.below(MOST as u64) as usize;
        (!handles.is_empty()).then(|| handles[index % handles.len()].clone())
    }

    /// Adds a handle. If there are too many, returns the handle that was removed. Its descriptor is closed when it is
    /// dropped.
    fn add(&self, handle: Handle) -> Option<Arc<Handle>> {
        let mut handles = self.lock();
        handles.push(Arc::new(handle));
        (handles.len() > MOST).then(|| handles.remove(0))
    }

    /// Removes and returns a handle.
    pub fn take(&self, rng: &mut Rng) -> Option<Arc<Handle>> {
        let index = rng.below(MOST as u64) as usize;
        let mut handles = self.lock();
        (!handles.is_empty())
            .then(|| index % handles.len())
            .map(|index| handles.remove(index))
    }
}

/// All objects and memory of a stream.
#[derive(Debug)]
pub struct World {
    /// VMs.
    pub vms: Handles,
    /// vCPUs of the VMs.
    pub vcpus: Handles,
    /// Statistics, guest_memfds and devices.
    pub others: Handles,
    /// Eventfds. The counter of the last one is full, so that a write to it would block.
    events: Vec<OwnedFd>,
    /// The memory that backs slots.
    pub ram: Ram,
}

/// The number of eventfds of a world.
const EVENTS: usize = 4;

fn eventfd(full: bool) -> OwnedFd {
    // SAFETY: the call makes a descriptor, which no other code owns.
    let event = unsafe {
        let fd = libc::eventfd(0, libc::EFD_CLOEXEC);
        assert!(fd >= 0, "eventfd");
        OwnedFd::from_raw_fd(fd)
    };
    if full {
        let most = (u64::MAX - 1).to_ne_bytes();
        // SAFETY: the array is live, and has 8 bytes.
        let written = unsafe { libc::write(event.as_raw_fd(), most.as_ptr().cast(), most.len()) };
        assert_eq!(written, 8);
    }
    event
}

impl World {
    /// Returns the descriptor number of one of the eventfds.
    pub fn event(&self, rng: &mut Rng) -> i32 {
        self.events[rng.below(EVENTS as u64) as usize].as_raw_fd()
    }

    /// Signals an eventfd whose counter is not full.
    pub fn signal(&self, rng: &mut Rng) {
        let one = 1u64.to_ne_bytes();
        let fd = self.events[rng.below(EVENTS as u64 - 1) as usize].as_raw_fd();
        // SAFETY: the array is live, and has 8 bytes.
        unsafe { libc::write(fd, one.as_ptr().cast(), one.len()) };
    }

    /// Makes a world without objects. [`fill`] has filled its memory with the pattern.
    pub fn new() -> Self {
        World {
            vms: Handles::default(),
            vcpus: Handles::default(),
            others: Handles::default(),
            events: (1..=EVENTS)
                .map(|number| eventfd(number == EVENTS))
                .collect(),
            ram: Ram::new(),
        }
    }

    /// Adds the object that a request has created to the handles. Returns the request's result.
    pub fn adopt(&self, answer: Answer) -> i32 {
        match answer {
            Answer::Value(value) => value,
            // The kernel serves such requests itself; they change only the descriptor, and return 0.
            Answer::Kernels => 0,
            Answer::Created(object, fd) | Answer::Stored(object, fd) => {
                let number = fd.as_raw_fd();
                let mapped = map_vcpu(&object, &fd);
                let handles = match object {
                    Object::Vm(_) => &self.vms,
                    Object::Vcpu(_) => &self.vcpus,
                    _ => &self.others,
                };
                drop(handles.add(Handle {
                    object,
                    fd,
                    mapped,
                    runs: AtomicBool::new(false),
                }));
                number
            }
        }
    }
}

impl Default for World {
    fn default() -> Self {
        Self::new()
    }
}

/// The guest memory: a few pages, and then a large inaccessible range of addresses. Before and after both there are
/// canaries, pages that must not be written.
#[derive(Debug)]
pub struct Ram {
    before: Guarded,
    all: Reserved,
    after: Guarded,
    /// Whether each page was given to a guest, or its mapping was changed by the client.
    given: [AtomicBool; PAGES],
}

impl Ram {
    fn new() -> Self {
        let ram = Ram {
            before: Guarded::new(PAGE),
            all: Reserved::new(PAGES * PAGE + BEYOND),
            after: Guarded::new(PAGE),
            given: [const { AtomicBool::new(false) }; PAGES],
        };
        ram.all.open(0, PAGES * PAGE);
        // SAFETY: the memory is new.
        unsafe { fill(ram.pages(0, PAGES)) };
        ram
    }

    /// Returns the addresses of `count` pages from page `first` on.
    pub fn pages(&self, first: usize, count: usize) -> Range<usize> {
        let start = self.all.start() + first * PAGE;
        start..start + count * PAGE
    }

    /// Returns the address at which a slot is backed if a request says `address`, so that a guest cannot change other
    /// memory of this process.
    pub fn harmless(&self, address: u64, size: u64) -> u64 {
        let all = self.all.range();
        let end = address.checked_add(size);
        let ours = end.is_some_and(|end| address >= all.start as u64 && end <= all.end as u64);
        // No memory is ever mapped at these addresses, so they are harmless.
        let nowhere = end.is_some_and(|end| end <= 0x1_0000) || address >= 1 << 47;
        match ours || nowhere || size == 0 {
            true => address,
            false if size <= BEYOND as u64 => all.start as u64 + address % (PAGES * PAGE) as u64,
            false => 1 << 47,
        }
    }

    /// Records that `range` may be written. Call before the guest or another thread may write to `range`.
    pub fn give(&self, range: Range<u64>) {
        let page = |address: u64| {
            (address.saturating_sub(self.all.start() as u64) as usize / PAGE).min(PAGES)
        };
        let last = page(range.end.saturating_add(PAGE as u64 - 1));
        for given in self.given.get(page(range.start)..last).unwrap_or_default() {
            given.store(true, Ordering::Relaxed);
        }
    }

    /// Writes `bytes` to the beginning of a page.
    pub fn write(&self, page: usize, bytes: &[u8]) {
        let range = self.pages(page, 1);
        self.give(range.start as u64..range.end as u64);
        // The write may fail, because a lane may have unmapped the page.
        let _ = slat_kvm::user::write_slice(range.start as u64, bytes);
    }

    /// Panics if a page was written that was never given to a guest.
    pub fn check(&self) {
        self.before.check();
        self.after.check();
        for page in (0..PAGES).filter(|page| !self.given[*page].load(Ordering::Relaxed)) {
            // SAFETY: `given` is set before a page's mapping is changed, and it is not set for this page. So the page
            // is still mapped.
            let touched = unsafe { first_touched(self.pages(page, 1)) };
            if let Some(at) = touched {
                panic!("{at:#x} in page {page}, which no slot has, was written");
            }
        }
    }
}
