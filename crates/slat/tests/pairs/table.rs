//! The table of all pairs of mechanisms.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

const TABLE: &str = include_str!("pairs.txt");

type Pair<'t> = [&'t str; 2];

/// The parsed text of the table.
#[derive(Default)]
struct Table<'t> {
    mechanisms: BTreeMap<&'t str, Vec<&'t str>>,
    /// Tests that make random operations: for each, its files, and the mechanisms that it uses.
    runs: Vec<(&'t str, Vec<&'t str>, Vec<&'t str>)>,
    pairs: Vec<(Pair<'t>, &'t str)>,
    apart: Vec<Pair<'t>>,
}

impl<'t> Table<'t> {
    fn read(text: &'t str) -> Self {
        let mut table = Table::default();
        let lines = text.lines().filter(|line| !line.starts_with('#'));
        for line in lines.filter(|line| !line.is_empty()) {
            let (head, tail) = line.split_once(": ").unwrap_or_else(|| panic!("{line}"));
            let words = |text: &'t str| text.split_whitespace().collect::<Vec<_>>();
            match words(head)[..] {
                ["mechanism", name] => drop(table.mechanisms.insert(name, words(tail))),
                ["run", test, "in", ref files @ ..] => {
                    table.runs.push((test, files.to_vec(), words(tail)));
                }
                ["pair", a, b] => table.pairs.push((sorted([a, b]), tail)),
                ["apart", a, b] => table.apart.push(sorted([a, b])),
                _ => panic!("{line}"),
            }
        }
        table
    }

    /// Returns the errors in the table.
    fn wrong(&self) -> Vec<String> {
        let mut wrong = Vec::new();
        let mut have = BTreeSet::new();
        for (test, files, names) in &self.runs {
            let (file, function) = test.split_once("::").unwrap();
            let texts: String = files.iter().map(|file| source(file)).collect();
            if function_of(&tests(&format!("{file}.rs")), function).is_none() {
                wrong.push(format!("there is no test {test}"));
            }
            for name in names {
                if !self.is_in(name, &texts) {
                    wrong.push(format!("no random operation has {name}"));
                }
            }
            let pairs = names
                .iter()
                .flat_map(|a| names.iter().map(|b| sorted([*a, *b])));
            have.extend(pairs);
        }
        for (pair, test) in &self.pairs {
            let (file, function) = test.split_once("::").unwrap();
            let text = match file.strip_prefix("slat-model/") {
                Some(_) => source(file),
                None => tests(file),
            };
            match function_of(&text, function) {
                None => wrong.push(format!("there is no test {test}")),
                Some(body) => {
                    for name in pair.iter().filter(|name| !self.is_in(name, body)) {
                        wrong.push(format!("{test} has no {name}"));
                    }
                }
            }
            have.insert(*pair);
        }
        have.extend(&self.apart);
        let names: Vec<_> = self.mechanisms.keys().copied().collect();
        let known = |pair: &Pair<'_>| pair.iter().all(|name| names.contains(name));
        let unknown = have.iter().filter(|pair| !known(pair));
        wrong.extend(unknown.map(|pair| format!("{pair:?} is no pair of mechanisms")));
        for (i, a) in names.iter().enumerate() {
            let missing = names[i + 1..].iter().map(|b| sorted([*a, *b]));
            let missing = missing.filter(|pair| !have.contains(pair));
            wrong.extend(missing.map(|[a, b]| format!("no test has {a} and {b}")));
        }
        wrong
    }

    /// Whether `text` contains one of the words by which a mechanism is recognised.
    fn is_in(&self, name: &str, text: &str) -> bool {
        let words = self.mechanisms.get(name);
        words.is_some_and(|words| words.iter().any(|word| text.contains(word)))
    }
}

fn sorted<'t>(mut pair: Pair<'t>) -> Pair<'t> {
    pair.sort_unstable();
    pair
}

fn source(file: &str) -> String {
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let path = crates.join(file);
    fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// Returns the text of a file of these tests.
fn tests(file: &str) -> String {
    source(&format!("slat/tests/{file}"))
}

/// Returns the source of a function, up to the next function that is not inside it, together with the macros that call
/// it.
fn function_of<'t>(text: &'t str, name: &str) -> Option<&'t str> {
    let head = [format!("fn {name}("), format!("fn {name}<")];
    let at = head.iter().find_map(|head| text.find(head))?;
    let line = text[..at].rfind('\n').map_or(0, |end| end + 1);
    let indent = text[line..].len() - text[line..].trim_start().len();
    let end = format!("\n{}}}\n", &text[line..line + indent]);
    let length = text[at..].find(&end).map_or(text.len() - at, |end| end + 2);
    Some(&text[at..at + length])
}

#[test]
fn each_pair_of_mechanisms_has_a_test() {
    let wrong = Table::read(TABLE).wrong();
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// Checks that the check finds errors.
#[test]
fn a_pair_without_a_test_is_found() {
    let without = |line: &str| {
        let lines = TABLE.lines().filter(|it| !it.starts_with(line));
        let text: String = lines.map(|it| format!("{it}\n")).collect();
        Table::read(&text).wrong()
    };
    assert_eq!(
        without("pair private fork"),
        ["no test has fork and private"]
    );
    assert!(!without("mechanism absent").is_empty());
    let other = TABLE.replace("::an_absent_private_page_is_both", "::there_is_none");
    assert_eq!(Table::read(&other).wrong().len(), 1);
    let other = TABLE.replace("mechanism absent: Await late", "mechanism absent: Nowhere");
    assert!(!Table::read(&other).wrong().is_empty());
}
