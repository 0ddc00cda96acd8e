//! Gives the library an entry point for when it is started as a program (`src/load/mod.rs`).

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rustc-cdylib-link-arg=-Wl,-e,slat_begin");
}
