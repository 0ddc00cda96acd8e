//! The modules of this crate import one another in no circle: neither its files, nor its top-level modules as a whole.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// A module's path from the crate's root on.
type Module = Vec<String>;

/// What the crate's root re-exports from another crate.
const FOREIGN: &str = "process";

/// Reads all modules below `directory`, but not the crate's root, which names them all.
fn read(directory: &Path, parent: &[String], found: &mut BTreeMap<Module, String>) {
    for entry in std::fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_stem().unwrap().to_str().unwrap().to_owned();
        let mut module = parent.to_vec();
        if path.is_dir() {
            module.push(name);
            read(&path, &module, found);
        } else if path.extension().is_some_and(|extension| extension == "rs") && name != "lib" {
            if name != "mod" {
                module.push(name);
            }
            found.insert(module, std::fs::read_to_string(&path).unwrap());
        }
    }
}

/// Returns a source text without comments and without the unit tests at its end.
fn code(text: &str) -> String {
    let tested = text.split("#[cfg(test)]\nmod tests").next().unwrap();
    let lines = tested.lines().map(|line| line.split("//").next().unwrap());
    lines.collect::<Vec<_>>().join("\n")
}

/// Splits a name off `text`. The name is empty where there is none.
fn name(text: &str) -> (&str, &str) {
    let end = text.find(|c: char| !c.is_alphanumeric() && c != '_');
    text.split_at(end.unwrap_or(text.len()))
}

/// Adds the paths that begin with `prefix` and continue with the path, or with the braces of a `use`, at which `text`
/// begins. Returns the rest of the text.
fn expand<'a>(prefix: &[String], text: &'a str, paths: &mut Vec<Module>) -> &'a str {
    let mut text = text.trim_start();
    if let Some(list) = text.strip_prefix('{') {
        text = list.trim_start();
        while !text.starts_with('}') {
            text = expand(prefix, text, paths).trim_start();
            text = text.strip_prefix(',').unwrap_or(text).trim_start();
        }
        return &text[1..];
    }
    let (first, rest) = name(text);
    let mut path = prefix.to_vec();
    path.push(first.to_owned());
    match rest.strip_prefix("::") {
        Some(rest) => expand(&path, rest, paths),
        None => {
            paths.push(path);
            rest.strip_prefix('*').unwrap_or(rest)
        }
    }
}

/// Returns the modules that `module`, with this code, names: the longest part of each path that is a module.
fn imports(module: &Module, code: &str, all: &BTreeMap<Module, String>) -> BTreeSet<Module> {
    let mut paths = Vec::new();
    let parent = &module[..module.len() - 1];
    for (keyword, base) in [("crate::", &[][..]), ("super::", parent)] {
        for (at, _) in code.match_indices(keyword) {
            expand(base, &code[at + keyword.len()..], &mut paths);
        }
    }
    let of = |path: Module| {
        let mut parts = (1..=path.len()).rev().map(|len| path[..len].to_vec());
        let found = parts.find(|part| all.contains_key(part));
        assert!(
            found.is_some() || path[0] == FOREIGN,
            "{module:?} uses {path:?} by the name in the crate's root, which hides its module"
        );
        found
    };
    let mut imports: BTreeSet<_> = paths.into_iter().filter_map(of).collect();
    imports.remove(module);
    imports
}

/// Removes the modules that are in no circle, and lie between no two.
fn keep_circles(graph: &mut BTreeMap<Module, BTreeSet<Module>>) {
    loop {
        let imported: BTreeSet<_> = graph.values().flatten().cloned().collect();
        let before = graph.len();
        graph.retain(|module, imports| !imports.is_empty() && imported.contains(module));
        let left: BTreeSet<_> = graph.keys().cloned().collect();
        for imports in graph.values_mut() {
            imports.retain(|module| left.contains(module));
        }
        if graph.len() == before {
            return;
        }
    }
}

#[test]
fn no_modules_import_one_another_in_a_circle() {
    let mut all = BTreeMap::new();
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    read(&source, &[], &mut all);
    assert!(all.len() > 50, "the sources are not at {source:?}");
    for depth in [usize::MAX, 1] {
        let mut graph: BTreeMap<Module, BTreeSet<Module>> = BTreeMap::new();
        let part = |module: &Module| module.iter().take(depth).cloned().collect::<Module>();
        for (module, text) in &all {
            let of = graph.entry(part(module)).or_default();
            of.extend(imports(module, &code(text), &all).iter().map(part));
        }
        for (module, imports) in &mut graph {
            imports.remove(module);
        }
        keep_circles(&mut graph);
        let circles: Vec<_> = (graph.iter())
            .map(|(module, imports)| {
                let imports: Vec<_> = imports.iter().map(|module| module.join("::")).collect();
                format!("{} imports {}", module.join("::"), imports.join(", "))
            })
            .collect();
        assert!(circles.is_empty(), "circles:\n{}", circles.join("\n"));
    }
}

/// Returns the names of a structure's fields.
fn fields(text: &str, structure: &str) -> BTreeSet<String> {
    let text = code(text);
    let declares = |at: &(usize, &str)| {
        let after = text[at.0 + at.1.len()..].trim_start();
        name(after).0 == structure && !name(after).1.starts_with(';')
    };
    let (at, _) = text
        .match_indices("struct ")
        .find(declares)
        .expect(structure);
    let body = &text[at..][text[at..].find('{').unwrap() + 1..];
    let body = &body[..body.find("\n}").unwrap()];
    let field = |line: &str| {
        let line = line.trim();
        let line = match line.strip_prefix("pub(crate) ") {
            Some(line) => line,
            None => line.strip_prefix("pub ").unwrap_or(line),
        };
        let (field, rest) = name(line);
        (rest.starts_with(':') && !rest.starts_with("::")).then(|| field.to_owned())
    };
    body.lines().filter_map(field).collect()
}

/// A client may save a vCPU at each return of `KVM_RUN`, and continue elsewhere with the saved state. So the document
/// names, for each field that lives longer than a run, the reason why the client needs no more.
#[test]
fn the_document_says_of_each_field_why_it_outlives_a_run() {
    let docs = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs");
    let text = std::fs::read_to_string(docs.join("state.md")).unwrap();
    let kinds = ["", "GET", "done", "client", "cache", "run", "as KVM"];
    let mut structures = 0;
    for section in text.split("\n## `").skip(1) {
        let (structure, rest) = section.split_once('`').unwrap();
        let path = rest.split(['(', ')']).nth(2).unwrap();
        let source = std::fs::read_to_string(docs.join(path)).unwrap();
        let mut named = BTreeSet::new();
        for row in rest.lines().filter(|line| line.starts_with("| `")) {
            let columns: Vec<_> = row.split('|').map(str::trim).collect();
            assert!(kinds.contains(&columns[2]), "{structure}: {row}");
            for field in columns[1].split('`').skip(1).step_by(2) {
                assert!(named.insert(field.to_owned()), "{structure}: {field} twice");
            }
        }
        assert_eq!(named, fields(&source, structure), "{structure}");
        structures += 1;
    }
    assert_eq!(structures, 13, "structures of state");
}
