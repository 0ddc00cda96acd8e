//! Tests which thread makes a call that a filter forbids.

use slat_process::calls::{Call, make, mark_own_thread};
use slat_process::{filter, helper, thread_id};

#[test]
fn slats_own_threads_need_no_helper() {
    // Announces a filter that forbids all calls. No thread installs it.
    let forbids = libc::sock_filter {
        code: (libc::BPF_RET | libc::BPF_K) as u16,
        jt: 0,
        jf: 0,
        k: libc::SECCOMP_RET_TRAP,
    };
    filter::announce(&[forbids]);
    helper::start(|helper| {
        std::thread::spawn(|| helper.serve());
        true
    });
    // SAFETY: the call has no arguments.
    let caller = || unsafe { make(Call::ThreadId, [0; 6]) };
    let own = || Ok(thread_id() as isize);
    assert_ne!(caller(), own(), "the helper makes it");
    std::thread::scope(|scope| {
        scope.spawn(|| {
            mark_own_thread();
            assert_eq!(caller(), own());
        });
    });
    assert_ne!(caller(), own(), "a mark is one thread's");
}
