//! Implements close, dup and fcntl, to keep slat's table of descriptors equal to the kernel's.

use crate::arch::calls::{self, O_LARGEFILE};
use crate::files::interpose;
use crate::guarded::guarded;
use crate::real::{Next, call, errno, plain, raw, result, set_errno};
use crate::{is_borrowed, table};
use slat_host::procfs;
use slat_kvm::ioctl::Object;
use slat_kvm::thread::Section;
use std::ffi::{c_int, c_uint, c_ulong};

static NEXT_FCLOSE: Next = Next::new(c"fclose");

/// Removes the table entry of `fd`. Call before the kernel closes `fd`.
pub fn forget(fd: c_int) {
    if !table::is_any_ours() {
        return;
    }
    if (procfs::holds(fd) || table::is_ours(fd)) && !is_borrowed() {
        guarded(|| {
            procfs::closed(fd);
            table::remove(fd);
            Ok(0)
        });
    }
}

/// Makes the table entry of `new` refer to the object of `old`. Call after the kernel has duplicated `old`. `new` is
/// the new descriptor. If `new` is negative, the kernel's call has failed, and this function does nothing.
pub fn follow(old: c_int, new: c_int) {
    if !table::is_any_ours() || new < 0 || new == old {
        return;
    }
    if is_plain(old, new) && !procfs::holds(new) || is_borrowed() {
        return;
    }
    guarded(|| {
        procfs::closed(new);
        match table::get(old) {
            Some(handle) => {
                table::share(new, handle);
            }
            None => table::remove(new),
        }
        Ok(0)
    });
}

/// Whether a command of fcntl works only on memfds (file seals).
fn is_about_seals(command: c_int) -> bool {
    matches!(command, libc::F_ADD_SEALS | libc::F_GET_SEALS)
}

/// Returns the status flags that the program sees for one of KVM's descriptors. `flags` are the kernel's flags of the
/// memfd behind that descriptor.
fn flags_shown(fd: c_int, flags: c_int) -> c_int {
    let _section = Section::enter();
    let Some(handle) = table::get(fd) else {
        return flags;
    };
    match handle.object() {
        Object::System(_) | Object::DevicePath | Object::Parameter(_) => flags,
        Object::Vm(_) | Object::Vcpu(_) | Object::Device(_) => flags & !O_LARGEFILE,
        Object::Stats(_) => flags & !(O_LARGEFILE | libc::O_ACCMODE) | libc::O_RDONLY,
        Object::GuestMemfd(_) => flags & !libc::O_PATH | O_LARGEFILE | libc::O_RDWR,
    }
}

fn is_plain(old: c_int, new: c_int) -> bool {
    !table::is_ours(old) && !table::is_ours(new)
}

/// Closes a range of descriptors, or marks them to be closed on exec.
///
/// # Safety
/// The conditions are those of close_range(2).
pub unsafe fn close_within(first: c_uint, last: c_uint, flags: c_int) -> c_int {
    const CLOSE_RANGE_CLOEXEC: c_int = 4;
    let closes = flags & CLOSE_RANGE_CLOEXEC == 0 && first <= last;
    if closes && table::is_any_ours() && !is_borrowed() {
        procfs::closed_within(first, last);
        for fd in table::ours_within(first, last) {
            forget(fd);
        }
    }
    // SAFETY: the arguments are valid for close_range(2), as this function's contract requires.
    let close = |first, last| unsafe { call!(libc::SYS_close_range, first, last, flags) as c_int };
    // slat's descriptor of /proc stays open, because slat could not open it again in another root directory.
    match procfs::directory().map(|fd| fd as c_uint) {
        Some(kept) if (first..=last).contains(&kept) && closes => {
            let below = kept.checked_sub(1).filter(|below| *below >= first);
            let answer = below.map_or(0, |below| close(first, below));
            let above = kept + 1;
            match answer == 0 && above <= last {
                true => close(above, last),
                false => answer,
            }
        }
        _ => close(first, last),
    }
}

interpose! {
    /// Replaces close(2).
    fn close(fd: c_int) -> c_int {
        // The program must see slat's descriptor of /proc as closed.
        if procfs::directory() == Some(fd) {
            set_errno(libc::EBADF);
            return -1;
        }
        forget(fd);
        // SAFETY: the arguments are valid for close(2), as this function's contract requires.
        unsafe { call!(libc::SYS_close, fd) as c_int }
    }

    /// Replaces close_range(2).
    fn close_range(first: c_uint, last: c_uint, flags: c_int) -> c_int {
        // SAFETY: the arguments are valid for close_range(2), as this function's contract requires.
        unsafe { close_within(first, last, flags) }
    }

    /// Replaces closefrom(3).
    fn closefrom(first: c_int) -> () {
        // SAFETY: the arguments are valid for closefrom(3), as this function's contract requires.
        unsafe { close_within(first.max(0) as c_uint, c_uint::MAX, 0) };
    }

    /// Replaces dup(2).
    fn dup(fd: c_int) -> c_int {
        // SAFETY: the arguments are valid for dup(2), as this function's contract requires.
        let new = unsafe { call!(libc::SYS_dup, fd) as c_int };
        follow(fd, new);
        new
    }

    /// Replaces dup2(2).
    fn dup2(fd: c_int, to: c_int) -> c_int {
        procfs::replaced(to);
        // SAFETY: the arguments are valid for dup2(2), as this function's contract requires.
        let made = unsafe {
            let (number, arguments) = calls::dup2(fd as usize, to as usize);
            plain(result(raw(number, arguments)))
        };
        let new = if made < 0 { -1 } else { to };
        follow(fd, new);
        new
    }

    /// Replaces dup3(2).
    fn dup3(fd: c_int, to: c_int, flags: c_int) -> c_int {
        procfs::replaced(to);
        // SAFETY: the arguments are valid for dup3(2), as this function's contract requires.
        let new = unsafe { call!(libc::SYS_dup3, fd, to, flags) as c_int };
        follow(fd, new);
        new
    }

    /// Replaces fclose(3). The C library's function closes the descriptor without calling this library's `close`.
    fn fclose(stream: *mut libc::FILE) -> c_int {
        if table::is_any_ours() {
            // A stream in memory has no descriptor, so `fileno` fails; this must not change the program's `errno`.
            let before = errno();
            // SAFETY: the arguments are valid for fclose(3), as this function's contract requires.
            forget(unsafe { libc::fileno(stream) });
            set_errno(before);
        }
        let Some(function) = NEXT_FCLOSE.get() else {
            set_errno(libc::ENOSYS);
            return libc::EOF;
        };
        type Fclose = unsafe extern "C" fn(*mut libc::FILE) -> c_int;
        // SAFETY: `function` is the C library's function, which has this signature. The caller's argument is valid for
        // it.
        unsafe { std::mem::transmute::<usize, Fclose>(function)(stream) }
    }

    /// Replaces fcntl(2).
    fn fcntl(fd: c_int, command: c_int, argument: c_ulong) -> c_int {
        if is_about_seals(command) && table::is_ours(fd) && !Section::is_entered() {
            set_errno(libc::EINVAL);
            return -1;
        }
        // SAFETY: the arguments are valid for fcntl(2), as this function's contract requires.
        let answer = unsafe { call!(libc::SYS_fcntl, fd, command, argument) as c_int };
        match command {
            libc::F_DUPFD | libc::F_DUPFD_CLOEXEC => follow(fd, answer),
            libc::F_GETFL if answer >= 0 && table::is_ours(fd) => return flags_shown(fd, answer),
            _ => {}
        }
        answer
    }

    /// Replaces fcntl64, which is fcntl(2) for large files.
    fn fcntl64(fd: c_int, command: c_int, argument: c_ulong) -> c_int {
        // SAFETY: the arguments are valid for fcntl(2), as this function's contract requires.
        unsafe { fcntl(fd, command, argument) }
    }
}
