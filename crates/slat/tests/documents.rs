//! The Rust in docs/hypervisor.md is Rust of this tree.

use std::fs;
use std::path::Path;

const DOCUMENT: &str = "docs/hypervisor.md";
/// Where its Rust comes from.
const SOURCES: [&str; 5] = [
    "metal/core/src/frames.rs",
    "metal/core/src/host.rs",
    "metal/core/src/shootdown.rs",
    "metal/npt/src/main.rs",
    "metal/npt/src/svm.rs",
];

#[test]
fn what_the_document_shows_is_in_the_tree() {
    let root = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."));
    let read = |path: &str| fs::read_to_string(root.join(path)).unwrap();
    let document = read(DOCUMENT);
    let sources = SOURCES.map(read);
    let mut shown = document.split("```rust\n").skip(1);
    assert!(shown.clone().count() > 5, "the document shows code");
    let missing = shown.find_map(|rest| {
        let (code, _) = rest.split_once("```").unwrap();
        let found = sources.iter().any(|source| source.contains(code));
        (!found).then_some(code)
    });
    assert_eq!(missing, None, "{DOCUMENT} shows what is not in the tree");
}
