//! What callgrind writes (Valgrind manual, "Callgrind Format Specification").

use std::path::Path;

/// Returns how many instructions `profile` has of functions in the file `object`, those that are inlined there
/// included.
///
/// A line of costs is one of numbers: a position, here 0, and the instructions at it. `ob=` names the file for the
/// lines after it. The line after `calls=` has the costs of the function that was called, which are also where this
/// function's own are.
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
