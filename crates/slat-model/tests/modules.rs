//! Checks that the crate's modules use each other in one direction only. So a reader can begin with modules that use
//! no other module.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

/// The modules of the crate, each with the modules that its files name as `crate::module`.
type Uses = BTreeMap<String, BTreeSet<String>>;

/// Adds the files below `directory`, which belong to `module`. Without `module`, each file or directory is a module.
fn read(directory: &Path, module: Option<&str>, uses: &mut Uses) {
    for entry in fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        let stem = path.file_stem().unwrap().to_str().unwrap();
        let module = module.unwrap_or(stem);
        if path.is_dir() {
            read(&path, Some(module), uses);
        } else if module != "lib" {
            let source = fs::read_to_string(&path).unwrap();
            uses.entry(module.into())
                .or_default()
                .extend(named(&source));
        }
    }
}

/// Returns the modules that `source` names outside comments.
fn named(source: &str) -> impl Iterator<Item = String> {
    let code = source.lines().map(|line| line.split("//").next().unwrap());
    let paths = code.flat_map(|line| line.split("crate::").skip(1));
    paths.map(|path| {
        let end = path.find(|c: char| c != '_' && !c.is_alphanumeric());
        path[..end.unwrap_or(path.len())].into()
    })
}

/// Removes the modules that use none of the remaining modules, as long as there are any. Each module that remains is
/// on a cycle, or uses a module on a cycle.
fn cycles(mut uses: Uses) -> Uses {
    loop {
        let left: BTreeSet<_> = uses.keys().cloned().collect();
        uses.retain(|module, used| {
            used.iter()
                .any(|used| used != module && left.contains(used))
        });
        if uses.len() == left.len() {
            return uses;
        }
    }
}

#[test]
fn modules_have_an_order() {
    let mut uses = Uses::new();
    let src = concat!(env!("CARGO_MANIFEST_DIR"), "/src");
    read(Path::new(src), None, &mut uses);
    assert!(uses.len() > 5 && uses.contains_key("tlb"), "{uses:?}");
    let known: BTreeSet<_> = uses.keys().collect();
    let unknown = uses.values().flatten().find(|used| !known.contains(used));
    assert_eq!(unknown, None, "name the module, not the root's export");
    assert_eq!(cycles(uses), Uses::new());
}

#[test]
fn a_cycle_is_found() {
    let uses = [
        ("leaf", ""),
        ("a", "use crate::leaf::Leaf; use crate::b;"),
        ("b", "fn f() -> crate::a::A {} // crate::nothing"),
    ];
    let uses = uses.map(|(module, source)| (module.into(), named(source).collect()));
    let found: Vec<_> = cycles(uses.into()).into_keys().collect();
    assert_eq!(found, ["a", "b"]);
}
