//! Tests the thread that compiles the guests' code: when it exists, and that it may change the protection of memory
//! even if the client may not.
#![cfg(target_arch = "x86_64")]

mod common;
mod long_mode;

use long_mode::Machine;
use slat_kvm::VcpuExit;
use slat_kvm::report::{self, Totals};
use slat_x86::Counters;
use std::time::{Duration, Instant};

/// mov ecx,300000; dec ecx; jnz; hlt
const LOOP: &[u8] = b"\xb9\xe0\x93\x04\0\xff\xc9\x75\xfc\xf4";
const CODE: u64 = 0x1000;

fn counter(totals: &Totals, name: &str) -> u64 {
    let index = Counters::NAMES.iter().position(|other| *other == name);
    totals.cpu[index.unwrap()]
}

/// Makes a VM with a vCPU that runs a loop, until compiled code has run, or for at most `limit`. Calls `prepare`
/// after the vCPU is made. Returns the statistics of the time when the vCPU still exists, and whether compiled code
/// has run.
fn run(prepare: impl FnOnce(), limit: Duration) -> (Totals, bool) {
    let machine = Machine::new();
    let mut vcpu = machine.vm.create_vcpu(0).unwrap();
    prepare();
    machine.memory.write(CODE, LOOP);
    let before = counter(&report::totals(), "instructions_compiled");
    let began = Instant::now();
    loop {
        machine.start(&vcpu);
        assert!(matches!(vcpu.run().unwrap(), VcpuExit::Hlt));
        let totals = report::totals();
        let is_compiled = counter(&totals, "instructions_compiled") > before;
        if is_compiled || began.elapsed() > limit {
            return (totals, is_compiled);
        }
    }
}

/// Returns whether a new vCPU's code is compiled. Calls `prepare` after the vCPU is made.
fn compiles(prepare: impl FnOnce()) -> bool {
    run(prepare, LIMIT).1
}

const LIMIT: Duration = Duration::from_secs(20);

/// Runs a loop without exits. After `patience`, the client overwrites an instruction of the loop by HLT. Returns how
/// long the vCPU has run after that.
fn patch(patience: Duration) -> Duration {
    let machine = Machine::new();
    let mut vcpu = machine.vm.create_vcpu(0).unwrap();
    // dec ecx; jmp back to the dec
    machine.memory.write(CODE, b"\xff\xc9\xeb\xfc");
    machine.start(&vcpu);
    std::thread::scope(|scope| {
        let client = scope.spawn(|| {
            std::thread::sleep(patience);
            machine.memory.write(CODE, b"\xf4");
            Instant::now()
        });
        assert!(matches!(vcpu.run().unwrap(), VcpuExit::Hlt));
        client.join().unwrap().elapsed()
    })
}

/// slat is not told when the client stores to code, and the loop has no exit. So slat has to check the code from time
/// to time.
fn a_running_loop_sees_that_the_client_has_changed_its_code() {
    slat_kvm::watch_signals();
    for patience in [Duration::from_millis(20), Duration::from_millis(500)] {
        let late = patch(patience);
        assert!(late < LIMIT, "{late:?} after {patience:?}");
    }
}

/// Runs `child` in a forked process. Returns what it returned.
fn forked(child: impl FnOnce() -> bool) -> bool {
    // SAFETY: the child only calls `child`, and ends below.
    unsafe {
        let pid = libc::fork();
        assert!(pid >= 0);
        if pid == 0 {
            libc::alarm(60);
            libc::_exit(i32::from(!child()));
        }
        let mut status = -1;
        libc::waitpid(pid, &mut status, 0);
        status == 0
    }
}

fn has_thread() -> bool {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap();
    let names = tasks.map(|task| std::fs::read_to_string(task.unwrap().path().join("comm")));
    names.flatten().any(|name| name.trim() == "slat-compiler")
}

/// Makes `mprotect` fail in this thread, and in threads that it creates from now on.
fn forbid_mprotect() {
    let op = |code: u32, jt, jf, k| libc::sock_filter {
        code: code as u16,
        jt,
        jf,
        k,
    };
    let mut program = [
        op(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0, 0),
        op(
            libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K,
            0,
            1,
            libc::SYS_mprotect as u32,
        ),
        op(
            libc::BPF_RET | libc::BPF_K,
            0,
            0,
            libc::SECCOMP_RET_ERRNO | libc::EPERM as u32,
        ),
        op(libc::BPF_RET | libc::BPF_K, 0, 0, libc::SECCOMP_RET_ALLOW),
    ];
    let filter = libc::sock_fprog {
        len: program.len() as u16,
        filter: program.as_mut_ptr(),
    };
    // SAFETY: the filter is on the stack, and the kernel copies it.
    unsafe {
        assert_eq!(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
        let mode = libc::SECCOMP_MODE_FILTER;
        assert_eq!(
            libc::prctl(libc::PR_SET_SECCOMP, mode, &raw const filter),
            0
        );
        let page = libc::mmap(
            std::ptr::null_mut(),
            4096,
            0,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
            -1,
            0,
        );
        assert_eq!(libc::mprotect(page, 4096, libc::PROT_READ), -1);
    }
}

/// Forbids this process to make memory executable. Returns whether the host can: Linux 6.3 and later.
fn forbid_executable_memory() -> bool {
    const PR_SET_MDWE: libc::c_int = 65;
    const REFUSE_EXEC_GAIN: libc::c_ulong = 1;
    let zero: libc::c_ulong = 0;
    // SAFETY: the call takes no pointer.
    unsafe { libc::prctl(PR_SET_MDWE, REFUSE_EXEC_GAIN, zero, zero, zero) == 0 }
}

/// This is one test on one thread. Another test in this process would make a VM, and the first part and the child
/// processes would see that.
#[test]
fn code_is_compiled_by_a_thread_of_each_process_and_may_be_changed() {
    code_is_compiled_by_a_thread_of_each_process_that_uses_kvm();
    a_running_loop_sees_that_the_client_has_changed_its_code();
}

fn code_is_compiled_by_a_thread_of_each_process_that_uses_kvm() {
    // Reading the statistics neither starts the compiler's thread nor prevents its start by the first vCPU.
    assert_eq!(report::totals().interprets, None);
    assert!(!has_thread());
    assert!(compiles(|| assert!(
        has_thread(),
        "before the first vCPU is returned"
    )));

    // A forked child gets a thread of its own with its first vCPU. So does a child of that child.
    let child = || {
        let fine = !has_thread() && compiles(|| assert!(has_thread()));
        fine && forked(|| !has_thread() && compiles(|| assert!(has_thread())))
    };
    assert!(forked(child));
    // This child reads the statistics before it makes a vCPU.
    assert!(forked(|| report::totals().vms == 0 && compiles(|| {})));
    // The parent can still compile.
    assert!(compiles(|| {}));

    // A filter that the client installs after its first vCPU does not apply to the compiler's thread.
    assert!(forked(|| compiles(forbid_mprotect)));

    let child = || {
        if !forbid_executable_memory() {
            return true;
        }
        let (totals, is_compiled) = run(|| {}, Duration::from_millis(300));
        let says = "(no code is compiled: the host allows no executable memory)";
        let executed = counter(&totals, "instructions");
        !is_compiled && executed > 600_000 && report::render(&totals).contains(says)
    };
    assert!(forked(child), "a host without executable memory");
}
