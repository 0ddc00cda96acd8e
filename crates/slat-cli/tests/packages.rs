//! Checks what a registry and docs.rs show of the published crates: manifests, licences, READMEs and links.
#![cfg(target_arch = "x86_64")]

use serde_json::Value;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs};

/// The crates that are published only because other crates need them. Their documents say that their API is not
/// stable.
const INNER: [&str; 10] = [
    "slat-a64",
    "slat-bench",
    "slat-gic",
    "slat-guard",
    "slat-hyperv",
    "slat-jit",
    "slat-preload",
    "slat-process",
    "slat-trace",
    "slat-x86",
];
const NO_PROMISE: &str = "A part of slat: there is no promise about this crate's API";

/// The categories of crates.io that the crates use. crates.io ignores a category that does not exist, without an
/// error.
const CATEGORIES: [&str; 10] = [
    "command-line-utilities",
    "development-tools::debugging",
    "development-tools::ffi",
    "development-tools::profiling",
    "development-tools::testing",
    "emulators",
    "memory-management",
    "no-std",
    "os::linux-apis",
    "virtualization",
];

/// The beginning of a URL of a source file on docs.rs. The package's name and the file's path follow.
const SOURCE: &str = "https://docs.rs/crate/";

struct Package {
    directory: PathBuf,
    manifest: Value,
}

impl Package {
    fn strings(&self, field: &str) -> Vec<&str> {
        let list = self.manifest[field].as_array().unwrap();
        list.iter().map(|word| word.as_str().unwrap()).collect()
    }

    fn read(&self, path: &str) -> String {
        let path = self.directory.join(path);
        fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
    }

    fn has_library(&self) -> bool {
        self.directory.join("src/lib.rs").exists()
    }
}

/// Returns the crates of the workspace that are published, by name.
fn published() -> BTreeMap<String, Package> {
    let cargo = env::var_os("CARGO").unwrap_or("cargo".into());
    let output = Command::new(cargo)
        .args(["metadata", "--no-deps", "--format-version", "1"])
        .arg("--manifest-path")
        .arg(concat!(env!("CARGO_MANIFEST_DIR"), "/../../Cargo.toml"))
        .output()
        .unwrap();
    assert!(output.status.success(), "{output:?}");
    let metadata: Value = serde_json::from_slice(&output.stdout).unwrap();
    let packages = metadata["packages"].as_array().unwrap().iter();
    // `publish = false` is an empty list of registries.
    let packages = packages.filter(|package| package["publish"].is_null());
    let packages = packages.map(|package| {
        let manifest = Path::new(package["manifest_path"].as_str().unwrap());
        let directory = manifest.parent().unwrap().to_owned();
        let manifest = package.clone();
        let name = package["name"].as_str().unwrap().to_owned();
        (
            name,
            Package {
                directory,
                manifest,
            },
        )
    });
    packages.collect()
}

#[test]
fn each_manifest_has_what_a_registry_shows() {
    let packages = published();
    assert!(packages.len() > 10, "published: {:?}", packages.keys());
    for (name, package) in &packages {
        let manifest = &package.manifest;
        for field in ["description", "license", "repository", "readme"] {
            assert!(manifest[field].is_string(), "{name} has no {field}");
        }
        let keywords = package.strings("keywords");
        let is_keyword = |word: &&str| {
            let is_part = |c: char| c.is_ascii_alphanumeric() || "_-+".contains(c);
            word.len() <= 20
                && word.starts_with(|c: char| c.is_ascii_alphanumeric())
                && word.chars().all(is_part)
        };
        assert!(
            (1..=5).contains(&keywords.len()) && keywords.iter().all(is_keyword),
            "{name}: a registry takes 1 to 5 keywords of at most 20 characters, not {keywords:?}"
        );
        let categories = package.strings("categories");
        let is_category = |word: &&str| CATEGORIES.contains(word);
        assert!(
            (1..=5).contains(&categories.len()) && categories.iter().all(is_category),
            "{name}: 1 to 5 of the registry's categories, not {categories:?}"
        );
        for licence in ["LICENSE-APACHE", "LICENSE-MIT"] {
            assert!(
                package.directory.join(licence).exists(),
                "{name} has no {licence}"
            );
        }
        let documentation = &manifest["metadata"]["docs"]["rs"];
        assert!(
            !package.has_library() || documentation["targets"].is_array(),
            "{name} does not say for which targets docs.rs documents it"
        );
        let features = documentation["features"].as_array();
        for feature in features.into_iter().flatten() {
            assert!(
                manifest["features"][feature.as_str().unwrap()].is_array(),
                "{name} has no feature {feature}, which docs.rs is told"
            );
        }
    }
}

#[test]
fn inner_crates_say_that_nothing_is_promised() {
    let packages = published();
    for name in INNER {
        let package = &packages[name];
        for file in ["README.md", "src/lib.rs"] {
            let beginning: Vec<_> = package
                .read(file)
                .lines()
                .take(8)
                .map(str::to_owned)
                .collect();
            assert!(
                beginning.join("\n").contains(NO_PROMISE),
                "{name}: {file} does not begin with: {NO_PROMISE}"
            );
        }
        let description = package.manifest["description"].as_str().unwrap();
        assert!(
            description.ends_with("(a part of slat, without a promise about its API)"),
            "{name}: {description}"
        );
    }
    for (name, package) in &packages {
        let is_inner = INNER.contains(&&**name);
        assert!(
            is_inner || !package.read("README.md").contains(NO_PROMISE),
            "{name} is not one of the inner crates"
        );
    }
}

/// Returns the targets of the links in a Markdown text, ignoring code blocks.
fn targets(text: &str) -> Vec<String> {
    let prose: String = text.split("```").step_by(2).collect();
    let inline = prose.match_indices("](").map(|(at, _)| &prose[at + 2..]);
    let definitions = prose.lines().filter(|line| line.starts_with('['));
    let definitions = definitions.filter_map(|line| Some(line.split_once("]: ")?.1));
    let ends = |c: char| c == ')' || c.is_whitespace();
    let all = inline.chain(definitions);
    all.map(|rest| rest.split(ends).next().unwrap().to_owned())
        .collect()
}

/// Returns why a link in a package's README is broken on a registry's page; `None` if it works. Relative paths do not
/// work there.
fn wrong(target: &str, packages: &BTreeMap<String, Package>) -> Option<String> {
    if !target.starts_with("https://") {
        return Some("a registry and docs.rs have no such file: link to docs.rs".into());
    }
    let (name, file) = target.strip_prefix(SOURCE)?.split_once('/')?;
    let Some(package) = packages.get(name) else {
        return Some(format!("{name} is not published"));
    };
    let path = file.strip_prefix("latest/source/")?;
    (!package.directory.join(path).is_file()).then(|| format!("{name} has no {path}"))
}

#[test]
fn links_lead_somewhere_on_the_pages_of_a_registry() {
    let packages = published();
    let mut found = 0;
    for (name, package) in &packages {
        for target in targets(&package.read("README.md")) {
            found += 1;
            if let Some(why) = wrong(&target, &packages) {
                panic!("README.md of {name}: {target}: {why}");
            }
        }
    }
    assert!(found > 10, "{found}");
    let refused = |target| wrong(target, &packages).is_some();
    assert!(refused("../slat") && refused("src/lib.rs") && refused("http://docs.rs/slat"));
    assert!(refused(
        "https://docs.rs/crate/slat/latest/source/examples/none.rs"
    ));
    assert!(refused(
        "https://docs.rs/crate/slat-peers/latest/source/README.md"
    ));
    assert!(!refused(
        "https://docs.rs/crate/slat/latest/source/examples/iommu.rs"
    ));
    assert_eq!(
        targets("[a](b) [c]\n```\n[d](e)\n```\n[c]: f\n"),
        ["b", "f"]
    );
}

/// Returns the Rust files below `directory`.
fn sources(directory: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(directory).unwrap();
    let paths = entries.map(|entry| entry.unwrap().path());
    let files = paths.flat_map(|path| match path.is_dir() {
        true => sources(&path),
        false => vec![path],
    });
    files
        .filter(|path| path.extension().is_some_and(|end| end == "rs"))
        .collect()
}

/// rustdoc checks links to items, but it copies links to files, and docs.rs does not have these files.
#[test]
fn documentation_links_to_no_file_of_the_repository() {
    for package in published().values() {
        for path in sources(&package.directory.join("src")) {
            let text = fs::read_to_string(&path).unwrap();
            let comments = text.lines().map(str::trim_start);
            let comments: Vec<_> = comments
                .filter(|line| line.starts_with("///") || line.starts_with("//!"))
                .collect();
            for target in targets(&comments.join("\n")) {
                let is_file = target.starts_with('.') || target.ends_with(".md");
                assert!(!is_file, "{}: links to {target}", path.display());
            }
        }
    }
}

/// A build from a package or a tarball knows no commit (`.ci/packages`).
#[test]
fn the_version_names_the_commit() {
    if Command::new("git").arg("--version").output().is_err() {
        return eprintln!("skipped: there is no git here");
    }
    let output = |command: &mut Command| {
        let output = command.output().ok()?;
        output
            .status
            .success()
            .then(|| String::from_utf8(output.stdout).unwrap())
    };
    let git = |arguments: &[&str]| {
        let directory = env!("CARGO_MANIFEST_DIR");
        output(Command::new("git").args(["-C", directory]).args(arguments))
    };
    let head =
        git(&["ls-files", "--error-unmatch", "build.rs"]).and_then(|_| git(&["rev-parse", "HEAD"]));
    let version = env!("CARGO_PKG_VERSION");
    let expected = match head {
        Some(head) => format!("slat {version} ({})\n", &head[..12]),
        None => format!("slat {version}\n"),
    };
    let slat = || Command::new(env!("CARGO_BIN_EXE_slat"));
    assert_eq!(output(slat().arg("--version")).unwrap(), expected);
    let info = output(slat().arg("info")).unwrap();
    assert_eq!(info.lines().next(), Some(expected.trim_end()));
}
