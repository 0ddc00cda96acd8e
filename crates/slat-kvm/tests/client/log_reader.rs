//! Tests readers of the dirty logs, by the Rust API and as a device of KVM's API (docs/run.md).

use crate::common::*;
use kvm_bindings::*;
use slat_kvm::{DeviceFd, VmFd};

/// The device's type, its groups and its attributes, as docs/run.md gives them.
const DEVICE_TYPE: u32 = 0x736c_0001;
const EPOCH: u32 = 0;
const RANGES: u32 = 1;
const BEGIN: u64 = 0;
const COMMIT: u64 = 1;
const ABORT: u64 = 2;

/// `struct slat_dirty_ranges`.
#[repr(C)]
#[derive(Debug, Default)]
struct Ranges {
    gfn: u64,
    address_space: u32,
    count: u32,
    min_gap: u64,
    max_pages: u64,
    ranges: u64,
}

/// The first frames and numbers of pages of ranges.
type Pages = Vec<(u64, u64)>;

fn errno<T: std::fmt::Debug>(result: slat_kvm::Result<T>) -> i32 {
    result.unwrap_err().errno()
}

fn set(device: &DeviceFd, attr: u64) -> slat_kvm::Result<()> {
    device.set_device_attr(&kvm_device_attr {
        group: EPOCH,
        attr,
        ..Default::default()
    })
}

fn get(device: &DeviceFd, asked: &mut Ranges) -> slat_kvm::Result<()> {
    let mut attribute = kvm_device_attr {
        group: RANGES,
        addr: std::ptr::from_mut(asked) as u64,
        ..Default::default()
    };
    // SAFETY: the address is that of a struct of this test, which refers to an array of the test.
    unsafe { device.get_device_attr(&mut attribute) }
}

fn create_reader(vm: &VmFd, flags: u32) -> DeviceFd {
    let mut asked = kvm_create_device {
        type_: DEVICE_TYPE,
        flags,
        ..Default::default()
    };
    vm.create_device(&mut asked).unwrap()
}

/// Returns the pages of the device's epoch, `room` ranges at a time.
fn pages_of(device: &DeviceFd, room: usize) -> Pages {
    // The words of a range are: the slot, the first frame, the number of pages, the address.
    let mut words = vec![[0u64; 4]; room];
    let mut asked = Ranges {
        ranges: words.as_mut_ptr() as u64,
        ..Default::default()
    };
    let mut pages = Pages::new();
    loop {
        asked.count = room as u32;
        get(device, &mut asked).unwrap();
        let found = &words[..asked.count as usize];
        pages.extend(found.iter().map(|[_, gfn, pages, _]| (*gfn, *pages)));
        if found.len() < room {
            return pages;
        }
    }
}

#[test]
fn readers_have_epochs_of_their_own() {
    let guest = halts(WRITE_AND_HALT);
    let (mut a, mut b) = (
        guest.vm.log_reader().unwrap(),
        guest.vm.log_reader().unwrap(),
    );
    assert_eq!(errno(a.commit()), libc::EINVAL, "there is no epoch");
    assert_eq!(errno(a.dirty_ranges(0, 1)), libc::EINVAL);
    guest.vm.mark_dirty(0, 0x3000, 8).unwrap();
    assert_eq!(a.begin().unwrap(), 1);
    let ranges = a.dirty_ranges(0, u64::MAX).unwrap();
    let [range] = ranges[..] else {
        panic!("{ranges:?}");
    };
    let backing = guest.memory.start as u64 + 0x3000;
    let found = (range.slot, range.gfn, range.pages, range.userspace_addr);
    assert_eq!(found, (0, 3, 1, backing));
    a.commit().unwrap();
    assert_eq!(errno(a.abort()), libc::EINVAL, "the epoch has ended");
    guest.vm.mark_dirty(0, 0x1000, 1).unwrap();
    b.begin().unwrap();
    b.abort().unwrap();
    assert_eq!(b.begin().unwrap(), 2);
    let pages = |ranges: Vec<slat_kvm::DirtyRange>| -> Pages {
        ranges.iter().map(|it| (it.gfn, it.pages)).collect()
    };
    assert_eq!(pages(b.dirty_ranges(0, 64).unwrap()), [(1, 1), (3, 1)]);
    assert_eq!(pages(b.dirty_ranges(2, 64).unwrap()), [(1, 3)]);
    // A range of two pages would end with a clean one.
    assert_eq!(pages(b.dirty_ranges(2, 2).unwrap()), [(1, 1), (3, 1)]);
    // A client without KVM_MEM_LOG_DIRTY_PAGES still has no log.
    assert_eq!(errno(guest.vm.get_dirty_log(0, MEMORY)), libc::ENOENT);
}

#[test]
fn a_device_is_a_reader() {
    let mut guest = halts(WRITE_AND_HALT);
    drop(create_reader(&guest.vm, KVM_CREATE_DEVICE_TEST));
    let (all, some) = (create_reader(&guest.vm, 0), create_reader(&guest.vm, 0));
    for (device, room) in [(&all, 64), (&some, 1)] {
        assert_eq!(errno(set(device, COMMIT)), libc::EINVAL, "no epoch");
        assert_eq!(errno(get(device, &mut Ranges::default())), libc::EINVAL);
        set(device, BEGIN).unwrap();
        assert_eq!(pages_of(device, room), []);
        set(device, COMMIT).unwrap();
    }
    start_at_code(&guest.vcpu);
    guest.vcpu.run().unwrap();
    guest.vm.mark_dirty(0, 0, 1).unwrap();
    for (device, room) in [(&all, 64), (&some, 1)] {
        set(device, BEGIN).unwrap();
        assert_eq!(pages_of(device, room), [(0, 1), (3, 1)]);
        set(device, ABORT).unwrap();
        set(device, BEGIN).unwrap();
        assert_eq!(pages_of(device, room), [(0, 1), (3, 1)]);
        set(device, COMMIT).unwrap();
        set(device, BEGIN).unwrap();
        assert_eq!(pages_of(device, room), []);
    }
}

#[test]
fn a_device_refuses_what_a_reader_has_not() {
    let guest = halts(WRITE_AND_HALT);
    let device = create_reader(&guest.vm, 0);
    set(&device, BEGIN).unwrap();
    guest.vm.mark_dirty(0, 0, 1).unwrap();
    set(&device, BEGIN).unwrap();
    for (group, attr, known) in [
        (EPOCH, BEGIN, true),
        (EPOCH, ABORT, true),
        (RANGES, 0, true),
        (EPOCH, 3, false),
        (RANGES, 1, false),
        (2, 0, false),
    ] {
        let mut attribute = kvm_device_attr {
            group,
            attr,
            ..Default::default()
        };
        let has = device.has_device_attr(&attribute);
        assert_eq!(has.is_ok(), known, "{group} {attr}");
        // SAFETY: nothing is at address 0, so nothing is written.
        let get = errno(unsafe { device.get_device_attr(&mut attribute) });
        let expected = match (known, group) {
            (false, _) => libc::ENXIO,
            (true, EPOCH) => libc::EPERM,
            (true, _) => libc::EFAULT,
        };
        assert_eq!(get, expected, "{group} {attr}");
        if !known || group == RANGES {
            let refused = if known { libc::EPERM } else { libc::ENXIO };
            assert_eq!(errno(device.set_device_attr(&attribute)), refused);
        }
    }
    set(&device, BEGIN).unwrap();
    let mut nowhere = Ranges {
        count: 1,
        ..Default::default()
    };
    assert_eq!(errno(get(&device, &mut nowhere)), libc::EFAULT);
    assert_eq!(pages_of(&device, 8), [(0, 1)], "the pages are still there");
}
