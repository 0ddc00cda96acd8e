//! Checks that the modules of some crates are in layers. A table in the documentation of the crate's root lists the
//! layers, the lowest first. Each module imports only from its own layer and from lower layers.

use super::sources::{ARCH, LAYERS, Module, Sources, each_of_all};
use std::collections::BTreeSet;

/// Crates that must have layers.
const LAYERED: [&str; 3] = ["slat-kvm", "slat-preload", "slat-x86"];

/// A layer, and its modules.
#[derive(Debug, PartialEq, Eq)]
pub struct Layer {
    name: String,
    modules: Vec<Module>,
}

/// Returns the layers in the table, the lowest first. Returns nothing if there is no such table. The modules of the
/// table are inside `parent`.
fn table(docs: &str, parent: &[String]) -> Vec<Layer> {
    let mut layers: Vec<Layer> = Vec::new();
    let Some((_, table)) = docs.split_once(LAYERS) else {
        return layers;
    };
    let rows = table.lines().skip(2);
    for row in rows.map_while(|line| line.strip_prefix('|')) {
        let columns: Vec<_> = row.split('|').map(str::trim).collect();
        if !columns[0].is_empty() {
            layers.push(Layer {
                name: columns[0].to_owned(),
                modules: Vec::new(),
            });
        }
        let modules = columns[1].split('`').skip(1).step_by(2);
        let modules = modules.map(|module| module.trim_end_matches('/').to_owned());
        let layer = layers.last_mut().expect("the first row names a layer");
        (layer.modules).extend(modules.map(|module| [parent, &[module]].concat()));
    }
    layers
}

/// Returns the layers of a crate, the lowest first. The table of an architecture adds modules to layers of the root's
/// table.
pub fn layers(sources: &Sources) -> Vec<Layer> {
    let mut layers = table(&sources.root_docs, &[]);
    for (arch, docs) in &sources.arch_docs {
        for Layer { name, modules } in table(docs, arch) {
            let known = layers.iter_mut().find(|layer| layer.name == name);
            let known = known.unwrap_or_else(|| panic!("{arch:?}: the root has no layer {name}"));
            known.modules.extend(modules);
        }
    }
    layers
}

/// Returns the number of a module's layer. The root, and the modules that select the architecture, have no layer.
pub fn layer_of(sources: &Sources, layers: &[Layer], module: &Module) -> Option<usize> {
    let top = sources.top(module);
    layers.iter().position(|layer| layer.modules.contains(&top))
}

#[test]
fn modules_import_from_their_layer_and_lower_ones_alone() {
    let mut wrong = Vec::new();
    let mut layered = BTreeSet::new();
    for (name, sources) in each_of_all() {
        let layers = layers(&sources);
        if layers.is_empty() {
            continue;
        }
        let listed: Vec<_> = layers.iter().flat_map(|layer| &layer.modules).collect();
        let unique: BTreeSet<_> = listed.iter().map(|module| (*module).clone()).collect();
        assert_eq!(
            listed.len(),
            unique.len(),
            "{name}: a module is listed twice"
        );
        let chooses = |module: &&Module| {
            let is_arch = module[..] == [ARCH.to_owned()] && !sources.arch_docs.is_empty();
            module.is_empty() || is_arch || sources.arch_docs.contains_key(*module)
        };
        let modules = sources.modules.keys().filter(|module| !chooses(module));
        let tops: BTreeSet<_> = modules.map(|module| sources.top(module)).collect();
        let missing: Vec<_> = tops.symmetric_difference(&unique).collect();
        assert!(
            missing.is_empty(),
            "{name}: listed, or there, alone: {missing:?}"
        );
        for (module, imports) in sources.imports() {
            let above = |import: &&Module| {
                let layer = layer_of(&sources, &layers, &module);
                layer.is_some() && layer_of(&sources, &layers, import) > layer
            };
            for import in imports.iter().filter(above) {
                let (module, import) = (module.join("::"), import.join("::"));
                wrong.push(format!("{name}: {module} imports {import}"));
            }
        }
        layered.insert(name);
    }
    assert!(
        LAYERED.iter().all(|name| layered.contains(*name)),
        "{layered:?}"
    );
    assert!(
        wrong.is_empty(),
        "from a higher layer:\n{}",
        wrong.join("\n")
    );
}

#[test]
fn layers_are_read_from_their_table() {
    let docs = "A crate.\n\n| layer | file | idea |\n|---|---|---|\n| low | `a`, `b/` | |\n| | `c` | |\n| high | `d` | |\n\nMore `e`.\n";
    let module = |path: &str| path.split("::").map(str::to_owned).collect::<Module>();
    let layer = |name: &str, modules: &[&str]| Layer {
        name: name.to_owned(),
        modules: modules.iter().map(|path| module(path)).collect(),
    };
    let expected = [
        layer("low", &["x::a", "x::b", "x::c"]),
        layer("high", &["x::d"]),
    ];
    assert_eq!(table(docs, &module("x")), expected);
    assert!(table("| file | idea |", &[]).is_empty());
}
