//! What programs read instead of `/proc/cpuinfo` where the machine's processor has neither VMX nor SVM: the same text, in which each
//! processor has SVM, as slat's CPU does. Tools look there for a machine with KVM (kvm-ok, libvirt).
//!
//! It is a file, so that a program which reads it makes no other system calls than before.

use super::{place, remove_unused};
use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};

const PREFIX: &str = "cpuinfo-";

/// Writes the text beside `library`, once for each boot. Returns its path; `None` where the processor has VMX or SVM, or it cannot be
/// written: then programs read the machine's.
pub fn write_out(library: &Path) -> Option<PathBuf> {
    let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
    let directory = library.parent()?;
    let name = format!("{PREFIX}{}", boot.trim());
    let path = directory.join(&name);
    if !path.exists() {
        let text = with_svm(&fs::read_to_string("/proc/cpuinfo").ok()?)?;
        place(directory, &path, text.as_bytes(), 0o644).ok()?;
        remove_unused(directory, PREFIX, OsStr::new(&name));
    }
    Some(path)
}

/// Returns `/proc/cpuinfo` with `svm` among the flags of each processor. `None` if it has flags like that.
fn with_svm(text: &str) -> Option<String> {
    let mut changed = String::with_capacity(text.len() + text.len() / 64);
    for line in text.split_inclusive('\n') {
        let flags = line
            .split_once(':')
            .filter(|(name, _)| name.trim() == "flags");
        match flags {
            Some((_, flags))
                if flags
                    .split_whitespace()
                    .any(|flag| matches!(flag, "vmx" | "svm")) =>
            {
                return None;
            }
            Some(_) => {
                changed.push_str(line.trim_end());
                changed.push_str(" svm\n");
            }
            None => changed.push_str(line),
        }
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
        assert_eq!(with_svm(text).as_deref(), Some(changed));
        assert_eq!(with_svm(&text.replace("sse2 ", "vmx ")), None);
        assert_eq!(with_svm(changed), None);
    }
}
