//! A thread that makes system calls for other threads.
//!
//! The helper is started before the program installs a seccomp filter, so no filter applies to it. All threads of a
//! process share memory and descriptors, so the helper can map memory, open a file or queue a signal for another
//! thread. A thread that asks the helper needs only `futex` itself.
//!
//! # Concurrency
//! A request is a group of words with a state: free, claimed by an asking thread, posted, done. Asking takes no lock
//! and allocates nothing, so a signal handler may ask, even if it has interrupted a thread that is waiting here. The
//! helper holds no lock while it makes a call, and makes only calls that do not block.
//!
//! Each change of a request's state is a release, and the next owner of the request acquires it. So each owner sees the
//! cells as the previous owner left them. Two more rules prevent a lost wake-up. The asking thread increments the count
//! of posts, and then reads whether the helper sleeps. The helper stores that it sleeps, and then reads the count. At
//! least one of the two must see what the other has stored, so all four accesses are sequentially consistent
//! (`loom_tests`).
//!
//! Two other accesses need less. The helper reads the count once more, before it looks for posted requests; this is an
//! acquire, because the helper must then find all requests that are counted. When the helper stores that it is awake,
//! that store needs no order: a thread that reads the old value only wakes the helper in vain.

use crate::enter::raw;
use crate::forks::PerProcess;
use crate::sync::{AtomicBool, AtomicU32, Cell, sleep, wake, yield_now};
use std::sync::atomic::Ordering;

const FREE: u32 = 0;
const CLAIMED: u32 = 1;
const POSTED: u32 = 2;
const DONE: u32 = 3;

/// The greatest number of requests that can wait for the helper at a time.
#[cfg(not(all(test, loom)))]
const REQUESTS: usize = 64;
/// The number of requests in the loom model, which has more threads than requests.
#[cfg(all(test, loom))]
const REQUESTS: usize = 1;

#[derive(Default)]
struct Request {
    state: AtomicU32,
    call: Cell<(i64, [usize; 6])>,
    answer: Cell<isize>,
}

// SAFETY: the thread that has claimed the request owns both cells. While the request is posted, the helper owns them
// instead.
unsafe impl Sync for Request {}

/// The helper thread's requests and state.
pub struct Helper {
    requests: [Request; REQUESTS],
    /// The number of requests posted so far.
    posts: AtomicU32,
    /// Whether the helper sleeps or is about to sleep, so that a thread that posts a request has to wake it.
    sleeps: AtomicBool,
    /// Whether the helper thread runs. No other data depends on this value, so accesses need no memory order.
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
/// whether it succeeded. Returns after the helper has begun to serve requests.
pub fn start(start: impl FnOnce(&'static Helper) -> bool) {
    let mut started = true;
    let helper = HELPER.get_or_start(|helper| started = start(helper));
    while started && !helper.serves.load(Ordering::Relaxed) {
        yield_now();
    }
}

/// Makes the helper execute a system call. `None`: there is no helper.
pub(crate) fn ask(number: i64, arguments: [usize; 6]) -> Option<isize> {
    let helper = HELPER.peek()?;
    (helper.serves.load(Ordering::Relaxed)).then(|| helper.ask(number, arguments))
}

impl Helper {
    fn ask(&self, number: i64, arguments: [usize; 6]) -> isize {
        let request = self.claim();
        // SAFETY: this thread has claimed the request.
        unsafe { request.call.set((number, arguments)) };
        request.state.store(POSTED, Ordering::Release);
        self.posts.fetch_add(1, Ordering::SeqCst);
        if self.sleeps.load(Ordering::SeqCst) {
            wake(&self.posts);
        }
        while request.state.load(Ordering::Acquire) != DONE {
            sleep(&request.state, POSTED, None);
        }
        // SAFETY: the request is done, so this thread owns the cells again.
        let answer = unsafe { request.answer.get() };
        request.state.store(FREE, Ordering::Release);
        answer
    }

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
                None => yield_now(),
            }
        }
    }

    /// Makes the system calls that other threads post, and never returns. The helper thread runs this.
    pub fn serve(&self) -> ! {
        self.serves.store(true, Ordering::Relaxed);
        loop {
            self.serve_once(|_| true);
        }
    }

    /// Makes the system calls that other threads have posted. Then calls `may_sleep` with their number; if it returns
    /// true, sleeps until the next post.
    fn serve_once(&self, may_sleep: impl FnOnce(usize) -> bool) {
        let posts = self.posts.load(Ordering::Acquire);
        if may_sleep(self.make_calls()) {
            self.sleep_after(posts);
        }
    }

    /// Makes the system calls that other threads have posted. Returns the number of calls.
    fn make_calls(&self) -> usize {
        let mut made = 0;
        for request in &self.requests {
            if request.state.load(Ordering::Acquire) == POSTED {
                // SAFETY: the request is posted, so only the helper uses its cells. The thread that has posted the
                // request may make the call on any thread, as `make` requires.
                unsafe {
                    let (number, arguments) = request.call.get();
                    request.answer.set(raw(number, arguments));
                }
                request.state.store(DONE, Ordering::Release);
                wake(&request.state);
                made += 1;
            }
        }
        made
    }

    /// Sleeps, unless a request has been posted since `posts` was read.
    fn sleep_after(&self, posts: u32) {
        self.sleeps.store(true, Ordering::SeqCst);
        if self.posts.load(Ordering::SeqCst) == posts {
            sleep(&self.posts, posts, None);
        }
        self.sleeps.store(false, Ordering::Relaxed);
    }
}

#[cfg(all(test, not(loom)))]
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

#[cfg(all(test, loom))]
mod loom_tests {
    use super::*;
    use loom::sync::Arc;
    use loom::thread;

    /// Checks that each of `asking` threads gets the result of its own call, and that no asking thread and not the
    /// helper sleeps forever.
    fn threads_get_their_answers(asking: usize, preemptions: Option<usize>) {
        let mut builder = loom::model::Builder::new();
        builder.preemption_bound = builder.preemption_bound.or(preemptions);
        builder.check(move || {
            let helper = Arc::new(Helper::default());
            let ask = |descriptor: usize| {
                let helper = helper.clone();
                thread::spawn(move || {
                    let (call, answer) = match descriptor {
                        0 => (libc::SYS_getpid, std::process::id() as isize),
                        _ => (libc::SYS_close, -(libc::EBADF as isize)),
                    };
                    let arguments = [descriptor.wrapping_neg(), 0, 0, 0, 0, 0];
                    assert_eq!(helper.ask(call, arguments), answer);
                })
            };
            let threads: Vec<_> = (0..asking).map(ask).collect();
            let mut made = 0;
            while made < asking {
                helper.serve_once(|calls| {
                    made += calls;
                    made < asking
                });
            }
            for thread in threads {
                thread.join().unwrap();
            }
        });
    }

    #[test]
    fn a_thread_that_asks_gets_its_answer() {
        threads_get_their_answers(1, None);
    }

    #[test]
    fn two_threads_that_ask_get_their_answers() {
        threads_get_their_answers(2, Some(2));
    }
}
