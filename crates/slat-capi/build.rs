//! Sets the soname of the shared library.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    // As long as the version begins with 0, each minor one may change the interface.
    println!(
        "cargo:rustc-cdylib-link-arg=-Wl,-soname,libslat.so.{}.{}",
        env!("CARGO_PKG_VERSION_MAJOR"),
        env!("CARGO_PKG_VERSION_MINOR")
    );
}
