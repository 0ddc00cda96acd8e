//! Finds the modules of a crate, and their imports, in the crate's source text.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

/// The path of a module from the crate's root. The root's own path is empty.
pub type Module = Vec<String>;

/// Modules that contain only tests, which may import all others.
const TESTS: [&str; 2] = ["tests", "loom_tests"];

/// The folder with a module for each architecture.
pub const ARCH: &str = "arch";

/// The beginning of a table of layers.
pub const LAYERS: &str = "| layer |";

/// The source text of a crate.
pub struct Sources {
    /// The code of each module, including the root, without comments and unit tests.
    pub modules: BTreeMap<Module, String>,
    /// The documentation of the root.
    pub root_docs: String,
    /// The documentation of each module `arch::…` that has a table of layers. The modules inside it count as top-level
    /// modules, like those inside the root.
    pub arch_docs: BTreeMap<Module, String>,
}

/// The name by which the module [`ARCH`] calls the architecture for which the crate is built.
const CHOSEN: &str = "chosen";

/// Returns the directory of the workspace's crates.
pub fn crates() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// Returns the names of all crates of the workspace.
pub fn all() -> BTreeSet<String> {
    let entries = fs::read_dir(crates()).unwrap();
    let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    names.collect()
}

/// Returns the sources of all crates of the workspace, with their names, as each architecture has them.
pub fn each_of_all() -> Vec<(String, Sources)> {
    let names = all().into_iter();
    let each = names.flat_map(|name| {
        let sources = Sources::each(&name).into_iter();
        sources.map(move |sources| (name.clone(), sources))
    });
    each.collect()
}

/// Returns a source text without comments and without the unit tests at its end.
fn code(text: &str) -> String {
    let tested = text.split("mod tests {").next().unwrap();
    let tested = tested.split("mod loom_tests {").next().unwrap();
    let lines = tested.lines().map(|line| line.split("//").next().unwrap());
    lines.flat_map(|line| [line, "\n"]).collect()
}

/// Returns the documentation of the module whose file has this text.
fn docs(text: &str) -> String {
    let docs = text.lines().filter_map(|line| line.strip_prefix("//!"));
    docs.flat_map(|line| [line.trim_start(), "\n"]).collect()
}

/// Returns the documentation of those architectures of a crate that have a table of layers.
fn arch_docs(source: &Path) -> BTreeMap<Module, String> {
    let entries = fs::read_dir(source.join(ARCH)).into_iter().flatten();
    let architectures = entries.filter_map(|entry| {
        let path = entry.unwrap().path();
        let docs = docs(&fs::read_to_string(path.join("mod.rs")).ok()?);
        let name = path.file_name()?.to_str()?;
        let module = vec![ARCH.to_owned(), name.to_owned()];
        docs.contains(LAYERS).then_some((module, docs))
    });
    architectures.collect()
}

/// Reads the modules below `directory`.
fn read(directory: &Path, parent: &[String], found: &mut BTreeMap<Module, String>) {
    for entry in fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_stem().unwrap().to_str().unwrap().to_owned();
        let mut module = parent.to_vec();
        if TESTS.contains(&&*name) || parent.is_empty() && name == "bin" {
            continue;
        }
        if path.is_dir() {
            module.push(name);
            read(&path, &module, found);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            let is_root = parent.is_empty() && (name == "lib" || name == "main");
            if name != "mod" && !is_root {
                module.push(name);
            }
            let text = code(&fs::read_to_string(&path).unwrap());
            found.entry(module).or_default().push_str(&text);
        }
    }
}

impl Sources {
    /// Reads the sources of the crate `name`.
    pub fn of(name: &str) -> Self {
        let source = crates().join(name).join("src");
        let mut modules = BTreeMap::new();
        read(&source, &[], &mut modules);
        let root = ["lib.rs", "main.rs"].map(|file| fs::read_to_string(source.join(file)));
        let root: String = root.into_iter().flatten().collect();
        let root_docs = docs(&root);
        let arch_docs = arch_docs(&source);
        Sources {
            modules,
            root_docs,
            arch_docs,
        }
    }

    /// Reads the sources of the crate `name` as each of its architectures has them: without the modules of the other
    /// architectures. Returns one set of sources for a crate whose architectures have no table of layers.
    pub fn each(name: &str) -> Vec<Self> {
        let all = Self::of(name);
        let architectures: Vec<_> = all.arch_docs.keys().cloned().collect();
        if architectures.is_empty() {
            return vec![all];
        }
        let of = |architecture: &Module| {
            let mut sources = Self::of(name);
            let others = |module: &Module| {
                let mut others = architectures.iter().filter(|it| *it != architecture);
                others.any(|other| module.starts_with(other))
            };
            sources.modules.retain(|module, _| !others(module));
            sources.arch_docs.retain(|module, _| module == architecture);
            sources
        };
        architectures.iter().map(of).collect()
    }

    /// Returns the top-level module to which a module belongs.
    pub fn top(&self, module: &Module) -> Module {
        let inside = |arch: &&Module| module.starts_with(arch);
        let depth = self.arch_docs.keys().find(inside).map_or(0, Vec::len);
        module.iter().take(depth + 1).cloned().collect()
    }

    /// Returns the paths that a module re-exports, by their names in that module. `None`: the path leads to another
    /// crate.
    pub fn re_exports(&self, module: &Module) -> BTreeMap<String, Option<Module>> {
        let Some(code) = self.modules.get(module) else {
            return BTreeMap::new();
        };
        let mut paths = Vec::new();
        for keyword in ["pub use ", "pub(crate) use "] {
            for (at, _) in code.match_indices(keyword) {
                expand(&[], &code[at + keyword.len()..], &mut paths);
            }
        }
        let own = paths.into_iter().map(|Import { path, name }| {
            let from_root = match path[0].as_str() {
                "crate" => path[1..].to_vec(),
                "self" => [module, &path[1..]].concat(),
                // `use x86_64 as chosen`. Of several architectures, any one has the same names.
                CHOSEN if !self.arch_docs.is_empty() => {
                    let (architecture, _) = self.arch_docs.iter().next().expect("there is one");
                    [architecture, &path[1..]].concat()
                }
                _ => [module, &path[..]].concat(),
            };
            let begins = match path[0].as_str() {
                "crate" => 1,
                _ => module.len() + 1,
            };
            let is_own = self.modules.contains_key(&from_root[..begins]);
            (name, is_own.then_some(from_root))
        });
        own.collect()
    }

    /// Returns the re-exports of the root, and of the modules that select the architecture.
    fn all_re_exports(&self) -> BTreeMap<Module, BTreeMap<String, Option<Module>>> {
        let arch = vec![ARCH.to_owned()];
        let modules = [Module::new(), arch].into_iter();
        let modules = modules.chain(self.arch_docs.keys().cloned());
        let all = modules.map(|module| {
            let re_exports = self.re_exports(&module);
            (module, re_exports)
        });
        all.collect()
    }

    /// Returns the module to which a path from the root leads: the longest part of the path that is a module, after
    /// following re-exports. A path to an item of the root leads to the root. `None`: another crate has the item.
    fn leads_to(
        &self,
        path: &[String],
        re_exports: &BTreeMap<Module, BTreeMap<String, Option<Module>>>,
    ) -> Option<Module> {
        let parts = (0..=path.len()).rev().map(|len| &path[..len]);
        let mut found = parts.filter(|part| self.modules.contains_key(*part));
        let found = found.next().expect("the root is a module");
        let item = path.get(found.len());
        match item.and_then(|item| re_exports.get(found)?.get(item)) {
            Some(of) => self.leads_to(of.as_ref()?, re_exports),
            None => Some(found.to_vec()),
        }
    }

    /// Returns the paths in the code of each module except the root, each from the root on.
    pub fn paths(&self) -> impl Iterator<Item = (&Module, Module)> {
        let modules = self.modules.iter().filter(|(module, _)| !module.is_empty());
        modules.flat_map(|(module, code)| {
            let paths = self.paths_of(module, code).into_iter();
            paths.map(move |path| (module, path))
        })
    }

    /// Returns the paths in the code of a module, each from the root on. In a crate with architectures, `arch` is the
    /// module that selects one. Paths that begin with the name of the selected architecture count as paths into `arch`,
    /// too.
    fn paths_of(&self, module: &Module, code: &str) -> Vec<Module> {
        let mut found = paths(module, code);
        if self.arch_docs.is_empty() {
            return found;
        }
        for (at, keyword) in code.match_indices("arch::") {
            let begins = code[..at].chars().next_back();
            if begins.is_none_or(|c| !c.is_alphanumeric() && c != '_' && c != ':') {
                let item = name(&code[at + keyword.len()..]).0;
                found.push(vec![ARCH.to_owned(), item.to_owned()]);
            }
        }
        found
    }

    /// Returns the modules that each module imports.
    ///
    /// A module and the modules inside it count as one. If a module uses items of its own children by the children's
    /// names, that is not an import. If a child uses items of its parent, that is an import.
    pub fn imports(&self) -> BTreeMap<Module, BTreeSet<Module>> {
        let re_exports = self.all_re_exports();
        let of = |(module, code): (&Module, &String)| {
            let paths = match module.is_empty() {
                true => root_paths(code),
                false => self.paths_of(module, code),
            };
            let to = paths
                .iter()
                .filter_map(|path| self.leads_to(path, &re_exports));
            let mut to: BTreeSet<_> = to.collect();
            to.remove(module);
            (module.clone(), to)
        };
        self.modules.iter().map(of).collect()
    }
}

/// Splits a name off the beginning of `text`. The name is empty if `text` does not begin with a name.
pub fn name(text: &str) -> (&str, &str) {
    let end = text.find(|c: char| !c.is_alphanumeric() && c != '_');
    text.split_at(end.unwrap_or(text.len()))
}

/// A path, and the name by which its last part is imported.
struct Import {
    path: Module,
    name: String,
}

/// `text` begins with a path, or with the braces of a `use`. Adds the paths that begin with `prefix` and continue with
/// these. Returns the rest of the text.
fn expand<'a>(prefix: &[String], text: &'a str, paths: &mut Vec<Import>) -> &'a str {
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
        Some(rest) if !rest.starts_with('<') => expand(&path, rest, paths),
        _ => {
            let rest = rest.strip_prefix('*').unwrap_or(rest);
            let alias = rest.trim_start().strip_prefix("as ").map(name);
            let (name, rest) = alias.unwrap_or((first, rest));
            let name = name.to_owned();
            paths.push(Import { path, name });
            rest
        }
    }
}

/// Returns the number of inline modules that are still open at the end of `code`, which is the beginning of a file.
fn inline_modules(code: &str) -> usize {
    let mut open: Vec<&str> = Vec::new();
    for line in code.lines() {
        let text = line.trim_start();
        let indent = &line[..line.len() - text.len()];
        let keyword = text.find("mod ");
        let is_module = keyword.is_some_and(|at| at == 0 || text.starts_with("pub"));
        if is_module && text.ends_with('{') {
            open.push(indent);
        } else if text == "}" && open.last() == Some(&indent) {
            open.pop();
        }
    }
    open.len()
}

/// Returns the paths in the code of a module that begin with `crate` or `super`, each from the root on.
fn paths(module: &[String], code: &str) -> Vec<Module> {
    let mut paths = Vec::new();
    for (at, keyword) in code.match_indices("crate::") {
        // `$crate` in a macro is an import of the modules that use the macro.
        if code[..at].ends_with('$') {
            continue;
        }
        expand(&[], &code[at + keyword.len()..], &mut paths);
    }
    for (at, keyword) in code.match_indices("super::") {
        // This is not the first of several `super::`. The first was handled already.
        if code[..at].ends_with("super::") {
            continue;
        }
        let mut rest = &code[at..];
        let mut levels = 0;
        while let Some(further) = rest.strip_prefix(keyword) {
            (levels, rest) = (levels + 1, further);
        }
        let up = usize::saturating_sub(levels, inline_modules(&code[..at]));
        expand(&module[..module.len() - up], rest, &mut paths);
    }
    paths.into_iter().map(|import| import.path).collect()
}

/// Returns the paths in the code of the root, except its re-exports. The root uses its modules by their names.
fn root_paths(code: &str) -> Vec<Module> {
    let mut paths = Vec::new();
    let statements = code.split_inclusive([';', '{', '}']);
    let mut is_re_export = false;
    for statement in statements {
        is_re_export |= statement.contains("pub use ") || statement.contains("pub(crate) use ");
        if !is_re_export {
            for (at, _) in statement.match_indices("::") {
                let before = &statement[..at];
                let start = before.rfind(|c: char| !c.is_alphanumeric() && c != '_' && c != ':');
                let first = name(&before[start.map_or(0, |start| start + 1)..]).0;
                paths.push(vec![first.to_owned()]);
            }
        }
        is_re_export &= !statement.ends_with(';');
    }
    paths
}

#[test]
fn paths_of_imports_are_found() {
    let module = ["vm", "range_op"].map(str::to_owned);
    let code = "use crate::{addr::{Gfn, Level as L}, heap,\n sync::*};\nuse super::super::slots::Memslot;\nuse super::Vm;\n\
                let x = crate::table::overlap(a, b);\n$crate::op::Row;\nmod inner {\n    use super::outer;\n}\nuse super::end;";
    let found: Vec<_> = (paths(&module, code).iter())
        .map(|path| path.join("::"))
        .collect();
    let expected = [
        "addr::Gfn",
        "addr::Level",
        "heap",
        "sync::",
        "table::overlap",
        "slots::Memslot",
        "vm::Vm",
        "vm::range_op::outer",
        "vm::end",
    ];
    assert_eq!(found, expected);
}

#[test]
fn the_root_uses_its_modules_by_name() {
    let code = "mod a;\npub use b::{C,\n D};\nuse e::f;\nfn g() { h::i::<J>(k::l); }";
    let found: Vec<_> = root_paths(code).into_iter().flatten().collect();
    assert_eq!(found, ["e", "h", "h", "k"]);
}
