//! What depends on the processor's architecture is in one directory of a crate, `arch`, which has the same modules for
//! each architecture. The rest of the crate is neutral.

use super::sources::crates;
use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

/// The crates that build for more than one architecture.
const CRATES: [&str; 4] = ["slat-guard", "slat-preload", "slat-process", "slat-trace"];

/// Text that depends on the architecture: what is compiled for one, and instructions.
const MARKS: [&str; 3] = ["target_arch", "naked_asm!", " asm!("];

/// Calls `look` with each source file below a directory, and its text.
fn each_file(directory: &Path, look: &mut dyn FnMut(&Path, &str)) {
    for entry in fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        match path.is_dir() {
            true => each_file(&path, look),
            false => look(&path, &fs::read_to_string(&path).unwrap()),
        }
    }
}

/// Returns the names of an architecture's modules. The architecture has a directory of files, or one file.
fn modules(architecture: &Path) -> BTreeSet<String> {
    if !architecture.is_dir() {
        return BTreeSet::new();
    }
    let files = fs::read_dir(architecture).unwrap().map(|entry| {
        let path = entry.unwrap().path();
        path.file_stem().unwrap().to_str().unwrap().to_owned()
    });
    files.filter(|name| name != "mod").collect()
}

/// Returns the first column of a table in a file's documentation.
fn table(text: &str) -> BTreeSet<String> {
    let rows = text.lines().filter_map(|line| line.strip_prefix("//! | `"));
    rows.map(|row| row.split('`').next().unwrap().to_owned())
        .collect()
}

#[test]
fn the_rest_of_a_crate_is_neutral() {
    let mut wrong = Vec::new();
    for name in CRATES {
        let source = crates().join(name).join("src");
        each_file(&source, &mut |path, text| {
            let inside = path.strip_prefix(&source).unwrap();
            let marks: &[&str] = match (inside.starts_with("arch"), inside.ends_with("mod.rs")) {
                (false, _) => &MARKS,
                // An architecture's own files are compiled for that architecture alone.
                (true, is_root) if !is_root || inside.components().count() > 2 => &MARKS[..1],
                _ => &[],
            };
            for mark in marks.iter().filter(|mark| text.contains(**mark)) {
                wrong.push(format!("{name}: {} has {mark}", inside.display()));
            }
        });
    }
    assert!(wrong.is_empty(), "\n{}", wrong.join("\n"));
}

#[test]
fn architectures_have_the_same_modules_which_a_table_lists() {
    for name in CRATES {
        let directory = crates().join(name).join("src/arch");
        let entries = fs::read_dir(&directory).unwrap();
        let paths: Vec<PathBuf> = entries.map(|entry| entry.unwrap().path()).collect();
        let all: Vec<_> = (paths.iter().filter(|path| !path.ends_with("mod.rs"))).collect();
        assert!(all.len() > 1, "{name}: {all:?}");
        for architecture in &all {
            let (one, first) = (modules(architecture), modules(all[0]));
            assert_eq!(one, first, "{name}: {architecture:?}, {:?}", all[0]);
        }
        let documented = table(&fs::read_to_string(directory.join("mod.rs")).unwrap());
        assert_eq!(
            documented,
            modules(all[0]),
            "{name}: the table in arch/mod.rs"
        );
    }
}
