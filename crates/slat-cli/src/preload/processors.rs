//! The replacement for `/proc/cpuinfo` where that file says that the machine's processors have no virtualization. In the
//! replacement they have it, like slat's CPU. Tools read that file to find out whether a machine has KVM (kvm-ok,
//! libvirt).
//!
//! The replacement is a file, so that a program that reads it makes no other system calls than before.

use super::{place, remove_unused};
use crate::arch::processors::with_virtualization;
use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::BufReader;
use std::path::{Path, PathBuf};

const PREFIX: &str = "cpuinfo-";

/// Writes the text beside `library`, once for each boot. Returns the path. Returns `None` if the text says
/// nothing else, or if the file cannot be written: then programs read the machine's own file.
pub fn write_out(library: &Path) -> Option<PathBuf> {
    let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
    let directory = library.parent()?;
    let name = format!("{PREFIX}{}", boot.trim());
    let path = directory.join(&name);
    if !path.exists() {
        // With this spelling the kernel's own file is read, even if this `slat run` is itself on slat.
        let text = with_virtualization(BufReader::new(File::open("/proc/./cpuinfo").ok()?))?;
        place(directory, &path, text.as_bytes(), 0o644).ok()?;
        remove_unused(directory, PREFIX, OsStr::new(&name));
    }
    Some(path)
}
