//! Checks that the header in the repository is the header that cbindgen makes of the code.

use std::path::Path;

#[test]
fn the_header_is_up_to_date() {
    let crate_directory = Path::new(env!("CARGO_MANIFEST_DIR"));
    let path = crate_directory.join("include/slat-engine.h");
    let bindings = cbindgen::generate(crate_directory).expect("cbindgen reads the crate");
    let mut header = Vec::new();
    bindings.write(&mut header);
    if std::env::var_os("SLAT_UPDATE").is_some() {
        std::fs::write(&path, header).unwrap();
        return;
    }
    assert!(
        std::fs::read(&path).is_ok_and(|written| written == header),
        "include/slat-engine.h is not what cbindgen makes of the code: SLAT_UPDATE=1 cargo test -p slat-engine-capi --test header"
    );
}
