//! Tests the fair lock.

use std::sync::Arc;

use super::{model, spawn, wait};
use crate::sync::FairLock;
use crate::sync::atomic::{AtomicBool, Ordering::*};

#[test]
fn one_thread_at_a_time_has_a_fair_lock_and_sees_earlier_writes() {
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
fn a_fair_lock_serves_threads_in_the_order_of_arrival() {
    model(3, || {
        // The data says whether the other thread has held the lock.
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
        assert!(had || !other_waits, "the first waiter was overtaken");
        other.join().unwrap();
    });
}
