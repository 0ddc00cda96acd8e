//! Sets the name (SONAME) of the shared library, which does not depend on the name of its file.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    // While the major version is 0, each minor version may change the interface.
    println!(
        "cargo:rustc-cdylib-link-arg=-Wl,-soname,libslat-engine.so.{}.{}",
        env!("CARGO_PKG_VERSION_MAJOR"),
        env!("CARGO_PKG_VERSION_MINOR")
    );
}
