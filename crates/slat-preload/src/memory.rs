//! Intercepts changes of the program's memory mappings. This replaces the kernel's MMU notifiers.
//!
//! Each call runs inside an invalidation of its range in every VM. After the change and before the invalidation ends,
//! slat tells `slat-host` to query the kernel again about the range. slat's own mappings are not guest memory, so calls
//! for them go straight to the kernel. While no VM exists, all calls go straight to the kernel: a call then costs one
//! load and the system call, and takes no lock.

use crate::files::interpose;
use crate::guarded::guarded;
use crate::real::{kernel, plain, set_errno};
use crate::table;
use slat_host::{mappings, procfs, registered};
use slat_kvm::ioctl::Object;
use slat_kvm::notify;
use slat_kvm::thread::Section;
use slat_process::page_size;
use std::ffi::{c_int, c_void};

/// A range of addresses, rounded to whole pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Range {
    start: usize,
    end: usize,
}

impl Range {
    /// Makes a range of `len` bytes at `start`. If the end would overflow, returns an empty range; the kernel refuses
    /// such a call.
    pub fn at(start: usize, len: usize) -> Self {
        let end = start
            .checked_add(len)
            .and_then(|end| end.checked_next_multiple_of(page_size()));
        Range {
            start: start & !(page_size() - 1),
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

/// Whether slat need not handle a change of mappings, because no VM exists, or because slat itself makes the change.
fn passes_by() -> bool {
    !notify::is_anyone_listening() || Section::is_entered()
}

/// The result of a system call: a value or an errno.
type Answer = Result<isize, i32>;

/// Runs `change` inside an invalidation of all of `ranges`.
pub fn around(ranges: &[Range], change: impl FnOnce() -> Answer) -> isize {
    around_then(ranges, change, |_| {})
}

/// Runs `change` inside an invalidation like [`around`]. If `change` succeeds, also runs `told` with the value that
/// `change` returned, before the invalidation ends.
fn around_then(
    ranges: &[Range],
    change: impl FnOnce() -> Answer,
    told: impl FnOnce(isize),
) -> isize {
    if passes_by() {
        return plain(change());
    }
    guarded(|| invalidating(ranges, change, told))
}

/// Runs `change` and `told` inside an invalidation like [`around_then`]. The caller is already in a [`Section`].
fn invalidating(
    ranges: &[Range],
    change: impl FnOnce() -> Answer,
    told: impl FnOnce(isize),
) -> Answer {
    let ranges = ranges.iter().filter(|range| !range.is_empty());
    let ranges: Vec<_> = ranges.map(|range| range.std()).collect();
    notify::around_all(&ranges, || {
        let answer = change();
        if let Ok(value) = answer {
            told(value);
        }
        answer
    })
}

/// Runs `change`, which registers `range` with userfaultfd. From then on the program fills each missing page, so slat
/// uses no huge pages in `range`.
pub fn fault_handled(range: Range, change: impl FnOnce() -> Answer) -> isize {
    advise_huge_pages(range, mappings::HugePages::Unwanted, change)
}

fn advise_huge_pages(
    range: Range,
    wish: mappings::HugePages,
    change: impl FnOnce() -> Answer,
) -> isize {
    if !notify::is_anyone_listening() {
        let answer = change();
        mappings::advice_passed_by();
        return plain(answer);
    }
    around_then(&[range], change, |_| mappings::advised(range.std(), wish))
}

/// Ends the registration with a userfaultfd of slat for memory that the caller is about to unmap or to replace.
fn forget_registered(range: Range) {
    if registered::is_any() && !range.is_empty() {
        let _section = Section::enter();
        registered::forget(&range.std());
    }
}

/// Runs `drop_pages`, which drops the content of `range`. If the memory is registered with a userfaultfd of slat, its
/// pages are missing afterwards.
fn dropping(range: Range, drop_pages: impl FnOnce() -> Answer) -> isize {
    if !registered::is_any() || Section::is_entered() {
        return around(&[range], drop_pages);
    }
    guarded(|| {
        let pages = range.std();
        let _removal = registered::removing(&pages);
        notify::around(pages.clone(), || {
            registered::discarding(&pages);
            let answer = drop_pages();
            registered::discarded(&pages);
            answer
        })
    })
}

/// Maps one of KVM's descriptors. vCPUs and guest_memfds have pages to map; other objects have none.
unsafe fn map_object(
    fd: c_int,
    range: Range,
    len: usize,
    protection: c_int,
    flags: c_int,
    offset: i64,
    change: impl FnOnce() -> Answer,
) -> Answer {
    let Some(handle) = table::get(fd) else {
        return change();
    };
    let object = handle.object();
    if matches!(object, Object::Vcpu(vcpu) if vcpu.is_foreign()) {
        return change();
    }
    (object.check_mapping(offset as u64, len, protection, flags)).map_err(|error| error.errno())?;
    invalidating(&[range], change, |address| {
        mappings::changed(Range::at(address as usize, len).std());
        // SAFETY: `change` has just made this mapping.
        unsafe { object.complete_mapping(address as usize, len, offset as u64) };
    })
}

/// Implements mmap, whether the program calls it by name or through `syscall`.
///
/// # Safety
/// The conditions are those of mmap(2).
pub unsafe fn map(
    address: usize,
    len: usize,
    protection: c_int,
    flags: c_int,
    fd: c_int,
    offset: i64,
) -> isize {
    // SAFETY: the arguments are valid for mmap(2), as this function's contract requires.
    let mapped = || unsafe { kernel!(libc::SYS_mmap, address, len, protection, flags, fd, offset) };
    let replaces = flags & libc::MAP_FIXED != 0;
    let range = Range::at(address, if replaces { len } else { 0 });
    let change = || {
        forget_registered(range);
        mapped()
    };
    if flags & libc::MAP_ANONYMOUS == 0 && table::is_ours(fd) && !Section::is_entered() {
        // SAFETY: the arguments are valid for mmap(2), as this function's contract requires.
        return guarded(|| unsafe {
            map_object(fd, range, len, protection, flags, offset, change)
        });
    }
    around_then(&[range], change, |address| {
        mappings::changed(Range::at(address as usize, len).std())
    })
}

/// Implements munmap.
///
/// # Safety
/// The conditions are those of munmap(2).
pub unsafe fn unmap(address: usize, len: usize) -> isize {
    let range = Range::at(address, len);
    // SAFETY: the arguments are valid for munmap(2), as this function's contract requires.
    let unmapped = || unsafe { kernel!(libc::SYS_munmap, address, len) };
    let change = || {
        forget_registered(range);
        unmapped()
    };
    around_then(&[range], change, |_| mappings::changed(range.std()))
}

/// Implements mremap.
///
/// # Safety
/// The conditions are those of mremap(2).
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
    // SAFETY: the arguments are valid for mremap(2), as this function's contract requires.
    let remapped = || unsafe { kernel!(libc::SYS_mremap, address, old_len, len, flags, to) };
    let change = || {
        forget_registered(old);
        forget_registered(new);
        remapped()
    };
    around_then(&[old, new], change, |address| {
        mappings::changed(old.std());
        mappings::changed(Range::at(address as usize, len).std());
    })
}

/// Implements madvise.
///
/// # Safety
/// The conditions are those of madvise(2).
pub unsafe fn advise(address: usize, len: usize, advice: c_int) -> isize {
    const MADV_DONTNEED_LOCKED: c_int = 24;
    const MADV_COLLAPSE: c_int = 25;
    let range = Range::at(address, len);
    // SAFETY: the arguments are valid for madvise(2), as this function's contract requires.
    let change = || unsafe { kernel!(libc::SYS_madvise, address, len, advice) };
    match advice {
        libc::MADV_HUGEPAGE => advise_huge_pages(range, mappings::HugePages::Wanted, change),
        libc::MADV_NOHUGEPAGE => advise_huge_pages(range, mappings::HugePages::Unwanted, change),
        libc::MADV_DONTNEED
        | libc::MADV_FREE
        | libc::MADV_REMOVE
        | libc::MADV_HWPOISON
        | MADV_DONTNEED_LOCKED => dropping(range, change),
        // A guest_memfd has no huge pages, but the memfd that implements it may have.
        MADV_COLLAPSE if !passes_by() => guarded(|| match has_guest_memfd(range) {
            true => Err(libc::EINVAL),
            false => change(),
        }),
        _ => plain(change()),
    }
}

/// Whether an open guest_memfd is mapped in `range`.
fn has_guest_memfd(range: Range) -> bool {
    let mut files = Vec::new();
    procfs::each_mapped_file(&mut |mapped, device, inode| {
        if mapped.start < range.end && range.start < mapped.end {
            files.push((device, inode));
        }
    });
    let is_mapped = |fd| match table::get(fd).as_ref().map(table::Handle::object) {
        Some(Object::GuestMemfd(guest_memfd)) => {
            (files.iter()).any(|(device, inode)| guest_memfd.is_file(*device, *inode))
        }
        _ => false,
    };
    !files.is_empty() && table::ours_within(0, u32::MAX).any(is_mapped)
}

/// Implements mprotect and pkey_mprotect.
///
/// # Safety
/// The conditions are those of mprotect(2).
pub unsafe fn protect(
    number: i64,
    address: usize,
    len: usize,
    protection: c_int,
    key: c_int,
) -> isize {
    // SAFETY: the arguments are valid for mprotect(2), as this function's contract requires.
    let protected = || unsafe { kernel!(number, address, len, protection, key) };
    let range = Range::at(address, len);
    let is_programs = !Section::is_entered();
    let change = || {
        let answer = protected()?;
        if registered::is_any() && is_programs {
            let _section = Section::enter();
            let allows = |right| protection & right != 0;
            let (read, write) = (allows(libc::PROT_READ), allows(libc::PROT_WRITE));
            registered::protected(&range.std(), read || write, write);
        }
        Ok(answer)
    };
    around_then(&[range], change, |_| mappings::protected(range.std()))
}

/// Runs `change`, which changes the file of `fd`, inside an invalidation of all of the file's mappings.
fn around_file(fd: c_int, change: impl FnOnce() -> Answer) -> isize {
    if passes_by() {
        return plain(change());
    }
    guarded(|| invalidating(&mapped_from(fd), change, |_| {}))
}

/// Returns the ranges at which the file that `fd` refers to is mapped in this process.
fn mapped_from(fd: c_int) -> Vec<Range> {
    // SAFETY: all-zero is a valid `stat`.
    let mut stat: libc::stat = unsafe { std::mem::zeroed() };
    let mut found = Vec::new();
    // SAFETY: the call fills in a live struct.
    if unsafe { kernel!(libc::SYS_fstat, fd, &raw mut stat) }.is_ok() {
        let device = (libc::major(stat.st_dev), libc::minor(stat.st_dev));
        procfs::each_mapped_file(&mut |range, other, inode| {
            if (other, inode) == (device, stat.st_ino) {
                found.push(Range::at(range.start, range.len()));
            }
        });
    }
    found
}

/// Returns the range of the System V segment that is attached at an address. `shmdt` unmaps all of this range. Empty if
/// no segment is attached.
fn attached_at(address: usize) -> Range {
    let mut whole = Range::at(address, 0);
    let mut segment = None;
    procfs::each_mapped_file(&mut |range, device, inode| {
        let next = whole.end.max(whole.start);
        let is_it = segment.is_none_or(|known| known == (device, inode));
        if range.start == next && is_it {
            segment = Some((device, inode));
            whole.end = range.end;
        }
    });
    whole
}

/// Implements shmdt.
///
/// # Safety
/// The conditions are those of shmdt(2).
pub unsafe fn detach(address: usize) -> isize {
    // SAFETY: the arguments are valid for shmdt(2), as this function's contract requires.
    let change = || unsafe { kernel!(libc::SYS_shmdt, address) };
    if passes_by() {
        return plain(change());
    }
    guarded(|| {
        let range = attached_at(address);
        invalidating(&[range], change, |_| mappings::changed(range.std()))
    })
}

/// Implements shmat. With SHM_REMAP, the call replaces mappings in a range whose size only the kernel knows before the
/// call. So slat invalidates this range after the call.
///
/// # Safety
/// The conditions are those of shmat(2).
pub unsafe fn attach(id: c_int, address: usize, flags: c_int) -> isize {
    // SAFETY: the arguments are valid for shmat(2), as this function's contract requires.
    let change = || unsafe { kernel!(libc::SYS_shmat, id, address, flags) };
    if passes_by() {
        return plain(change());
    }
    guarded(|| {
        let attached = change()?;
        let range = attached_at(attached as usize);
        invalidating(
            &[range],
            || Ok(attached),
            |_| mappings::changed(range.std()),
        )
    })
}

/// Implements fallocate.
///
/// # Safety
/// The conditions are those of fallocate(2).
pub unsafe fn allocate(fd: c_int, mode: c_int, offset: i64, len: i64) -> isize {
    // SAFETY: the arguments are valid for fallocate(2), as this function's contract requires.
    let change = || unsafe { kernel!(libc::SYS_fallocate, fd, mode, offset, len) };
    if table::is_ours(fd) && !Section::is_entered() {
        return guarded(|| match table::get(fd) {
            Some(handle) => match handle.object() {
                // Memslots may also be backed by the client's own mappings of the guest_memfd's file.
                Object::GuestMemfd(guest_memfd) => invalidating(
                    &mapped_from(fd),
                    || {
                        let answer = guest_memfd.fallocate(mode, offset, len);
                        answer.map(|()| 0).map_err(|error| error.errno())
                    },
                    |_| {},
                ),
                _ => Err(libc::ENODEV),
            },
            None => change(),
        });
    }
    // With mode 0, or with KEEP_SIZE alone, the call only adds pages, so no invalidation is needed.
    if mode & !libc::FALLOC_FL_KEEP_SIZE == 0 {
        plain(change())
    } else {
        around_file(fd, change)
    }
}

/// Implements ftruncate.
///
/// # Safety
/// The conditions are those of ftruncate(2).
pub unsafe fn truncate(fd: c_int, len: i64) -> isize {
    if table::is_ours(fd) && !Section::is_entered() {
        set_errno(libc::EINVAL);
        return -1;
    }
    // SAFETY: the arguments are valid for ftruncate(2), as this function's contract requires.
    around_file(fd, || unsafe { kernel!(libc::SYS_ftruncate, fd, len) })
}

interpose! {
    /// Replaces mmap(2).
    fn mmap(address: *mut c_void, len: usize, protection: c_int, flags: c_int, fd: c_int, offset: i64) -> *mut c_void {
        // SAFETY: the arguments are valid for mmap(2), as this function's contract requires.
        unsafe { map(address as usize, len, protection, flags, fd, offset) as *mut c_void }
    }

    /// Replaces mmap64, which is mmap(2) for large files.
    fn mmap64(address: *mut c_void, len: usize, protection: c_int, flags: c_int, fd: c_int, offset: i64) -> *mut c_void {
        // SAFETY: the arguments are valid for mmap(2), as this function's contract requires.
        unsafe { map(address as usize, len, protection, flags, fd, offset) as *mut c_void }
    }

    /// Replaces munmap(2).
    fn munmap(address: *mut c_void, len: usize) -> c_int {
        // SAFETY: the arguments are valid for munmap(2), as this function's contract requires.
        unsafe { unmap(address as usize, len) as c_int }
    }

    /// Replaces shmdt(2).
    fn shmdt(address: *const c_void) -> c_int {
        // SAFETY: the arguments are valid for shmdt(2), as this function's contract requires.
        unsafe { detach(address as usize) as c_int }
    }

    /// Replaces shmat(2).
    fn shmat(id: c_int, address: *const c_void, flags: c_int) -> *mut c_void {
        // SAFETY: the arguments are valid for shmat(2), as this function's contract requires.
        unsafe { attach(id, address as usize, flags) as *mut c_void }
    }

    /// Replaces mremap(2).
    fn mremap(address: *mut c_void, old_len: usize, len: usize, flags: c_int, to: *mut c_void) -> *mut c_void {
        // SAFETY: the arguments are valid for mremap(2), as this function's contract requires. Without MREMAP_FIXED
        // the last argument is not read.
        unsafe { remap(address as usize, old_len, len, flags, to as usize) as *mut c_void }
    }

    /// Replaces madvise(2).
    fn madvise(address: *mut c_void, len: usize, advice: c_int) -> c_int {
        // SAFETY: the arguments are valid for madvise(2), as this function's contract requires.
        unsafe { advise(address as usize, len, advice) as c_int }
    }

    /// Replaces mprotect(2).
    fn mprotect(address: *mut c_void, len: usize, protection: c_int) -> c_int {
        // SAFETY: the arguments are valid for mprotect(2), as this function's contract requires.
        unsafe { protect(libc::SYS_mprotect, address as usize, len, protection, 0) as c_int }
    }

    /// Replaces pkey_mprotect(2).
    fn pkey_mprotect(address: *mut c_void, len: usize, protection: c_int, key: c_int) -> c_int {
        // SAFETY: the arguments are valid for pkey_mprotect(2), as this function's contract requires.
        unsafe { protect(libc::SYS_pkey_mprotect, address as usize, len, protection, key) as c_int }
    }

    /// Replaces fallocate(2).
    fn fallocate(fd: c_int, mode: c_int, offset: i64, len: i64) -> c_int {
        // SAFETY: the arguments are valid for fallocate(2), as this function's contract requires.
        unsafe { allocate(fd, mode, offset, len) as c_int }
    }

    /// Replaces fallocate64, which is fallocate(2) for large files.
    fn fallocate64(fd: c_int, mode: c_int, offset: i64, len: i64) -> c_int {
        // SAFETY: the arguments are valid for fallocate(2), as this function's contract requires.
        unsafe { allocate(fd, mode, offset, len) as c_int }
    }

    /// Replaces ftruncate(2).
    fn ftruncate(fd: c_int, len: i64) -> c_int {
        // SAFETY: the arguments are valid for ftruncate(2), as this function's contract requires.
        unsafe { truncate(fd, len) as c_int }
    }

    /// Replaces ftruncate64, which is ftruncate(2) for large files.
    fn ftruncate64(fd: c_int, len: i64) -> c_int {
        // SAFETY: the arguments are valid for ftruncate(2), as this function's contract requires.
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
        // SAFETY: the segment belongs to the test, and is removed when it is detached. The test changes the rights of
        // half of the segment.
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
        let fd = slat_kvm::run_page::memfd(c"test", 8192, true).unwrap();
        use std::os::fd::AsRawFd;
        assert_eq!(mapped_from(fd.as_raw_fd()), []);
        // SAFETY: the call makes a new mapping.
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
        assert_eq!(mapped_from(fd.as_raw_fd()), [Range::at(address, 8192)]);
    }
}
