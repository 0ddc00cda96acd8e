//! Tests memslots with `KVM_MEM_USERFAULT`: the pages of a guest are absent at first, and the client brings them one
//! by one.
#![cfg(target_arch = "x86_64")]

mod combined;
#[path = "../common/mod.rs"]
mod common;

use common::*;
use kvm_bindings::*;
use slat_kvm::{Kvm, VcpuExit, VcpuFd, VmFd};
use std::sync::Once;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::*};

const KVM_CAP_USERFAULT: u64 = 0x736c_0001;
const KVM_MEM_USERFAULT: u32 = 1 << 3;
const KVM_MEMORY_EXIT_FLAG_USERFAULT: u64 = 1 << 4;

const PAGE: u64 = 4096;
const PAGES: u64 = 256;

/// ```text
/// begin: mov ax, 0x1000
/// next: mov ds, ax           ; each page from 64 KiB to 960 KiB
///       mov bx, [0]
///       add cx, bx
///       add ax, 0x100
///       cmp ax, 0xf000
///       jb next
///       mov ax, cx          ; the sum of their first words
///       out 0x10, ax
///       mov cx, 0
///       jmp begin
/// ```
const SUM: &[u8] = &[
    0xb8, 0x00, 0x10, 0x8e, 0xd8, 0x8b, 0x1e, 0x00, 0x00, 0x01, 0xd9, 0x05, 0x00, 0x01, 0x3d, 0x00,
    0xf0, 0x72, 0xf0, 0x89, 0xc8, 0xe7, 0x10, 0xb9, 0x00, 0x00, 0xeb, 0xe4,
];
const SUMMED: std::ops::Range<u64> = 0x10..0xf0;

/// Returns the first word of a page.
fn word(page: u64) -> u16 {
    (page * 257 + 1) as u16
}

fn sum() -> u16 {
    SUMMED.map(word).fold(0, u16::wrapping_add)
}

/// 1 MiB of memory, and the bitmap of its absent pages. At first all pages are absent.
struct Late {
    memory: Memory,
    bitmap: [AtomicU64; PAGES as usize / 64],
}

impl Late {
    fn new() -> Box<Self> {
        Box::new(Late {
            memory: Memory::new((PAGES * PAGE) as usize),
            bitmap: [const { AtomicU64::new(!0) }; PAGES as usize / 64],
        })
    }

    fn region(&self, flags: u32) -> kvm_userspace_memory_region2 {
        let mut region = kvm_userspace_memory_region2 {
            flags,
            memory_size: PAGES * PAGE,
            userspace_addr: self.memory.start as u64,
            ..Default::default()
        };
        // This field is `userfault_bitmap`.
        region.pad2[0] = self.bitmap.as_ptr() as u64;
        region
    }

    /// Stores the contents of a page, and then clears its bit in the bitmap.
    fn bring(&self, page: u64) {
        self.memory.write(page * PAGE, &word(page).to_le_bytes());
        if page == CODE / PAGE {
            self.memory.write(CODE, SUM);
        }
        self.clear(page);
    }

    fn clear(&self, page: u64) {
        self.bitmap[page as usize / 64].fetch_and(!(1 << (page % 64)), Release);
    }

    fn set(&self, page: u64) {
        self.bitmap[page as usize / 64].fetch_or(1 << (page % 64), Release);
    }

    fn is_absent(&self, page: u64) -> bool {
        self.bitmap[page as usize / 64].load(Acquire) >> (page % 64) & 1 != 0
    }
}

/// Opens the KVM of this process, which has the policy `userfault`.
fn kvm() -> Kvm {
    static POLICY: Once = Once::new();
    // SAFETY: each test calls this function first, and no thread of this process reads the environment before.
    POLICY.call_once(|| unsafe { std::env::set_var("SLAT_SET", "userfault=on") });
    Kvm::new().unwrap()
}

fn vm() -> VmFd {
    kvm().create_vm().unwrap()
}

fn set(vm: &VmFd, region: kvm_userspace_memory_region2) -> Result<(), i32> {
    // SAFETY: the tests access this memory only by raw pointers, so a write of the guest breaks nothing.
    unsafe { vm.set_user_memory_region2(region) }.map_err(|error| error.errno())
}

/// Creates a VM whose pages are all absent, and a vCPU that begins at [`CODE`].
fn guest(late: &Late) -> (VmFd, VcpuFd) {
    let vm = vm();
    set(&vm, late.region(KVM_MEM_USERFAULT)).unwrap();
    let vcpu = vm.create_vcpu(0).unwrap();
    start_at_code(&vcpu);
    (vm, vcpu)
}

/// Runs the vCPU until it has written a sum to the port. Brings each page for which it waits, and returns these pages.
fn run(vcpu: &mut VcpuFd, late: &Late) -> Vec<u64> {
    let mut brought = Vec::new();
    loop {
        match vcpu.run() {
            Ok(VcpuExit::MemoryFault { flags, gpa, size }) => {
                assert_eq!((flags, size), (KVM_MEMORY_EXIT_FLAG_USERFAULT, PAGE));
                assert!(late.is_absent(gpa / PAGE), "{gpa:#x} is there");
                brought.push(gpa / PAGE);
                late.bring(gpa / PAGE);
            }
            Ok(VcpuExit::IoOut(0x10, data)) => {
                assert_eq!(data, sum().to_le_bytes());
                return brought;
            }
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn the_client_brings_each_page_that_the_guest_uses() {
    let late = Late::new();
    let (vm, mut vcpu) = guest(&late);
    assert_eq!(vm.check_extension_raw(KVM_CAP_USERFAULT), 1);
    let expected: Vec<_> = [CODE / PAGE].into_iter().chain(SUMMED).collect();
    assert_eq!(run(&mut vcpu, &late), expected);
    assert_eq!(run(&mut vcpu, &late), []);
}

#[test]
fn a_bit_counts_again_when_the_flag_is_set_again() {
    let late = Late::new();
    let (vm, mut vcpu) = guest(&late);
    run(&mut vcpu, &late);
    late.set(0x20);
    // As in the kernel's patches for this flag, a page that is already mapped does not fault when its bit is set.
    assert_eq!(run(&mut vcpu, &late), []);
    set(&vm, late.region(0)).unwrap();
    assert_eq!(run(&mut vcpu, &late), []);
    set(&vm, late.region(KVM_MEM_USERFAULT)).unwrap();
    assert_eq!(run(&mut vcpu, &late), [0x20]);
    // Replaces the bitmap by another one.
    let other = Late::new();
    (0..PAGES)
        .filter(|page| *page != 0x30)
        .for_each(|page| other.clear(page));
    let region = kvm_userspace_memory_region2 {
        userspace_addr: late.memory.start as u64,
        ..other.region(KVM_MEM_USERFAULT)
    };
    set(&vm, region).unwrap();
    match vcpu.run() {
        Ok(VcpuExit::MemoryFault { gpa, .. }) => assert_eq!(gpa, 0x30 * PAGE),
        other => panic!("{other:?}"),
    }
    other.clear(0x30);
    assert_eq!(run(&mut vcpu, &late), []);
}

#[test]
fn a_slot_that_is_deleted_takes_its_bitmap_along() {
    let late = Late::new();
    let (vm, mut vcpu) = guest(&late);
    run(&mut vcpu, &late);
    let nothing = kvm_userspace_memory_region2 {
        memory_size: 0,
        ..late.region(0)
    };
    set(&vm, nothing).unwrap();
    (0..PAGES).for_each(|page| late.set(page));
    set(&vm, late.region(0)).unwrap();
    assert_eq!(run(&mut vcpu, &late), []);
    set(&vm, nothing).unwrap();
    set(&vm, late.region(KVM_MEM_USERFAULT)).unwrap();
    assert_ne!(run(&mut vcpu, &late), []);
}

#[test]
fn events_are_delivered_once_their_pages_are_there() {
    let late = Late::new();
    let (_vm, mut vcpu) = guest(&late);
    run(&mut vcpu, &late);
    // The pages of the vector table, the handler and the stack are absent. The handler at 0x5000 halts.
    const STACK: u64 = 0xf2;
    let mut sregs = vcpu.get_sregs().unwrap();
    (sregs.ss.base, sregs.ss.selector) = (STACK * PAGE, (STACK << 8) as u16);
    vcpu.set_sregs(&sregs).unwrap();
    let mut regs = vcpu.get_regs().unwrap();
    (regs.rsp, regs.rflags) = (0x800, 0x202);
    vcpu.set_regs(&regs).unwrap();
    vcpu.interrupt(0x20).unwrap();
    let mut waited_for = Vec::new();
    loop {
        match vcpu.run() {
            Ok(VcpuExit::MemoryFault { gpa, .. }) => {
                let page = gpa / PAGE;
                waited_for.push(page);
                match page {
                    0 => late.memory.write(4 * 0x20, &[0x00, 0x50, 0, 0]),
                    5 => late.memory.write(0x5000, &[0xf4]),
                    STACK => {}
                    other => panic!("page {other:#x}"),
                }
                late.clear(page);
            }
            Ok(VcpuExit::Hlt) => break,
            other => panic!("{other:?}"),
        }
    }
    waited_for.sort();
    assert_eq!(waited_for, [0, 5, STACK]);
    // The interrupt was delivered once: three words are on the stack, and they describe the interrupted code.
    let now = vcpu.get_regs().unwrap();
    assert_eq!((now.rsp, now.rip), (0x800 - 6, 0x5001));
    let mut frame = [0; 6];
    late.memory.read(STACK * PAGE + 0x800 - 6, &mut frame);
    // The vCPU had stopped at an OUT, and first completes it.
    assert_eq!(frame[..2], (regs.rip as u16 + 2).to_le_bytes());
    assert_eq!(frame[4..], 0x202u16.to_le_bytes());
}

#[test]
fn no_vcpu_sees_a_page_before_it_is_there() {
    let late = Late::new();
    let (vm, mut vcpu) = guest(&late);
    let mut second = vm.create_vcpu(1).unwrap();
    start_at_code(&second);
    late.bring(CODE / PAGE);
    let done = AtomicBool::new(false);
    std::thread::scope(|threads| {
        // This thread brings pages in its own order, whichever pages the vCPUs wait for. `run` compares the sums.
        threads.spawn(|| {
            for page in SUMMED.rev().step_by(3) {
                late.bring(page);
                std::thread::yield_now();
            }
        });
        let other = threads.spawn(|| {
            // The page for which the vCPU waits may have come since the exit.
            while !done.load(Relaxed) {
                match second.run() {
                    Ok(VcpuExit::MemoryFault { gpa, .. }) => late.bring(gpa / PAGE),
                    Ok(VcpuExit::IoOut(0x10, data)) => assert_eq!(data, sum().to_le_bytes()),
                    other => panic!("{other:?}"),
                }
            }
        });
        for _ in 0..20 {
            match vcpu.run() {
                Ok(VcpuExit::MemoryFault { gpa, .. }) => late.bring(gpa / PAGE),
                Ok(VcpuExit::IoOut(0x10, data)) => assert_eq!(data, sum().to_le_bytes()),
                other => panic!("{other:?}"),
            }
        }
        done.store(true, Relaxed);
        other.join().unwrap();
    });
}

#[test]
fn a_bitmap_that_cannot_be_read_stops_the_vcpu() {
    let late = Late::new();
    let vm = vm();
    let gone = Memory::new(4096);
    let mut region = late.region(KVM_MEM_USERFAULT);
    region.pad2[0] = gone.start as u64;
    gone.take_away(0);
    set(&vm, region).unwrap();
    let mut vcpu = vm.create_vcpu(0).unwrap();
    start_at_code(&vcpu);
    assert_eq!(vcpu.run().unwrap_err().errno(), libc::EFAULT);
    // Sets the bitmap to an address that no program can use.
    region.pad2[0] = 1 << 63;
    assert_eq!(set(&vm, region), Err(libc::EINVAL));
    // The older ioctl has no field for a bitmap.
    let old = kvm_userspace_memory_region {
        slot: 1,
        flags: KVM_MEM_USERFAULT,
        guest_phys_addr: PAGES * PAGE,
        memory_size: PAGE,
        userspace_addr: late.memory.start as u64,
    };
    // SAFETY: the call is refused, so the guest does not get the memory.
    let refused = unsafe { vm.set_user_memory_region(old) };
    assert_eq!(refused.unwrap_err().errno(), libc::EINVAL);
}
