//! Threads and processes that the program makes by its own system calls.
//!
//! slat's code runs on each thread of the program, and needs a thread of slat's C library for it: so a new thread of a loaded program is
//! one of that library's, which goes on where the program's thread begins, with its stack and its thread pointer. When the program ends
//! the thread, the library's returns.
//!
//! A child of `vfork` would run on the stack from which its parent is served: it gets a copy of memory instead. Its parent waits for it
//! all the same.

use super::calls::{error, exit_now};
use super::filters::{self, Inherited};
use super::frame::{self, Frame};
use super::{arm_thread, block_all, is_armed, robust, rseq};
use crate::files::interpose;
use crate::guarded::guarded;
use crate::real::{Next, kernel, raw};
use crate::{forks, load};
use slat_kvm::thread::Section;
use slat_process::gate::GATE;
use slat_process::{pointers, stack, wait};
use std::arch::naked_asm;
use std::cell::Cell;
use std::ffi::{c_int, c_void};
use std::mem::transmute;
use std::ptr::{null, null_mut};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};

/// Bytes of the stack on which a thread's calls are served: as many as the standard library gives a thread.
const STACK: usize = 2 << 20;

/// The key whose destructor gives a thread's stack back.
static KEY: OnceLock<libc::pthread_key_t> = OnceLock::new();

/// Gives the stack of a thread that ends back. What the thread calls from now on passes to the kernel.
unsafe extern "C" fn drop_stack(low: *mut c_void) {
    super::disarm_thread();
    stack::set(0, 0);
    // SAFETY: the stack of `make_stack`, on which no call is being served: this is the C library's code.
    let _ = unsafe { kernel!(libc::SYS_munmap, low, STACK) };
}

/// Has the stacks given back that [`make_stack`] makes. Call at the program's start.
pub fn prepare() {
    KEY.get_or_init(|| {
        let mut key = 0;
        // SAFETY: a key to fill in, and a function of this library, which is never unloaded.
        unsafe { libc::pthread_key_create(&mut key, Some(drop_stack)) };
        key
    });
}

/// Gives this thread a stack for its calls. Ends the process if there is no memory.
pub fn make_stack() {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_STACK;
    let access = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: new memory.
    let Ok(low) = (unsafe { kernel!(libc::SYS_mmap, 0, STACK, access, flags, usize::MAX, 0) })
    else {
        const MESSAGE: &str = "slat: there is no memory for a thread's stack\n";
        // SAFETY: a live buffer; then the process ends.
        unsafe {
            let _ = kernel!(libc::SYS_write, 2, MESSAGE.as_ptr(), MESSAGE.len());
            let _ = kernel!(libc::SYS_exit_group, 66);
        }
        unreachable!("the process has ended");
    };
    // SAFETY: the page below which the stack must not grow, which nothing uses yet.
    let _ = unsafe { kernel!(libc::SYS_mprotect, low, 4096, libc::PROT_NONE) };
    stack::set(low as usize, low as usize + STACK);
    if let Some(key) = KEY.get() {
        // SAFETY: the key of `prepare`: among the first, whose values need no memory.
        unsafe { libc::pthread_setspecific(*key, low as *const c_void) };
    }
}

/// What a program asks for when it makes a thread or a process: the kernel's `struct clone_args` (`include/uapi/linux/sched.h`).
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct Request {
    flags: u64,
    pidfd: u64,
    child_tid: u64,
    parent_tid: u64,
    exit_signal: u64,
    stack: u64,
    stack_size: u64,
    tls: u64,
    set_tid: u64,
    set_tid_size: u64,
    cgroup: u64,
}

const VM: u64 = libc::CLONE_VM as u64;
const VFORK: u64 = libc::CLONE_VFORK as u64;
const THREAD: u64 = libc::CLONE_THREAD as u64;
const SIGHAND: u64 = libc::CLONE_SIGHAND as u64;
const PIDFD: u64 = libc::CLONE_PIDFD as u64;
const SET_TLS: u64 = libc::CLONE_SETTLS as u64;
const PARENT_SET_TID: u64 = libc::CLONE_PARENT_SETTID as u64;
const CHILD_SET_TID: u64 = libc::CLONE_CHILD_SETTID as u64;
const CHILD_CLEAR_TID: u64 = libc::CLONE_CHILD_CLEARTID as u64;
/// `CLONE_CLEAR_SIGHAND`: would take the handler of SIGSYS away.
const CLEAR_SIGHAND: u64 = 1 << 32;

impl Request {
    /// fork(2).
    pub fn fork() -> Self {
        Request {
            exit_signal: libc::SIGCHLD as u64,
            ..Request::default()
        }
    }

    /// vfork(2).
    pub fn vfork() -> Self {
        Request {
            flags: VM | VFORK,
            ..Self::fork()
        }
    }

    /// clone(2), as x86-64 orders its arguments.
    pub fn clone([flags, stack, parent_tid, child_tid, tls, _]: [usize; 6]) -> Self {
        const EXIT_SIGNAL: u64 = 0xff;
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

    /// clone3(2): reads the arguments.
    ///
    /// # Errors
    /// The kernel's answer to bad arguments.
    pub fn clone3(address: usize, bytes: usize) -> Result<Self, isize> {
        const FIRST_VERSION: usize = 64;
        if bytes < FIRST_VERSION {
            return Err(error(libc::EINVAL));
        }
        if bytes > size_of::<Self>() {
            return Err(error(libc::E2BIG));
        }
        let mut request = Request::default();
        // SAFETY: integers; a guarded copy into a live value.
        unsafe {
            let to = (&raw mut request).cast::<u8>();
            let to = std::slice::from_raw_parts_mut(to, bytes);
            slat_guard::copy_in(to, address as *const u8).map_err(|_| error(libc::EFAULT))?;
        }
        Ok(request)
    }

    fn has(&self, flag: u64) -> bool {
        self.flags & flag != 0
    }

    /// Whether this is what fork(2) makes.
    fn is_fork(&self) -> bool {
        let known = PARENT_SET_TID | CHILD_SET_TID | CHILD_CLEAR_TID;
        self.flags & !known == 0
            && self.exit_signal == libc::SIGCHLD as u64
            && self.set_tid_size == 0
    }

    /// Whether clone(2) can say the same as clone3(2).
    fn fits(&self) -> bool {
        let two_words = self.has(PIDFD) && self.has(PARENT_SET_TID);
        self.flags >> 32 == 0 && self.set_tid_size == 0 && !two_words
    }

    /// Does clone(2), with a stack pointer for the child; 0: its maker's. Returns what the kernel does.
    ///
    /// # Safety
    /// - The request [fits](Self::fits). The caller goes on in both processes, or the child where its stack says.
    unsafe fn clone_to(&self, sp: usize) -> isize {
        let word = match self.has(PIDFD) {
            true => self.pidfd,
            false => self.parent_tid,
        };
        let flags = (self.flags | self.exit_signal) as usize;
        let (word, child_tid, tls) = (word as usize, self.child_tid as usize, self.tls as usize);
        // SAFETY: the caller's promise.
        unsafe { raw(libc::SYS_clone, [flags, sp, word, child_tid, tls, 0]) }
    }

    /// Makes a process, on a copy of the caller's stack. Returns what the kernel does.
    ///
    /// # Safety
    /// - The caller goes on in both processes.
    unsafe fn issue(&self) -> isize {
        // The filters of container runtimes refuse clone3, because they cannot read its flags.
        if self.fits() {
            // SAFETY: the caller's promise.
            return unsafe { self.clone_to(0) };
        }
        let arguments = [
            std::ptr::from_ref(self) as usize,
            size_of::<Self>(),
            0,
            0,
            0,
            0,
        ];
        // SAFETY: the caller's promise.
        unsafe { raw(libc::SYS_clone3, arguments) }
    }

    /// Returns where the new thread's stack begins; `None` if it goes on with its maker's.
    fn stack_top(&self) -> Option<usize> {
        (self.stack != 0).then(|| (self.stack + self.stack_size) as usize)
    }
}

/// Makes a thread or a process. Returns what the kernel returns to the caller, in a process also to the child.
pub fn make(frame: &mut Frame, request: &Request) -> isize {
    if request.has(THREAD) {
        return match load::is_loaded() {
            true => make_thread(frame, request),
            false => refuse("a thread that the C library does not know"),
        };
    }
    if request.has(VM) && !request.has(VFORK) {
        return match (load::is_loaded(), request.stack_top()) {
            (false, Some(top)) if request.fits() => make_beside(frame, request, top),
            _ => refuse("a process that shares memory with its maker"),
        };
    }
    make_process(frame, request)
}

fn refuse(what: &str) -> isize {
    slat_kvm::report::say(format_args!(
        "clone: slat cannot follow {what}; the call answers ENOSYS"
    ));
    error(libc::ENOSYS)
}

/// Makes a process that shares memory with its maker and has a stack of its own: LeakSanitizer looks at its program's threads by one. It has
/// no thread of slat's C library, so its calls pass to the kernel.
fn make_beside(frame: &Frame, request: &Request, top: usize) -> isize {
    /// Where the child begins: behind the gate's `ret`, with the frame where rt_sigreturn(2) expects it.
    #[unsafe(naked)]
    unsafe extern "C" fn begin() {
        naked_asm!(
            "mov eax, {rt_sigreturn}",
            "jmp qword ptr [rip + {gate}]",
            rt_sigreturn = const libc::SYS_rt_sigreturn,
            gate = sym GATE,
        )
    }
    // SAFETY: the program gives this stack to the child, below the red zone of what it may have put there. The parent goes on here.
    unsafe {
        let copy = &mut *frame.copy_below(top - frame::RED_ZONE);
        copy.alternate = NO_STACK;
        copy.set_register(libc::REG_RAX, 0);
        copy.set_register(libc::REG_RSP, top);
        let sp = (&raw mut *copy).cast::<usize>().sub(1);
        *sp = begin as *const () as usize;
        request.clone_to(sp as usize)
    }
}

fn make_process(frame: &mut Frame, request: &Request) -> isize {
    let copied = Request {
        flags: match request.has(VM) {
            true => request.flags & !(VM | SIGHAND | SET_TLS | CLEAR_SIGHAND),
            false => request.flags & !(SET_TLS | CLEAR_SIGHAND),
        },
        stack: 0,
        stack_size: 0,
        tls: 0,
        ..*request
    };
    // A handler must not run in the child before its calls are dispatched. The return to the program undoes this.
    block_all();
    let answer = match copied.is_fork() {
        // The C library's own: where other threads make threads meanwhile, the child's copy of it has to be mended.
        // SAFETY: a plain call. The child goes on here.
        true => match unsafe { libc::fork() } {
            -1 => error(slat_process::errno()),
            child => child as isize,
        },
        // SAFETY: the program's request for a process with a copy of memory. The child goes on here.
        false => forks::around(|| unsafe { copied.issue() }),
    };
    if answer > 0 && copied.is_fork() && copied.has(PARENT_SET_TID) {
        // SAFETY: a guarded store. The kernel ignores a bad address, too.
        let _ = unsafe { slat_guard::store(copied.parent_tid as *mut u32, answer as u32) };
    }
    if answer == 0 {
        BEGUN_AT.set(0);
        set_clear_at_exit(0);
        if copied.is_fork() {
            if copied.has(CHILD_SET_TID) {
                // SAFETY: as above.
                let _ = unsafe {
                    slat_guard::store(
                        copied.child_tid as *mut u32,
                        slat_process::thread_id() as u32,
                    )
                };
            }
            if copied.has(CHILD_CLEAR_TID) {
                set_clear_at_exit(copied.child_tid as usize);
            }
        }
        THREADS.store(1, Ordering::Relaxed);
        if let Some(top) = request.stack_top() {
            frame.set_register(libc::REG_RSP, top);
        }
        if request.has(SET_TLS) {
            pointers::set_programs(request.tls as usize);
        }
    }
    answer
}

thread_local! {
    // Without initialisers or destructors: signal handlers read them.
    /// The word that becomes 0 when this thread ends (set_tid_address(2)), or 0.
    static CLEAR_AT_EXIT: Cell<usize> = const { Cell::new(0) };
    /// Where the stack of slat's C library's thread goes on when the program's thread has ended; 0 on the first thread.
    static BEGUN_AT: Cell<usize> = const { Cell::new(0) };
}

/// Threads of a loaded program that have not ended.
static THREADS: AtomicU32 = AtomicU32::new(1);

/// Sets the word that becomes 0, and is woken, when this thread ends.
pub fn set_clear_at_exit(address: usize) {
    CLEAR_AT_EXIT.set(address);
}

/// No alternate stack.
const NO_STACK: libc::stack_t = libc::stack_t {
    ss_sp: null_mut(),
    ss_flags: libc::SS_DISABLE,
    ss_size: 0,
};

/// A thread to be made: on its maker's stack, until `tid` is set.
struct Start<'a> {
    frame: &'a Frame,
    request: &'a Request,
    filters: Inherited,
    tid: AtomicU32,
}

type Create = unsafe extern "C" fn(
    *mut libc::pthread_t,
    *const libc::pthread_attr_t,
    extern "C-unwind" fn(*mut c_void) -> *mut c_void,
    *mut c_void,
) -> c_int;

static NEXT_CREATE: Next = Next::new(c"pthread_create");

fn make_thread(frame: &Frame, request: &Request) -> isize {
    let Some(create) = NEXT_CREATE.get() else {
        return error(libc::ENOSYS);
    };
    let start = Start {
        frame,
        request,
        filters: filters::of_this_thread(),
        tid: AtomicU32::new(0),
    };
    THREADS.fetch_add(1, Ordering::Relaxed);
    // The new thread begins with this mask.
    block_all();
    // SAFETY: the C library's function; attributes on the stack; `start` outlives the new thread's use of it, which ends when `tid` is
    // set.
    let failed = unsafe {
        let create = transmute::<usize, Create>(create);
        let mut attributes = std::mem::zeroed();
        let mut thread = 0;
        let mut failed = libc::pthread_attr_init(&mut attributes);
        if failed == 0 {
            libc::pthread_attr_setstacksize(&mut attributes, STACK);
            libc::pthread_attr_setdetachstate(&mut attributes, libc::PTHREAD_CREATE_DETACHED);
            let start = (&raw const start).cast_mut().cast();
            failed = create(&mut thread, &attributes, begin, start);
            libc::pthread_attr_destroy(&mut attributes);
        }
        failed
    };
    if failed != 0 {
        THREADS.fetch_sub(1, Ordering::Relaxed);
        return error(failed);
    }
    loop {
        match start.tid.load(Ordering::Acquire) {
            0 => wait::sleep(&start.tid, 0, None),
            tid => return tid as isize,
        };
    }
}

/// The thread of slat's C library: runs the program's thread to its end.
extern "C-unwind" fn begin(start: *mut c_void) -> *mut c_void {
    // SAFETY: the argument is a `Start`.
    BEGUN_AT.with(|begun_at| unsafe { run(start.cast(), begun_at.as_ptr()) });
    null_mut()
}

/// Calls [`go`] on this stack, and stores where [`leave`] finds it.
#[unsafe(naked)]
unsafe extern "C" fn run(start: *const Start<'_>, begun_at: *mut usize) {
    naked_asm!(
        "push rbx",
        "push rbp",
        "push r12",
        "push r13",
        "push r14",
        "push r15",
        "sub rsp, 8",
        "mov [rsi], rsp",
        "call {go}",
        "ud2",
        go = sym go,
    )
}

/// Returns from [`run`].
///
/// # Safety
/// - This thread is in `run`, which has stored `begun_at`. Nothing on its stacks is needed any more.
#[unsafe(naked)]
unsafe extern "C" fn leave(begun_at: usize) -> ! {
    naked_asm!(
        "mov rsp, rdi",
        "add rsp, 8",
        "pop r15",
        "pop r14",
        "pop r13",
        "pop r12",
        "pop rbp",
        "pop rbx",
        "ret",
    )
}

/// Becomes the program's thread.
unsafe extern "C" fn go(start: *const Start<'_>) -> ! {
    /// What this function itself needs of the stack.
    const OWN: usize = 16 << 10;
    // SAFETY: the maker waits until `tid` is set. The processor can do what the first thread has done. The thread's stack between its
    // end and this function's own part is free, and the frame's copy there says where the program's thread begins.
    unsafe {
        let Start {
            frame,
            request,
            filters,
            tid,
        } = &*start;
        filters::inherit(*filters);
        let own_pointer = match request.has(SET_TLS) {
            true => request.tls as usize,
            false => pointers::programs_of_maker(),
        };
        pointers::separate(own_pointer);
        let high = BEGUN_AT.get() - OWN;
        stack::set(stack_end(), high);
        let copy = &mut *frame.copy_below(high);
        stack::set_used_to(&raw const *copy as usize);
        copy.alternate = NO_STACK;
        copy.set_register(libc::REG_RAX, 0);
        if let Some(top) = request.stack_top() {
            copy.set_register(libc::REG_RSP, top);
        }
        let number = slat_process::thread_id() as u32;
        for (flag, word) in [
            (PARENT_SET_TID, request.parent_tid),
            (CHILD_SET_TID, request.child_tid),
        ] {
            if request.has(flag) {
                // The kernel ignores a bad address, too.
                let _ = slat_guard::store(word as *mut u32, number);
            }
        }
        if request.has(CHILD_CLEAR_TID) {
            set_clear_at_exit(request.child_tid as usize);
        }
        arm_thread();
        tid.store(number, Ordering::Release);
        wait::wake(tid);
        frame::resume(copy)
    }
}

/// Returns the end of this thread's stack: its lowest address above the guard.
fn stack_end() -> usize {
    // SAFETY: attributes on the stack, of this thread, which exists.
    unsafe {
        let mut attributes = std::mem::zeroed();
        let (mut low, mut size) = (null_mut(), 0);
        libc::pthread_getattr_np(libc::pthread_self(), &mut attributes);
        libc::pthread_attr_getstack(&attributes, &mut low, &mut size);
        libc::pthread_attr_destroy(&mut attributes);
        low as usize
    }
}

/// Does exit(2): ends this thread, and with the program's last one the process, in which slat's own threads would go on.
pub fn exit(status: usize) -> ! {
    block_all();
    if load::is_loaded() {
        if THREADS.fetch_sub(1, Ordering::AcqRel) == 1 {
            crate::at_exit();
            // SAFETY: ends the process.
            let _ = unsafe { kernel!(libc::SYS_exit_group, status) };
        }
        rseq::leave();
        robust::leave();
    }
    let clear = CLEAR_AT_EXIT.get();
    if clear != 0 {
        // SAFETY: a guarded store to the word that the program has named, and a wake of who waits for it.
        unsafe {
            let _ = slat_guard::store(clear as *mut u32, 0);
            let _ = kernel!(libc::SYS_futex, clear, libc::FUTEX_WAKE, 1);
        }
    }
    match BEGUN_AT.get() {
        0 => exit_now(status),
        // SAFETY: `run` has stored it; signals are blocked.
        begun_at => unsafe { leave(begun_at) },
    }
}

/// What a thread runs that the C library has made.
struct Routine {
    routine: extern "C-unwind" fn(*mut c_void) -> *mut c_void,
    argument: *mut c_void,
}

/// Begins a thread that the C library has made, for the program or for slat.
extern "C-unwind" fn first(start: *mut c_void) -> *mut c_void {
    let Routine { routine, argument } = {
        let _section = Section::enter();
        // SAFETY: `pthread_create` below has made it for this thread.
        *unsafe { Box::from_raw(start.cast::<Routine>()) }
    };
    match load::is_loaded() {
        // slat's own thread, which has GS from its maker.
        // SAFETY: the first thread has done the same.
        true => unsafe { pointers::separate(0) },
        false => begin_armed(),
    }
    routine(argument)
}

static NEXT_THRD: Next = Next::new(c"thrd_create");

/// What a thread of thrd_create runs.
struct ShortRoutine {
    routine: extern "C-unwind" fn(*mut c_void) -> c_int,
    argument: *mut c_void,
}

extern "C-unwind" fn first_short(start: *mut c_void) -> c_int {
    let ShortRoutine { routine, argument } = {
        let _section = Section::enter();
        // SAFETY: `thrd_create` below has made it for this thread.
        *unsafe { Box::from_raw(start.cast::<ShortRoutine>()) }
    };
    begin_armed();
    routine(argument)
}

/// Has a new thread's calls dispatched. Its stack is made now: later, a filter may forbid it.
fn begin_armed() {
    arm_thread();
    make_stack();
}

interpose! {
    /// thrd_create(3).
    fn thrd_create(
        thread: *mut c_void,
        routine: extern "C-unwind" fn(*mut c_void) -> c_int,
        argument: *mut c_void,
    ) -> c_int {
        const THRD_ERROR: c_int = 2;
        type Create =
            unsafe extern "C" fn(*mut c_void, extern "C-unwind" fn(*mut c_void) -> c_int, *mut c_void) -> c_int;
        let Some(create) = NEXT_THRD.get() else {
            return THRD_ERROR;
        };
        // SAFETY: the C library's function of this name.
        let create = unsafe { transmute::<usize, Create>(create) };
        if !is_armed() {
            // SAFETY: the caller's promise.
            return unsafe { create(thread, routine, argument) };
        }
        let mut start = null_mut();
        guarded(|| {
            start = Box::into_raw(Box::new(ShortRoutine { routine, argument }));
            Ok(0)
        });
        // SAFETY: the caller's promise; the new thread takes `start`. (One that is not made leaves its few bytes.)
        unsafe { create(thread, first_short, start.cast()) }
    }

    /// pthread_create(3): a thread's calls are dispatched if its maker's are.
    fn pthread_create(
        thread: *mut libc::pthread_t,
        attributes: *const libc::pthread_attr_t,
        routine: extern "C-unwind" fn(*mut c_void) -> *mut c_void,
        argument: *mut c_void,
    ) -> c_int {
        let Some(create) = NEXT_CREATE.get() else {
            return libc::EAGAIN;
        };
        // SAFETY: the C library's function of this name.
        let create = unsafe { transmute::<usize, Create>(create) };
        // slat's own threads make no calls that have to be dispatched.
        let is_slats = Section::is_entered();
        if !is_armed() || is_slats && !load::is_loaded() {
            // SAFETY: the caller's promise.
            return unsafe { create(thread, attributes, routine, argument) };
        }
        let mut start = null::<Routine>().cast_mut();
        guarded(|| {
            start = Box::into_raw(Box::new(Routine { routine, argument }));
            Ok(0)
        });
        // SAFETY: the caller's promise; the new thread takes `start`.
        let failed = unsafe { create(thread, attributes, first, start.cast()) };
        if failed != 0 {
            guarded(|| {
                // SAFETY: no thread has taken it.
                drop(unsafe { Box::from_raw(start) });
                Ok(0)
            });
        }
        failed
    }
}
