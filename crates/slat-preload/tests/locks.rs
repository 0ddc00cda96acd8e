//! Checks that the table in `src/forks.rs` has each lock that a whole process has. The table says in which state a
//! forked child finds the lock.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

/// The crates whose code runs in the program's process.
const CRATES: [&str; 7] = [
    "slat-kvm",
    "slat-host",
    "slat-preload",
    "slat-process",
    "slat-guard",
    "slat-x86",
    "slat-trace",
];

/// The standard library's types on which a thread may wait.
const WAITED_FOR: [&str; 8] = [
    "Mutex",
    "RwLock",
    "OnceLock",
    "LazyLock",
    "Once",
    "Condvar",
    "Barrier",
    "ReentrantLock",
];

/// The type of data of one process. No other process uses locks in it.
const OWN: &str = "PerProcess<";

fn crates() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

fn sources(directory: &Path, to: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            sources(&path, to);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            to.push(path);
        }
    }
}

/// If a line declares a static with a lock that a thread of another process could hold, returns the static's name.
fn lock_of(line: &str) -> Option<&str> {
    let declared = line.trim_start();
    let declared = declared.strip_prefix("pub ").unwrap_or(declared);
    let declared = match declared.strip_prefix("pub(") {
        Some(rest) => rest.split_once(") ")?.1,
        None => declared,
    };
    let (name, rest) = declared.strip_prefix("static ")?.split_once(": ")?;
    let kind = rest.split(" = ").next()?;
    let words = kind.split(|c: char| !c.is_alphanumeric() && c != '_');
    let waits = words.into_iter().any(|word| WAITED_FOR.contains(&word));
    (waits && !kind.starts_with(OWN)).then_some(name)
}

/// The attribute before a module, or before a variable in a macro, that exists only in models.
const OF_MODELS: &str = "#[cfg(all(test, loom))]\n";

/// Returns the code without the unit tests and the models.
fn without_tests(text: &str) -> String {
    let code = text.split("#[cfg(test)]\nmod ").next().unwrap();
    let mut parts = code.split(OF_MODELS);
    let mut kept = parts.next().unwrap().to_owned();
    for part in parts {
        if part.starts_with("mod ") {
            // A module of models is the last module of its file.
            break;
        }
        // Any other item of models has only one line, or has no lock.
        kept.extend(part.split_inclusive('\n').skip(1));
    }
    kept
}

/// Returns the locks in the sources, each with its file, except for those of unit tests.
fn declared() -> BTreeSet<(String, String)> {
    let mut all = BTreeSet::new();
    for name in CRATES {
        let mut files = Vec::new();
        sources(&crates().join(name).join("src"), &mut files);
        for file in files {
            let text = fs::read_to_string(&file).unwrap();
            let code = without_tests(&text);
            let path = file.strip_prefix(crates()).unwrap().to_str().unwrap();
            let locks = code.lines().filter_map(lock_of);
            all.extend(locks.map(|lock| (lock.to_owned(), path.to_owned())));
        }
    }
    all
}

/// Returns the locks in the table.
fn argued() -> BTreeSet<(String, String)> {
    let text = fs::read_to_string(crates().join("slat-preload/src/forks.rs")).unwrap();
    let rows = text.lines().filter_map(|line| {
        let mut cells = line.strip_prefix("//! | `")?.split("` | `");
        let lock = cells.next()?;
        let file = cells.next()?.split('`').next()?;
        Some((lock.to_owned(), file.to_owned()))
    });
    rows.collect()
}

#[test]
fn every_lock_of_the_process_is_argued() {
    let (declared, argued) = (declared(), argued());
    let missing: Vec<_> = declared.difference(&argued).collect();
    let stale: Vec<_> = argued.difference(&declared).collect();
    assert!(
        missing.is_empty() && stale.is_empty(),
        "not in the table of forks.rs: {missing:#?}\nin the table only: {stale:#?}"
    );
}

#[test]
fn locks_are_found_however_they_are_declared() {
    for (line, lock) in [
        (
            "static STATE: Mutex<State> = Mutex::new(State {",
            Some("STATE"),
        ),
        (
            "    pub(crate) static A: std::sync::OnceLock<bool> = OnceLock::new();",
            Some("A"),
        ),
        (
            "pub static B: [Mutex<()>; 3] = [const { Mutex::new(()) }; 3];",
            Some("B"),
        ),
        ("static C: Once = Once::new();", Some("C")),
        ("static D: PerProcess<Mutex<u8>> = PerProcess::new();", None),
        ("static E: Computed<u8> = Computed::new();", None),
        ("static F: AtomicU32 = AtomicU32::new(0);", None),
        ("let mutex = Mutex::new(0);", None),
    ] {
        assert_eq!(lock_of(line), lock, "{line}");
    }
}
