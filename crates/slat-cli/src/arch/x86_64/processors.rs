//! The file that programs on slat read in place of `/proc/cpuinfo`.

use std::io::BufRead;

/// Returns the text of `/proc/cpuinfo` with `svm` added to the flags of each processor. Returns `None` if the text
/// cannot be read, or already has `svm` or `vmx`. For that check, only the first processor's part is read, because the
/// kernel needs time to write each part.
pub fn with_virtualization(text: impl BufRead) -> Option<String> {
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
    use super::with_virtualization;

    #[test]
    fn each_processor_gets_svm_unless_one_has_virtualization() {
        let text = "processor\t: 0\nflags\t\t: fpu sse2\nbugs\t\t: no vmx\n\nprocessor\t: 1\nflags\t\t: fpu sse2 \n";
        let changed = "processor\t: 0\nflags\t\t: fpu sse2 svm\nbugs\t\t: no vmx\n\nprocessor\t: 1\nflags\t\t: fpu sse2 svm\n";
        assert_eq!(
            with_virtualization(text.as_bytes()).as_deref(),
            Some(changed)
        );
        assert_eq!(
            with_virtualization(text.replace("sse2 ", "vmx ").as_bytes()),
            None
        );
        assert_eq!(with_virtualization(changed.as_bytes()), None);
    }
}
