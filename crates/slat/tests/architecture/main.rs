//! Checks that the dependencies of the crates, of their modules and of the engine's modules are as in
//! docs/architecture.md and in the documentation of each crate's root.

mod arch;
mod circles;
mod layers;
mod methods;
mod sources;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

const DOCUMENT: &str = "docs/architecture.md";
/// A module that may import all others.
const MODELS: &str = "loom_tests";

fn root() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."))
}

/// Returns the section of the document that begins with `heading`.
fn section(heading: &str) -> String {
    let document = fs::read_to_string(root().join(DOCUMENT)).unwrap();
    let (_, rest) = document.split_once(&format!("\n## {heading}\n")).unwrap();
    rest.split("\n## ").next().unwrap().to_owned()
}

/// The crates of this workspace that a crate depends on.
#[derive(Debug, Default, PartialEq, Eq)]
struct Dependencies {
    all: BTreeSet<String>,
    /// The additional crates on which the crate's tests depend.
    tests: BTreeSet<String>,
}

/// Returns the crates in the picture, from top to bottom. A line of the picture contains the group's name, if any, the
/// crate, and its arrows.
fn picture() -> Vec<(String, Dependencies)> {
    let section = section("The crates");
    let picture = section.split("```").nth(1).unwrap();
    let is_crate = |word: &&str| *word == "slat" || word.starts_with("slat-");
    let lines = picture.lines().filter_map(|line| {
        let mut words = line.split_whitespace().skip_while(|word| !is_crate(word));
        let name = words.next()?.to_owned();
        let mut shown = Dependencies::default();
        let mut arrow = "no arrow";
        for word in words {
            match (arrow, word) {
                (_, "──>" | "··>") => arrow = word,
                ("──>", name) => assert!(shown.all.insert(name.to_owned()), "twice: {line}"),
                ("··>", name) => assert!(shown.tests.insert(name.to_owned()), "twice: {line}"),
                _ => panic!("neither arrow nor crate: {line}"),
            }
        }
        Some((name, shown))
    });
    lines.collect()
}

/// Reads the crates of the workspace on which a crate depends. Each is a line of `manifest`.
fn dependencies(manifest: &str) -> Dependencies {
    let mut found = Dependencies::default();
    let mut table = "";
    for line in manifest.lines() {
        if line.starts_with('[') {
            table = line.trim_matches(['[', ']']);
            assert!(!table.contains("dependencies.slat"), "not read: {line}");
        }
        let name = line.split(['.', ' ', '=']).next().unwrap();
        if !name.starts_with("slat") || !table.ends_with("dependencies") {
            continue;
        }
        match table.ends_with("dev-dependencies") {
            true => found.tests.insert(name.to_owned()),
            false => found.all.insert(name.to_owned()),
        };
    }
    found
}

#[test]
fn the_picture_shows_the_crates_and_their_dependencies() {
    let workspace = fs::read_to_string(root().join("Cargo.toml")).unwrap();
    assert!(workspace.contains("members = [\"crates/*\"]"));
    let crates = fs::read_dir(root().join("crates")).unwrap().map(|entry| {
        let path = entry.unwrap().path();
        let manifest = fs::read_to_string(path.join("Cargo.toml")).unwrap();
        let name = path.file_name().unwrap().to_str().unwrap();
        (name.to_owned(), dependencies(&manifest))
    });
    let picture = picture();
    for (i, (name, shown)) in picture.iter().enumerate() {
        for other in &shown.all {
            let is_below = picture[i + 1..].iter().any(|(below, _)| below == other);
            assert!(is_below, "{name} depends on {other}, which is not below it");
        }
    }
    let crates: BTreeMap<_, _> = crates.collect();
    let mut names: Vec<_> = picture.iter().map(|(name, _)| name).collect();
    names.sort();
    assert!(
        names.iter().eq(&crates.keys().collect::<Vec<_>>()),
        "{names:?}"
    );
    let mut table = table("The crates");
    table.sort();
    assert!(names.iter().copied().eq(&table), "the table: {table:?}");
    for (name, shown) in &picture {
        assert_eq!(
            shown, &crates[name],
            "{name}: shown on the left, Cargo.toml on the right"
        );
    }
}

/// Reads the names in the first column of the document's table under `heading`, from top to bottom.
fn table(heading: &str) -> Vec<String> {
    let section = section(heading);
    let rows = section.lines().filter_map(|line| line.strip_prefix("| [`"));
    let names = rows.map(|row| row.split('`').next().unwrap().to_owned());
    names.collect()
}

/// Calls `then` with the path of each module below `directory`, and its code without comments and tests.
fn each_module(directory: &Path, parent: &[String], then: &mut dyn FnMut(&[String], &str)) {
    for entry in fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_stem().unwrap().to_str().unwrap().to_owned();
        if ["lib", "tests", MODELS].contains(&&*name) {
            continue;
        }
        let mut module = parent.to_vec();
        if name != "mod" {
            module.push(name);
        }
        if path.is_dir() {
            each_module(&path, &module, then);
            continue;
        }
        let text = fs::read_to_string(&path).unwrap();
        let code = text.split("\nmod tests").next().unwrap();
        let lines = code.lines().map(|line| line.split("//").next().unwrap());
        then(&module, &lines.collect::<Vec<_>>().join("\n"));
    }
}

/// Returns the first name of the path at which `text` begins, or of each path in the braces of a `use`.
fn first_names(text: &str) -> Vec<&str> {
    let name = |text: &'_ str| text.find(|c: char| !c.is_alphanumeric() && c != '_');
    let Some(list) = text.strip_prefix('{') else {
        return vec![&text[..name(text).unwrap_or(text.len())]];
    };
    let mut names = Vec::new();
    let mut depth = 0;
    for part in list.split_inclusive(['{', ',', '}']) {
        let part_name = part.trim_start();
        let part_name = &part_name[..name(part_name).unwrap_or(part_name.len())];
        if depth == 0 && !part_name.is_empty() {
            names.push(part_name);
        }
        depth += i32::from(part.ends_with('{')) - i32::from(part.ends_with('}'));
        if depth < 0 {
            break;
        }
    }
    names
}

/// Returns the names in the crate's root that the code of `module` uses.
fn imports<'c>(module: &[String], code: &'c str) -> BTreeSet<&'c str> {
    let mut names = BTreeSet::new();
    for (at, keyword) in code.match_indices("crate::") {
        names.extend(first_names(&code[at + keyword.len()..]));
    }
    // A path that begins with this number of `super::` begins at the root.
    let to_root = "super::".repeat(module.len());
    for (at, keyword) in code.match_indices(&to_root) {
        names.extend(first_names(&code[at + keyword.len()..]));
    }
    names
}

/// Returns the module of each name that the crate's root re-exports.
fn re_exports(root: &str) -> BTreeMap<&str, &str> {
    let mut modules = BTreeMap::new();
    for statement in root.split("pub use ").skip(1) {
        let names = statement.split(';').next().unwrap();
        let names = names.split(|c: char| !c.is_alphanumeric() && c != '_');
        let mut names = names.filter(|name| !name.is_empty());
        let module = names.next().unwrap();
        modules.extend(names.map(|name| (name, module)));
    }
    modules
}

#[test]
fn names_of_imports_are_found() {
    let module = ["vm".to_owned(), "range_op".to_owned()];
    let code = "use crate::{addr::{Gfn, Level}, heap,\n sync::*};\nuse super::super::slots::Memslot;\nuse super::Vm;\n\
                let x = crate::table::overlap(a, b);";
    let expected = ["addr", "heap", "slots", "sync", "table"];
    assert_eq!(imports(&module, code), BTreeSet::from(expected));
}

#[test]
fn modules_import_only_from_modules_below() {
    let table = table("The engine's modules");
    let place = |name: &str| table.iter().position(|other| other == name);
    let source = root().join("crates/slat/src");
    let lib = fs::read_to_string(source.join("lib.rs")).unwrap();
    let re_exports = re_exports(&lib);
    let mut modules = BTreeSet::new();
    let mut wrong = Vec::new();
    let mut seen = 0;
    each_module(&source, &[], &mut |module, code| {
        let name = module[0].as_str();
        modules.insert(name.to_owned());
        for import in imports(module, code) {
            seen += 1;
            let import = re_exports.get(import).copied().unwrap_or(import);
            if import != name && (place(import).is_none() || place(import) <= place(name)) {
                wrong.push(format!("{} imports {import}", module.join("::")));
            }
        }
    });
    assert_eq!(modules, table.iter().cloned().collect(), "the modules");
    assert!(seen > 100, "imports are found: {seen}");
    assert!(wrong.is_empty(), "not below:\n{}", wrong.join("\n"));
}
