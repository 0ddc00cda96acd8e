//! Checks that the code which documents show, and the items to which they link, exist.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

/// The document that shows Rust code, and the files that the code comes from.
const HYPERVISOR: &str = "docs/hypervisor.md";
const SOURCES: [&str; 12] = [
    "conformance/axaddrspace/platform.rs",
    "crates/slat/examples/backup.rs",
    "crates/slat/examples/layers.rs",
    "crates/slat/examples/plain_memory/mod.rs",
    "crates/slat/examples/snapshot.rs",
    "crates/slat/examples/software_cpu.rs",
    "metal/core/src/frames.rs",
    "metal/core/src/host.rs",
    "metal/core/src/shootdown.rs",
    "metal/core/src/vmids.rs",
    "metal/npt/src/main.rs",
    "metal/npt/src/svm.rs",
];

fn root() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."))
}

fn read(path: impl AsRef<Path>) -> String {
    fs::read_to_string(root().join(path)).unwrap()
}

#[test]
fn what_the_document_shows_is_in_the_tree() {
    let document = read(HYPERVISOR);
    let sources = SOURCES.map(read);
    let mut shown = document.split("```rust\n").skip(1);
    assert!(shown.clone().count() > 5, "the document shows code");
    let missing = shown.find_map(|rest| {
        let (code, _) = rest.split_once("```").unwrap();
        let found = sources.iter().any(|source| source.contains(code));
        (!found).then_some(code)
    });
    assert_eq!(missing, None, "{HYPERVISOR} shows what is not in the tree");
}

/// Checks that `.ci/run quick` runs the loom models that CONTRIBUTING.md's table names for the changed files.
#[test]
fn the_table_of_proofs_names_each_loom_model() {
    let table = read("CONTRIBUTING.md");
    let rows = table.lines().filter(|line| line.starts_with("| `slat"));
    let lists = rows.flat_map(|row| row.split("loom's ").skip(1));
    let lists = lists.filter_map(|list| list.split([';', '|']).next());
    let named: BTreeSet<_> = lists
        .flat_map(|list| list.split('`').skip(1).step_by(2))
        .collect();
    let models = read("crates/slat/src/loom_tests/mod.rs");
    let models = models.lines().filter_map(|line| line.strip_prefix("mod "));
    let models: BTreeSet<_> = models.map(|name| name.trim_end_matches(';')).collect();
    assert_eq!(named, models);
}

/// Returns the documents of the workspace: those of the root, of `docs`, `conformance` and `fuzz`, and
/// each crate's README.
fn documents() -> Vec<PathBuf> {
    let in_directory = |directory: &Path| {
        let entries = fs::read_dir(directory).unwrap();
        let paths = entries.map(|entry| entry.unwrap().path());
        let documents = paths.filter(|path| path.extension().is_some_and(|e| e == "md"));
        documents.collect::<Vec<_>>()
    };
    let mut documents = in_directory(root());
    for directory in ["docs", "conformance", "fuzz"] {
        documents.extend(in_directory(&root().join(directory)));
    }
    for entry in fs::read_dir(root().join("crates")).unwrap() {
        documents.extend(in_directory(&entry.unwrap().path()));
    }
    documents
}

/// A link of a document.
struct Link<'a> {
    /// The prose between the previous link and this link.
    before: &'a str,
    text: &'a str,
    target: &'a str,
}

impl<'a> Link<'a> {
    /// If the link's text is an item of Rust, returns the item, and the file to which the link goes.
    fn item(&self) -> Option<(&'a str, &'a str)> {
        let item = self.text.strip_prefix('`')?.strip_suffix('`')?;
        Some((item, self.target.split('#').next()?))
    }
}

/// Returns the links outside code blocks.
fn links(document: &str) -> Vec<Link<'_>> {
    let mut links = Vec::new();
    for mut prose in document.split("```").step_by(2) {
        while let Some((before, rest)) = prose.split_once("](") {
            let (before, text) = before.rsplit_once('[').unwrap();
            let (target, rest) = rest.split_once(')').unwrap();
            links.push(Link {
                before,
                text,
                target,
            });
            prose = rest;
        }
    }
    links
}

/// Returns the names in a line of code. Leaves out comments and all other characters.
fn names(line: &str) -> Vec<&str> {
    let code = line.split("//").next().unwrap();
    let names = code.split(|c: char| !c.is_alphanumeric() && c != '_');
    names.filter(|name| !name.is_empty()).collect()
}

/// Whether `source` defines `name`: as a function, a type, a constant or a macro; or as a variant, at the beginning of
/// a line.
fn defines(source: &str, name: &str) -> bool {
    const KEYWORDS: [&str; 7] = [
        "fn",
        "struct",
        "enum",
        "trait",
        "type",
        "const",
        "macro_rules",
    ];
    let is_type = name.starts_with(char::is_uppercase);
    source.lines().any(|line| {
        let names = names(line);
        let defined = |pair: &[&str]| KEYWORDS.contains(&pair[0]) && pair[1] == name;
        names.windows(2).any(defined) || is_type && names.first() == Some(&name)
    })
}

/// Checks a link to `path`, relative to the root, whose text is `` `item` ``. If the item is one of Rust (`function`,
/// `Type`, `Type::method`) and the link is wrong, returns the reason. A crate or module may be linked by its name.
fn wrong_item(path: &Path, item: &str) -> Option<String> {
    let is_rust = |c: char| c.is_alphanumeric() || c == '_' || c == ':';
    if !item.chars().all(is_rust) {
        return None;
    }
    let is_part = |name: &str| path.with_extension("").iter().any(|part| part == name);
    let mut parts = item.rsplit("::");
    let last = parts.next().unwrap();
    if last == item && is_part(item) {
        return None;
    }
    let source = fs::read_to_string(root().join(path)).unwrap_or_default();
    let has = |name: &str| source.lines().any(|line| names(line).contains(&name));
    match parts.find(|part| !has(part) && !is_part(part)) {
        Some(part) => Some(format!("{part} is not there")),
        None => (!defines(&source, last)).then(|| format!("{last} is not defined there")),
    }
}

#[test]
fn what_the_documents_link_to_is_in_the_tree() {
    let root = root().canonicalize().unwrap();
    let mut wrong = Vec::new();
    let mut items = 0;
    for document in documents() {
        let text = fs::read_to_string(&document).unwrap();
        for link in links(&text) {
            let Link { text, target, .. } = link;
            let target = target.split('#').next().unwrap();
            if target.is_empty() || target.contains("://") {
                continue;
            }
            let path = document.parent().unwrap().join(target);
            let item = link.item().map(|(item, _)| item);
            items += usize::from(item.is_some());
            let why = match path.canonicalize() {
                Err(_) => Some("there is no such file".to_owned()),
                Ok(path) => match path.strip_prefix(&root) {
                    Err(_) => Some("it is outside the tree".to_owned()),
                    Ok(path) => item.and_then(|item| wrong_item(path, item)),
                },
            };
            let document = document.file_name().unwrap();
            wrong.extend(why.map(|why| format!("{document:?}: [{text}]({target}): {why}")));
        }
    }
    assert!(items > 100, "the documents link to items: {items}");
    assert!(wrong.is_empty(), "wrong links:\n{}", wrong.join("\n"));
}

/// The document whose sentences about calls are compared with the code.
const ARCHITECTURE: &str = "docs/architecture.md";

/// Returns the bodies of all functions with the name `name` in `source`, which rustfmt has formatted.
fn bodies<'a>(source: &'a str, name: &str) -> Vec<Vec<&'a str>> {
    let lines: Vec<_> = source.lines().collect();
    let is_function = |line: &str| names(line).windows(2).any(|pair| pair == ["fn", name]);
    let starts = (0..lines.len()).filter(|at| is_function(lines[*at]));
    let bodies = starts.filter_map(|at| {
        let indent = lines[at].len() - lines[at].trim_start().len();
        let of_function = |line: &&str| line.len() - line.trim_start().len() == indent;
        // The signature ends with the brace, or with the semicolon if a trait's method has no body.
        let opening = (at..lines.len()).find(|at| lines[*at].ends_with(['{', '}', ';']))?;
        let is_closing = |at: &usize| of_function(&lines[*at]) && lines[*at].trim() == "}";
        match lines[opening].ends_with('{') {
            true => {
                let closing = (opening + 1..lines.len()).find(is_closing)?;
                Some(lines[opening + 1..closing].to_vec())
            }
            false => None,
        }
    });
    bodies.collect()
}

/// If `caller` does not call `callee`, returns the reason: of the functions with the caller's name, in the file to
/// which `caller` links, none has the callee's name in its body. A function that the body passes on as an argument
/// counts as called.
fn wrong_call(caller: (&str, &str), callee: (&str, &str)) -> Option<String> {
    let last = |item: &str| item.rsplit("::").next().unwrap().to_owned();
    let path = Path::new(ARCHITECTURE).parent().unwrap().join(caller.1);
    let source = read(path);
    let callee = last(callee.0);
    let bodies = bodies(&source, &last(caller.0));
    let calls = |body: &Vec<&str>| body.iter().any(|line| names(line).contains(&&*callee));
    let why = match bodies.is_empty() {
        true => "it has no body",
        false => "its body does not name that",
    };
    (!bodies.iter().any(calls)).then(|| format!("{} calls {callee}: {why}", caller.0))
}

/// In the sentence "[`a`](x.rs) calls [`b`](y.rs), [`c`](z.rs) and [`d`](w.rs)", the function `a` of `x.rs` calls the
/// other functions.
#[test]
fn functions_call_what_the_page_says_that_they_call() {
    let page = read(ARCHITECTURE);
    let links = links(&page);
    let mut wrong = Vec::new();
    let mut calls = 0;
    let mut caller = None;
    for (at, link) in links.iter().enumerate().skip(1) {
        let calls_next = links
            .get(at + 1)
            .is_some_and(|next| next.before.trim() == "calls");
        caller = match link.before.split_whitespace().collect::<Vec<_>>()[..] {
            ["calls"] => links[at - 1].item(),
            // In the sentence "`a` calls `b`, and `c` calls `d`", `c` is a caller.
            [","] | ["and"] | [",", "and"] if !calls_next => caller,
            _ => None,
        };
        if let Some((caller, callee)) = caller.zip(link.item()) {
            calls += 1;
            wrong.extend(wrong_call(caller, callee));
        }
    }
    assert!(
        calls > 100,
        "the page says which function calls which: {calls}"
    );
    assert!(wrong.is_empty(), "wrong calls:\n{}", wrong.join("\n"));
}

/// A row of one of the tables in `conformance`.
#[derive(Default)]
struct Row {
    name: String,
    passes: bool,
    /// The versions of the programs that have the test: from `since` on, and before `before`.
    since: Option<String>,
    before: Option<String>,
}

impl Row {
    /// Whether the programs of `version` have the test.
    fn is_of(&self, version: &str) -> bool {
        let numbers = |version: &str| -> Vec<u32> {
            let numbers = version.split('.').map(|number| number.parse().unwrap());
            numbers.collect()
        };
        let is_at_least = |other: &String| numbers(version) >= numbers(other);
        self.since.as_ref().is_none_or(is_at_least)
            && !self.before.as_ref().is_some_and(is_at_least)
    }
}

/// Reads a table of `conformance`.
fn rows(path: &str) -> Vec<Row> {
    let text = read(path);
    let rows = text.split("\n[[test]]\n").skip(1).map(|block| {
        let mut row = Row {
            passes: true,
            ..Row::default()
        };
        for (key, value) in block.lines().filter_map(|line| line.split_once(" = ")) {
            let value = value.trim_matches('"').to_owned();
            match key {
                "name" => row.name = value,
                "expect" => row.passes = value == "pass",
                "since" => row.since = Some(value),
                "before" => row.before = Some(value),
                _ => {}
            }
        }
        row
    });
    rows.collect()
}

/// Returns the number of rows, of those that programs of `version` have, that pass, and the number of rows that do not.
fn passing(rows: &[Row], version: &str) -> (usize, usize) {
    let of_version = rows.iter().filter(|row| row.is_of(version));
    let (pass, skip): (Vec<_>, Vec<_>) = of_version.partition(|row| row.passes);
    (pass.len(), skip.len())
}

#[test]
fn the_documents_count_what_the_conformance_tables_have() {
    let selftests = rows("conformance/expected.toml");
    let monitors = rows("conformance/vmm/rows.toml");
    let unit_tests = rows("conformance/unit-tests/tests.toml");
    let kvm_ioctls = rows("conformance/kvm-ioctls/tests.toml");
    let tools = rows("conformance/tools/rows.toml");
    let (by_hand, with_qemu): (Vec<_>, Vec<_>) = monitors
        .into_iter()
        .partition(|row| ["firecracker", "cloud-hypervisor"].contains(&&*row.name));

    let mut says = Vec::new();
    for version in ["6.12", "7.3"] {
        let (pass, skip) = passing(&selftests, version);
        says.push((
            "conformance/README.md",
            format!("| {version} | {pass} | {skip} |"),
        ));
    }
    let arm64 = rows("conformance/arm64/expected.toml");
    for version in ["6.12", "7.3"] {
        let (pass, skip) = passing(&arm64, version);
        says.push((
            "conformance/README.md",
            format!("Of Linux {version}'s, {pass} rows pass and {skip} are skipped"),
        ));
    }
    let linux = ["6.12", "7.3"].map(|version| passing(&selftests, version).0);
    let qemu = ["7.2", "11.1"].map(|version| passing(&with_qemu, version).0);
    let (unit, _) = passing(&unit_tests, "0");
    says.push((
        "README.md",
        format!(
            "{} of Linux 6.12's KVM selftests pass and {} of Linux 7.3's, {unit} of kvm-unit-tests, and of boots, devices and \
             migrations {} with QEMU 7.2 and {} with QEMU 11.1",
            linux[0], linux[1], qemu[0], qemu[1]
        ),
    ));
    says.push(("conformance/README.md", format!("of which {unit} pass")));
    let (unit, skip) = passing(&rows("conformance/arm64/unit-tests.toml"), "0");
    says.push((
        "conformance/README.md",
        format!("{unit} pass and {skip} are skipped: a performance monitor"),
    ));
    let (all, none) = passing(&kvm_ioctls, "0");
    assert_eq!(none, 0);
    says.push((
        "conformance/README.md",
        format!("{all} rows, all of which pass"),
    ));
    says.push((
        "conformance/README.md",
        format!("least that is real: {} rows", tools.len()),
    ));
    says.push(("README.md", format!("{} rows are run", tools.len())));
    for row in &tools {
        says.push(("conformance/README.md", format!("`{}`", row.name)));
    }
    let names: BTreeSet<_> = with_qemu
        .iter()
        .chain(&by_hand)
        .map(|row| &row.name)
        .collect();
    for name in names {
        let count = with_qemu
            .iter()
            .chain(&by_hand)
            .filter(|row| row.name == *name)
            .count();
        says.push(("conformance/README.md", format!("| `{name}` | {count} |")));
    }
    for row in selftests.iter().filter(|row| row.passes) {
        says.push(("conformance/README.md", format!("`{}`", row.name)));
    }
    for (path, text) in says {
        let document = read(path).split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(document.contains(&text), "{path} does not say: {text}");
    }
}
