//! A thread that makes system calls for others.
//!
//! The thread is started before the program installs a seccomp filter, so no filter binds it. All threads of a process
//! share memory and descriptors, so any thread can map memory, open a file or queue a signal for another. A thread that
//! asks the helper only needs `futex`.
//!
//! # Concurrency
//! A request is a row of words with a state: free, claimed by an asking thread, posted, done. Asking takes no lock and
//! allocates nothing, so a signal handler may ask, even if it has interrupted a thread that is waiting here. The helper
//! holds no lock while it makes a call, and only makes calls that do not block.

use crate::enter::raw;
use crate::forks::PerProcess;
use crate::wait;
use std::cell::UnsafeCell;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

const FREE: u32 = 0;
const CLAIMED: u32 = 1;
const POSTED: u32 = 2;
const DONE: u32 = 3;

/// Requests that can be open at a time.
const REQUESTS: usize = 64;

#[derive(Default)]
struct Request {
    state: AtomicU32,
    call: UnsafeCell<(i64, [usize; 6])>,
    answer: UnsafeCell<isize>,
}

// SAFETY: the thread that has claimed the request owns both cells, except while the request is posted:
// then the helper does.
unsafe impl Sync for Request {}

/// The helper thread's requests and state.
pub struct Helper {
    requests: [Request; REQUESTS],
    /// Raised with every request that is posted.
    posts: AtomicU32,
    /// Whether the helper sleeps, or is about to, and has to be woken.
    sleeps: AtomicBool,
    /// Whether the helper thread runs.
    serves: AtomicBool,
}

impl Default for Helper {
    fn default() -> Self {
        Helper {
            requests: std::array::from_fn(|_| Request::default()),
            posts: AtomicU32::new(0),
            sleeps: AtomicBool::new(false),
            serves: AtomicBool::new(false),
        }
    }
}

static HELPER: PerProcess<Helper> = PerProcess::new();

/// Starts the process's helper if there is none. `start` starts a thread that runs [`Helper::serve`], and returns
/// whether it succeeded. Returns when the helper serves requests.
pub fn start(start: impl FnOnce(&'static Helper) -> bool) {
    let mut started = true;
    let helper = HELPER.get_or_start(|helper| started = start(helper));
    while started && !helper.serves.load(Ordering::Acquire) {
        wait::yield_now();
    }
}

/// Makes the helper execute a system call. `None`: there is no helper.
pub(crate) fn ask(number: i64, arguments: [usize; 6]) -> Option<isize> {
    let helper = HELPER.peek()?;
    if !helper.serves.load(Ordering::Acquire) {
        return None;
    }
    let request = helper.claim();
    // SAFETY: this thread has claimed the request.
    unsafe { *request.call.get() = (number, arguments) };
    request.state.store(POSTED, Ordering::Release);
    helper.posts.fetch_add(1, Ordering::SeqCst);
    if helper.sleeps.load(Ordering::SeqCst) {
        wait::wake(&helper.posts);
    }
    while request.state.load(Ordering::Acquire) != DONE {
        wait::sleep(&request.state, POSTED, None);
    }
    // SAFETY: the request is done, so its cells belong to this thread again.
    let answer = unsafe { *request.answer.get() };
    request.state.store(FREE, Ordering::Release);
    Some(answer)
}

impl Helper {
    fn claim(&self) -> &Request {
        loop {
            let claimed = self.requests.iter().find(|request| {
                let free = (request.state).compare_exchange(
                    FREE,
                    CLAIMED,
                    Ordering::Acquire,
                    Ordering::Relaxed,
                );
                free.is_ok()
            });
            match claimed {
                Some(request) => return request,
                None => wait::yield_now(),
            }
        }
    }

    /// Makes other threads' calls, for ever.
    pub fn serve(&self) -> ! {
        self.serves.store(true, Ordering::Release);
        loop {
            let posts = self.posts.load(Ordering::SeqCst);
            for request in &self.requests {
                if request.state.load(Ordering::Acquire) == POSTED {
                    // SAFETY: the request is posted, so its cells belong to the helper. The asking thread upholds the
                    // call's promises.
                    unsafe {
                        let (number, arguments) = *request.call.get();
                        *request.answer.get() = raw(number, arguments);
                    }
                    request.state.store(DONE, Ordering::Release);
                    wait::wake(&request.state);
                }
            }
            self.sleeps.store(true, Ordering::SeqCst);
            if self.posts.load(Ordering::SeqCst) == posts {
                wait::sleep(&self.posts, posts, None);
            }
            self.sleeps.store(false, Ordering::SeqCst);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::thread_id;

    #[test]
    fn many_threads_ask() {
        assert_eq!(ask(libc::SYS_getpid, [0; 6]), None);
        start(|helper| {
            std::thread::spawn(|| helper.serve());
            true
        });
        let own = thread_id() as isize;
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    for _ in 0..2000 {
                        let pid = std::process::id() as isize;
                        assert_eq!(ask(libc::SYS_getpid, [0; 6]), Some(pid));
                        let arguments = [usize::MAX, 0, 0, 0, 0, 0];
                        let bad = -(libc::EBADF as isize);
                        assert_eq!(ask(libc::SYS_close, arguments), Some(bad));
                    }
                });
            }
        });
        let other = ask(libc::SYS_gettid, [0; 6]);
        assert!(other.is_some_and(|other| other > 0 && other != own));
        // SAFETY: the child only asks the helper, and exits.
        let status = unsafe {
            let child = libc::fork();
            if child == 0 {
                libc::_exit(i32::from(ask(libc::SYS_getpid, [0; 6]).is_some()));
            }
            let mut status = -1;
            libc::waitpid(child, &mut status, 0);
            status
        };
        assert_eq!(status, 0, "a forked child asks its parent's helper");
    }
}
