//! Tells the compiler where cargo writes the preload library, which `src/preload.rs` embeds.
//!
//! slat-preload is an ordinary dependency of this package, so cargo has built its `cdylib` by the
//! time the `slat` binary is compiled; this script itself may run earlier. The library is in the
//! `deps` directory of the profile, three levels above `OUT_DIR`
//! (`<profile>/build/slat-cli-<hash>/out`), under its plain name.

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
    println!(
        "cargo::rustc-env=SLAT_PRELOAD_LIBRARY={}",
        library.display()
    );
}
