//! Tests call sites of a static program (`conformance/programs/sites.c`), which slat rewrites while the program runs.
//! A part of the program runs under `PR_SET_MDWE`, where the kernel refuses memory that is writable and executable.
#![cfg(target_arch = "x86_64")]

use std::process::Command;

#[test]
fn call_sites_are_rewritten_and_no_memory_is_writable_and_executable() {
    let source = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../../conformance/programs/sites.c"
    );
    let program = std::env::temp_dir().join(format!("slat-sites-{}", std::process::id()));
    let compiled = Command::new("cc")
        .args(["-O2", "-Wall", "-Wextra", "-static", "-o"])
        .arg(&program)
        .args([source, "-lpthread"])
        .output();
    match compiled {
        Ok(output) if output.status.success() => {}
        Ok(output) => {
            // Distributions have the C library for static programs in a package of its own.
            let why = String::from_utf8_lossy(&output.stderr).into_owned();
            assert!(why.contains("cannot find -lc"), "{why}");
            return eprintln!("skipped: there is no static C library here");
        }
        Err(error) => return eprintln!("skipped: there is no C compiler here: {error}"),
    }
    let library = std::env::current_exe()
        .unwrap()
        .with_file_name("libslat_preload.so");
    assert!(library.exists(), "{} has not been built", library.display());
    let output = Command::new(library)
        .env("SLAT_PROGRAM", &program)
        .env_remove("LD_PRELOAD")
        .output();
    std::fs::remove_file(&program).unwrap();
    let output = output.unwrap();
    let (said, complained) = (
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr),
    );
    if complained.contains("loads no libraries") {
        return eprintln!("skipped: this machine cannot load static programs: {complained}");
    }
    assert!(output.status.success(), "{said}{complained}");
    assert!(said.ends_with("all parts passed\n"), "{said}");
}
