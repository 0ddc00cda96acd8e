//! Tests that the VM's dirty log has the pages that devices write through vm-memory, and that a memslot exists as long
//! as its region.

mod common;

use common::*;
use kvm_bindings::*;
use slat_kvm::VcpuExit;
use slat_vm_memory::{Error, Memslot, memory, region};
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use vm_memory::bitmap::Bitmap;
use vm_memory::{
    Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion,
    MemoryRegionAddress, MmapRegion, VolatileMemory,
};

const LOGGED: u32 = KVM_MEM_LOG_DIRTY_PAGES;

/// Returns the address at which the memory of page 0 is mapped.
fn first_byte(memory: &GuestMemoryMmap<Memslot>) -> *mut u8 {
    memory.get_host_address(page(0)).unwrap()
}

#[test]
fn writes_of_the_guest_and_of_devices_are_in_one_log() {
    let vm = vm();
    let memory = memory(&vm, LOGGED, &[(GuestAddress(0), 128 * PAGE)]).unwrap();
    let mut vcpu = vcpu(&vm, &memory);
    dirty(&memory, 0);

    assert!(matches!(vcpu.run().unwrap(), VcpuExit::Hlt));
    memory.write_obj(1u64, page(10)).unwrap();
    memory.store(1u32, page(70), SeqCst).unwrap();
    memory.write_slice(&[1; PAGE + 1], page(20)).unwrap();
    memory
        .read_volatile_from(page(30), &mut &[1u8; 9][..], 9)
        .unwrap();
    let slice = memory.get_slice(page(40), 2 * PAGE).unwrap();
    slice.get_ref::<u16>(PAGE).unwrap().store(1);
    slice.subslice(PAGE - 1, 1).unwrap().copy_from(&[1u8]);
    // The guest's code is logged when it is mapped, as KVM logs it.
    let (code, data) = (CODE / PAGE, DATA / PAGE);
    assert_eq!(dirty(&memory, 0), [code, data, 10, 20, 21, 30, 40, 41, 70]);
    assert!(dirty(&memory, 0).is_empty(), "harvested");
    assert_eq!(memory.read_obj::<u64>(page(10)).unwrap(), 1);
    assert!(dirty(&memory, 0).is_empty(), "a read");
}

#[test]
fn a_log_is_looked_at_and_cleared_page_by_page() {
    let vm = vm();
    let cap = kvm_enable_cap {
        cap: KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2,
        args: [1, 0, 0, 0],
        ..Default::default()
    };
    vm.enable_cap(&cap).unwrap();
    let memory = memory(&vm, LOGGED, &[(GuestAddress(0), 128 * PAGE)]).unwrap();
    let bitmap = memory.find_region(page(0)).unwrap().bitmap();
    let slice = bitmap.slice_at(PAGE);
    for page_written in [1, 2, 64] {
        memory.write_obj(1u8, page(page_written)).unwrap();
    }
    let seen = || [0, 1, 2, 3, 64].map(|page| bitmap.dirty_at(page * PAGE));
    assert_eq!(seen(), [false, true, true, false, true]);
    assert_eq!(dirty(&memory, 0), [1, 2, 64]);
    vm.clear_dirty_log(0, 0, 64, &[1 << 1]).unwrap();
    assert_eq!(seen(), [false, false, true, false, true]);
    assert!(slice.dirty_at(PAGE) && !slice.dirty_at(0), "an offset");
    memory.write_obj(1u8, page(1)).unwrap();
    assert_eq!(dirty(&memory, 0), [1, 2, 64]);
}

#[test]
fn a_memslot_without_a_log_notes_nothing_until_it_has_one() {
    let vm = vm();
    let memory = memory(&vm, 0, &[(GuestAddress(0), 8 * PAGE)]).unwrap();
    let region = memory.find_region(page(0)).unwrap();
    let memslot = Memslot::of(region);
    memory.write_obj(1u8, page(1)).unwrap();
    assert!(!memslot.dirty_at(PAGE));
    assert_eq!(memslot.dirty_log().unwrap_err().errno(), libc::ENOENT);
    memslot.log_dirty_pages(true).unwrap();
    memory.write_obj(1u8, page(2)).unwrap();
    assert_eq!(dirty(&memory, 0), [2]);
    memslot.log_dirty_pages(false).unwrap();
    assert_eq!(memslot.dirty_log().unwrap_err().errno(), libc::ENOENT);
}

#[test]
fn a_write_across_regions_is_in_the_log_of_each() {
    let vm = vm();
    let size = 4 * PAGE;
    let ranges = [(page(0), size), (page(4), size), (page(100), size)];
    let memory = memory(&vm, LOGGED, &ranges).unwrap();
    memory
        .write_slice(&[1; 2 * PAGE], GuestAddress(3 * 4096 + 1))
        .unwrap();
    memory.write_obj(1u8, page(103)).unwrap();
    assert_eq!(dirty(&memory, 0), [3]);
    assert_eq!(dirty(&memory, 4), [0, 1]);
    assert_eq!(dirty(&memory, 100), [3]);
    let numbers: Vec<u32> = memory
        .iter()
        .map(|region| Memslot::of(region).number())
        .collect();
    assert_eq!(numbers, [0, 1, 2]);
}

#[test]
fn a_region_takes_its_memslot_along() {
    let vm = vm();
    let at_first = memory(&vm, 0, &[(page(0), 8 * PAGE)]).unwrap();
    let plugged = region(&vm, 1, LOGGED, page(8), MmapRegion::new(8 * PAGE).unwrap()).unwrap();
    let more = at_first.insert_region(plugged.into()).unwrap();
    more.write_obj(1u8, page(9)).unwrap();
    assert_eq!(dirty(&more, 8), [1]);
    let harvest = || vm.get_dirty_log(1, 8 * PAGE).map_err(|error| error.errno());
    let (less, removed) = more.remove_region(page(8), 8 * PAGE as u64).unwrap();
    drop((at_first, more));
    assert_eq!(harvest(), Ok(vec![0]), "somebody has the region");
    drop(removed);
    assert_eq!(harvest(), Err(libc::ENOENT));
    assert_eq!(less.num_regions(), 1);
}

#[test]
fn the_guest_finds_no_memory_where_a_region_was() {
    let vm = vm();
    let memory = memory(&vm, 0, &[(page(0), 2 * PAGE), (page(2), 2 * PAGE)]).unwrap();
    let mut vcpu = vcpu(&vm, &memory);
    assert!(matches!(vcpu.run().unwrap(), VcpuExit::Hlt));
    let (left, removed) = memory.remove_region(page(2), 2 * PAGE as u64).unwrap();
    start(&vcpu);
    drop((memory, removed));
    assert!(
        matches!(vcpu.run().unwrap(), VcpuExit::MmioWrite(address, _) if address == DATA as u64)
    );
    drop(left);
}

#[test]
fn what_fails_leaves_no_memslot() {
    let vm = vm();
    let overlapping = [(page(0), 4 * PAGE), (page(3), 4 * PAGE)];
    let error = memory(&vm, LOGGED, &overlapping).unwrap_err();
    assert!(
        matches!(&error, Error::Memslot { slot: 1, error, .. } if error.errno() == libc::EEXIST)
    );
    assert!(
        error
            .to_string()
            .starts_with("setting memslot 1, 0x4000 bytes at 0x3000: ")
    );
    let unsorted = [(page(8), PAGE), (page(0), PAGE)];
    assert!(matches!(
        memory(&vm, LOGGED, &unsorted),
        Err(Error::Memory(_))
    ));
    let no_page = memory(&vm, LOGGED, &[(GuestAddress(1), PAGE)]);
    assert!(matches!(no_page, Err(Error::Memslot { error, .. }) if error.errno() == libc::EINVAL));
    for slot in 0..2 {
        assert_eq!(
            vm.get_dirty_log(slot, PAGE).unwrap_err().errno(),
            libc::ENOENT
        );
    }
    memory(&vm, LOGGED, &overlapping[..1]).unwrap();
}

#[test]
fn a_number_is_for_one_region() {
    let vm = vm();
    let memory = memory(&vm, LOGGED, &[(page(0), 4 * PAGE)]).unwrap();
    let again = region(&vm, 0, LOGGED, page(8), MmapRegion::new(4 * PAGE).unwrap());
    assert!(matches!(again, Err(Error::Memslot { error, .. }) if error.errno() == libc::EINVAL));
    let first = Memslot::of(memory.find_region(page(0)).unwrap());
    // SAFETY: no code accesses memory through this region, which is refused.
    let none = unsafe { MmapRegion::build_raw(first_byte(&memory), 0, libc::PROT_READ, 0) };
    let none = region(&vm, 0, LOGGED, page(8), none.unwrap());
    assert!(matches!(none, Err(Error::Memslot { error, .. }) if error.errno() == libc::EINVAL));
    memory.write_obj(1u8, page(1)).unwrap();
    assert_eq!(first.dirty_log().unwrap(), [0b10], "it is where it was");
}

/// The slots of system management mode have numbers from 1 << 16 on.
#[test]
fn each_address_space_has_its_own_log() {
    let vm = vm();
    let memory = memory(&vm, LOGGED, &[(page(0), 4 * PAGE)]).unwrap();
    let managed = region(
        &vm,
        1 << 16,
        LOGGED,
        page(0),
        MmapRegion::new(4 * PAGE).unwrap(),
    );
    let managed = managed.unwrap();
    managed
        .write_obj(1u8, MemoryRegionAddress(2 * PAGE as u64))
        .unwrap();
    assert!(Memslot::of(&managed).dirty_at(2 * PAGE));
    assert!(dirty(&memory, 0).is_empty());
    memory.write_obj(1u8, page(1)).unwrap();
    assert_eq!(Memslot::of(&managed).dirty_log().unwrap(), [0b100]);
    assert_eq!(dirty(&memory, 0), [1]);
}

/// A dead VM refuses to delete a memslot, too. Its vCPUs may still use the memory.
#[test]
fn memory_stays_mapped_when_its_memslot_cannot_be_deleted() {
    let vm = vm();
    let memory = memory(&vm, 0, &[(page(0), PAGE)]).unwrap();
    let start = first_byte(&memory);
    let deleted = kvm_userspace_memory_region::default();
    // SAFETY: the memslot's memory is not given to the guest.
    unsafe { vm.set_user_memory_region(deleted).unwrap() };
    drop(memory);
    // SAFETY: the call only looks at the mapping.
    let mapped = unsafe { libc::msync(start.cast(), PAGE, libc::MS_ASYNC) };
    assert_eq!(mapped, 0);
}

#[test]
fn rings_cannot_note_what_devices_write() {
    let vm = vm();
    let cap = kvm_enable_cap {
        cap: KVM_CAP_DIRTY_LOG_RING,
        args: [4096, 0, 0, 0],
        ..Default::default()
    };
    vm.enable_cap(&cap).unwrap();
    let logged = memory(&vm, LOGGED, &[(page(0), PAGE)]);
    assert!(matches!(logged, Err(Error::Rings(0))));
    let memory = memory(&vm, 0, &[(page(0), PAGE)]).unwrap();
    let memslot = Memslot::of(memory.find_region(page(0)).unwrap());
    assert!(matches!(
        memslot.log_dirty_pages(true),
        Err(Error::Rings(0))
    ));
    memory.write_obj(1u8, page(0)).unwrap();
}

/// The page of each write is in the first harvest that ends after the write, or in the next harvest.
#[test]
fn no_write_is_lost_between_two_harvests() {
    const PAGES: usize = 256;
    let vm = vm();
    let memory = memory(&vm, LOGGED, &[(page(0), PAGES * PAGE)]).unwrap();
    let done = AtomicBool::new(false);
    let mut found = [0u32; PAGES];
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for i in 0..PAGES {
                memory.write_obj(1u8, page(i)).unwrap();
            }
            done.store(true, SeqCst);
        });
        loop {
            let last = done.load(SeqCst);
            dirty(&memory, 0).iter().for_each(|page| found[*page] += 1);
            if last {
                break;
            }
        }
    });
    assert_eq!(found, [1; PAGES]);
}
