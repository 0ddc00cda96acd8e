//! Tests the workspace's default command.

use std::process::{Command, Output};

fn demo(arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_slat-demo"));
    for name in ["SLAT_MMU", "SLAT_FORMAT", "SLAT_SET", "SLAT_STATS"] {
        command.env_remove(name);
    }
    command
        .args(arguments)
        .output()
        .expect("the command starts")
}

#[test]
fn run_prints_the_account() {
    let output = demo(&["run"]);
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success(), "{text}{:?}", output.stderr);
    let of_architecture = match std::env::consts::ARCH {
        "x86_64" => {
            "A KVM program ran on slat: 2 vCPUs, 2 threads, 4 memslots, ept tables. No /dev/kvm."
        }
        _ => "No guest ran: the demonstration has no guest for arm64 yet.",
    };
    for line in [
        of_architecture,
        "  lost a memslot (2 MiB) while writing to it ",
        "  pf_taken ",
        "  slot_changes ",
    ] {
        assert!(text.contains(line), "{line:?} is missing in\n{text}");
    }
}

#[test]
fn whoever_asks_for_more_learns_where_it_is() {
    for arguments in [&[][..], &["run", "--stats"], &["bench"], &["--help"]] {
        let output = demo(arguments);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}");
        let text = String::from_utf8(output.stderr).unwrap();
        assert!(
            text.contains("cargo install --path crates/slat-cli"),
            "{text}"
        );
        assert!(output.stdout.is_empty());
    }
}
