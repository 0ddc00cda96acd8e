//! The calls that concern neither their thread nor its signals: they are made like calls by `syscall`.

use super::filters;
use crate::indirect::by_number;
use crate::real::error;
use crate::{ioctls, loaded};
use slat_process::filter::Made;

/// Makes a call of a rewritten call site. Returns the kernel's result.
pub fn from_site(made: &Made) -> isize {
    filters::judged(made).unwrap_or_else(|| make(made.number, made.arguments))
}

/// Makes a call that this thread's filters allow. Returns the kernel's result.
pub fn make(number: i64, arguments: [usize; 6]) -> isize {
    // SAFETY: the program's call. The C library that cancels threads here is not the loaded program's.
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
