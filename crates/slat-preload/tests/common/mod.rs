//! Runs clients of the kernel's API. A client is an ignored test in the module `client` of a test program, and runs in
//! its own process. Clients use `/dev/kvm` through kvm-ioctls and plain system calls. Clients know nothing of slat.
//!
//! Under the library a client uses slat. Without the library, the client uses the machine's own KVM, if `/dev/kvm`
//! opens. A run without the library checks that the kernel does what the client asserts.
#![allow(
    dead_code,
    unused_imports,
    unused_macros,
    reason = "not every test program uses all of it"
)]

pub mod guest;

use std::os::fd::AsRawFd;
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::time::{Duration, Instant};

/// A client's time limit. Clients need far less, even in an emulated machine beside other work, so a client that exceeds it
/// hangs.
const PATIENCE: Duration = Duration::from_secs(240);

/// Runs the client called `name` under the library.
pub fn under_the_library(name: &str) {
    under_the_library_with(name, &[]);
}

/// Runs the client called `name` without the library.
pub fn without_the_library(name: &str) {
    run(&mut client(name), name);
}

/// Like [`under_the_library`], with these variables in the client's environment.
pub fn under_the_library_with(name: &str, variables: &[(&str, &str)]) {
    let library = std::env::current_exe()
        .unwrap()
        .with_file_name("libslat_preload.so");
    assert!(library.exists(), "{} has not been built", library.display());
    let mut client = client(name);
    client.envs(variables.iter().copied());
    run(client.env("LD_PRELOAD", library), name);
}

/// Runs the client called `name` on the machine's own KVM, if that opens. An emulator of user programs opens the
/// device, but does not know the device's requests.
pub fn on_the_kernel(name: &str) {
    let device = std::fs::File::options()
        .read(true)
        .write(true)
        .open("/dev/kvm");
    match device {
        Ok(device) if !is_served(&device) => eprintln!("skipped: /dev/kvm is not served here"),
        Ok(_) => run(client(name).env(NATIVE, "1"), name),
        Err(error) => eprintln!("skipped: /dev/kvm does not open here: {error}"),
    }
}

/// Whether the device knows KVM's first request.
fn is_served(device: &std::fs::File) -> bool {
    const KVM_GET_API_VERSION: libc::c_ulong = 0xae00;
    // SAFETY: the request takes no pointer.
    unsafe { libc::ioctl(device.as_raw_fd(), KVM_GET_API_VERSION as _, 0) == 12 }
}

/// Defines a test for each client that runs it under the library. The test has the client's name.
macro_rules! on_slat {
    ($($name:ident)*) => {
        $(#[test] fn $name() { common::under_the_library(stringify!($name)); })*
    };
}
pub(crate) use on_slat;

/// Defines two tests for each client: one under the library, and one on the machine's own KVM.
macro_rules! on_both {
    ($($name:ident)*) => {
        mod under_the_library { $(#[test] fn $name() { super::common::under_the_library(stringify!($name)); })* }
        mod on_the_kernel { $(#[test] fn $name() { super::common::on_the_kernel(stringify!($name)); })* }
    };
}
pub(crate) use on_both;

const NATIVE: &str = "SLAT_TEST_ON_THE_KERNEL";

/// Whether this client runs on the machine's own KVM.
pub fn is_native() -> bool {
    std::env::var_os(NATIVE).is_some()
}

/// Names the link that [`shows_link`] shows.
const LINK: &str = "SLAT_TEST_LINK";

/// Asserts that a descriptor is slat's if the client runs under the library, and the kernel's otherwise. A client that
/// reached the machine's own KVM by mistake would not test slat. Another process, in which the dynamic linker runs this
/// test program without the library, makes the check. slat would follow any other program that the client executes, and
/// would also see a system call of the client itself.
pub fn demand_slats(fd: i32) {
    let linker = match std::env::consts::ARCH {
        "x86_64" => "/lib64/ld-linux-x86-64.so.2",
        _ => "/lib/ld-linux-aarch64.so.1",
    };
    let output = Command::new(linker)
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", "common::shows_link"])
        .args(["--ignored", "--nocapture", "--test-threads=1"])
        .env(LINK, format!("/proc/{}/fd/{fd}", std::process::id()))
        .env_remove("LD_PRELOAD")
        .output()
        .unwrap();
    let shown = String::from_utf8(output.stdout).unwrap();
    let link = shown.split_once(LINK).expect("the link is shown").1;
    assert_eq!(
        link.starts_with("=/memfd:kvm"),
        !is_native(),
        "{fd} is {link}"
    );
}

#[test]
#[ignore = "is run by demand_slats"]
fn shows_link() {
    let link = std::fs::read_link(std::env::var_os(LINK).unwrap());
    println!("{LINK}={}", link.unwrap().display());
}

/// Returns the path of a client. A name with a module is a path already.
fn path(name: &str) -> String {
    match name.contains("::") {
        true => name.to_owned(),
        false => format!("client::{name}"),
    }
}

fn client(name: &str) -> Command {
    let mut client = Command::new(std::env::current_exe().unwrap());
    client
        .args(["--exact", &path(name)])
        .args(["--ignored", "--nocapture", "--test-threads=1"])
        .env_remove("LD_PRELOAD")
        .env_remove("SLAT_SET")
        .process_group(0);
    client
}

/// Runs a client, which must pass within the time limit.
fn run(client: &mut Command, name: &str) {
    let path = format!(
        "slat-client-{}-{name}-{}",
        std::process::id(),
        is_preloaded(client)
    );
    let path = std::env::temp_dir().join(path);
    let file = std::fs::File::create(&path).unwrap();
    client.stdout(file.try_clone().unwrap()).stderr(file);
    let mut process = client.spawn().unwrap();
    let begin = Instant::now();
    let status = loop {
        if let Some(status) = process.try_wait().unwrap() {
            break Some(status);
        }
        if begin.elapsed() > PATIENCE {
            // SAFETY: the signal goes to the client's process group. The client was not waited for.
            unsafe { libc::kill(-(process.id() as i32), libc::SIGKILL) };
            process.wait().unwrap();
            break None;
        }
        std::thread::sleep(Duration::from_millis(5));
    };
    let text = String::from_utf8_lossy(&std::fs::read(&path).unwrap()).into_owned();
    let _ = std::fs::remove_file(&path);
    let status = status.unwrap_or_else(|| panic!("{name} hangs:\n{text}"));
    assert!(status.success(), "{name}: {status}\n{text}");
    assert!(text.contains("1 passed"), "{name} did not run:\n{text}");
    let skipped = text
        .lines()
        .filter_map(|line| line.find("skipped: ").map(|at| &line[at..]));
    skipped.for_each(|why| eprintln!("{why}"));
}

fn is_preloaded(client: &Command) -> bool {
    client
        .get_envs()
        .any(|(name, value)| name == "LD_PRELOAD" && value.is_some())
}
