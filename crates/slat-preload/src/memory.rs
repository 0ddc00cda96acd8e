//! Changes of the program's memory mappings: KVM's MMU notifiers.
//!
//! Each call runs inside an invalidation of its range in every VM, and afterwards, still inside, the port is told that the
//! kernel has to be asked anew. What slat itself maps is none of the guests' memory and passes by.

use crate::files::interpose;
use crate::guarded::guarded;
use crate::real::{call, raw, set_errno};
use crate::table;
use slat_host::mappings;
use slat_kvm::ioctl::Object;
use slat_kvm::notify;
use slat_kvm::thread::Inside;
use std::ffi::{c_int, c_void};
use std::io::BufRead;
use std::os::fd::FromRawFd;

/// A range of addresses, rounded to whole pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Range {
    start: usize,
    end: usize,
}

impl Range {
    const PAGE: usize = 4096;

    /// `len` bytes from `start` on. A range that wraps around is empty: the kernel refuses it.
    pub fn at(start: usize, len: usize) -> Self {
        let end = start
            .checked_add(len)
            .and_then(|end| end.checked_next_multiple_of(Self::PAGE));
        Range {
            start: start & !(Self::PAGE - 1),
            end: end.unwrap_or(0),
        }
    }

    fn is_empty(self) -> bool {
        self.start >= self.end
    }

    fn std(self) -> std::ops::Range<usize> {
        self.start..self.end.max(self.start)
    }
}

/// Whether a call is slat's own: its memory is no guest's.
fn passes_by() -> bool {
    Inside::now()
}

/// Runs `change` inside an invalidation of all the ranges.
pub fn around(ranges: &[Range], change: impl FnOnce() -> isize) -> isize {
    around_then(ranges, change, |_| {})
}

/// The same; `told` runs after the change, still inside, when it succeeded.
fn around_then(
    ranges: &[Range],
    change: impl FnOnce() -> isize,
    told: impl FnOnce(isize),
) -> isize {
    if passes_by() {
        return change();
    }
    let ranges: Vec<_> = ranges
        .iter()
        .filter(|range| !range.is_empty())
        .map(|range| range.std())
        .collect();
    notify::around_all(&ranges, || {
        let result = change();
        if result != -1 {
            let before = crate::real::errno();
            let _inside = Inside::enter();
            told(result);
            crate::real::set_errno(before);
        }
        result
    })
}

/// userfaultfd has been registered for a range: pages arrive one by one there.
pub fn fault_handled(range: Range, change: impl FnOnce() -> isize) -> isize {
    around_then(&[range], change, |_| {
        mappings::advised(range.std(), mappings::HugePages::Unwanted)
    })
}

/// The vCPU of this process whose descriptor is to be mapped, if it is one.
fn mapped_vcpu(fd: c_int, flags: c_int) -> Option<table::Handle> {
    if flags & libc::MAP_ANONYMOUS != 0 || passes_by() {
        return None;
    }
    table::get(fd).filter(|handle| {
        matches!(handle.object(), Object::Vcpu(_)) && !handle.object().is_foreign()
    })
}

/// The private guest memory that a descriptor stands for, if it does.
fn private_memory(fd: c_int) -> Option<table::Handle> {
    table::get(fd).filter(|handle| matches!(handle.object(), Object::GuestMemfd(_)))
}

/// mmap, by name or through `syscall`.
///
/// # Safety
/// As for `mmap`.
pub unsafe fn map(
    address: usize,
    len: usize,
    protection: c_int,
    flags: c_int,
    fd: c_int,
    offset: i64,
) -> isize {
    // SAFETY: the caller's.
    let change = || unsafe { call!(libc::SYS_mmap, address, len, protection, flags, fd, offset) };
    let replaces = flags & libc::MAP_FIXED != 0;
    let range = Range::at(address, if replaces { len } else { 0 });
    if flags & libc::MAP_ANONYMOUS == 0 && !passes_by() && private_memory(fd).is_some() {
        set_errno(libc::ENODEV);
        return -1;
    }
    let handle = mapped_vcpu(fd, flags);
    let vcpu = handle.as_ref().and_then(|handle| match handle.object() {
        Object::Vcpu(vcpu) => Some(vcpu),
        _ => None,
    });
    if let Some(vcpu) = vcpu
        && let Err(error) = vcpu.check_mapping(offset as u64, len, protection, flags)
    {
        set_errno(error.errno());
        return -1;
    }
    around_then(&[range], change, |address| {
        mappings::changed(Range::at(address as usize, len).std());
        if let Some(vcpu) = vcpu {
            // SAFETY: this is the mapping that was just made. Should the host have no room for another mapping, the client sees
            // an empty ring.
            let _ = unsafe { vcpu.show_coalesced(address as usize, len, offset as u64) };
        }
    })
}

/// munmap.
///
/// # Safety
/// As for `munmap`.
pub unsafe fn unmap(address: usize, len: usize) -> isize {
    let range = Range::at(address, len);
    // SAFETY: the caller's.
    let change = || unsafe { call!(libc::SYS_munmap, address, len) };
    around_then(&[range], change, |_| mappings::changed(range.std()))
}

/// mremap.
///
/// # Safety
/// As for `mremap`.
pub unsafe fn remap(address: usize, old_len: usize, len: usize, flags: c_int, to: usize) -> isize {
    let old = Range::at(address, old_len);
    let new = Range::at(
        to,
        if flags & libc::MREMAP_FIXED != 0 {
            len
        } else {
            0
        },
    );
    // SAFETY: the caller's.
    let change = || unsafe { call!(libc::SYS_mremap, address, old_len, len, flags, to) };
    around_then(&[old, new], change, |address| {
        mappings::changed(old.std());
        mappings::changed(Range::at(address as usize, len).std());
    })
}

/// madvise.
///
/// # Safety
/// As for `madvise`.
pub unsafe fn advise(address: usize, len: usize, advice: c_int) -> isize {
    const MADV_DONTNEED_LOCKED: c_int = 24;
    let range = Range::at(address, len);
    // SAFETY: the caller's.
    let change = || unsafe { call!(libc::SYS_madvise, address, len, advice) };
    match advice {
        libc::MADV_HUGEPAGE => around_then(&[range], change, |_| {
            mappings::advised(range.std(), mappings::HugePages::Wanted)
        }),
        libc::MADV_NOHUGEPAGE => around_then(&[range], change, |_| {
            mappings::advised(range.std(), mappings::HugePages::Unwanted)
        }),
        libc::MADV_DONTNEED
        | libc::MADV_FREE
        | libc::MADV_REMOVE
        | libc::MADV_HWPOISON
        | MADV_DONTNEED_LOCKED => around(&[range], change),
        _ => change(),
    }
}

/// mprotect and pkey_mprotect.
///
/// # Safety
/// As for `mprotect`.
pub unsafe fn protect(
    number: i64,
    address: usize,
    len: usize,
    protection: c_int,
    key: c_int,
) -> isize {
    // SAFETY: the caller's.
    let change = || unsafe { call!(number, address, len, protection, key) };
    around_then(&[Range::at(address, len)], change, |_| {
        mappings::protected()
    })
}

/// A change of a file: whatever maps it changes with it.
fn around_file(fd: c_int, change: impl FnOnce() -> isize) -> isize {
    if passes_by() || notify::live().is_empty() {
        return change();
    }
    let ranges = {
        let before = crate::real::errno();
        let _inside = Inside::enter();
        let ranges = mapped_from(fd).unwrap_or_default();
        crate::real::set_errno(before);
        ranges
    };
    around(&ranges, change)
}

/// Where the file behind a descriptor is mapped in this process.
fn mapped_from(fd: c_int) -> Option<Vec<Range>> {
    // SAFETY: all-zero is a valid `stat`.
    let mut stat: libc::stat = unsafe { std::mem::zeroed() };
    // SAFETY: a struct to fill in.
    if unsafe {
        raw(
            libc::SYS_fstat,
            [fd as usize, &raw mut stat as usize, 0, 0, 0, 0],
        )
    } != 0
    {
        return None;
    }
    let device = format!(
        "{:02x}:{:02x}",
        libc::major(stat.st_dev),
        libc::minor(stat.st_dev)
    );
    let file = (device, stat.st_ino.to_string());
    let maps = maps()?.into_iter().filter(|map| map.file == file);
    Some(maps.map(|map| map.range).collect())
}

/// The whole of a System V segment that is attached at an address: what `shmdt` takes away. Empty if nothing is.
fn attached_at(address: usize) -> Range {
    let mut whole = Range::at(address, 0);
    let maps = maps().unwrap_or_default();
    let mut maps = maps
        .iter()
        .skip_while(|map| map.range.start != whole.start)
        .peekable();
    let file = maps.peek().map(|map| &map.file);
    for map in maps.take_while(|map| Some(&map.file) == file) {
        if map.range.start != whole.end.max(whole.start) {
            break;
        }
        whole.end = map.range.end;
    }
    whole
}

/// A line of `/proc/self/maps`.
struct Map {
    range: Range,
    /// Device and inode, as they are written there.
    file: (String, String),
}

/// The mappings of this process, in order.
fn maps() -> Option<Vec<Map>> {
    // SAFETY: a constant path; the descriptor is new and ours.
    let maps = unsafe {
        let flags = (libc::O_RDONLY | libc::O_CLOEXEC) as usize;
        let fd = raw(
            libc::SYS_openat,
            [
                libc::AT_FDCWD as usize,
                c"/proc/self/maps".as_ptr() as usize,
                flags,
                0,
                0,
                0,
            ],
        );
        if fd < 0 {
            return None;
        }
        std::fs::File::from_raw_fd(fd as c_int)
    };
    let mut found = Vec::new();
    for line in std::io::BufReader::new(maps).lines().map_while(Result::ok) {
        // address perms offset device inode path
        let mut words = line.split_ascii_whitespace();
        let address = words.next()?;
        let (device, inode) = (words.nth(2)?, words.next()?);
        let (start, end) = address.split_once('-')?;
        let start = usize::from_str_radix(start, 16).ok()?;
        let end = usize::from_str_radix(end, 16).ok()?;
        found.push(Map {
            range: Range::at(start, end - start),
            file: (device.to_owned(), inode.to_owned()),
        });
    }
    Some(found)
}

/// shmdt.
///
/// # Safety
/// As for `shmdt`.
pub unsafe fn detach(address: usize) -> isize {
    // SAFETY: the caller's.
    let change = || unsafe { call!(libc::SYS_shmdt, address) };
    if passes_by() || notify::live().is_empty() {
        return change();
    }
    let range = {
        let before = crate::real::errno();
        let _inside = Inside::enter();
        let range = attached_at(address);
        set_errno(before);
        range
    };
    around_then(&[range], change, |_| mappings::changed(range.std()))
}

/// shmat. What SHM_REMAP replaces is told afterwards only: how much it is the kernel alone knows before.
///
/// # Safety
/// As for `shmat`.
pub unsafe fn attach(id: c_int, address: usize, flags: c_int) -> isize {
    // SAFETY: the caller's.
    let attached = unsafe { call!(libc::SYS_shmat, id, address, flags) };
    if attached != -1 && !passes_by() && !notify::live().is_empty() {
        let range = {
            let before = crate::real::errno();
            let _inside = Inside::enter();
            let range = attached_at(attached as usize);
            set_errno(before);
            range
        };
        around_then(&[range], || 0, |_| mappings::changed(range.std()));
    }
    attached
}

/// fallocate.
///
/// # Safety
/// As for `fallocate`.
pub unsafe fn allocate(fd: c_int, mode: c_int, offset: i64, len: i64) -> isize {
    if let Some(handle) = private_memory(fd)
        && let Object::GuestMemfd(guest_memfd) = handle.object()
    {
        return guarded(|| match guest_memfd.fallocate(mode, offset, len) {
            Ok(()) => Ok(0),
            Err(error) => Err(error.errno()),
        });
    }
    // SAFETY: the caller's.
    let change = || unsafe { call!(libc::SYS_fallocate, fd, mode, offset, len) };
    // Without a mode, and with KEEP_SIZE alone, pages are only added.
    if mode & !libc::FALLOC_FL_KEEP_SIZE == 0 {
        change()
    } else {
        around_file(fd, change)
    }
}

/// ftruncate.
///
/// # Safety
/// As for `ftruncate`.
pub unsafe fn truncate(fd: c_int, len: i64) -> isize {
    if private_memory(fd).is_some() {
        set_errno(libc::EINVAL);
        return -1;
    }
    // SAFETY: the caller's.
    around_file(fd, || unsafe { call!(libc::SYS_ftruncate, fd, len) })
}

interpose! {
    /// mmap(2).
    fn mmap(address: *mut c_void, len: usize, protection: c_int, flags: c_int, fd: c_int, offset: i64) -> *mut c_void {
        // SAFETY: the caller's.
        unsafe { map(address as usize, len, protection, flags, fd, offset) as *mut c_void }
    }

    /// mmap(2) with large files.
    fn mmap64(address: *mut c_void, len: usize, protection: c_int, flags: c_int, fd: c_int, offset: i64) -> *mut c_void {
        // SAFETY: the caller's.
        unsafe { map(address as usize, len, protection, flags, fd, offset) as *mut c_void }
    }

    /// munmap(2).
    fn munmap(address: *mut c_void, len: usize) -> c_int {
        // SAFETY: the caller's.
        unsafe { unmap(address as usize, len) as c_int }
    }

    /// shmdt(2).
    fn shmdt(address: *const c_void) -> c_int {
        // SAFETY: the caller's.
        unsafe { detach(address as usize) as c_int }
    }

    /// shmat(2).
    fn shmat(id: c_int, address: *const c_void, flags: c_int) -> *mut c_void {
        // SAFETY: the caller's.
        unsafe { attach(id, address as usize, flags) as *mut c_void }
    }

    /// mremap(2).
    fn mremap(address: *mut c_void, old_len: usize, len: usize, flags: c_int, to: *mut c_void) -> *mut c_void {
        // SAFETY: the caller's. Without MREMAP_FIXED the last argument is not looked at.
        unsafe { remap(address as usize, old_len, len, flags, to as usize) as *mut c_void }
    }

    /// madvise(2).
    fn madvise(address: *mut c_void, len: usize, advice: c_int) -> c_int {
        // SAFETY: the caller's.
        unsafe { advise(address as usize, len, advice) as c_int }
    }

    /// mprotect(2).
    fn mprotect(address: *mut c_void, len: usize, protection: c_int) -> c_int {
        // SAFETY: the caller's.
        unsafe { protect(libc::SYS_mprotect, address as usize, len, protection, 0) as c_int }
    }

    /// pkey_mprotect(2).
    fn pkey_mprotect(address: *mut c_void, len: usize, protection: c_int, key: c_int) -> c_int {
        // SAFETY: the caller's.
        unsafe { protect(libc::SYS_pkey_mprotect, address as usize, len, protection, key) as c_int }
    }

    /// fallocate(2).
    fn fallocate(fd: c_int, mode: c_int, offset: i64, len: i64) -> c_int {
        // SAFETY: the caller's.
        unsafe { allocate(fd, mode, offset, len) as c_int }
    }

    /// fallocate(2) with large files.
    fn fallocate64(fd: c_int, mode: c_int, offset: i64, len: i64) -> c_int {
        // SAFETY: the caller's.
        unsafe { allocate(fd, mode, offset, len) as c_int }
    }

    /// ftruncate(2).
    fn ftruncate(fd: c_int, len: i64) -> c_int {
        // SAFETY: the caller's.
        unsafe { truncate(fd, len) as c_int }
    }

    /// ftruncate(2) with large files.
    fn ftruncate64(fd: c_int, len: i64) -> c_int {
        // SAFETY: the caller's.
        unsafe { truncate(fd, len) as c_int }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_whole_pages() {
        assert_eq!(Range::at(0x1001, 1).std(), 0x1000..0x2000);
        assert_eq!(Range::at(0x1000, 0x1000).std(), 0x1000..0x2000);
        assert!(Range::at(0x1000, 0).is_empty());
        assert!(Range::at(usize::MAX - 5, 100).is_empty());
    }

    #[test]
    fn an_attached_segment_is_found_whole() {
        // SAFETY: a segment of our own, which goes when it is detached; half of it gets other rights.
        unsafe {
            let id = libc::shmget(libc::IPC_PRIVATE, 16384, 0o600);
            assert!(id >= 0);
            let address = libc::shmat(id, std::ptr::null(), 0);
            libc::shmctl(id, libc::IPC_RMID, std::ptr::null_mut());
            assert_eq!(libc::mprotect(address, 8192, libc::PROT_READ), 0);
            let whole = Range::at(address as usize, 16384);
            assert_eq!(attached_at(address as usize), whole);
            libc::shmdt(address);
            assert!(attached_at(address as usize).is_empty());
        }
    }

    #[test]
    fn mappings_of_a_file_are_found() {
        let fd = slat_kvm::run_page::memfd("test\0", 8192, true).unwrap();
        use std::os::fd::AsRawFd;
        assert_eq!(mapped_from(fd.as_raw_fd()).unwrap(), []);
        // SAFETY: a new mapping.
        let address = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                8192,
                libc::PROT_READ,
                libc::MAP_SHARED,
                fd.as_raw_fd(),
                0,
            )
        } as usize;
        assert_eq!(
            mapped_from(fd.as_raw_fd()).unwrap(),
            [Range::at(address, 8192)]
        );
    }
}
