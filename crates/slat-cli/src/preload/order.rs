//! The order of the libraries in LD_PRELOAD: first runtimes of sanitizers, then slat's library, then all others.
//!
//! A sanitizer's runtime replaces functions of the C library. It passes calls on to the next library that has the
//! function, so slat's library must come right after the runtime. A runtime after slat's library would refuse to start,
//! or miss calls.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use super::PREFIX;

/// The beginnings of the file names of sanitizers' runtimes: GCC's runtimes, then clang's.
const RUNTIMES: &[&str] = &[
    "libasan.so",
    "libhwasan.so",
    "liblsan.so",
    "libtsan.so",
    "libubsan.so",
    "libclang_rt.asan",
    "libclang_rt.hwasan",
    "libclang_rt.lsan",
    "libclang_rt.tsan",
    "libclang_rt.ubsan",
];

/// Whether the library `name`, with or without a path, is a sanitizer's runtime.
fn is_sanitizer(name: &[u8]) -> bool {
    RUNTIMES
        .iter()
        .any(|runtime| file_name(name).starts_with(runtime.as_bytes()))
}

fn file_name(path: &[u8]) -> &[u8] {
    path.rsplit(|&b| b == b'/').next().unwrap_or_default()
}

/// The values of LD_PRELOAD for PROGRAM and for the programs that it starts.
#[derive(Debug, PartialEq, Eq)]
pub struct Order {
    /// The value of LD_PRELOAD for PROGRAM.
    pub program: OsString,
    /// The value for the programs that PROGRAM starts. It lacks the runtimes that only PROGRAM needs.
    pub children: OsString,
}

impl Order {
    /// Adds `library` to `present`, the user's LD_PRELOAD, and keeps the entries of `present`. But a slat library in
    /// `present`, from a `slat run` around this one, is replaced by `library`. `needed` are the libraries that PROGRAM
    /// is linked with.
    pub fn new(library: &Path, present: Option<&OsStr>, needed: &[OsString]) -> Self {
        let entries: Vec<_> = present
            .unwrap_or_default()
            .as_bytes()
            .split(|b| matches!(b, b':' | b' '))
            .filter(|entry| !entry.is_empty() && !file_name(entry).starts_with(PREFIX.as_bytes()))
            .collect();
        let (first, rest): (Vec<_>, Vec<_>) = entries.into_iter().partition(|e| is_sanitizer(e));
        let children = [&first[..], &[library.as_os_str().as_bytes()], &rest].concat();
        let runtimes = needed.iter().map(|name| name.as_bytes());
        let missing = runtimes.filter(|name| {
            is_sanitizer(name) && !first.iter().any(|e| file_name(e) == file_name(name))
        });
        let program: Vec<_> = missing.chain(children.iter().copied()).collect();
        Order {
            program: OsStr::from_bytes(&program.join(&b':')).to_owned(),
            children: OsStr::from_bytes(&children.join(&b':')).to_owned(),
        }
    }
}

/// Settings that make sanitizers accept two things. One is a program that is linked with a runtime which LD_PRELOAD
/// does not name, such as a child of PROGRAM. The other is threads that slat starts after a fork.
const SETTINGS: [(&str, &str); 2] = [
    ("ASAN_OPTIONS", "verify_asan_link_order=0"),
    ("TSAN_OPTIONS", "die_after_fork=0"),
];

/// Returns the environment variables of the sanitizers. Each value consists of slat's settings and then the user's. If
/// two settings contradict each other, the last one counts, so the user's setting wins. `variable` returns the user's
/// value of a variable.
pub fn sanitizer_settings(
    variable: impl Fn(&str) -> Option<OsString>,
) -> impl Iterator<Item = (&'static str, OsString)> {
    SETTINGS.into_iter().map(move |(name, ours)| {
        let mut value = OsString::from(ours);
        // Inside another `slat run`, the user's value already begins with slat's settings.
        match variable(name) {
            Some(users) if users.as_bytes().starts_with(ours.as_bytes()) => value = users,
            Some(users) if !users.is_empty() => {
                value.push(":");
                value.push(users);
            }
            _ => {}
        }
        (name, value)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const OURS: &str = "/run/slat/libslat_preload-1.so";

    fn order(present: &str, needed: &[&str]) -> (String, String) {
        let needed: Vec<_> = needed.iter().map(OsString::from).collect();
        let order = Order::new(Path::new(OURS), Some(OsStr::new(present)), &needed);
        let text = |value: OsString| value.into_string().unwrap().replace(OURS, "OURS");
        (text(order.program), text(order.children))
    }

    #[test]
    fn entries_of_the_user_stay_after_ours_and_an_older_one_of_ours_does_not() {
        let empty = Order::new(Path::new(OURS), None, &[]);
        assert_eq!(empty.program, OURS);
        let (program, children) = order("/a.so b.so:/x/libslat_preload-0.so", &[]);
        assert_eq!(program, "OURS:/a.so:b.so");
        assert_eq!(children, program);
    }

    #[test]
    fn runtimes_of_sanitizers_come_first() {
        for runtime in [
            "libasan.so.8",
            "/usr/lib/gcc/x86_64-linux-gnu/12/libtsan.so",
            "/usr/lib/clang/19/lib/linux/libclang_rt.ubsan_standalone-x86_64.so",
        ] {
            let (program, children) = order(&format!("a.so:{runtime}"), &[]);
            assert_eq!(program, format!("{runtime}:OURS:a.so"));
            assert_eq!(children, program);
        }
        assert_eq!(order("/libasan.so/a.so", &[]).0, "OURS:/libasan.so/a.so");
    }

    #[test]
    fn a_runtime_that_only_the_program_needs_is_not_its_childrens() {
        let (program, children) = order("a.so", &["libm.so.6", "libasan.so.8", "libubsan.so.1"]);
        assert_eq!(program, "libasan.so.8:libubsan.so.1:OURS:a.so");
        assert_eq!(children, "OURS:a.so");
        let (program, children) = order("/opt/libasan.so.8", &["libasan.so.8"]);
        assert_eq!(program, "/opt/libasan.so.8:OURS");
        assert_eq!(children, program);
    }

    #[test]
    fn settings_of_the_user_come_after_ours() {
        let set = |users: Option<&str>| {
            let settings =
                sanitizer_settings(|name| (name == "TSAN_OPTIONS").then_some(users?.into()));
            settings.last().unwrap().1.into_string().unwrap()
        };
        assert_eq!(set(None), "die_after_fork=0");
        assert_eq!(set(Some("")), "die_after_fork=0");
        let both = set(Some("die_after_fork=1"));
        assert_eq!(both, "die_after_fork=0:die_after_fork=1");
        assert_eq!(set(Some(&both)), both);
    }
}
