//! A userfaultfd as a client sees it (`include/uapi/linux/userfaultfd.h`), and memory to register.

use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::atomic::{AtomicU8, Ordering};

pub const PAGE: usize = 4096;

pub const API: u64 = 0xc018_aa3f;
pub const REGISTER: u64 = 0xc020_aa00;
pub const UNREGISTER: u64 = 0x8010_aa01;
pub const WAKE: u64 = 0x8010_aa02;
pub const COPY: u64 = 0xc028_aa03;
pub const ZEROPAGE: u64 = 0xc020_aa04;
pub const WRITEPROTECT: u64 = 0xc018_aa06;

pub const MODE_MISSING: u64 = 1;
pub const MODE_WP: u64 = 2;
pub const FEATURE_WP: u64 = 1;
pub const FEATURE_REMOVE: u64 = 1 << 3;
pub const FEATURE_THREAD_ID: u64 = 1 << 8;

/// An event: its number, and three words.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Event(pub u8, pub [u64; 3]);

pub const PAGEFAULT: u8 = 0x12;
pub const REMOVE: u8 = 0x15;
pub const WRITE: u64 = 1;
pub const WP: u64 = 2;

/// Returns the last call's errno.
pub fn errno() -> i32 {
    std::io::Error::last_os_error().raw_os_error().unwrap()
}

/// A userfaultfd.
pub struct Uffd(pub OwnedFd);

impl Uffd {
    /// Opens a userfaultfd, without `UFFDIO_API`. `Err`: the errno.
    pub fn open() -> Result<Self, i32> {
        // SAFETY: the call takes no pointer, and no other code owns the new descriptor.
        unsafe {
            let flags = libc::O_CLOEXEC | libc::O_NONBLOCK;
            let fd = libc::syscall(libc::SYS_userfaultfd, flags) as i32;
            if fd < 0 {
                return Err(errno());
            }
            Ok(Self::of(OwnedFd::from_raw_fd(fd)))
        }
    }

    /// Takes ownership of a new userfaultfd. A client that reached the kernel's by mistake would not test slat.
    pub fn of(fd: OwnedFd) -> Self {
        let link = std::fs::read_link(format!("/proc/self/fd/{}", fd.as_raw_fd())).unwrap();
        let is_kernels = link.to_str().unwrap().starts_with("anon_inode:");
        assert_eq!(is_kernels, std::env::var_os("SLAT_USERFAULTFD").is_none());
        Uffd(fd)
    }

    /// Opens a userfaultfd with these features.
    pub fn new(features: u64) -> Self {
        let uffd = Self::open().unwrap();
        let (result, words) = uffd.request(API, [0xaa, features, 0, 0, 0]);
        assert_eq!(result, Ok(()));
        assert_eq!(words[1] & features, features);
        assert_eq!(words[2], 1 << 63 | 3);
        uffd
    }

    /// Makes a request. Returns its result, and the structure afterwards.
    pub fn request(&self, number: u64, words: [u64; 5]) -> (Result<(), i32>, [u64; 5]) {
        let mut words = words;
        // SAFETY: no request has a structure of more than five words.
        let answer = unsafe { libc::ioctl(self.0.as_raw_fd(), number as _, words.as_mut_ptr()) };
        let result = if answer == 0 { Ok(()) } else { Err(errno()) };
        (result, words)
    }

    pub fn register(&self, start: usize, len: usize, modes: u64) {
        let (result, words) = self.request(REGISTER, [start as u64, len as u64, modes, 0, 0]);
        assert_eq!(result, Ok(()));
        let basic = 1 << 2 | 1 << 3 | 1 << 4;
        assert_eq!(words[3] & basic, basic);
        assert_eq!(words[3] >> 6 & 1 != 0, modes & MODE_WP != 0);
    }

    pub fn copy(&self, to: usize, from: &[u8]) -> (Result<(), i32>, i64) {
        let words = [to as u64, from.as_ptr() as u64, from.len() as u64, 0, 0];
        let (result, words) = self.request(COPY, words);
        (result, words[4] as i64)
    }

    pub fn zero(&self, to: usize, len: usize) -> (Result<(), i32>, i64) {
        let (result, words) = self.request(ZEROPAGE, [to as u64, len as u64, 0, 0, 0]);
        (result, words[3] as i64)
    }

    pub fn wake(&self, start: usize, len: usize) {
        let (result, _) = self.request(WAKE, [start as u64, len as u64, 0, 0, 0]);
        assert_eq!(result, Ok(()));
    }

    pub fn protect(&self, start: usize, len: usize, mode: u64) -> Result<(), i32> {
        let words = [start as u64, len as u64, mode, 0, 0];
        self.request(WRITEPROTECT, words).0
    }

    /// Waits for the next event, for at most 20 seconds.
    pub fn event(&self) -> Event {
        assert!(self.is_ready(20_000), "no event");
        let mut message = [0u64; 4];
        // SAFETY: the buffer has this size.
        let read = unsafe {
            let (to, len) = (message.as_mut_ptr().cast(), size_of_val(&message));
            libc::read(self.0.as_raw_fd(), to, len)
        };
        assert_eq!(read, 32, "{}", errno());
        let [event, words @ ..] = message;
        Event(event as u8, words)
    }

    /// Waits for the event of an access to the page at `page`, with these flags.
    pub fn fault(&self, page: usize, flags: u64) {
        assert_eq!(self.event(), Event(PAGEFAULT, [flags, page as u64, 0]));
    }

    /// Whether there is an event, or comes one in this time.
    pub fn is_ready(&self, milliseconds: i32) -> bool {
        let mut polled = libc::pollfd {
            fd: self.0.as_raw_fd(),
            events: libc::POLLIN,
            revents: 0,
        };
        // SAFETY: the call accesses one live structure.
        unsafe { libc::poll(&mut polled, 1, milliseconds) == 1 }
    }
}

/// Maps new anonymous memory of so many pages. It is never unmapped.
pub fn map(pages: usize) -> usize {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    let rights = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: the call makes a new mapping at an address of the kernel's choice.
    let start = unsafe { libc::mmap(std::ptr::null_mut(), pages * PAGE, rights, flags, -1, 0) };
    assert_ne!(start, libc::MAP_FAILED);
    start as usize
}

/// Returns a byte of memory that [`map`] has mapped.
pub fn at(address: usize) -> &'static AtomicU8 {
    // SAFETY: the mapping is never unmapped while the byte is used, and all accesses are atomic.
    unsafe { AtomicU8::from_ptr(address as *mut u8) }
}

pub fn load(address: usize) -> u8 {
    at(address).load(Ordering::SeqCst)
}

pub fn store(address: usize, value: u8) {
    at(address).store(value, Ordering::SeqCst);
}

/// A page whose bytes are all `value`.
pub fn page_of(value: u8) -> Vec<u8> {
    vec![value; PAGE]
}
