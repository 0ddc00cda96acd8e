//! The modules of some crates are in layers, which a table in the documentation of the crate's root lists, from the
//! lowest layer on. Each module imports only from its own layer and from lower ones.

use super::sources::{Module, Sources, all};
use std::collections::BTreeSet;

/// Crates with layers, at least.
const LAYERED: [&str; 3] = ["slat-kvm", "slat-preload", "slat-x86"];

/// Returns the modules of each layer in the table, from the lowest layer on. Nothing if there is no such table.
pub fn layers(docs: &str) -> Vec<Vec<String>> {
    let mut layers = Vec::new();
    let Some((_, table)) = docs.split_once("| layer |") else {
        return layers;
    };
    let rows = table.lines().skip(2);
    for row in rows.map_while(|line| line.strip_prefix('|')) {
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

/// Returns the number of a top-level module's layer. The root has none.
pub fn layer_of(layers: &[Vec<String>], module: &Module) -> Option<usize> {
    let top = module.first()?;
    layers.iter().position(|layer| layer.contains(top))
}

#[test]
fn modules_import_from_their_layer_and_lower_ones_alone() {
    let mut wrong = Vec::new();
    let mut layered = BTreeSet::new();
    for name in all() {
        let sources = Sources::of(&name);
        let layers = layers(&sources.root_docs);
        if layers.is_empty() {
            continue;
        }
        let listed: Vec<_> = layers.iter().flatten().collect();
        let unique: BTreeSet<_> = listed.iter().copied().collect();
        assert_eq!(
            listed.len(),
            unique.len(),
            "{name}: a module is listed twice"
        );
        let tops = sources.modules.keys().filter_map(|module| module.first());
        let tops: BTreeSet<_> = tops.collect();
        let missing: Vec<_> = tops.symmetric_difference(&unique).collect();
        assert!(
            missing.is_empty(),
            "{name}: listed, or there, alone: {missing:?}"
        );
        for (module, imports) in sources.imports() {
            let above = |import: &&Module| {
                layer_of(&layers, import) > layer_of(&layers, &module) && !module.is_empty()
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
    let expected = [vec!["a", "b", "c"], vec!["d"]];
    assert_eq!(layers(docs), expected);
    assert!(layers("| file | idea |").is_empty());
}
