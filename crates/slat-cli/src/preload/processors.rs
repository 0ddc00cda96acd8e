//! The replacement for `/proc/cpuinfo` where the machine's processor has neither VMX nor SVM. It is the same text,
//! except that each processor has SVM, like slat's CPU. Tools read that file to find out whether a machine has KVM
//! (kvm-ok, libvirt).
//!
//! The replacement is a file, so that a program that reads it makes no other system calls than before.

use super::{place, remove_unused};
use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};

const PREFIX: &str = "cpuinfo-";

/// Writes the text beside `library`, once for each boot. Returns the path. Returns `None` if the processor has VMX or
/// SVM, or if the file cannot be written: then programs read the machine's own file.
pub fn write_out(library: &Path) -> Option<PathBuf> {
    let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
    let directory = library.parent()?;
    let name = format!("{PREFIX}{}", boot.trim());
    let path = directory.join(&name);
    if !path.exists() {
        // With this spelling the kernel's own file is read, even if this `slat run` is itself on slat.
        let text = with_svm(BufReader::new(File::open("/proc/./cpuinfo").ok()?))?;
        place(directory, &path, text.as_bytes(), 0o644).ok()?;
        remove_unused(directory, PREFIX, OsStr::new(&name));
    }
    Some(path)
}

/// Returns the text of `/proc/cpuinfo` with `svm` among the flags of each processor. Returns `None` if the text cannot
/// be read, or already has such flags. In the second case only the first processor is read, because the kernel takes
/// time for each.
fn with_svm(text: impl BufRead) -> Option<String> {
    let mut changed = String::new();
    for line in text.lines() {
        let line = line.ok()?;
        changed.push_str(line.trim_end());
        if let Some((name, flags)) = line.split_once(':')
            && name.trim_end() == "flags"
        {
            if flags.split(' ').any(|flag| matches!(flag, "vmx" | "svm")) {
                return None;
            }
            changed.push_str(" svm");
        }
        changed.push('\n');
    }
    Some(changed)
}

#[cfg(test)]
mod tests {
    use super::with_svm;

    #[test]
    fn each_processor_gets_svm_unless_one_has_virtualization() {
        let text = "processor\t: 0\nflags\t\t: fpu sse2\nbugs\t\t: no vmx\n\nprocessor\t: 1\nflags\t\t: fpu sse2 \n";
        let changed = "processor\t: 0\nflags\t\t: fpu sse2 svm\nbugs\t\t: no vmx\n\nprocessor\t: 1\nflags\t\t: fpu sse2 svm\n";
        assert_eq!(with_svm(text.as_bytes()).as_deref(), Some(changed));
        assert_eq!(with_svm(text.replace("sse2 ", "vmx ").as_bytes()), None);
        assert_eq!(with_svm(changed.as_bytes()), None);
    }
}
