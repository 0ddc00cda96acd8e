//! The link arguments of the x86 monitors, for their build scripts.

fn main() {
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/../x86/link.ld");
    println!("cargo:rerun-if-changed={script}");
    for arg in ["-nostdlib", "-nostartfiles", "-static", "-no-pie"] {
        println!("cargo:rustc-link-arg-bins={arg}");
    }
    for arg in ["--build-id=none", "-zmax-page-size=0x1000", "-znoexecstack"] {
        println!("cargo:rustc-link-arg-bins=-Wl,{arg}");
    }
    println!("cargo:rustc-link-arg-bins=-Wl,-T,{script}");
}
