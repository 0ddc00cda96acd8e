//! Checks that docs/state.md describes all state that a vCPU keeps longer than a run.

use std::collections::BTreeSet;
use std::path::Path;

/// Returns a source text without comments and without the unit tests at its end.
fn code(text: &str) -> String {
    let tested = text.split("#[cfg(test)]\nmod tests").next().unwrap();
    let lines = tested.lines().map(|line| line.split("//").next().unwrap());
    lines.collect::<Vec<_>>().join("\n")
}

/// Splits a name off `text`. The name is empty if `text` does not begin with a name.
fn name(text: &str) -> (&str, &str) {
    let end = text.find(|c: char| !c.is_alphanumeric() && c != '_');
    text.split_at(end.unwrap_or(text.len()))
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
    assert_eq!(structures, 28, "structures of state");
}
