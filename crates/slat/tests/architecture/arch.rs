//! Checks that in each crate only the directory `arch` contains code that depends on the processor's architecture. All
//! other files are neutral.

use super::sources::{ARCH, Sources, crates};
use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

/// The crate whose architectures also have a CPU and devices.
const KVM: &str = "slat-kvm";

/// The crates in which every architecture has the same modules.
const CRATES: [&str; 5] = [
    "slat-cli",
    "slat-guard",
    "slat-preload",
    "slat-process",
    "slat-trace",
];

/// The other crates with files of architectures: one architecture has guests, and another one has none.
const OTHERS: [&str; 3] = [KVM, "slat-bench", "slat-demo"];

/// Text that selects code for one architecture.
const CHOICE: &str = "target_arch";

/// Text of instructions.
const INSTRUCTIONS: [&str; 2] = ["naked_asm!", " asm!("];

/// Names that only the files of an architecture may use in [`KVM`]: its CPU, its devices, and the host's instructions.
const OF_ARCHITECTURES: [&str; 7] = [
    "slat_a64",
    "slat_x86",
    "slat_gic",
    "slat_irqchip",
    "slat_hyperv",
    "core::arch",
    "std::arch",
];

/// Returns the forbidden texts that the file `inside` the sources of a crate contains.
fn forbidden(name: &str, inside: &Path, text: &str) -> Vec<&'static str> {
    let is_neutral = !inside.starts_with(ARCH);
    let chooses = inside == Path::new("arch/mod.rs");
    let mut marks = Vec::new();
    if !chooses {
        marks.push(CHOICE);
    }
    if is_neutral {
        marks.extend(INSTRUCTIONS);
    }
    if is_neutral && name == KVM {
        marks.extend(OF_ARCHITECTURES);
    }
    marks.retain(|mark| text.contains(mark));
    marks
}

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
fn neutral_files_have_nothing_of_an_architecture() {
    let mut wrong = Vec::new();
    for name in CRATES.into_iter().chain(OTHERS) {
        let source = crates().join(name).join("src");
        assert!(source.join(ARCH).is_dir(), "{name} has architectures");
        each_file(&source, &mut |path, text| {
            let inside = path.strip_prefix(&source).unwrap();
            for mark in forbidden(name, inside, text) {
                wrong.push(format!("{name}: {} has {mark}", inside.display()));
            }
        });
    }
    assert!(wrong.is_empty(), "\n{}", wrong.join("\n"));
}

/// Neutral files of slat-kvm use only names that `arch/mod.rs` re-exports. So the list in `arch/mod.rs` is the whole
/// interface of an architecture.
#[test]
fn neutral_files_use_what_the_choice_of_the_architecture_exports() {
    let sources = Sources::of(KVM);
    assert!(!sources.arch_docs.is_empty(), "{KVM} has architectures");
    let exported = sources.re_exports(&vec![ARCH.to_owned()]);
    assert!(exported.len() > 30, "exports are found: {exported:?}");
    let mut wrong = Vec::new();
    let mut used = 0;
    for (module, path) in sources
        .paths()
        .filter(|(module, _)| module.first().is_none_or(|top| top != ARCH))
    {
        if path.first().is_none_or(|first| first != ARCH) {
            continue;
        }
        used += 1;
        // `use crate::arch` alone imports the module. Its items are then used as `arch::…`.
        let item = path.get(1).filter(|item| *item != "self");
        if item.is_some_and(|item| !exported.contains_key(item)) {
            wrong.push(format!("{} uses {}", module.join("::"), path.join("::")));
        }
    }
    assert!(used > 30, "uses are found: {used}");
    assert!(wrong.is_empty(), "not exported:\n{}", wrong.join("\n"));
}

#[test]
fn what_neutral_files_must_not_contain_is_found() {
    let code = "use slat_x86::Exit;\n#[cfg(target_arch = \"x86_64\")]\nfn f() {}";
    let found = |inside| forbidden(KVM, Path::new(inside), code);
    assert_eq!(found("run/accesses.rs"), ["target_arch", "slat_x86"]);
    assert_eq!(found("arch/x86_64/run.rs"), ["target_arch"]);
    assert!(found("arch/mod.rs").is_empty());
    assert_eq!(found("lib.rs"), ["target_arch", "slat_x86"]);
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
