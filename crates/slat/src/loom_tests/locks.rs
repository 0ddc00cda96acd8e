//! The lock that is held for long.

use std::sync::Arc;

use super::{model, spawn, wait};
use crate::sync::FairLock;
use crate::sync::atomic::{AtomicBool, Ordering::*};

#[test]
fn one_at_a_time_has_a_fair_lock_and_sees_what_was_done_before() {
    model(2, || {
        let lock = Arc::new(FairLock::new(0));
        let add = |lock: Arc<FairLock<u64>>| {
            move || {
                for _ in 0..2 {
                    *lock.lock(wait) += 1;
                }
            }
        };
        let threads = [spawn(add(lock.clone())), spawn(add(lock.clone()))];
        *lock.lock(wait) += 1;
        for thread in threads {
            thread.join().unwrap();
        }
        assert_eq!(*lock.lock(wait), 5);
    });
}

#[test]
fn who_waits_for_a_fair_lock_has_it_before_those_who_come_later() {
    model(3, || {
        // Whether the other thread has had it.
        let lock = Arc::new(FairLock::new(false));
        let waits = Arc::new(AtomicBool::new(false));
        let first = lock.lock(wait);
        let other = spawn({
            let (lock, waits) = (lock.clone(), waits.clone());
            move || {
                let mut guard = lock.lock(|round| {
                    waits.store(true, Release);
                    wait(round);
                });
                *guard = true;
            }
        });
        let other_waits = waits.load(Acquire);
        drop(first);
        let had = *lock.lock(wait);
        assert!(had || !other_waits, "it was overtaken");
        other.join().unwrap();
    });
}
