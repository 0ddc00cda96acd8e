//! The KVM API for unmodified programs: a library to preload.
//!
//! A part of slat: there is no promise about this crate's API, and any version may change it.
//!
//! This library replaces the C library's functions by which a program reaches `/dev/kvm`, and those by which it changes
//! its memory mappings and signal handlers. slat passes all other calls on to the kernel.
//!
//! | layer | file | idea |
//! |---|---|---|
//! | base | `arch` | code that depends on the processor's architecture |
//! | | `real` | system calls that bypass this library's functions |
//! | | `looked_up` | functions of the C library that are looked up by name |
//! | | `seccomp` | the program's seccomp filters |
//! | | `landlock` | a program's Landlock rules |
//! | | `environment` | the environment of the programs that the program executes |
//! | | `elf` | the headers of a program's file |
//! | | `user_dispatch` | the kernel's dispatch of system calls, on and off |
//! | files | `paths` | the special file to which a path leads, in any spelling |
//! | | `looks` | the attributes that stat shows of KVM's files and descriptors |
//! | | `device` | `/dev/kvm` and KVM's module parameters as files |
//! | | `files` | open, access |
//! | | `carry` | copies of slat's own files, for programs in another root |
//! | | `loaded` | facts about a program that slat has loaded |
//! | calls | `status` | stat, readlink, realpath |
//! | | `attributes` | chown, chmod, getxattr and the calls like it |
//! | | `fds` | close, dup, fcntl |
//! | | `streams` | read, write, lseek |
//! | | `memory` | mmap and the calls like it: KVM's MMU notifiers |
//! | | `program_break` | brk of a program that slat has loaded |
//! | | `children` | execve and the calls like it |
//! | | `signals` | sigaction and the calls like it |
//! | | `roots` | chroot and the calls like it |
//! | | `heap` | memory that is not allocated by the program's `malloc` |
//! | | `forks` | fork: the heap's lock is held over it |
//! | | `userfault` | userfaultfd, where the kernel refuses it |
//! | | `ioctls` | ioctl |
//! | by number | `indirect` | syscall and prctl: system calls by number |
//! | dispatch | `dispatch` | system calls that do not pass through the C library |
//! | load | `load` | programs that load no libraries: this library is started as a program and loads them |
//!
//! A module imports from its own layer and from lower ones (`crates/slat/tests/architecture`).
//!
//! # Required system calls
//! A vCPU thread makes a few system calls while the guest runs: `docs/seccomp.md` lists them. When a program installs a
//! seccomp filter that forbids one of them on a vCPU's thread, slat prints a message on standard error.
//!
//! # Programs that do not call the C library's functions
//! The kernel sends the system calls of such programs to slat: see `docs/dispatch.md`.

// The executable of the unit tests does not export the C functions, so no code in this executable calls them.
#![cfg_attr(test, allow(dead_code))]

mod arch;
mod attributes;
mod carry;
mod children;
mod device;
mod dispatch;
mod elf;
mod environment;
mod fds;
mod files;
mod forks;
mod heap;
mod indirect;
mod ioctls;
mod landlock;
mod load;
mod loaded;
mod looked_up;
mod looks;
mod memory;
mod paths;
mod program_break;
mod real;
mod roots;
mod seccomp;
mod signals;
mod status;
mod streams;
mod user_dispatch;
mod userfault;

use slat_host::process;
use slat_kvm::{descriptors as table, guarded};
use slat_process::caller::with_own_floats;
use slat_process::once::Prepared;

#[cfg(not(test))]
#[global_allocator]
static HEAP: heap::Heap = heap::Heap;

/// Whether this process is a child of `vfork`. Such a child shares its memory, and so slat's table of descriptors, with
/// its parent. But it has its own descriptors.
pub(crate) fn is_borrowed() -> bool {
    process::owner() != slat_process::myself().0
}

pub(crate) extern "C" fn at_exit() {
    // A program that has not used KVM must make no system calls that it would not make without slat.
    if !is_prepared() {
        return;
    }
    with_own_floats(|| {
        guarded::guarded(|| {
            slat_kvm::report::at_exit();
            slat_kvm::trace::end();
            if !is_borrowed() {
                slat_kvm::publish::end();
                slat_kvm::profile::end();
                slat_kvm::perf::end();
            }
            Ok(0)
        })
    });
}

pub(crate) extern "C" fn start() {
    // The ids must be stored before the program's first fork and its first seccomp filter.
    process::owner();
    slat_process::find_noted_id();
    slat_kvm::publish::enable();
    forks::watch();
    environment::prepare();
    // SAFETY: `at_exit` has the right signature. The call only fails for lack of memory.
    unsafe { libc::atexit(at_exit) };
    files::prepare();
    status::prepare();
    streams::prepare();
    signals::prepare();
    children::prepare();
}

extern "C" fn start_preloaded() {
    start();
    dispatch::arm_if_needed();
}

#[cfg(not(test))]
#[used]
#[unsafe(link_section = ".init_array")]
static START: extern "C" fn() = start_preloaded;

static PREPARED: Prepared = Prepared::new();

/// Prepares the process for the first KVM object. The caller is in a `Section`.
///
/// # Errors
/// `ENOMEM`. Even then, the signal handlers are installed.
pub(crate) fn prepare() -> Result<(), i32> {
    if !is_prepared() {
        PREPARED.once(|| {
            slat_guard::install().map_err(|error| error.raw_os_error().unwrap_or(libc::EIO))?;
            signals::take_over();
            slat_guard::on_deferral(slat_kvm::signal_arrived);
            slat_kvm::watch_signals();
            Ok::<(), i32>(())
        })?;
    }
    if heap::is_ready() {
        Ok(())
    } else {
        Err(libc::ENOMEM)
    }
}

/// Whether [`prepare`] has installed the signal handlers that guard accesses to the program's memory.
pub(crate) fn is_prepared() -> bool {
    PREPARED.is_done()
}
