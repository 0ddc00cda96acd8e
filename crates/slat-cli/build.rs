//! Has a preload library for `src/preload/mod.rs` to embed, also where cargo makes none.
//!
//! slat-preload is an ordinary dependency of this package, so cargo has built its `cdylib` by the
//! time the `slat` binary is compiled; this script itself may run earlier. The library is in the
//! `deps` directory of the profile, three levels above `OUT_DIR`
//! (`<profile>/build/slat-cli-<hash>/out`), under its plain name. `include_bytes!` names it from `OUT_DIR`, too: cargo
//! says where that is in each build, while what a script has printed is remembered, with the paths of a target directory
//! that was copied or moved since.

use std::fs::{self, OpenOptions};
use std::path::PathBuf;
use std::{env, io};

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    if env::var("CARGO_CFG_TARGET_ARCH").as_deref() != Ok("x86_64") {
        return;
    }
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
    let profile = out.ancestors().nth(3).expect("OUT_DIR is inside a profile");
    let deps = profile.join("deps");
    fs::create_dir_all(&deps).expect("the profile's directory can be written");
    let library = deps.join("libslat_preload.so");

    // `cargo check` and clippy make no libraries, but `include_bytes!` reads the file: an empty one
    // is enough for them. A build replaces it before it compiles the binary. `create_new`: never
    // touch a library that exists or is just being linked.
    match OpenOptions::new()
        .write(true)
        .create_new(true)
        .open(&library)
    {
        Err(e) if e.kind() != io::ErrorKind::AlreadyExists => panic!("{}: {e}", library.display()),
        _ => {}
    }
}
