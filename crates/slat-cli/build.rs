//! Tells `slat --version` the commit, and makes sure that `src/preload/mod.rs` finds a preload library to embed.

use std::fs::{self, OpenOptions};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, io};

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    let mut version = env::var("CARGO_PKG_VERSION").expect("cargo sets the version");
    if let Some(commit) = commit() {
        version.push_str(&format!(" ({})", &commit[..12]));
    }
    println!("cargo::rustc-env=VERSION_AND_COMMIT={version}");
    has_preload_library();
}

/// Returns the repository's commit, ignoring uncommitted changes. Returns `None` if the source comes from a package
/// or a tarball, or if git cannot be run. Makes cargo run this script again when HEAD moves.
fn commit() -> Option<String> {
    // If the package was unpacked inside another repository, that repository's commit says nothing about the package.
    if git(&["rev-parse", "--show-prefix"])? != "crates/slat-cli/" {
        return None;
    }
    git(&["ls-files", "--error-unmatch", "build.rs"])?;
    let commit = git(&["rev-parse", "--verify", "HEAD"])?;
    // The log of HEAD grows with each commit and checkout, so cargo watches it. Without a log, cargo watches all
    // existing files that determine HEAD: a file that does not exist would make cargo run this script in each build.
    let path = |name| git(&["rev-parse", "--git-path", name]);
    let log = path("logs/HEAD")?;
    if Path::new(&log).exists() {
        println!("cargo::rerun-if-changed={log}");
        return Some(commit);
    }
    for name in ["HEAD", "packed-refs", "refs/heads"] {
        let path = path(name)?;
        if Path::new(&path).exists() {
            println!("cargo::rerun-if-changed={path}");
        }
    }
    Some(commit)
}

/// Returns what `git` prints in this package's directory, without the line's end.
fn git(arguments: &[&str]) -> Option<String> {
    let output = Command::new("git").args(arguments).output().ok()?;
    let printed = output.status.success().then_some(output.stdout)?;
    Some(String::from_utf8(printed).ok()?.trim_end().to_owned())
}

/// Makes sure that the library exists under its plain name in the profile's `deps` directory, where
/// `src/preload/mod.rs` looks for it: three levels above `OUT_DIR` (`<profile>/build/slat-cli-<hash>/out`).
/// `include_bytes!` also starts from `OUT_DIR`, which cargo sets in each build. A path printed by this script would
/// not do, because cargo remembers it even after the target directory was copied or moved.
fn has_preload_library() {
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
    let profile = out.ancestors().nth(3).expect("OUT_DIR is inside a profile");
    let deps = profile.join("deps");
    fs::create_dir_all(&deps).expect("the profile's directory can be written");
    let library = deps.join("libslat_preload.so");

    // For glibc, slat-preload is an ordinary dependency of this package. So cargo has built its `cdylib` before it
    // compiles the `slat` binary, though perhaps not before it runs this script. For musl, cargo builds no such
    // library, and none is needed: the library for glibc loads programs for musl.
    if env::var("CARGO_CFG_TARGET_ENV").as_deref() != Ok("gnu") {
        println!("cargo::rerun-if-env-changed=SLAT_PRELOAD");
        let built = env::var("SLAT_PRELOAD").unwrap_or_else(|_| {
            let architecture = env::var("CARGO_CFG_TARGET_ARCH").expect("cargo sets the architecture");
            panic!(
                "a slat that is not built for glibc embeds a preload library that is: set SLAT_PRELOAD to the path of \
                 libslat_preload.so, made by `cargo build --release -p slat-preload --target {architecture}-unknown-linux-gnu`"
            )
        });
        println!("cargo::rerun-if-changed={built}");
        fs::copy(&built, &library).unwrap_or_else(|e| panic!("SLAT_PRELOAD={built}: {e}"));
        return;
    }

    // `cargo check` and clippy build no libraries. For them an empty file is enough, because `include_bytes!` only
    // has to read it. A build replaces the file before it compiles the binary. `create_new` never changes a library
    // that exists or is being linked.
    match OpenOptions::new()
        .write(true)
        .create_new(true)
        .open(&library)
    {
        Err(e) if e.kind() != io::ErrorKind::AlreadyExists => panic!("{}: {e}", library.display()),
        _ => {}
    }
}
