//! A file of slat-kvm is neutral, or belongs to one architecture and is in that architecture's folder.

use super::sources::{ARCH, Module, Sources};

const CRATE: &str = "slat-kvm";

/// What only the files of an architecture name: its CPU, its devices, and the host's instructions.
const OF_ARCHITECTURES: [&str; 5] = [
    "slat_x86",
    "slat_irqchip",
    "slat_hyperv",
    "core::arch",
    "std::arch",
];

/// Neutral files are all but those below the folder of the architectures.
fn is_neutral(module: &Module) -> bool {
    module.first().is_none_or(|top| top != ARCH)
}

/// Returns what the code of a module must not contain.
fn forbidden(module: &Module, code: &str) -> Vec<String> {
    let mut found = Vec::new();
    let chooses = module[..] == [ARCH.to_owned()];
    if !chooses && code.contains("target_arch") {
        found.push("target_arch".to_owned());
    }
    if !is_neutral(module) {
        return found;
    }
    let named = |name: &&&str| code.contains(**name);
    found.extend(
        OF_ARCHITECTURES
            .iter()
            .filter(named)
            .map(|name| (*name).to_owned()),
    );
    found
}

#[test]
fn neutral_files_name_nothing_of_an_architecture() {
    let sources = Sources::of(CRATE);
    assert!(!sources.arch_docs.is_empty(), "{CRATE} has architectures");
    let mut wrong = Vec::new();
    for (module, code) in &sources.modules {
        for name in forbidden(module, code) {
            wrong.push(format!("{} has {name}", module.join("::")));
        }
    }
    assert!(wrong.is_empty(), "{CRATE}:\n{}", wrong.join("\n"));
}

/// They name what `arch/mod.rs` re-exports, so that its list is all that an architecture provides.
#[test]
fn neutral_files_use_what_the_choice_of_the_architecture_exports() {
    let sources = Sources::of(CRATE);
    let exported = sources.re_exports(&vec![ARCH.to_owned()]);
    assert!(exported.len() > 30, "exports are found: {exported:?}");
    let mut wrong = Vec::new();
    let mut used = 0;
    for (module, path) in sources.paths().filter(|(module, _)| is_neutral(module)) {
        if path.first().is_none_or(|first| first != ARCH) {
            continue;
        }
        used += 1;
        // `use crate::arch` alone is the module, whose items are then named by `arch::`.
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
    let module = |path: &str| path.split("::").map(str::to_owned).collect::<Module>();
    let code = "use slat_x86::Exit;\n#[cfg(target_arch = \"x86_64\")]\nfn f() {}";
    assert_eq!(
        forbidden(&module("run::accesses"), code),
        ["target_arch", "slat_x86"]
    );
    assert_eq!(
        forbidden(&module("arch::x86_64::run"), code),
        ["target_arch"]
    );
    assert!(forbidden(&module("arch"), code).is_empty());
}
