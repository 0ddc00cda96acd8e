//! The program's environment: the variables that `slat run` has set, and the environment for the programs that the
//! program executes.

use crate::real::{kernel, map_memory};
use std::ffi::{CStr, c_char};
use std::ptr::null_mut;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicPtr, Ordering};

/// The variable that holds LD_PRELOAD for the program's children, if that differs from the program's own LD_PRELOAD. If
/// the program is linked with sanitizers, `slat run` puts their runtimes before this library in the program's
/// LD_PRELOAD. In the children, these runtimes would report unwanted errors.
const CHILDRENS: &CStr = c"SLAT_CHILDRENS_LD_PRELOAD";

/// Variables whose values at the program's start are kept. The first [`SETTINGS`] of them have the same
/// meaning in any root.
const NAMES: [&str; 8] = [
    "SLAT_DISPATCH=",
    "SLAT_FORMAT=",
    "SLAT_LOG=",
    "SLAT_MMU=",
    "SLAT_SET=",
    "SLAT_STATS=",
    "SLAT_USERFAULTFD=",
    "SLAT_CPUINFO=",
];
const SETTINGS: usize = 7;
/// The index of the variable that asks slat to serve userfaultfd even if the kernel permits it.
const USERFAULTFD: usize = 6;
/// The index of the variable with the path of the file that is opened in place of `/proc/cpuinfo`. `slat run` sets the
/// variable if it has written such a file.
const PROCESSORS: usize = 7;

/// Copies of the variables of [`NAMES`]. A null means that the variable was not set.
static KEPT: [AtomicPtr<c_char>; NAMES.len()] = [const { AtomicPtr::new(null_mut()) }; NAMES.len()];

/// The `stat` of the file that is opened in place of `/proc/cpuinfo`, and the `stat` of `/proc/cpuinfo` itself. Both
/// are read at the program's start, because a seccomp filter may forbid that later.
static LOOKS: OnceLock<[libc::stat; 2]> = OnceLock::new();

/// Returns the value that a variable had at the program's start. Async-signal-safe.
fn kept(index: usize) -> Option<&'static CStr> {
    let text = KEPT[index].load(Ordering::Acquire);
    // SAFETY: the string ends with 0, and is never freed.
    (!text.is_null()).then(|| unsafe { CStr::from_ptr(text) })
}

/// Returns slat's settings of this program. A program that is started in another root directory, with an empty
/// environment, gets the same settings. Async-signal-safe.
pub(crate) fn settings() -> impl Iterator<Item = &'static CStr> {
    (0..SETTINGS).filter_map(kept)
}

/// The maximum number of settings that [`settings`] returns.
pub(crate) const MOST_SETTINGS: usize = SETTINGS;

/// Returns the file that is opened in place of `/proc/cpuinfo`. `None`: the kernel's file is opened. Async-signal-safe.
pub(crate) fn processors() -> Option<&'static CStr> {
    let bytes = kept(PROCESSORS)?.to_bytes_with_nul();
    CStr::from_bytes_with_nul(&bytes[NAMES[PROCESSORS].len()..]).ok()
}

/// Whether slat serves userfaultfd even if the kernel permits it. Async-signal-safe.
pub(crate) fn serves_userfaultfd() -> bool {
    kept(USERFAULTFD).is_some_and(|text| text.to_bytes() == b"SLAT_USERFAULTFD=slat")
}

/// Returns the `stat` of `/proc/cpuinfo`, if the file with this device and inode is opened in its
/// place. Async-signal-safe.
pub(crate) fn look_of_processors(device: u64, inode: u64) -> Option<&'static libc::stat> {
    let [file, kernels] = LOOKS.get()?;
    ((file.st_dev, file.st_ino) == (device, inode)).then_some(kernels)
}

/// Returns the kernel's `stat` of the file at `path`.
fn look(path: &CStr) -> Option<libc::stat> {
    // SAFETY: all-zero is a valid `stat`, which the call fills in. The path ends with 0.
    unsafe {
        let mut stat: libc::stat = std::mem::zeroed();
        let here = libc::AT_FDCWD;
        kernel!(libc::SYS_newfstatat, here, path.as_ptr(), &raw mut stat, 0).ok()?;
        Some(stat)
    }
}

/// Copies the variables of [`NAMES`] to new memory, because the program may overwrite the memory that the kernel has
/// given it. The heap is not used, because the runtime of a preloaded sanitizer may not be initialized yet.
///
/// # Safety
/// - No other thread changes the environment.
unsafe fn keep() {
    unsafe extern "C" {
        static environ: *const *const c_char;
    }
    let each = |found: &mut dyn FnMut(usize, &[u8])| {
        // SAFETY: no other thread changes the environment, as this function's contract requires. The environment is
        // strings that end with 0, and a null pointer after the last.
        unsafe {
            let mut next = environ;
            while !next.is_null() && !(*next).is_null() {
                let text = CStr::from_ptr(*next).to_bytes_with_nul();
                if let Some(index) = NAMES
                    .iter()
                    .position(|name| text.starts_with(name.as_bytes()))
                {
                    found(index, text);
                }
                next = next.add(1);
            }
        }
    };
    let mut bytes = 0;
    each(&mut |_, text| bytes += text.len());
    let access = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: the call maps new memory. If there is no memory, no variable is kept.
    let Some(mut at) = (bytes != 0)
        .then(|| unsafe { map_memory(0, bytes, access, 0) }.ok())
        .flatten()
    else {
        return;
    };
    each(&mut |index, text| {
        let to = at as *mut u8;
        // SAFETY: the mapping has space for all variables that are found.
        unsafe { to.copy_from_nonoverlapping(text.as_ptr(), text.len()) };
        KEPT[index].store(to.cast(), Ordering::Release);
        at += text.len();
    });
}

/// Copies the variables, and changes LD_PRELOAD for the children. Call when the program starts, while the process has
/// one thread. Uses neither heap nor thread-local variables.
pub(crate) fn prepare() {
    // SAFETY: the process has only one thread.
    unsafe { keep() };
    if let Some(file) = processors().and_then(look)
        && let Some(kernels) = look(c"/proc/cpuinfo")
    {
        let _ = LOOKS.set([file, kernels]);
    }
    // SAFETY: no other thread reads or changes the environment yet. `value`, which is part of the environment, is
    // copied before the variable is removed. If there is no memory, the environment does not change.
    unsafe {
        let value = libc::getenv(CHILDRENS.as_ptr());
        if !value.is_null() {
            libc::setenv(c"LD_PRELOAD".as_ptr(), value, 1);
            libc::unsetenv(CHILDRENS.as_ptr());
        }
    }
}
