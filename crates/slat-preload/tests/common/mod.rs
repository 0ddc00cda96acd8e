//! Runs clients of the kernel's API. A client is an ignored test in the module `client` of a test program, and runs in
//! its own process. Clients use `/dev/kvm` through kvm-ioctls and plain system calls. They know nothing of slat.
//!
//! Under the library a client uses slat. Without the library, the client uses the machine's own KVM, if `/dev/kvm`
//! opens. A run without the library checks that the kernel does what the client asserts.
#![allow(
    dead_code,
    unused_imports,
    unused_macros,
    reason = "not every test program uses all of it"
)]

use std::os::unix::process::CommandExt;
use std::process::Command;
use std::time::{Duration, Instant};

/// A client's time limit. Clients need far less, so a client that exceeds it hangs.
const PATIENCE: Duration = Duration::from_secs(60);

/// Runs the client called `name` under the library.
pub fn under_the_library(name: &str) {
    let library = std::env::current_exe()
        .unwrap()
        .with_file_name("libslat_preload.so");
    assert!(library.exists(), "{} has not been built", library.display());
    run(client(name).env("LD_PRELOAD", library), name);
}

/// Runs the client called `name` on the machine's own KVM, if that opens.
pub fn on_the_kernel(name: &str) {
    let device = std::fs::File::options()
        .read(true)
        .write(true)
        .open("/dev/kvm");
    match device {
        Ok(_) => run(client(name).env(NATIVE, "1"), name),
        Err(error) => eprintln!("skipped: /dev/kvm does not open here: {error}"),
    }
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

/// Asserts that a descriptor is slat's if the client runs under the library, and the kernel's otherwise. A client that
/// reached the machine's own KVM by mistake would not test slat. Another program, which the dynamic linker runs
/// without the library, makes the check. slat would follow any other program that the client executes, and would also
/// see a system call of the client itself.
pub fn demand_slats(fd: i32) {
    let link = Command::new("/lib64/ld-linux-x86-64.so.2")
        .arg("/usr/bin/readlink")
        .arg(format!("/proc/{}/fd/{fd}", std::process::id()))
        .env_remove("LD_PRELOAD")
        .output()
        .unwrap();
    let link = String::from_utf8(link.stdout).unwrap();
    assert_eq!(
        link.starts_with("/memfd:kvm"),
        !is_native(),
        "{fd} is {link}"
    );
}

fn client(name: &str) -> Command {
    let mut client = Command::new(std::env::current_exe().unwrap());
    client
        .args(["--exact", &format!("client::{name}")])
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
            // SAFETY: the signal goes to the group of the client that was started above and not waited for.
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

/// Guests and helpers that clients use.
pub mod guest {
    use kvm_bindings::kvm_userspace_memory_region;
    use kvm_ioctls::{Kvm, VcpuFd, VmFd};
    use std::io::Read;
    use std::os::fd::{AsRawFd, FromRawFd};

    pub const MEMORY: usize = 0x4000;
    pub const CODE: usize = 0x1000;
    /// `jmp $`
    pub const SPIN: &[u8] = &[0xeb, 0xfe];
    /// `out 0x10,al; jmp -4`
    pub const OUT: &[u8] = &[0xe6, 0x10, 0xeb, 0xfc];

    /// Maps new anonymous memory of `len` bytes.
    pub fn map(len: usize) -> *mut u8 {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        let rights = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a new mapping.
        let start = unsafe { libc::mmap(std::ptr::null_mut(), len, rights, flags, -1, 0) };
        assert_ne!(start, libc::MAP_FAILED);
        start.cast()
    }

    pub fn region(slot: u32, gpa: u64, memory: *mut u8, len: usize) -> kvm_userspace_memory_region {
        kvm_userspace_memory_region {
            slot,
            flags: 0,
            guest_phys_addr: gpa,
            memory_size: len as u64,
            userspace_addr: memory as u64,
        }
    }

    /// Creates a VM with four pages of memory at address 0 and `code` in the second, and a vCPU in
    /// real mode at the code.
    pub fn guest(code: &[u8]) -> (VmFd, VcpuFd, *mut u8) {
        let memory = map(MEMORY);
        let (vm, vcpu) = guest_in(memory, MEMORY, code);
        (vm, vcpu, memory)
    }

    /// Like [`guest`], but the VM's memory is the `len` bytes at `memory`.
    pub fn guest_in(memory: *mut u8, len: usize, code: &[u8]) -> (VmFd, VcpuFd) {
        let vm = Kvm::new().unwrap().create_vm().unwrap();
        // SAFETY: the code fits into the mapping. The guest may write all of the mapping.
        unsafe {
            std::ptr::copy_nonoverlapping(code.as_ptr(), memory.add(CODE), code.len());
            vm.set_user_memory_region(region(0, 0, memory, len))
                .unwrap();
        }
        let vcpu = vm.create_vcpu(0).unwrap();
        start(&vcpu, CODE as u64);
        (vm, vcpu)
    }

    /// Sets the vCPU to start at `rip`, in real mode.
    pub fn start(vcpu: &VcpuFd, rip: u64) {
        let mut sregs = vcpu.get_sregs().unwrap();
        (sregs.cs.base, sregs.cs.selector) = (0, 0);
        vcpu.set_sregs(&sregs).unwrap();
        let mut regs = vcpu.get_regs().unwrap();
        (regs.rip, regs.rflags) = (rip, 2);
        vcpu.set_regs(&regs).unwrap();
    }

    /// Returns a statistic of a VM or vCPU by its name: KVM_GET_STATS_FD, and the layout of KVM's API document.
    pub fn statistic(object: &impl AsRawFd, name: &str) -> u64 {
        const KVM_GET_STATS_FD: u64 = 0xaece;
        // SAFETY: a plain system call; no other code owns the new descriptor.
        let mut file = unsafe {
            let fd = libc::ioctl(object.as_raw_fd(), KVM_GET_STATS_FD, 0);
            assert!(fd >= 0, "KVM_GET_STATS_FD: {}", errno());
            std::fs::File::from_raw_fd(fd)
        };
        let mut all = Vec::new();
        file.read_to_end(&mut all).unwrap();
        let word = |at: usize| u32::from_le_bytes(all[at..at + 4].try_into().unwrap()) as usize;
        let (name_size, count, descriptors, data) = (word(4), word(8), word(16), word(20));
        let descriptor = (0..count)
            .map(|index| descriptors + index * (16 + name_size))
            .find(|at| {
                let text = &all[at + 16..at + 16 + name_size];
                text.starts_with(name.as_bytes()) && text[name.len()] == 0
            })
            .unwrap_or_else(|| panic!("no statistic {name}"));
        let at = data + word(descriptor + 8);
        u64::from_le_bytes(all[at..at + 8].try_into().unwrap())
    }

    /// Returns the last call's errno.
    pub fn errno() -> i32 {
        std::io::Error::last_os_error().raw_os_error().unwrap()
    }
}
