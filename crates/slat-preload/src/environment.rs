//! The program's environment: what `slat run` has put there, and what the program's children get.

use crate::real::kernel;
use std::ffi::{CStr, CString};
use std::os::unix::ffi::OsStrExt;
use std::sync::OnceLock;

/// The LD_PRELOAD of the program's children, where it is not the program's own: `slat run` puts the runtimes of sanitizers that the
/// program is linked with before this library. In other programs these would work, too, and report what nobody asked for.
const CHILDRENS: &CStr = c"SLAT_CHILDRENS_LD_PRELOAD";

/// The file that is opened for `/proc/cpuinfo`, where `slat run` has written one.
struct Processors {
    file: CString,
    /// How the file and `/proc/cpuinfo` look. Asked for at the program's start: later, a filter may forbid it.
    looks: Option<[libc::stat; 2]>,
}

static PROCESSORS: OnceLock<Processors> = OnceLock::new();

/// Returns the file that is opened for `/proc/cpuinfo`; `None`: the kernel's. Async-signal-safe.
pub(crate) fn processors() -> Option<&'static CStr> {
    PROCESSORS.get().map(|known| known.file.as_c_str())
}

/// Returns how `/proc/cpuinfo` looks, if the file with this device and inode is opened for it. Async-signal-safe.
pub(crate) fn look_of_processors(device: u64, inode: u64) -> Option<&'static libc::stat> {
    let [file, kernels] = PROCESSORS.get()?.looks.as_ref()?;
    ((file.st_dev, file.st_ino) == (device, inode)).then_some(kernels)
}

/// Asks the kernel about the file at `path`.
fn look(path: &CStr) -> Option<libc::stat> {
    // SAFETY: all-zero is a valid `stat`, which the call fills in; a path that ends with 0.
    unsafe {
        let mut stat: libc::stat = std::mem::zeroed();
        let here = libc::AT_FDCWD;
        kernel!(libc::SYS_newfstatat, here, path.as_ptr(), &raw mut stat, 0).ok()?;
        Some(stat)
    }
}

/// What `slat run` sets for slat itself, and means the same in any root.
const SETTINGS: [&str; 6] = [
    "SLAT_DISPATCH=",
    "SLAT_FORMAT=",
    "SLAT_LOG=",
    "SLAT_MMU=",
    "SLAT_SET=",
    "SLAT_STATS=",
];

/// The settings that this program was started with.
static GIVEN: OnceLock<Vec<CString>> = OnceLock::new();

/// Returns the settings that this program was started with, for one that it starts in another root without environment.
pub(crate) fn settings() -> &'static [CString] {
    GIVEN.get().map_or(&[], Vec::as_slice)
}

/// Call at the program's start, while it has one thread.
pub(crate) fn prepare() {
    let given = std::env::vars_os().filter_map(|(name, value)| {
        let variable = [name.as_bytes(), b"=", value.as_bytes()].concat();
        let is_setting = SETTINGS
            .iter()
            .any(|name| variable.starts_with(name.as_bytes()));
        is_setting.then(|| CString::new(variable).ok()).flatten()
    });
    let _ = GIVEN.set(given.collect());
    // SAFETY: no other thread changes the environment yet; what it has is a C string, which is copied.
    unsafe {
        let file = libc::getenv(c"SLAT_CPUINFO".as_ptr());
        if !file.is_null() {
            let file = CStr::from_ptr(file).to_owned();
            let looks = look(&file).zip(look(c"/proc/cpuinfo"));
            let looks = looks.map(|(file, kernels)| [file, kernels]);
            let _ = PROCESSORS.set(Processors { file, looks });
        }
    }
    // SAFETY: no other thread reads or changes the environment yet; `value`, which is a part of it, is copied before the variable is
    // removed. A failure for lack of memory leaves the environment as it is.
    unsafe {
        let value = libc::getenv(CHILDRENS.as_ptr());
        if !value.is_null() {
            libc::setenv(c"LD_PRELOAD".as_ptr(), value, 1);
            libc::unsetenv(CHILDRENS.as_ptr());
        }
    }
}
