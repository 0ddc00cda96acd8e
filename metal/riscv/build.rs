//! Makes the linker place the monitor at the address that the firmware expects.

fn main() {
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/link.ld");
    println!("cargo:rustc-link-arg-bins=-T{script}");
    println!("cargo:rerun-if-changed={script}");
}
