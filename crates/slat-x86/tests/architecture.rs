//! The modules of this crate are in layers, which the table in the crate's root lists. Each module imports only from
//! its own layer and from lower ones.
//!
//! The modules of the `cpu` layer depend on one another in circles: a CPU holds blocks, whose operations hold functions
//! that take the CPU. So the modules of one layer may import one another.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// The compiler's items that other modules may use, by module: handles that these modules hold but do not look into.
/// All of them exist only with the feature `jit`.
const HANDLES: [(&str, &[&str]); 5] = [
    ("block", &["Entrance", "Tier", "WARM"]),
    ("blocks", &["Entrance", "Step", "Tier"]),
    ("cpu", &["Compiled"]),
    ("fixed", &["Targets"]),
    ("snapshot", &["Region"]),
];

/// Returns the source text of each top-level module, without comments and unit tests.
fn sources() -> BTreeMap<String, String> {
    fn read(path: &Path) -> String {
        if path.is_dir() {
            let entries = std::fs::read_dir(path).unwrap();
            return entries.map(|entry| read(&entry.unwrap().path())).collect();
        }
        if path.ends_with("tests.rs") {
            return String::new();
        }
        let text = std::fs::read_to_string(path).unwrap();
        let tested = text.split("#[cfg(test)]\nmod tests").next().unwrap();
        let lines = tested.lines().map(|line| line.split("//").next().unwrap());
        lines.flat_map(|line| [line, "\n"]).collect()
    }
    let mut sources = BTreeMap::<String, String>::new();
    for entry in std::fs::read_dir(source()).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_stem().unwrap().to_str().unwrap().to_owned();
        sources.entry(name).or_default().push_str(&read(&path));
    }
    sources.remove("lib");
    sources
}

fn source() -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("src")
}

fn root() -> String {
    std::fs::read_to_string(source().join("lib.rs")).unwrap()
}

fn name(text: &str) -> &str {
    let end = text.find(|c: char| !c.is_alphanumeric() && c != '_');
    &text[..end.unwrap_or(text.len())]
}

/// Returns the items of a list up to its closing brace, each with the contents of its own braces.
fn items(list: &str) -> Vec<&str> {
    let (mut depth, mut start, mut items) = (0, 0, Vec::new());
    for (at, c) in list.char_indices() {
        match c {
            '{' => depth += 1,
            ',' | '}' if depth == 0 => {
                items.push(list[start..at].trim());
                start = at + 1;
                if c == '}' {
                    break;
                }
            }
            '}' => depth -= 1,
            _ => {}
        }
    }
    items.retain(|item| !item.is_empty());
    items
}

/// Returns the paths that begin at `text`: one path, or a list of paths in braces.
fn paths(text: &str) -> Vec<&str> {
    match text.strip_prefix('{') {
        Some(list) => items(list),
        None => vec![text],
    }
}

/// Returns the modules whose items the crate's root re-exports, by item.
fn exports() -> BTreeMap<String, String> {
    let root = root();
    let mut exports = BTreeMap::new();
    for line in root.split("pub use ").skip(1) {
        let module = name(line);
        for item in paths(&line[module.len() + 2..]) {
            exports.insert(name(item).to_owned(), module.to_owned());
        }
    }
    exports
}

/// Returns the modules of each layer in the table, from the lowest layer on.
fn layers() -> Vec<Vec<String>> {
    let root = root();
    let rows = root.lines().filter_map(|line| line.strip_prefix("//! |"));
    let mut layers = Vec::new();
    for row in rows.skip(2) {
        let columns: Vec<_> = row.split('|').map(str::trim).collect();
        if !columns[0].is_empty() {
            layers.push(Vec::new());
        }
        let modules = columns[1].split('`').skip(1).step_by(2);
        let layer = layers.last_mut().expect("the first row names a layer");
        layer.extend(modules.map(|module| module.trim_end_matches('/').to_owned()));
    }
    layers
}

#[test]
fn each_module_imports_from_its_layer_and_lower_ones_alone() {
    let (sources, exports, layers) = (sources(), exports(), layers());
    let listed: Vec<_> = layers.iter().flatten().collect();
    let unique: BTreeSet<_> = listed.iter().copied().collect();
    assert_eq!(listed.len(), unique.len(), "a module is listed twice");
    assert!(unique.into_iter().eq(sources.keys()), "{listed:?}");
    let layer = |module: &str| {
        layers
            .iter()
            .position(|layer| layer.iter().any(|m| m == module))
    };

    let mut upward = Vec::new();
    let mut handles = BTreeMap::<&str, BTreeSet<&str>>::new();
    for (module, code) in &sources {
        for (at, _) in code.match_indices("crate::") {
            for path in paths(&code[at + "crate::".len()..]) {
                let first = name(path);
                let imported = exports.get(first).map_or(first, String::as_str);
                if layer(imported) <= layer(module) {
                    continue;
                }
                match path.strip_prefix("jit::") {
                    Some(rest) => {
                        let names = paths(rest).into_iter().map(name);
                        handles.entry(module).or_default().extend(names);
                    }
                    None => upward.push(format!("{module} imports {imported}")),
                }
            }
        }
    }
    assert!(upward.is_empty(), "{upward:#?}");
    let allowed = HANDLES.map(|(module, names)| (module, names.iter().copied().collect()));
    assert_eq!(handles, BTreeMap::from(allowed));
}
