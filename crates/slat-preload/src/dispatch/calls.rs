//! Serves the system calls that concern the calling thread, its signals or its memory. The kernel would change the
//! thread's state for such a call. While slat serves a call, that state is in the frame, or slat keeps it. All other
//! calls go to [`others`].

use super::frame::{self, Frame};
use super::request::Request;
use super::{filters, others, rseq, threads};
use crate::arch;
use crate::guarded::guarded;
use crate::real::{error, raw};
use crate::user_dispatch::{SET_DISPATCH, passing};
use crate::{loaded, program_break, signals};
use slat_guard::blockable;
use slat_process::filter::Made;
use slat_process::pointers;
use std::ffi::c_char;

/// The size of the kernel's signal set, in bytes.
const SET_BYTES: usize = 8;

/// Reads a `T` at an address in the program's memory.
fn read<T: slat_guard::Word>(address: usize) -> Result<T, isize> {
    // SAFETY: the load is guarded (a bad address is an error), because slat installs its handlers together with the
    // dispatch. The kernel would read this address for the program, too.
    unsafe { slat_guard::load(address as *const T) }.map_err(|_| error(libc::EFAULT))
}

/// Writes a `T` to an address in the program's memory.
fn write<T: slat_guard::Word>(address: usize, value: T) -> Result<(), isize> {
    // SAFETY: the store is guarded (a bad address is an error), because slat installs its handlers together with the
    // dispatch. The kernel would write to this address for the program, too.
    unsafe { slat_guard::store(address as *mut T, value) }.map_err(|_| error(libc::EFAULT))
}

/// Whether a call needs not only the program's registers, but also its signal mask or alternate stack.
pub fn needs_state(number: i64) -> bool {
    matches!(
        number,
        libc::SYS_rt_sigreturn
            | libc::SYS_rt_sigprocmask
            | libc::SYS_sigaltstack
            | libc::SYS_clone
            | libc::SYS_clone3
    )
}

/// Serves the call `made`, whose registers are in the frame. If the call [needs](needs_state) the program's signal mask
/// or alternate stack, the frame has these, too. Returns the result that the kernel would return.
pub fn answer(frame: &mut Frame, made: &Made) -> isize {
    let Made {
        number, arguments, ..
    } = *made;
    if let Some(answer) = filters::judged(made) {
        return answer;
    }
    let (newer, newer_arguments) = arch::calls::newer(number, arguments);
    let [a, b, c, d, ..] = newer_arguments;
    match newer {
        libc::SYS_rt_sigreturn => {
            // SAFETY: by this call the program says that its handler has ended. The handler's frame is at the stack
            // pointer, as the kernel expects.
            unsafe { frame::return_from_handler(frame) }
        }
        libc::SYS_rt_sigprocmask => change_mask(frame, a as i32, b, c, d).unwrap_or_else(|e| e),
        libc::SYS_rt_sigaction => change_action(a as i32, b, c, d).unwrap_or_else(|e| e),
        libc::SYS_sigaltstack => change_alternate(frame, a, b),
        libc::SYS_clone => threads::make(frame, &Request::clone(newer_arguments)),
        libc::SYS_clone3 => match Request::clone3(a, b) {
            Ok(request) => threads::make(frame, &request),
            Err(error) => error,
        },
        libc::SYS_exit => threads::exit(a),
        libc::SYS_tkill if b == threads::SIGCANCEL && loaded::is_loaded() => {
            threads::wait_until_separate();
            pass(number, arguments)
        }
        libc::SYS_tgkill if c == threads::SIGCANCEL && loaded::is_loaded() => {
            threads::wait_until_separate();
            pass(number, arguments)
        }
        libc::SYS_exit_group => {
            crate::at_exit();
            pass(number, arguments)
        }
        libc::SYS_rt_sigsuspend => with_mask(number, arguments, 0, 1),
        libc::SYS_ppoll => with_mask(number, arguments, 3, 4),
        libc::SYS_epoll_pwait | libc::SYS_epoll_pwait2 => with_mask(number, arguments, 4, 5),
        libc::SYS_pselect6 => select(arguments),
        libc::SYS_prctl if a == SET_DISPATCH => {
            slat_kvm::messages::say(format_args!(
                "prctl(PR_SET_SYSCALL_USER_DISPATCH): slat uses it itself in this program; the call answers EINVAL"
            ));
            error(libc::EINVAL)
        }
        // A detached thread of musl unmaps its own stack before it ends. So after this call, the thread has no stack
        // for a signal handler.
        libc::SYS_munmap if loaded::is_loaded() && frame.sp().wrapping_sub(a) < b => {
            match others::make(number, arguments) {
                0 => threads::exit(0),
                error => error,
            }
        }
        _ if loaded::is_loaded() => match in_loaded_program(number, arguments) {
            Some(answer) => answer,
            None => {
                let (number, arguments) = loaded::with_own_path(number, arguments);
                others::make(number, arguments)
            }
        },
        _ => others::make(number, arguments),
    }
}

/// Passes a call that slat need not serve to the kernel.
fn pass(number: i64, arguments: [usize; 6]) -> isize {
    // SAFETY: the program has made this call, and the call is passed on unchanged.
    unsafe { raw(number, arguments) }
}

/// Serves the calls by which the loaded program's own C library sets up a thread and its memory. Returns `None` for
/// other calls.
fn in_loaded_program(number: i64, arguments: [usize; 6]) -> Option<isize> {
    let store = |to: usize, value: u64| write(to, value).map_or_else(|e| e, |()| 0);
    let refuse = |why: &str| {
        slat_kvm::messages::say(format_args!("{why}; the call answers EINVAL"));
        error(libc::EINVAL)
    };
    if let Some(answer) = arch::pointer_calls::serve(number, arguments, store, refuse) {
        return Some(answer);
    }
    let (newer, newer_arguments) = arch::calls::newer(number, arguments);
    let [a, b, ..] = newer_arguments;
    Some(match newer {
        libc::SYS_seccomp if a == libc::SECCOMP_SET_MODE_FILTER as usize => {
            let on_all = b & libc::SECCOMP_FILTER_FLAG_TSYNC as usize != 0;
            confine(arguments[2], on_all, |program| {
                pass(number, [a, b, program, 0, 0, 0])
            })
        }
        libc::SYS_prctl
            if a == libc::PR_SET_SECCOMP as usize && b == libc::SECCOMP_MODE_FILTER as usize =>
        {
            confine(arguments[2], false, |program| {
                pass(number, [a, b, program, 0, 0, 0])
            })
        }
        libc::SYS_seccomp if a == libc::SECCOMP_SET_MODE_STRICT as usize => refuse_strict(),
        libc::SYS_prctl
            if a == libc::PR_SET_SECCOMP as usize && b == libc::SECCOMP_MODE_STRICT as usize =>
        {
            refuse_strict()
        }
        libc::SYS_set_tid_address => {
            threads::set_clear_at_exit(a);
            slat_process::thread_id() as isize
        }
        libc::SYS_brk => program_break::set_break(a) as isize,
        libc::SYS_rseq => rseq::register(arguments),
        libc::SYS_readlinkat => {
            let [_, path, to, len, ..] = newer_arguments;
            loaded::own_link(path as *const c_char, to, len)?
        }
        _ => return None,
    })
}

/// Installs the seccomp filter at the address `program`, after a change that lets slat's own calls pass. Calls
/// `install` with the address of the changed filter.
fn confine(program: usize, on_all: bool, install: impl FnOnce(usize) -> isize) -> isize {
    let Some(passing) = passing() else {
        return error(libc::EINVAL);
    };
    let mut answer = 0;
    guarded(|| {
        answer = filters::install(passing, program, on_all, install);
        Ok(0)
    });
    answer
}

fn refuse_strict() -> isize {
    slat_kvm::messages::say(format_args!(
        "seccomp: in strict mode a static program cannot use slat; the call answers EINVAL"
    ));
    error(libc::EINVAL)
}

/// Implements rt_sigprocmask: changes the mask in the frame, which the kernel restores when the call returns.
fn change_mask(
    frame: &mut Frame,
    how: i32,
    set: usize,
    before: usize,
    bytes: usize,
) -> Result<isize, isize> {
    if bytes != SET_BYTES {
        return Err(error(libc::EINVAL));
    }
    let old = frame.mask;
    if set != 0 {
        let set: u64 = read(set)?;
        frame.mask = blockable(match how {
            libc::SIG_BLOCK => old | set,
            libc::SIG_UNBLOCK => old & !set,
            libc::SIG_SETMASK => set,
            _ => return Err(error(libc::EINVAL)),
        });
    }
    if before != 0 {
        write(before, old)?;
    }
    Ok(0)
}

/// Implements rt_sigaction. The kernel's `struct sigaction` has handler, flags, restorer and mask.
fn change_action(signal: i32, new: usize, old: usize, bytes: usize) -> Result<isize, isize> {
    if bytes != SET_BYTES {
        return Err(error(libc::EINVAL));
    }
    let words = |address: usize| -> Result<[u64; 4], isize> {
        let mut words = [0; 4];
        for (index, word) in words.iter_mut().enumerate() {
            *word = read(address + 8 * index)?;
        }
        Ok(words)
    };
    // SAFETY: all-zero is a valid action.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    let mut before = action;
    if new != 0 {
        let [handler, flags, _, mask] = words(new)?;
        action.sa_sigaction = handler as usize;
        action.sa_flags = flags as i32;
        // SAFETY: the C library's signal set is larger, and begins with the kernel's set.
        unsafe {
            (&raw mut action.sa_mask)
                .cast::<u64>()
                .write(blockable(mask))
        };
    }
    let given = if new == 0 {
        std::ptr::null()
    } else {
        &raw const action
    };
    // SAFETY: the pointers refer to live structures, or are null.
    if unsafe { signals::set_action(signal, given, &mut before) } != 0 {
        return Err(error(slat_process::errno()));
    }
    if old != 0 {
        // SAFETY: the C library's signal set is larger, and begins with the kernel's set.
        let mask = unsafe { (&raw const before.sa_mask).cast::<u64>().read() };
        let words = [
            before.sa_sigaction as u64,
            before.sa_flags as u32 as u64,
            0,
            mask,
        ];
        for (index, word) in words.into_iter().enumerate() {
            write(old + 8 * index, word)?;
        }
    }
    Ok(0)
}

/// Implements sigaltstack. The kernel cannot serve the call, because it would see slat's stack pointer. The program's
/// stack pointer is in the frame. The frame also has the alternate stack, which the return to the program restores.
fn change_alternate(frame: &mut Frame, new: usize, old: usize) -> isize {
    const AUTODISARM: i32 = 1 << 31;
    let before = frame.alternate;
    let is_used = frame.comes_from_alternate() && before.ss_flags & AUTODISARM == 0;
    if new != 0 {
        if is_used {
            return error(libc::EPERM);
        }
        let answer = pass(libc::SYS_sigaltstack, [new, 0, 0, 0, 0, 0]);
        if answer != 0 {
            return answer;
        }
        let alternate = &raw mut frame.alternate as usize;
        pass(libc::SYS_sigaltstack, [0, alternate, 0, 0, 0, 0]);
        pointers::set_alternate(&frame.alternate);
    }
    if old != 0 {
        // The frame has the alternate stack that the program has set. The call also returns whether that stack is in
        // use.
        let state = match (before.ss_size, is_used) {
            (0, _) => libc::SS_DISABLE,
            (_, true) => libc::SS_ONSTACK,
            (_, false) => 0,
        };
        let flags = before.ss_flags | state;
        let words = [
            before.ss_sp as u64,
            u64::from(flags as u32),
            before.ss_size as u64,
        ];
        for (index, word) in words.into_iter().enumerate() {
            if let Err(error) = write(old + 8 * index, word) {
                return error;
            }
        }
    }
    0
}

/// Makes a call that sets a signal mask while the call waits. The argument at index `set` points to the mask; the
/// argument at index `bytes` is the mask's size.
fn with_mask(number: i64, mut arguments: [usize; 6], set: usize, bytes: usize) -> isize {
    let mask;
    if arguments[set] != 0 && arguments[bytes] == SET_BYTES {
        mask = match read::<u64>(arguments[set]) {
            Ok(mask) => blockable(mask),
            Err(error) => return error,
        };
        arguments[set] = &raw const mask as usize;
    }
    pass(number, arguments)
}

/// Implements pselect6. Its last argument points to a pair: the pointer to the mask, and the mask's size.
fn select(mut arguments: [usize; 6]) -> isize {
    let given = arguments[5];
    let (mask, pair);
    if given != 0 {
        let (set, bytes) = match (read::<u64>(given), read::<u64>(given + 8)) {
            (Ok(set), Ok(bytes)) => (set as usize, bytes as usize),
            _ => return error(libc::EFAULT),
        };
        if set != 0 && bytes == SET_BYTES {
            mask = match read::<u64>(set) {
                Ok(mask) => blockable(mask),
                Err(error) => return error,
            };
            pair = [&raw const mask as usize, bytes];
            arguments[5] = &raw const pair as usize;
        }
    }
    pass(libc::SYS_pselect6, arguments)
}
