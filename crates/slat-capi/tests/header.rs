//! Checks that the header in the repository is the one that cbindgen makes from the code.

use std::path::Path;

/// The parameters of `slat_ioctl` as Rust defines them, and as C declares them. Rust cannot define functions with
/// variable arguments. In both forms, a pointer or a number is passed in the same register.
const FIXED: &str = "unsigned long request, size_t argument)";
const VARIABLE: &str = "unsigned long request, ...)";

fn generate() -> String {
    let crate_directory = Path::new(env!("CARGO_MANIFEST_DIR"));
    let bindings = cbindgen::generate(crate_directory).expect("cbindgen reads the crate");
    let mut header = Vec::new();
    bindings.write(&mut header);
    let header = String::from_utf8(header).unwrap();
    assert_eq!(header.matches(FIXED).count(), 1, "slat_ioctl in:\n{header}");
    header.replace(FIXED, VARIABLE)
}

#[test]
fn the_header_is_up_to_date() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("include/slat.h");
    let header = generate();
    if std::env::var_os("SLAT_UPDATE").is_some() {
        std::fs::write(&path, header).unwrap();
        return;
    }
    assert!(
        std::fs::read_to_string(&path).is_ok_and(|written| written == header),
        "include/slat.h is not what cbindgen makes of the code: SLAT_UPDATE=1 cargo test -p slat-capi --test header"
    );
}
