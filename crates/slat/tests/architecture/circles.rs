//! Checks that no modules of a crate import one another in a circle.

use super::sources::{Module, each_of_all};
use std::collections::{BTreeMap, BTreeSet};

/// The exceptions: modules that are in a circle, by crate. The root of both crates contains the library's entry points,
/// and the items that these need.
const IN_CIRCLES: &[(&str, &str)] = &[
    ("slat-engine-capi", "the root"),
    ("slat-preload", "the root"),
];

/// Removes all modules that are in no circle and on no path between two circles.
pub fn keep_circles<M: Ord + Clone>(graph: &mut BTreeMap<M, BTreeSet<M>>) {
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

fn shown(module: &Module) -> String {
    match module.is_empty() {
        true => "the root".to_owned(),
        false => module.join("::"),
    }
}

/// Returns the circles of a crate's modules. `part` returns the module to which a module is counted.
fn circles(
    imports: &BTreeMap<Module, BTreeSet<Module>>,
    part: &dyn Fn(&Module) -> Module,
    except: &[&str],
) -> Vec<String> {
    let mut graph: BTreeMap<Module, BTreeSet<Module>> = BTreeMap::new();
    for (module, imports) in imports {
        let of = graph.entry(part(module)).or_default();
        of.extend(imports.iter().map(&part));
    }
    let is_excepted = |module: &Module| except.contains(&&*shown(module));
    graph.retain(|module, _| !is_excepted(module));
    for (module, imports) in &mut graph {
        imports.remove(module);
        imports.retain(|module| !is_excepted(module));
    }
    keep_circles(&mut graph);
    let lines = graph.iter().map(|(module, imports)| {
        let imports: Vec<_> = imports.iter().map(shown).collect();
        format!("{} imports {}", shown(module), imports.join(", "))
    });
    lines.collect()
}

/// Checks the files of each crate, and its top-level modules with all files inside them.
#[test]
fn no_modules_import_one_another_in_a_circle() {
    let mut found = Vec::new();
    let mut seen = 0;
    for (name, sources) in each_of_all() {
        let imports = sources.imports();
        let top = |module: &Module| sources.top(module);
        seen += imports.values().map(BTreeSet::len).sum::<usize>();
        let listed = IN_CIRCLES.iter().filter(|(of, _)| *of == name);
        let except: Vec<_> = listed.map(|(_, module)| *module).collect();
        for part in [&Module::clone as &dyn Fn(&Module) -> Module, &top] {
            for line in circles(&imports, part, &except) {
                found.push(format!("{name}: {line}"));
            }
        }
        if !except.is_empty() && circles(&imports, &top, &[]).is_empty() {
            found.push(format!("{name}: {except:?} need no exception"));
        }
    }
    assert!(seen > 1500, "imports are found: {seen}");
    assert!(found.is_empty(), "circles:\n{}", found.join("\n"));
}

#[test]
fn circles_are_found_between_files_and_between_directories() {
    let module = |path: &str| path.split("::").map(str::to_owned).collect::<Module>();
    let graph = |edges: &[(&str, &str)]| {
        let mut graph: BTreeMap<_, BTreeSet<_>> = BTreeMap::new();
        for (from, to) in edges {
            graph.entry(module(from)).or_default().insert(module(to));
            graph.entry(module(to)).or_default();
        }
        graph
    };
    let first = |module: &Module| module[..1].to_vec();
    let files = graph(&[("a", "b"), ("b", "c"), ("c", "b"), ("c", "d")]);
    assert_eq!(
        circles(&files, &Module::clone, &[]),
        ["b imports c", "c imports b"]
    );
    assert_eq!(circles(&files, &Module::clone, &["c"]), [""; 0]);
    let directories = graph(&[("a::x", "b::x"), ("b::y", "a::y")]);
    assert_eq!(circles(&directories, &Module::clone, &[]), [""; 0]);
    assert_eq!(circles(&directories, &first, &[]).len(), 2);
}
