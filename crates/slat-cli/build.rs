//! Tells `slat --version` the commit, and has a preload library for `src/preload/mod.rs` to embed.

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

/// Returns the commit of this repository that is built, without changes that are not committed. `None`: the source
/// comes from a package or a tarball, or git cannot be run. Has cargo run this script again when HEAD has moved.
fn commit() -> Option<String> {
    // A package may lie below another repository, for which its files are nothing.
    if git(&["rev-parse", "--show-prefix"])? != "crates/slat-cli/" {
        return None;
    }
    git(&["ls-files", "--error-unmatch", "build.rs"])?;
    let commit = git(&["rev-parse", "--verify", "HEAD"])?;
    // The log of HEAD grows by a line with each commit and checkout. Without one: all files that can say where HEAD is.
    // A file that does not exist would have cargo build anew each time.
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

/// Has a library where `src/preload/mod.rs` looks for it, in the `deps` directory of the profile, three levels above
/// `OUT_DIR` (`<profile>/build/slat-cli-<hash>/out`), under its plain name. `include_bytes!` names it from `OUT_DIR`,
/// too: cargo says where that is in each build, while what a script has printed is remembered, with the paths of a
/// target directory that was copied or moved since.
fn has_preload_library() {
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
    let profile = out.ancestors().nth(3).expect("OUT_DIR is inside a profile");
    let deps = profile.join("deps");
    fs::create_dir_all(&deps).expect("the profile's directory can be written");
    let library = deps.join("libslat_preload.so");

    // slat-preload is an ordinary dependency of this package for glibc, so cargo has built its `cdylib` by the time the
    // `slat` binary is compiled; this script itself may run earlier. For musl cargo makes no such library, and none is
    // needed: the library for glibc loads programs for musl.
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

    // `cargo check` and clippy make no libraries, but `include_bytes!` reads the file: an empty one is enough for them.
    // A build replaces it before it compiles the binary. `create_new`: never touch a library that exists or is just
    // being linked.
    match OpenOptions::new()
        .write(true)
        .create_new(true)
        .open(&library)
    {
        Err(e) if e.kind() != io::ErrorKind::AlreadyExists => panic!("{}: {e}", library.display()),
        _ => {}
    }
}
