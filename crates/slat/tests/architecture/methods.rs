//! Checks the layers of slat-x86 for method calls, too. Methods of one structure may be defined in many modules, and
//! calling one needs no import.

use super::circles::keep_circles;
use super::layers::{layer_of, layers};
use super::sources::{Module, Sources, name};
use std::collections::{BTreeMap, BTreeSet};

/// The structures, and the texts before a call of their methods.
const STRUCTURES: [&str; 2] = ["Cpu", "Executor"];
const NAMES: [&str; 4] = ["cpu.", "executor.", "Cpu::", "Executor::"];
const SELF: [&str; 2] = ["self.", "Self::"];

/// Returns the bodies of the structures' `impl` blocks in the code of a module.
fn bodies(code: &str) -> Vec<&str> {
    let mut bodies = Vec::new();
    for structure in STRUCTURES {
        for (at, _) in code.match_indices(&format!("\nimpl {structure} {{")) {
            let body = &code[at + 1..];
            bodies.push(&body[..body.find("\n}").expect("the block ends")]);
        }
    }
    bodies
}

/// Returns the names of the methods that each module defines.
fn defined(sources: &Sources) -> BTreeMap<&str, BTreeSet<&Module>> {
    let mut defined: BTreeMap<_, BTreeSet<_>> = BTreeMap::new();
    for (module, code) in &sources.modules {
        for body in bodies(code) {
            for (at, keyword) in body.match_indices("fn ") {
                let method = name(&body[at + keyword.len()..]).0;
                defined.entry(method).or_default().insert(module);
            }
        }
    }
    defined
}

/// Adds the names of the methods that `code` calls on one of `receivers`.
fn calls<'c>(code: &'c str, receivers: &[&str], found: &mut BTreeSet<&'c str>) {
    for receiver in receivers {
        for (at, _) in code.match_indices(receiver) {
            let (method, rest) = name(&code[at + receiver.len()..]);
            if rest.starts_with(['(', ':', ')', ',']) {
                found.insert(method);
            }
        }
    }
}

/// Returns the names of the methods that `code` calls. `self` is one of the structures only in their `impl` blocks.
fn called(code: &str) -> BTreeSet<&str> {
    let mut found = BTreeSet::new();
    calls(code, &NAMES, &mut found);
    for body in bodies(code) {
        calls(body, &SELF, &mut found);
    }
    found
}

/// Calls `then` with a module, another module, and a method, for each method that the first module calls and only the
/// second defines.
fn each_call(sources: &Sources, then: &mut dyn FnMut(&Module, &Module, &str)) {
    let defined = defined(sources);
    assert!(defined.len() > 300, "methods are found: {}", defined.len());
    let names_one = |code: &str| STRUCTURES.iter().any(|name| code.contains(name));
    for (module, code) in sources.modules.iter().filter(|(_, code)| names_one(code)) {
        for method in called(code) {
            // If several modules define a method with this name, it is a method of different structures.
            let of = defined.get(method).filter(|of| of.len() == 1);
            if let Some(of) = of.and_then(BTreeSet::first).filter(|of| **of != module) {
                then(module, of, method);
            }
        }
    }
}

#[test]
fn methods_are_called_from_their_layer_and_higher_ones_alone() {
    let sources = Sources::of("slat-x86");
    let layers = layers(&sources);
    let mut wrong = Vec::new();
    each_call(&sources, &mut |module, of, method| {
        if layer_of(&sources, &layers, of) > layer_of(&sources, &layers, module) {
            wrong.push(format!(
                "{} calls {}::{method}",
                module.join("::"),
                of.join("::")
            ));
        }
    });
    assert!(wrong.is_empty(), "of a higher layer:\n{}", wrong.join("\n"));
}

/// The run loop and the completion of an instruction call one another. So the modules of the highest layer count as
/// one.
#[test]
fn below_the_highest_layer_methods_call_one_another_in_no_circle() {
    let sources = Sources::of("slat-x86");
    let layers = layers(&sources);
    let highest = Some(layers.len() - 1);
    let mut graph: BTreeMap<Module, BTreeSet<Module>> = BTreeMap::new();
    each_call(&sources, &mut |module, of, _| {
        if layer_of(&sources, &layers, module) < highest {
            let calls = graph.entry(module.clone()).or_default();
            calls.insert(of.clone());
        }
    });
    assert!(graph.len() > 20, "modules with calls: {}", graph.len());
    keep_circles(&mut graph);
    assert!(graph.is_empty(), "circles: {graph:#?}");
}
