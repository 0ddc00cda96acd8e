//! Tests virtio-queue's queues over this memory: the VM's dirty log has the pages that a queue writes for a device.

mod common;

use common::*;
use kvm_bindings::KVM_MEM_LOG_DIRTY_PAGES;
use slat_vm_memory::memory;
use std::io::{Read, Write};
use virtio_queue::desc::{RawDescriptor, split::Descriptor};
use virtio_queue::mock::MockSplitQueue;
use virtio_queue::{Queue, QueueT};
use vm_memory::{Bytes, GuestAddress};

/// A descriptor flag: the device writes the buffer.
const WRITE: u16 = 2;
/// The number of entries of the queue. The number is so large that the used ring has its own pages.
const LEN: u16 = 1024;

/// Returns the number of the page of `address`.
fn page_of(address: GuestAddress) -> usize {
    address.0 as usize / PAGE
}

#[test]
fn a_device_behind_a_queue_dirties_buffers_and_the_used_ring() {
    let vm = vm();
    let ranges = [(page(0), 64 * PAGE), (page(64), 64 * PAGE)];
    let memory = memory(&vm, KVM_MEM_LOG_DIRTY_PAGES, &ranges).unwrap();
    let driver = MockSplitQueue::new(&memory, LEN);
    let mut queue: Queue = driver.create_queue().unwrap();
    let request = page(20);
    // The second buffer crosses the boundary between the regions.
    let (first, second) = (page(30), GuestAddress((64 * PAGE - 10) as u64));
    memory.write_slice(b"hello", request).unwrap();
    let descriptors = [(request, 5, 0), (first, 8, WRITE), (second, 20, WRITE)];
    let descriptors = descriptors.map(|(address, len, flags)| {
        RawDescriptor::from(Descriptor::new(address.0, len, flags, 0))
    });
    driver.build_desc_chain(&descriptors).unwrap();
    let driver_wrote = dirty(&memory, 0);
    assert!(driver_wrote.contains(&page_of(driver.desc_table_addr())));
    assert!(driver_wrote.contains(&page_of(driver.avail_addr())));

    let chain = queue.pop_descriptor_chain(&memory).unwrap();
    let mut asked = String::new();
    let mut reader = chain.clone().reader(&memory).unwrap();
    reader.read_to_string(&mut asked).unwrap();
    assert_eq!(asked, "hello");
    assert!(dirty(&memory, 0).is_empty(), "a device that reads");
    let mut writer = chain.clone().writer(&memory).unwrap();
    writer.write_all(&[7; 28]).unwrap();
    queue.add_used(&memory, chain.head_index(), 28).unwrap();

    let used = page_of(driver.used_addr());
    assert_eq!(dirty(&memory, 0), [used, page_of(first), 63]);
    assert_eq!(dirty(&memory, 64), [0]);
    assert_eq!(u16::from_le(driver.used().idx().load()), 1);
    assert_eq!(memory.read_obj::<[u8; 20]>(second).unwrap(), [7; 20]);
}
