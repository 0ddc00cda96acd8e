//! The operations of CPUs, host and client, and which of them run at the same time.

use std::sync::Arc;

use slat::{Access::*, Prefetch, Setting};

use crate::interleave::interleave;
use crate::world::*;

/// A function that makes a world in some state.
type Prepare = fn() -> Arc<World>;

/// No table is tracked.
const UNTRACKED: Prepare = World::new;

/// The pages are mapped by the first entry of the directory, and stores to all tables are noticed.
const MAPPED: Prepare = || {
    let world = World::new();
    world.on_cpu(|cpu| [A, B].map(|gva| cpu.access(gva, Write)));
    world
};

/// Like [`MAPPED`], but stores to the level 1 table are not noticed.
const UNSYNCED: Prepare = || {
    let world = MAPPED();
    world.on_cpu(|cpu| {
        cpu.store(TABLE, 1, DATA + 1);
        cpu.invlpg(B);
    });
    world
};

/// Like [`MAPPED`], but the client has declared that it may have stored to any table.
const DISTRUSTED: Prepare = || {
    let world = MAPPED();
    world.vm.guest_memory_changed();
    world
};

const WORLDS: [Prepare; 4] = [UNTRACKED, MAPPED, UNSYNCED, DISTRUSTED];

/// Accesses, through both entries of the directory that refer to the table.
const ACCESSES: [Act; 2] = [
    |w| _ = w.on_cpu(|cpu| cpu.access(A, Write)),
    |w| _ = w.on_cpu(|cpu| cpu.access(A2, Read)),
];
const FLUSH: Act = |w| w.on_cpu(|cpu| cpu.flush());

/// Stores, each followed by the flush that makes it effective. If there is a holder, the holder stores, by a
/// translation from before the table was tracked.
const STORES: [Act; 5] = [
    |w| {
        w.by_holder(|cpu| {
            cpu.store(TABLE, 0, NEW);
            cpu.invlpg(A);
        });
    },
    |w| {
        w.by_holder(|cpu| {
            cpu.store(TABLE, 0, NEW);
            cpu.invlpg(A2);
        });
    },
    |w| {
        w.by_holder(|cpu| {
            cpu.store(TABLE, 0, NEW);
            cpu.flush();
        });
    },
    |w| {
        w.by_holder(|cpu| {
            cpu.store(DIRECTORY, 0, OTHER);
            cpu.store(DIRECTORY, 1, OTHER);
            cpu.flush();
        });
    },
    |w| {
        w.by_holder(|cpu| {
            cpu.store_word(TABLE, 0, 0);
            cpu.flush();
        });
    },
];

/// Accesses after which a table is tracked, linked or compared, each followed by a store of the holder.
const ACCESSES_AND_STORES: [Act; 4] = [
    // The directory is tracked after the store. Its shadow page contains only the directory's other entry.
    |w| {
        w.by_holder(|cpu| {
            cpu.store(DIRECTORY, 0, OTHER);
            cpu.load_cr3();
        });
        w.on_cpu(|cpu| cpu.access(B2, Read));
    },
    |w| {
        w.on_cpu(|cpu| cpu.access(B2, Read));
        STORES[2](w);
    },
    |w| {
        STORES[3](w);
        w.on_cpu(|cpu| cpu.access(B, Read));
    },
    |w| {
        w.on_cpu(|cpu| cpu.access(B, Read));
        STORES[3](w);
        w.on_cpu(|cpu| cpu.access(A, Write));
    },
];

/// Operations of the host and of the client.
const HOST: [Act; 7] = [
    |w| w.invalidate(DATA),
    |w| w.invalidate(DATA + 1),
    |w| w.invalidate(TABLE),
    |w| w.invalidate(DIRECTORY),
    |w| {
        w.log(true);
        w.on_cpu(|cpu| cpu.access(A, Write));
    },
    |w| w.set_slot_1(Some(FAR)),
    |w| {
        w.set_slot_1(Some(FAR));
        w.set_slot_1(Some(FAR - 1));
    },
];

/// The client stores while the guest runs, and makes a CPU flush.
const CLIENT_STORES: [Act; 2] = [
    |w| w.client_stores(TABLE, 0, NEW),
    |w| {
        w.on_cpu(|cpu| cpu.flush());
        w.client_stores(TABLE, 0, NEW);
    },
];

/// Runs each victim with each intruder, in each of `worlds`. The holder has the right to store to the frames `held`, if
/// the MMU grants it.
fn each_beside_each(worlds: &[Prepare], held: &[u64], victims: &[Act], intruders: &[Act]) {
    for world in worlds {
        for victim in victims {
            for intruder in intruders {
                interleave(world, held, *victim, *intruder);
            }
        }
    }
}

/// The tables that the holder may store to. Its stores make those of level 1 unsynced.
const TABLES: &[u64] = &[TABLE, DIRECTORY];

#[test]
fn an_access_and_a_store_by_an_old_translation() {
    each_beside_each(&[UNTRACKED, UNSYNCED], TABLES, &ACCESSES, &STORES);
}

#[test]
fn an_access_and_a_store() {
    each_beside_each(&[MAPPED, DISTRUSTED], &[], &ACCESSES, &STORES);
}

#[test]
fn an_access_and_a_table_that_another_access_reaches() {
    let worlds = [UNTRACKED, UNSYNCED];
    each_beside_each(&worlds, TABLES, &ACCESSES, &ACCESSES_AND_STORES);
    each_beside_each(&worlds, &[], &ACCESSES, &ACCESSES_AND_STORES);
}

#[test]
fn a_flush_and_a_store_by_an_old_translation() {
    let worlds = [MAPPED, UNSYNCED];
    each_beside_each(&worlds, TABLES, &[FLUSH], &STORES);
    each_beside_each(&worlds, TABLES, &[FLUSH], &ACCESSES_AND_STORES);
}

#[test]
fn two_stores() {
    let other: Act = |w| {
        w.on_cpu(|cpu| {
            cpu.store(TABLE, 1, NEW);
            cpu.invlpg(B);
        });
    };
    each_beside_each(&WORLDS, &[], &[other], &STORES);
}

#[test]
fn an_access_and_what_the_host_does() {
    let far: Act = |w| _ = w.on_cpu(|cpu| cpu.access(C, Read));
    each_beside_each(&[UNTRACKED], &[TABLE], &ACCESSES, &HOST);
    each_beside_each(&[UNSYNCED], &[], &[FLUSH, far], &HOST);
}

/// The CPU has the page at [`B`] in its TLB. Another access of the CPU ends after a flush for a change of the guest's
/// tables. Unless that access reports the flush, the CPU continues to use the page.
#[test]
fn an_access_that_stops_and_what_the_host_does() {
    const READ_ONLY: u64 = DATA << 12 | 0x65;
    let unsynced: Prepare = || {
        let world = World::new();
        world.on_cpu(|cpu| {
            cpu.store_word(TABLE, 0, READ_ONLY);
            cpu.access(A, Read);
            cpu.store(TABLE, 1, DATA + 1);
            // The shadow page still has the old entry.
            cpu.store_word(TABLE, 0, 0);
        });
        world
    };
    let page_fault: Act = |w| {
        w.on_cpu(|cpu| {
            cpu.access(B, Write);
            assert_eq!(cpu.access(A, Write), Found::PageFault);
        });
    };
    let mmio: Act = |w| {
        w.on_cpu(|cpu| {
            cpu.access(B, Write);
            cpu.access(C, Read);
        });
    };
    let store: Act = |w| {
        w.on_cpu(|cpu| {
            cpu.access(B, Write);
            cpu.store(DIRECTORY, 1, OTHER);
        });
    };
    let host = &HOST[1..4];
    each_beside_each(&[unsynced], &[], &[page_fault], host);
    each_beside_each(
        &[UNTRACKED, UNSYNCED, DISTRUSTED],
        &[],
        &[mmio, store],
        host,
    );
}

#[test]
fn what_the_host_does_and_a_store() {
    each_beside_each(&[MAPPED], &[], &HOST, &STORES[1..3]);
}

/// The log removes the right to store from the leaves of all tables. Until the flush, the holder may still have the
/// right in its TLB. Meanwhile tracking of the tables begins.
#[test]
fn a_log_that_begins_and_tables_that_are_tracked() {
    let all = [ROOT, UPPER, DIRECTORY, TABLE];
    let access_and_store: Act = |w| {
        ACCESSES[0](w);
        STORES[2](w);
    };
    let begin: Act = |w| w.log(true);
    each_beside_each(&[UNTRACKED], &all, &[begin], &[access_and_store]);
}

#[test]
fn pages_that_are_mapped_ahead_and_what_the_host_does() {
    let ahead: Prepare = || {
        let world = World::new();
        world.vm.set_policy(Setting::Prefetch(Prefetch::Window(8)));
        world
    };
    each_beside_each(&[ahead], &[], &ACCESSES[..1], &HOST);
    each_beside_each(&[ahead], &[], &ACCESSES[..1], &STORES);
}

#[test]
fn a_client_that_stores_and_what_a_cpu_does() {
    each_beside_each(&[DISTRUSTED], &[], &[FLUSH], &CLIENT_STORES);
    each_beside_each(&[UNSYNCED], &[], &ACCESSES, &CLIENT_STORES);
}

/// SDM 3A, "Operations that Invalidate TLBs and Paging-Structure Caches": a page fault invalidates the entries for its
/// address.
#[test]
fn a_page_fault_drops_what_was_mapped_at_its_address() {
    const READ_ONLY: u64 = DATA << 12 | 0x65;
    let world = World::new();
    world.on_cpu(|cpu| {
        cpu.store_word(TABLE, 0, READ_ONLY);
        cpu.access(A, Read);
        // Stores to the table are not noticed from now on.
        cpu.store(TABLE, 1, DATA + 1);
        cpu.store_word(TABLE, 0, 0);
        assert_eq!(
            cpu.access(A, Read),
            Found::HostPage(DATA),
            "it may use its TLB"
        );
        assert_eq!(cpu.access(A, Write), Found::PageFault);
        assert_eq!(cpu.access(A, Read), Found::PageFault);
    });
}
