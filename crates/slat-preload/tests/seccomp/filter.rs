//! Seccomp filters: lists of system calls as programs of the kernel's filter machine
//! (`Documentation/userspace-api/seccomp_filter.rst`).

use libc::{BPF_ABS, BPF_ALU, BPF_AND, BPF_JEQ, BPF_JMP, BPF_K, BPF_LD, BPF_RET, BPF_W};
use std::mem::zeroed;

/// One system call that a filter allows.
#[derive(Clone)]
pub struct Allowed {
    number: i64,
    /// Conditions on arguments: the argument's index, a mask, and the value that the masked argument must have. All
    /// conditions must hold.
    arguments: Vec<(u32, u32, u32)>,
}

/// Allows a system call with any arguments.
pub fn any(number: i64) -> Allowed {
    with(number, &[])
}

/// Allows a system call with certain arguments.
pub fn with(number: i64, arguments: &[(u32, u32, u32)]) -> Allowed {
    Allowed {
        number,
        arguments: arguments.to_vec(),
    }
}

/// All bits of an argument.
pub const ALL: u32 = u32::MAX;

/// Allows `ioctl` with a request.
macro_rules! requests {
    ($($request:expr),* $(,)?) => { [$(crate::filter::with(libc::SYS_ioctl, &[(1, crate::filter::ALL, $request)])),*] };
}
/// Allows calls without a condition.
macro_rules! calls {
    ($($number:ident),* $(,)?) => { [$(crate::filter::any(libc::$number)),*] };
}
pub(crate) use {calls, requests};

fn statement(code: u32, value: u32) -> libc::sock_filter {
    libc::sock_filter {
        code: code as u16,
        jt: 0,
        jf: 0,
        k: value,
    }
}

/// Makes an instruction that skips `skip` instructions unless the accumulator is `value`.
fn unless(value: u32, skip: usize) -> libc::sock_filter {
    libc::sock_filter {
        jf: u8::try_from(skip).unwrap(),
        ..statement(BPF_JMP | BPF_JEQ | BPF_K, value)
    }
}

/// Makes the program that traps every call that `allowed` does not name.
fn program(allowed: &[Allowed]) -> Vec<libc::sock_filter> {
    let load = |offset| statement(BPF_LD | BPF_W | BPF_ABS, offset);
    let mut program = Vec::new();
    for call in allowed {
        // Each argument takes three instructions. Then one instruction allows the call.
        program.push(load(0));
        program.push(unless(call.number as u32, 3 * call.arguments.len() + 1));
        for (index, (argument, mask, value)) in call.arguments.iter().enumerate() {
            program.push(load(16 + 8 * argument));
            program.push(statement(BPF_ALU | BPF_AND | BPF_K, *mask));
            program.push(unless(*value, 3 * (call.arguments.len() - index - 1) + 1));
        }
        program.push(statement(BPF_RET | BPF_K, libc::SECCOMP_RET_ALLOW));
    }
    program.push(statement(BPF_RET | BPF_K, libc::SECCOMP_RET_TRAP));
    program
}

/// Installs a filter on this thread that allows only the calls in `allowed`. For any other call the process prints the
/// call's number and ends.
pub fn install(allowed: &[Allowed]) {
    extern "C" fn trapped(_: i32, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
        // SAFETY: the information comes from the kernel. The call's number is in the sixth word after the header and
        // the address.
        let number = unsafe { *info.cast::<i32>().add(6) };
        let text = format!("the filter trapped system call {number}\n");
        // SAFETY: the buffer is live.
        unsafe {
            libc::write(2, text.as_ptr().cast(), text.len());
            libc::_exit(3);
        }
    }
    let mut filter = program(allowed);
    let program = libc::sock_fprog {
        len: filter.len() as u16,
        filter: filter.as_mut_ptr(),
    };
    // SAFETY: the action and the filter program are on the stack.
    unsafe {
        let mut action: libc::sigaction = zeroed();
        action.sa_sigaction = trapped as *const () as usize;
        action.sa_flags = libc::SA_SIGINFO;
        let handles = libc::sigaction(libc::SIGSYS, &action, std::ptr::null_mut());
        assert_eq!(handles, 0);
        assert_eq!(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
        let set = libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &program);
        assert_eq!(set, 0);
    }
}
