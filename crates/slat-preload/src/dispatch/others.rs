//! System calls that concern neither their own thread nor its signals. slat makes such a call as if the program had
//! called the C library's `syscall`.

use super::filters;
use crate::indirect::by_number;
use crate::real::error;
use crate::{ioctls, loaded};
use slat_process::filter::Made;

/// Makes a call that came from a rewritten call site. Returns the kernel's result.
pub fn from_site(made: &Made) -> isize {
    filters::judged(made).unwrap_or_else(|| make(made.number, made.arguments))
}

/// Makes a call that this thread's seccomp filters allow. Returns the kernel's result.
pub fn make(number: i64, arguments: [usize; 6]) -> isize {
    // SAFETY: the program has made this call. slat's C library does not cancel threads of the loaded program.
    let answer = unsafe {
        match number {
            libc::SYS_ioctl if !loaded::is_loaded() => {
                ioctls::ioctl_here(arguments[0] as i32, arguments[1] as u64, arguments[2]) as isize
            }
            _ => by_number(number, arguments),
        }
    };
    match answer {
        -1 => error(slat_process::errno()),
        answer => answer,
    }
}
