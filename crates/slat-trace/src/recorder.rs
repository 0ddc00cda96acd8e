//! The trace file of this process, and the code by which a tracepoint writes to the file.

use crate::Selection;
use crate::clock::{Moment, cycles};
use crate::layout::*;
use crate::points::Point;
use slat_process::calls::{Call, is_any_forbidden, make, raw, result};
use slat_process::file_size::limited;
use slat_process::forks::{Birth, PerProcess, traced};
use std::cell::Cell;
use std::ffi::{CStr, CString};
use std::io;
use std::marker::PhantomData;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::ptr::NonNull;
use std::str::FromStr;
use std::sync::atomic::{AtomicU64, Ordering::*, fence};
use std::sync::{Mutex, OnceLock, PoisonError};

/// The number of rings for which a file has space.
const MOST_RINGS: u64 = 256;
/// The number of rings allocated at the start: for slat's own threads, and for threads of the program that run no vCPU.
const FIRST_RINGS: u64 = 8;

/// The error when the disk is full.
const FULL: &str =
    "no space is left for its first rings: free some, or give a smaller --trace-buffer";

/// The size of a thread's ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Buffer {
    mebibytes: u32,
}

impl Buffer {
    const SIZES: std::ops::RangeInclusive<u32> = 1..=1024;

    fn ring_bytes(self) -> u64 {
        u64::from(self.mebibytes) << 20
    }
}

impl Default for Buffer {
    fn default() -> Self {
        Buffer { mebibytes: 4 }
    }
}

impl std::fmt::Display for Buffer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.mebibytes.fmt(f)
    }
}

impl FromStr for Buffer {
    /// A message that says which values are accepted.
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.parse() {
            Ok(mebibytes) if Self::SIZES.contains(&mebibytes) => Ok(Buffer { mebibytes }),
            _ => Err("give mebibytes, from 1 to 1024".to_owned()),
        }
    }
}

/// The mapped file.
struct Mapped {
    start: NonNull<u8>,
    ring_bytes: u64,
    /// The lock that is held while rings are allocated.
    allocating: Mutex<()>,
}

// SAFETY: the mapping lives as long as the process. Everything in it that threads share is atomic; a ring
// belongs to one thread.
unsafe impl Send for Mapped {}
// SAFETY: the mapping lives as long as the process. Everything in it that threads share is atomic; a ring belongs to
// one thread.
unsafe impl Sync for Mapped {}

static MAPPED: PerProcess<OnceLock<Mapped>> = PerProcess::new();

/// Writes a record if the tracepoint is selected. Calls `values` only then. Otherwise the cost is one relaxed load.
#[inline(always)]
pub fn point<P: Point>(values: impl FnOnce() -> P) {
    if traced().load(Relaxed) >> P::ID & 1 != 0 {
        record(values());
    }
}

/// The ring of a thread.
#[derive(Clone, Copy)]
struct Claimed {
    /// The process for which the ring is valid. A forked child cannot use the ring, because the child has another file.
    birth: Birth,
    /// The ring, which is valid as long as the process lives.
    ring: NonNull<Ring>,
    /// The number of records that fit into the ring.
    capacity: u64,
}

thread_local! {
    static CLAIMED: Cell<Option<Claimed>> = const { Cell::new(None) };
    /// The VM and the vCPU that this thread runs.
    static RUNS: Cell<(u16, u32)> = const { Cell::new((0, NO_VCPU)) };
    /// The name of this thread, if it is slat's own.
    static NAME: Cell<&'static CStr> = const { Cell::new(c"") };
}

/// Writes a record to the ring of this thread.
#[cold]
#[inline(never)]
fn record<P: Point>(values: P) {
    let claimed = match CLAIMED.get() {
        Some(claimed) if claimed.birth.is_here() => claimed,
        _ => match claim() {
            Some(claimed) => claimed,
            None => return,
        },
    };
    let (vm, vcpu) = RUNS.get();
    // SAFETY: `claim` has returned a ring of this process, in a mapping that is never unmapped.
    let ring = unsafe { claimed.ring.as_ref() };
    let at = ring.next.load(Relaxed);
    // The fence orders the last store of the head before the stores of this record, which may overwrite an older
    // record. So a reader that has read bytes of the new record finds by the head that the older record is lost.
    fence(Release);
    // SAFETY: the ring has `capacity` records after its header, and `at` is less. Only this thread, which claimed the
    // ring, writes to the records, and no thread of this process reads them. The values fit into a record: `points`
    // asserts this.
    unsafe {
        let records = claimed.ring.cast::<u8>().add(RING_HEADER_BYTES);
        let record = records.cast::<Record>().add(at as usize).as_ptr();
        (&raw mut (*record).cycles).write(cycles());
        (&raw mut (*record).point).write(P::ID as u16);
        (&raw mut (*record).vm).write(vm);
        (&raw mut (*record).vcpu).write(vcpu);
        (&raw mut (*record).values)
            .cast::<P>()
            .write_unaligned(values);
    }
    let next = if at + 1 == claimed.capacity {
        0
    } else {
        at + 1
    };
    ring.next.store(next, Relaxed);
    let count = &ring.counts[P::ID];
    count.store(count.load(Relaxed) + 1, Relaxed);
    // The head moves after the record is written. So even if the process is killed, a reader sees only complete
    // records.
    ring.head.store(ring.head.load(Relaxed) + 1, Release);
}

/// Gives this thread a ring. `None`: no ring is left; the record is lost, and the loss is counted.
fn claim() -> Option<Claimed> {
    // The fence follows the relaxed load by which `point` found the tracepoint selected. The thread that selected the
    // tracepoint had published the file before.
    fence(Acquire);
    let mapped = MAPPED.peek()?.get()?;
    let header = mapped.header();
    let next = |claimed| (claimed < header.allocated.load(Acquire)).then_some(claimed + 1);
    let Ok(index) = header.claimed.fetch_update(Relaxed, Relaxed, next) else {
        header.lost.fetch_add(1, Relaxed);
        return None;
    };
    let claimed = Claimed {
        birth: Birth::here(),
        ring: mapped.ring(index).cast(),
        capacity: capacity(mapped.ring_bytes),
    };
    // SAFETY: the ring is allocated, in a mapping that is never unmapped.
    let ring = unsafe { claimed.ring.as_ref() };
    ring.tid.store(slat_process::thread_id() as u32, Relaxed);
    let name = NAME.get().to_bytes();
    for (word, bytes) in ring.name.iter().zip(name.chunks(8)) {
        let mut whole = [0; 8];
        whole[..bytes.len()].copy_from_slice(bytes);
        word.store(u64::from_le_bytes(whole), Relaxed);
    }
    CLAIMED.set(Some(claimed));
    Some(claimed)
}

/// Sets the name of this thread in the file. Call at the start of each of slat's own threads.
pub fn name_thread(name: &'static CStr) {
    NAME.set(name);
}

/// While this guard lives, records of this thread name a vCPU.
#[must_use]
pub struct OnVcpu {
    before: (u16, u32),
    _of_thread: PhantomData<*const ()>,
}

/// Makes records of this thread name the vCPU `id` of the VM `vm`, until the returned guard is dropped. `None`: this
/// process records nothing.
#[inline]
pub fn run_vcpu(vm: u64, id: u32) -> Option<OnVcpu> {
    (traced().load(Relaxed) != 0).then(|| OnVcpu {
        before: RUNS.replace((vm as u16, id)),
        _of_thread: PhantomData,
    })
}

/// Returns the id of the vCPU that this thread runs.
pub fn vcpu() -> Option<u32> {
    let (_, id) = RUNS.get();
    (id != NO_VCPU).then_some(id)
}

impl Drop for OnVcpu {
    fn drop(&mut self) {
        RUNS.set(self.before);
    }
}

/// Begins to record the tracepoints in `selected` in this process, unless the process records already. Makes a new file
/// at `path`; if another process has a file there, the new file's name is `path`, a dot and this process's id. The ring
/// of each thread has the size `buffer`. Returns the path of the new file; `None` if the process records already.
///
/// # Errors
/// The system's error: the file cannot be made or mapped, or there is no space for the first rings.
pub fn begin(path: &Path, selected: Selection, buffer: Buffer) -> io::Result<Option<PathBuf>> {
    let slot = MAPPED.get();
    if slot.get().is_some() {
        return Ok(None);
    }
    let start = Moment::now();
    let (path, file) = create(path)?;
    let mapped = Mapped::new(&file, buffer.ring_bytes())
        .and_then(|mapped| {
            (0..FIRST_RINGS)
                .try_for_each(|_| mapped.allocate())
                .map(|()| mapped)
        })
        .inspect_err(|_| remove(&path))?;
    mapped.describe(selected, start);
    if slot.set(mapped).is_ok() {
        // The fence of `claim` belongs to this release: a thread that finds a tracepoint selected finds the file.
        traced().store(selected.0, Release);
    }
    Ok(Some(path))
}

/// Allocates one more ring, for the thread of a new vCPU. No ring is added if there is no space, or if a seccomp filter
/// of the program forbids the system calls. Then a thread may find no ring; the records of such a thread are lost, and
/// counted.
pub fn add_ring() {
    if let Some(mapped) = MAPPED.peek().and_then(|mapped| mapped.get()) {
        mapped.mark_time();
        if !is_any_forbidden() {
            let _ = mapped.allocate();
        }
    }
}

/// Stores the current time in the file. The later the last stored time is, the more precise are the
/// times of the records.
pub fn mark_time() {
    if let Some(mapped) = MAPPED.peek().and_then(|mapped| mapped.get()) {
        mapped.mark_time();
    }
}

/// An open file. Dropping this value closes the file.
struct File(usize);

impl Drop for File {
    fn drop(&mut self) {
        // SAFETY: only this value owns the descriptor. An error changes nothing.
        let _ = unsafe { make(Call::Close, [self.0, 0, 0, 0, 0, 0]) };
    }
}

/// Makes the trace file: at `path`, or, if that exists, at `path` with the process's id appended.
fn create(path: &Path) -> io::Result<(PathBuf, File)> {
    match open_new(path) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
            let mut own = path.as_os_str().to_owned();
            own.push(format!(".{}", std::process::id()));
            let own = PathBuf::from(own);
            let file = open_new(&own)?;
            Ok((own, file))
        }
        opened => Ok((path.to_owned(), opened?)),
    }
}

/// Removes a file that did not become a trace. An error does not matter, because the next run makes a new file.
fn remove(path: &Path) {
    if let Ok(path) = CString::new(path.as_os_str().as_bytes()) {
        let arguments = [libc::AT_FDCWD as usize, path.as_ptr() as usize, 0, 0, 0, 0];
        // SAFETY: the path ends with NUL.
        let _ = unsafe { call(libc::SYS_unlinkat, arguments) };
    }
}

fn open_new(path: &Path) -> io::Result<File> {
    let path = CString::new(path.as_os_str().as_bytes())?;
    let flags = libc::O_RDWR | libc::O_CREAT | libc::O_EXCL | libc::O_CLOEXEC;
    let arguments = [
        libc::AT_FDCWD as usize,
        path.as_ptr() as usize,
        flags as usize,
        0o600,
        0,
        0,
    ];
    // SAFETY: the path ends with NUL.
    let opened = unsafe { make(Call::Open, arguments) };
    Ok(File(opened.map_err(io::Error::from_raw_os_error)? as usize))
}

/// Makes a system call directly, not by a function of the C library: the preload library would take the call of such a
/// function for a call of the program.
///
/// # Safety
/// The arguments are valid for the system call `number`.
unsafe fn call(number: i64, arguments: [usize; 6]) -> io::Result<usize> {
    // SAFETY: the arguments are valid for the system call, as this function's contract requires.
    let answer = result(unsafe { raw(number, arguments) });
    answer
        .map(|value| value as usize)
        .map_err(io::Error::from_raw_os_error)
}

impl Mapped {
    /// Gives the file its greatest length, and maps the file.
    fn new(file: &File, ring_bytes: u64) -> io::Result<Self> {
        let bytes = HEADER_BYTES + (MOST_RINGS * ring_bytes) as usize;
        let protection = (libc::PROT_READ | libc::PROT_WRITE) as usize;
        // SAFETY: the descriptor is our own. The file is extended, and mapped at a free address.
        let start = unsafe {
            limited(|| call(libc::SYS_ftruncate, [file.0, bytes, 0, 0, 0, 0]))?;
            let flags = libc::MAP_SHARED as usize;
            call(libc::SYS_mmap, [0, bytes, protection, flags, file.0, 0])?
        };
        let mapped = Mapped {
            start: NonNull::new(start as *mut u8).ok_or(io::ErrorKind::AddrNotAvailable)?,
            ring_bytes,
            allocating: Mutex::new(()),
        };
        mapped.populate(mapped.start, HEADER_BYTES)?;
        Ok(mapped)
    }

    fn header(&self) -> &Header {
        // SAFETY: the mapping begins with the header, whose parts are all atomics.
        unsafe { self.start.cast().as_ref() }
    }

    fn ring(&self, index: u64) -> NonNull<u8> {
        // SAFETY: the file has space for `MOST_RINGS`, and `allocate` allows no more.
        unsafe { (self.start).add(HEADER_BYTES + (index * self.ring_bytes) as usize) }
    }

    /// Allocates pages of the file, so that stores to these pages find space on the disk, and cause no fault.
    fn populate(&self, start: NonNull<u8>, bytes: usize) -> io::Result<()> {
        let advice = libc::MADV_POPULATE_WRITE as usize;
        // SAFETY: the pages belong to the mapping, and their contents stay.
        let populated = unsafe {
            call(
                libc::SYS_madvise,
                [start.as_ptr() as usize, bytes, advice, 0, 0, 0],
            )
        };
        match populated {
            // EFAULT means that no space is left on the disk, and a store would cause a SIGBUS.
            Err(error) if error.raw_os_error() == Some(libc::EFAULT) => {
                Err(io::Error::new(io::ErrorKind::StorageFull, FULL))
            }
            populated => populated.map(drop),
        }
    }

    /// Allocates the next ring.
    fn allocate(&self) -> io::Result<()> {
        let _alone = (self.allocating.lock()).unwrap_or_else(PoisonError::into_inner);
        let index = self.header().allocated.load(Relaxed);
        if index == MOST_RINGS {
            return Err(io::ErrorKind::StorageFull.into());
        }
        self.populate(self.ring(index), self.ring_bytes as usize)?;
        self.header().allocated.store(index + 1, Release);
        Ok(())
    }

    /// Fills the header.
    fn describe(&self, selected: Selection, start: Moment) {
        let (header, text) = (self.header(), text());
        assert!(TEXT_AT + text.len() <= HEADER_BYTES, "{} bytes", text.len());
        // SAFETY: the header's pages have space for the text, and no other thread knows of them yet.
        unsafe {
            let to = self.start.as_ptr().add(TEXT_AT);
            to.copy_from_nonoverlapping(text.as_ptr(), text.len());
        }
        header.text_bytes.store(text.len() as u64, Relaxed);
        header.version.store(VERSION, Relaxed);
        header.pid.store(std::process::id(), Relaxed);
        header.ring_bytes.store(self.ring_bytes, Relaxed);
        header.selected.store(selected.0, Relaxed);
        store(&header.start, start);
        self.mark_time();
        header.magic.store(MAGIC, Release);
    }

    fn mark_time(&self) {
        store(&self.header().latest, Moment::now());
    }
}

fn store([cycles, ns]: &[AtomicU64; 2], moment: Moment) {
    cycles.store(moment.cycles, Relaxed);
    ns.store(moment.ns, Relaxed);
}
