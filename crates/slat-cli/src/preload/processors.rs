//! A replacement for `/proc/cpuinfo` on machines whose processors have no virtualization. According to the replacement,
//! they have virtualization, as slat's CPU has. Tools (kvm-ok, libvirt) read `/proc/cpuinfo` to find out whether a
//! machine has KVM.
//!
//! The replacement is a real file, so a program that reads it makes the same system calls as without slat.

use super::{place, remove_unused};
use crate::arch::processors::with_virtualization;
use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::BufReader;
use std::path::{Path, PathBuf};

const PREFIX: &str = "cpuinfo-";

/// Writes the replacement to the directory of `library`, once for each boot, and returns its path. Returns `None` if
/// the machine's own file needs no replacement, or if the replacement cannot be written. Then programs read the
/// machine's own file.
pub fn write_out(library: &Path) -> Option<PathBuf> {
    let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
    let directory = library.parent()?;
    let name = format!("{PREFIX}{}", boot.trim());
    let path = directory.join(&name);
    if !path.exists() {
        // slat replaces only the usual spelling of this path. With this unusual spelling, slat reads the kernel's own
        // file even if this `slat run` itself runs on slat.
        let text = with_virtualization(BufReader::new(File::open("/proc/./cpuinfo").ok()?))?;
        place(directory, &path, text.as_bytes(), 0o644).ok()?;
        remove_unused(directory, PREFIX, OsStr::new(&name));
    }
    Some(path)
}
