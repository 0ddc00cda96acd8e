//! Reads the file that callgrind has written (Valgrind manual, "Callgrind Format Specification").

use std::path::Path;

/// Returns the number of instructions that `profile` has for functions in the file `object`, including the functions
/// that were inlined there.
///
/// A line of costs has two numbers: a position, which is always 0 here, and the number of instructions at this
/// position. A line `ob=` names the object file for the following lines. The line after `calls=` has the costs of the
/// called function. It is skipped, because the called function's own lines have the same costs.
pub fn instructions_in(profile: &str, object: &Path) -> u64 {
    let (mut inside, mut of_call, mut sum) = (false, false, 0);
    for line in profile.lines() {
        if let Some(name) = line.strip_prefix("ob=") {
            inside = Path::new(name) == object;
        } else if line.starts_with("calls=") {
            of_call = true;
        } else if line.starts_with(|first: char| first.is_ascii_digit()) {
            let own = !std::mem::take(&mut of_call) && inside;
            let cost = line
                .split(' ')
                .nth(1)
                .and_then(|cost| cost.parse::<u64>().ok());
            sum += cost.filter(|_| own).unwrap_or(0);
        }
    }
    sum
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_another_file_does_is_not_counted() {
        let profile = "version: 1\nevents: Ir\n\nob=/a\nfl=x.rs\nfn=one\n0 10\nfi=y.rs\n0 5\n\
                       cob=/libc\ncfn=memcpy\ncalls=2 0\n\
                       0 100\n0 1\n\nob=/libc\nfn=memcpy\n0 100\n\nob=/a\nfn=two\n0 7\n\ntotals: 123\n";
        assert_eq!(instructions_in(profile, Path::new("/a")), 23);
        assert_eq!(instructions_in(profile, Path::new("/libc")), 100);
        assert_eq!(instructions_in(profile, Path::new("/b")), 0);
    }
}
