//! Runs a client of the kernel's API: one of the ignored tests of this very program, in a process of its own.
//!
//! Under the library the client meets slat. Without it, it meets the machine's own KVM, where `/dev/kvm` opens: what the client
//! demands is then what the kernel does.

use std::path::PathBuf;
use std::process::Command;

/// Runs `client` under the library.
pub fn under_the_library(client: &str) {
    let program = std::env::current_exe().unwrap();
    let library: PathBuf = program.parent().unwrap().join("libslat_preload.so");
    assert!(library.exists(), "{} has not been built", library.display());
    run(command(client).env("LD_PRELOAD", library), client);
}

/// Runs `client` on the machine's own KVM, if that opens.
#[allow(dead_code)]
pub fn on_the_kernel(client: &str) {
    let device = std::fs::File::options()
        .read(true)
        .write(true)
        .open("/dev/kvm");
    match device {
        Ok(_) => run(command(client).env(NATIVE, "1"), client),
        Err(error) => eprintln!("skipped: /dev/kvm does not open here: {error}"),
    }
}

const NATIVE: &str = "SLAT_TEST_ON_THE_KERNEL";

/// Whether this is a client on the machine's own KVM.
#[allow(dead_code)]
pub fn is_native() -> bool {
    std::env::var_os(NATIVE).is_some()
}

/// Demands that a descriptor is slat's under the library, and the kernel's without it. The kernel itself is asked, by a system call
/// that the library cannot see: a client that came by the machine's own KVM would demand nothing of slat.
#[allow(dead_code)]
pub fn demand_slats(fd: i32) {
    let path = std::ffi::CString::new(format!("/proc/self/fd/{fd}")).unwrap();
    let mut link = [0u8; 64];
    let len: isize;
    // SAFETY: readlink, with a C string and a live buffer; the kernel clobbers RCX and R11 only.
    unsafe {
        std::arch::asm!(
            "syscall",
            inlateout("rax") libc::SYS_readlink as isize => len,
            in("rdi") path.as_ptr(),
            in("rsi") link.as_mut_ptr(),
            in("rdx") link.len(),
            lateout("rcx") _,
            lateout("r11") _,
        );
    }
    let link = String::from_utf8_lossy(&link[..len as usize]);
    assert_eq!(
        link.starts_with("/memfd:kvm"),
        !is_native(),
        "{fd} is {link}"
    );
}

/// Ends a client that hangs.
pub fn watch() {
    // SAFETY: plain call; the signal's default action ends the program.
    unsafe { libc::alarm(60) };
}

fn command(client: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args(["--exact", client, "--ignored", "--nocapture"])
        .arg("--test-threads=1")
        .env_remove("LD_PRELOAD")
        .env_remove("SLAT_SET");
    command
}

fn run(command: &mut Command, client: &str) {
    let output = command.output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    assert!(
        output.status.success(),
        "{client}: {}\n{text}",
        output.status
    );
    assert!(text.contains("1 passed"), "{client} did not run:\n{text}");
}
