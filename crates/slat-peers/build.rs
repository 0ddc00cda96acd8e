//! Tells `slat-counts` which compiler compiles it.

use std::process::Command;

fn main() {
    let rustc = std::env::var_os("RUSTC").expect("cargo says which compiler it uses");
    let version = Command::new(rustc).arg("--version").output();
    let version = version.expect("the compiler runs").stdout;
    let version = String::from_utf8(version).expect("its version is text");
    let target = std::env::var("TARGET").expect("cargo says for what it compiles");
    println!("cargo::rerun-if-changed=build.rs");
    println!(
        "cargo::rustc-env=COUNTS_COMPILER={}, {target}",
        version.trim()
    );
}
