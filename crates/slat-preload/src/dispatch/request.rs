//! The arguments with which a program creates a thread or a process.

use crate::arch::calls;
use crate::real::{error, raw};

/// The arguments with which a program creates a thread or a process: the kernel's `struct clone_args`
/// (`include/uapi/linux/sched.h`).
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct Request {
    pub flags: u64,
    pidfd: u64,
    pub child_tid: u64,
    pub parent_tid: u64,
    pub exit_signal: u64,
    pub stack: u64,
    pub stack_size: u64,
    pub tls: u64,
    set_tid: u64,
    set_tid_size: u64,
    cgroup: u64,
}

pub const VM: u64 = libc::CLONE_VM as u64;
pub const VFORK: u64 = libc::CLONE_VFORK as u64;
pub const THREAD: u64 = libc::CLONE_THREAD as u64;
pub const SIGHAND: u64 = libc::CLONE_SIGHAND as u64;
pub const PIDFD: u64 = libc::CLONE_PIDFD as u64;
pub const SET_TLS: u64 = libc::CLONE_SETTLS as u64;
pub const PARENT_SET_TID: u64 = libc::CLONE_PARENT_SETTID as u64;
pub const CHILD_SET_TID: u64 = libc::CLONE_CHILD_SETTID as u64;
pub const CHILD_CLEAR_TID: u64 = libc::CLONE_CHILD_CLEARTID as u64;
/// `CLONE_CLEAR_SIGHAND`. In the child this flag would remove the handler of SIGSYS.
pub const CLEAR_SIGHAND: u64 = 1 << 32;

impl Request {
    /// Makes the request for a clone(2) with these `arguments`.
    pub fn clone(arguments: [usize; 6]) -> Self {
        const EXIT_SIGNAL: u64 = 0xff;
        let [flags, stack, parent_tid, child_tid, tls, _] = calls::reordered(arguments);
        let flags = flags as u64;
        Request {
            flags: flags & !EXIT_SIGNAL,
            pidfd: parent_tid as u64,
            child_tid: child_tid as u64,
            parent_tid: parent_tid as u64,
            exit_signal: flags & EXIT_SIGNAL,
            stack: stack as u64,
            tls: tls as u64,
            ..Request::default()
        }
    }

    /// Makes the request for a clone3(2), whose arguments are `bytes` bytes at `address`.
    ///
    /// # Errors
    /// The kernel's result for bad arguments.
    pub fn clone3(address: usize, bytes: usize) -> Result<Self, isize> {
        const FIRST_VERSION: usize = 64;
        if bytes < FIRST_VERSION {
            return Err(error(libc::EINVAL));
        }
        if bytes > size_of::<Self>() {
            return Err(error(libc::E2BIG));
        }
        let mut request = Request::default();
        // SAFETY: the struct consists of integers, and the copy into it is guarded.
        unsafe {
            let to = (&raw mut request).cast::<u8>();
            let to = std::slice::from_raw_parts_mut(to, bytes);
            slat_guard::copy_in(to, address as *const u8).map_err(|_| error(libc::EFAULT))?;
        }
        Ok(request)
    }

    pub fn has(&self, flag: u64) -> bool {
        self.flags & flag != 0
    }

    /// Returns this request changed for a process with a copy of the memory, its own signal handlers and its own stack.
    pub fn with_a_copy_of_memory(&self) -> Self {
        // The kernel refuses shared signal handlers without shared memory. So both flags are removed together.
        let shared = if self.has(VM) { VM | SIGHAND } else { 0 };
        Request {
            flags: self.flags & !(shared | SET_TLS | CLEAR_SIGHAND),
            stack: 0,
            stack_size: 0,
            tls: 0,
            ..*self
        }
    }

    /// Whether fork(2) has the effect that this request asks for.
    pub fn is_fork(&self) -> bool {
        let known = PARENT_SET_TID | CHILD_SET_TID | CHILD_CLEAR_TID;
        self.flags & !known == 0
            && self.exit_signal == libc::SIGCHLD as u64
            && self.set_tid_size == 0
    }

    /// Whether clone(2) can express this request.
    pub fn fits(&self) -> bool {
        let two_words = self.has(PIDFD) && self.has(PARENT_SET_TID);
        self.flags >> 32 == 0 && self.set_tid_size == 0 && !two_words
    }

    /// Returns the arguments of clone(2) for a request that [fits](Self::fits), in which the child keeps its creator's
    /// stack pointer.
    pub fn clone_arguments(&self) -> [usize; 6] {
        let word = match self.has(PIDFD) {
            true => self.pidfd,
            false => self.parent_tid,
        };
        let flags = (self.flags | self.exit_signal) as usize;
        let (word, child_tid, tls) = (word as usize, self.child_tid as usize, self.tls as usize);
        calls::reordered([flags, 0, word, child_tid, tls, 0])
    }

    /// Creates a process, on a copy of the caller's stack. Returns the kernel's result.
    ///
    /// # Safety
    /// - The caller continues in both processes.
    pub unsafe fn issue(&self) -> isize {
        // Filters of container runtimes refuse clone3, because they cannot read its flags. So slat calls clone if clone
        // suffices.
        if self.fits() {
            // SAFETY: the caller may continue in both processes, as this function's contract requires.
            return unsafe { raw(libc::SYS_clone, self.clone_arguments()) };
        }
        let arguments = [
            std::ptr::from_ref(self) as usize,
            size_of::<Self>(),
            0,
            0,
            0,
            0,
        ];
        // SAFETY: the caller may continue in both processes, as this function's contract requires.
        unsafe { raw(libc::SYS_clone3, arguments) }
    }

    /// Returns the address at which the new thread's stack begins. `None`: the new thread keeps its creator's stack
    /// pointer.
    pub fn stack_top(&self) -> Option<usize> {
        (self.stack != 0).then(|| (self.stack + self.stack_size) as usize)
    }
}
