//! Quiescence: readers that enter, leave and pass quiescent points, concurrent with writers that wait for them.

use std::sync::{Arc, Mutex};
use std::vec::Vec;

use super::{model, spawn, wait};
use crate::sync::atomic::{AtomicU64, Ordering::*, Watch};
use crate::sync::quiesce::{Attention, Reader, Readers};

/// A page to which readers get through one entry. When the page is removed, the entry is set to 0.
struct World {
    readers: Readers,
    entry: AtomicU64,
    page: Watch,
}

impl World {
    fn new() -> Arc<World> {
        Arc::new(World {
            readers: Readers::new(),
            entry: AtomicU64::new(1),
            page: Watch::new(),
        })
    }

    /// Clears the entry, waits for readers like a flush, and then uses the page exclusively.
    fn remove_page(&self) {
        self.entry.store(0, Release);
        self.readers.synchronize(|round, _| wait(round));
        self.page.owned();
    }

    /// Returns whether a reader finds the page.
    fn walk(&self) -> bool {
        self.entry.load(Acquire) != 0
    }
}

/// Runs `reader` concurrently with a writer that removes the page.
fn during_a_flush(preemptions: usize, reader: fn(&World, &Reader)) {
    model(preemptions, move || {
        let world = World::new();
        let mine = world.clone();
        let thread = spawn(move || {
            let me = mine.readers.register().unwrap();
            reader(&mine, me);
            mine.readers.release(me);
        });
        world.remove_page();
        thread.join().unwrap();
    });
}

#[test]
fn a_page_found_in_a_section_stays_until_the_section_ends() {
    during_a_flush(4, |world, me| {
        for _ in 0..2 {
            me.enter(&world.readers, 0);
            if world.walk() {
                world.page.used();
            }
            me.leave();
        }
    });
}

#[test]
fn a_page_found_in_a_brief_section_stays_until_the_section_ends() {
    model(4, || {
        let world = World::new();
        world.readers.prepare().unwrap();
        let mine = world.clone();
        let thread = spawn(move || {
            for _ in 0..2 {
                let _section = mine.readers.brief().unwrap();
                if mine.walk() {
                    mine.page.used();
                }
            }
        });
        world.remove_page();
        thread.join().unwrap();
    });
}

/// Two threads begin a brief section, for which there is only one `Reader`. The second thread may find this reader
/// free, in use, or just being taken or released by the first thread.
#[test]
fn two_brief_sections_at_once_are_both_waited_for() {
    model(2, || {
        let world = World::new();
        world.readers.prepare().unwrap();
        let threads = [(); 2].map(|()| {
            let mine = world.clone();
            spawn(move || {
                let _section = mine.readers.brief().unwrap();
                if mine.walk() {
                    mine.page.used();
                }
            })
        });
        world.remove_page();
        for thread in threads {
            thread.join().unwrap();
        }
    });
}

#[test]
fn a_cpu_uses_nothing_from_before_its_acknowledgement() {
    during_a_flush(4, |world, me| {
        me.enter(&world.readers, 0);
        let mut remembered = world.walk();
        for _ in 0..2 {
            if remembered {
                world.page.used();
            }
            if me.attention().flag().load(Relaxed) & Attention::FLUSH != 0 {
                me.quiesce(&world.readers);
                remembered = world.walk();
            }
        }
        me.leave();
    });
}

#[test]
fn a_request_during_an_acknowledgement_is_not_lost() {
    model(3, || {
        let world = World::new();
        let done = Arc::new(AtomicU64::new(0));
        let (mine, seen) = (world.clone(), done.clone());
        let thread = spawn(move || {
            let me = mine.readers.register().unwrap();
            me.enter(&mine.readers, 0);
            me.quiesce(&mine.readers);
            // Like a guest that runs forever: quiesces only when a flush is requested.
            while seen.load(Acquire) == 0 {
                if me.attention().flag().load(Relaxed) & Attention::FLUSH != 0 {
                    me.quiesce(&mine.readers);
                }
                loom::thread::yield_now();
            }
            me.leave();
        });
        world.remove_page();
        done.store(1, Release);
        thread.join().unwrap();
    });
}

#[test]
fn a_reader_that_was_outside_during_a_flush_sees_that_when_it_enters() {
    during_a_flush(4, |world, me| {
        me.enter(&world.readers, 0);
        let remembered = world.walk();
        me.leave();
        let missed = me.enter(&world.readers, 0);
        if remembered && !missed {
            world.page.used();
        }
        me.leave();
    });
}

#[test]
fn two_flushes_each_wait_for_the_same_reader() {
    model(2, || {
        let world = World::new();
        let (mine, others) = (world.clone(), world.clone());
        let thread = spawn(move || {
            let me = mine.readers.register().unwrap();
            me.enter(&mine.readers, 0);
            if mine.walk() {
                mine.page.used();
            }
            me.leave();
        });
        let other = spawn(move || {
            others.readers.synchronize(|round, _| wait(round));
        });
        world.remove_page();
        thread.join().unwrap();
        other.join().unwrap();
    });
}

#[test]
fn a_reader_has_one_owner() {
    model(3, || {
        struct World {
            readers: Readers,
            held: Mutex<Vec<usize>>,
        }
        impl World {
            fn hold(&self, reader: &Reader) {
                let id = std::ptr::from_ref(reader) as usize;
                assert!(
                    !self.held.lock().unwrap().contains(&id),
                    "the reader has another owner"
                );
                self.held.lock().unwrap().push(id);
                reader.enter(&self.readers, 0);
                reader.leave();
                self.held.lock().unwrap().retain(|held| *held != id);
            }

            fn operations(&self) {
                let reader = self.readers.borrow().unwrap();
                self.hold(reader);
                self.readers.release(reader);
                let reader = self.readers.register().unwrap();
                self.hold(reader);
                self.readers.release(reader);
            }
        }
        let world = Arc::new(World {
            readers: Readers::new(),
            held: Mutex::default(),
        });
        let other = world.clone();
        let thread = spawn(move || other.operations());
        world.operations();
        thread.join().unwrap();
    });
}
