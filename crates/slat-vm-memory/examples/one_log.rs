//! A VMM with one dirty log. The guest drives a virtio queue, and the device fills a buffer through vm-memory.
//! KVM_GET_DIRTY_LOG returns the pages that the guest or the device has written. To say which of them wrote a page,
//! the VMM harvests the log whenever the writer changes. The guest's pages include pages that it only reads or
//! executes, here 0x1000 and 0x4000. As in KVM, a page is logged when the guest's first access maps it writable.

use kvm_bindings::KVM_MEM_LOG_DIRTY_PAGES;
use slat_kvm::{Kvm, VcpuExit, VcpuFd};
use slat_vm_memory::{Memslot, memory};
use std::error::Error;
use std::io::Write;
use std::sync::Arc;
use virtio_queue::{Queue, QueueT};
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion};

type Memory = GuestMemoryMmap<Memslot>;

/// ```text
/// mov word [0x2000], 0x7c00   ; descriptor 0: the buffer's address,
/// mov word [0x2008], 0x1000   ; its length,
/// mov word [0x200c], 2        ; and that the device writes it
/// mov word [0x3002], 1        ; avail.idx: ring[0] = 0 is available
/// out 0x10, al                ; the doorbell
/// mov ax, [0x4002]            ; used.idx
/// mov [0x6000], ax
/// hlt
/// ```
const GUEST: &[u8] = &[
    0xc7, 0x06, 0x00, 0x20, 0x00, 0x7c, 0xc7, 0x06, 0x08, 0x20, 0x00, 0x10, 0xc7, 0x06, 0x0c, 0x20,
    0x02, 0x00, 0xc7, 0x06, 0x02, 0x30, 0x01, 0x00, 0xe6, 0x10, 0xa1, 0x02, 0x40, 0xa3, 0x00, 0x60,
    0xf4,
];
const CODE: u64 = 0x1000;
/// Addresses of the queue's descriptor table, available ring and used ring.
const QUEUE: [u32; 3] = [0x2000, 0x3000, 0x4000];
const DOORBELL: u16 = 0x10;

/// A device that fills each buffer of its queue, as an entropy device does.
struct Device {
    queue: Queue,
}

impl Device {
    fn new() -> Result<Self, Box<dyn Error>> {
        let mut queue = Queue::new(16)?;
        let [descriptors, available, used] = QUEUE.map(Some);
        queue.set_desc_table_address(descriptors, None);
        queue.set_avail_ring_address(available, None);
        queue.set_used_ring_address(used, None);
        queue.set_ready(true);
        Ok(Device { queue })
    }

    /// Fills the buffers that the guest has made available. The device knows nothing of logs.
    fn serve(&mut self, memory: &Memory) -> Result<(), Box<dyn Error>> {
        while let Some(chain) = self.queue.pop_descriptor_chain(memory) {
            let mut writer = chain.clone().writer(memory)?;
            let len = writer.available_bytes();
            writer.write_all(&vec![0x55; len])?;
            self.queue
                .add_used(memory, chain.head_index(), len as u32)?;
        }
        Ok(())
    }
}

/// Harvests the log. Returns a line with the pages that `writer` has written since the last harvest.
fn harvest(memory: &Memory, writer: &str) -> Result<String, Box<dyn Error>> {
    let mut line = writer.to_owned();
    for region in memory.iter() {
        let log = Memslot::of(region).dirty_log()?;
        let pages = (0..log.len() * 64).filter(|page| log[page / 64] >> (page % 64) & 1 != 0);
        let addresses = pages.map(|page| region.start_addr().0 + page as u64 * 4096);
        addresses.for_each(|address| line += &format!(" {address:#x}"));
    }
    Ok(line)
}

fn start(vcpu: &VcpuFd) -> Result<(), slat_kvm::Error> {
    let mut sregs = vcpu.get_sregs()?;
    (sregs.cs.base, sregs.cs.selector) = (0, 0);
    vcpu.set_sregs(&sregs)?;
    let mut regs = vcpu.get_regs()?;
    (regs.rip, regs.rflags) = (CODE, 2);
    vcpu.set_regs(&regs)
}

/// Runs the guest. Returns the lines of [`harvest`].
pub fn run() -> Result<Vec<String>, Box<dyn Error>> {
    let vm = Arc::new(Kvm::new()?.create_vm()?);
    let memory = memory(&vm, KVM_MEM_LOG_DIRTY_PAGES, &[(GuestAddress(0), 0x1_0000)])?;
    memory.write_slice(GUEST, GuestAddress(CODE))?;
    let mut lines = vec![harvest(&memory, "loader:")?];

    let mut device = Device::new()?;
    let mut vcpu = vm.create_vcpu(0)?;
    start(&vcpu)?;
    loop {
        let exit = vcpu.run()?;
        match exit {
            VcpuExit::IoOut(DOORBELL, _) => {
                lines.push(harvest(&memory, "guest:")?);
                device.serve(&memory)?;
                lines.push(harvest(&memory, "device:")?);
            }
            VcpuExit::Hlt => {
                lines.push(harvest(&memory, "guest:")?);
                return Ok(lines);
            }
            exit => return Err(format!("unexpected exit: {exit:?}").into()),
        }
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    println!("{}", run()?.join("\n"));
    Ok(())
}
