//! Several readers of the dirty logs, concurrent with writes, with the VMM's harvests, and with a change of the slot.
//! Each reader copies the pages of its epochs. At the end, each copy must contain the value that the guest has written
//! last.

use std::sync::Arc;

use super::dirty::{Copy, GET, Harvest, write_twice};
use super::{
    LOGGED, Machine, PLAIN, Small, SmallVm, hvas, model, on_cpu, set_slot, spawn, touch, vm,
};
use crate::addr::{Access::*, Gpa, Level, PAGE_SIZE};
use crate::vm::LogReader;
use crate::{Change, DirtyLogMethod, Region, Setting};

type Reader = LogReader<Machine, Small<2>>;

/// Begins and commits an epoch of `reader`. Returns whether page 0 is in it.
fn is_dirty(reader: &mut Reader) -> bool {
    let epoch = reader.begin();
    let dirty = epoch.pages() > 0;
    epoch.commit();
    dirty
}

/// A guest writes to page 0 twice. At the same time a reader has an epoch, and the client harvests by `harvest`.
fn each_copy_is_whole(prepare: fn() -> Arc<SmallVm>, harvest: Harvest) {
    model(2, move || {
        let vm = prepare();
        let mut readers = [vm.log_reader().unwrap(), vm.log_reader().unwrap()];
        let mut copies = [Copy::default(), Copy::default()];
        let mut clients = Copy::default();
        let cpus = vm.clone();
        let guest = spawn(move || on_cpu(&cpus, write_twice));
        copies[0].update(&vm, is_dirty(&mut readers[0]));
        clients.update(&vm, harvest(&vm));
        guest.join().unwrap();
        for (copy, reader) in copies.iter_mut().zip(&mut readers) {
            copy.update(&vm, is_dirty(reader));
            assert_eq!(copy.0, 2, "a reader was not told of a write");
        }
        clients.update(&vm, harvest(&vm));
        assert_eq!(clients.0, 2, "the client was not told of a write");
        vm.audit().unwrap();
    });
}

/// Makes a VM whose slot logs dirty pages by `method`, and whose page was read.
fn by(method: DirtyLogMethod) -> Arc<SmallVm> {
    let vm = vm(Level::PAGE, 0, PLAIN);
    vm.set_policy(Setting::DirtyLog(method));
    set_slot(&vm, 0, 1, LOGGED);
    touch(&vm, 0, Read);
    vm
}

#[test]
fn each_reader_and_the_client_are_told_of_each_write() {
    each_copy_is_whole(|| by(DirtyLogMethod::WriteProtect), GET);
}

#[test]
fn each_reader_and_the_client_are_told_of_each_dirty_bit() {
    each_copy_is_whole(|| by(DirtyLogMethod::DirtyBit), GET);
}

/// The client and a reader harvest at the same time.
#[test]
fn harvests_at_the_same_time_take_nothing_from_each_other() {
    model(2, || {
        let vm = by(DirtyLogMethod::WriteProtect);
        let mut reader = vm.log_reader().unwrap();
        touch(&vm, 0, Write);
        let client = vm.clone();
        let other = spawn(move || GET(&client));
        let told = is_dirty(&mut reader);
        let clients = other.join().unwrap();
        assert!(told || is_dirty(&mut reader));
        assert!(clients || GET(&vm));
        vm.audit().unwrap();
    });
}

/// Another slot replaces the slot while a reader harvests its log.
#[test]
fn a_slot_that_is_replaced_takes_what_readers_have_not_seen_along() {
    model(2, || {
        let vm = by(DirtyLogMethod::WriteProtect);
        let mut readers = [vm.log_reader().unwrap(), vm.log_reader().unwrap()];
        touch(&vm, 0, Write);
        let client = vm.clone();
        let change = spawn(move || {
            let region = Region::new(1, Gpa(0), PAGE_SIZE, hvas(0..1).start).with_flags(LOGGED);
            let changes = [Change::Remove(0), Change::Set(region)];
            client.set_memory_regions(0, &changes).unwrap();
        });
        let told = is_dirty(&mut readers[0]);
        change.join().unwrap();
        assert!(told || is_dirty(&mut readers[0]));
        assert!(is_dirty(&mut readers[1]));
        vm.audit().unwrap();
    });
}
