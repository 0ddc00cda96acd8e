//! Tests dirty logs that are harvested while the guest writes: each write is in one log, and no log has a page that
//! was not written.

use crate::common::*;
use kvm_bindings::*;
use slat_kvm::VcpuExit;
use std::time::Duration;

const FIRST: u64 = 0x1_0000;
const PAGES: usize = 240;
const ITERATION: u64 = 0x3000;
const STOP: u64 = 0x3004;

/// The guest's code. It repeatedly writes the number at [`ITERATION`] to every page from [`FIRST`] on; exits between
/// two rounds while [`STOP`] is set.
#[rustfmt::skip]
const WRITE_FOREVER: &[u8] = &[
    0xb8, 0x00, 0x10,             // 0: mov ax,0x1000
    0x8e, 0xc0,                   // 1: mov es,ax
    0x8b, 0x1e, 0x00, 0x30,       //    mov bx,[ITERATION]
    0x26, 0x89, 0x1e, 0x00, 0x00, //    mov es:[0],bx
    0x05, 0x00, 0x01,             //    add ax,0x100
    0x73, 0xf0,                   //    jnc 1b
    0xf6, 0x06, 0x04, 0x30, 0x01, //    test byte [STOP],1
    0x74, 0xe6,                   //    jz 0b
    0xe6, 0x10,                   //    out 0x10,al
    0xeb, 0xe2,                   //    jmp 0b
];

#[test]
fn a_log_has_what_was_written_since_the_one_before() {
    let logged = Memory::new(PAGES * 4096);
    let mut guest = Guest::new(WRITE_FOREVER);
    let region = kvm_userspace_memory_region {
        slot: 1,
        flags: KVM_MEM_LOG_DIRTY_PAGES,
        guest_phys_addr: FIRST,
        memory_size: logged.len as u64,
        userspace_addr: logged.start as u64,
    };
    // SAFETY: the tests access this memory only by raw pointers, so a write of the guest breaks nothing.
    unsafe { guest.vm.set_user_memory_region(region).unwrap() };
    let mut must_come = [false; PAGES];
    for iteration in 1..=300u16 {
        // The vCPU does not run, so no write with the old number is in progress.
        guest.memory.write(ITERATION, &iteration.to_le_bytes());
        guest.memory.write(STOP, &[0]);
        let log = std::thread::scope(|scope| {
            let vcpu = &mut guest.vcpu;
            let run = scope.spawn(|| {
                let exit = vcpu.run().unwrap();
                assert!(matches!(exit, VcpuExit::IoOut(0x10, _)), "{exit:?}");
            });
            std::thread::sleep(Duration::from_micros(u64::from(iteration % 7) * 100));
            let log = guest.vm.get_dirty_log(1, logged.len).unwrap();
            guest.memory.write(STOP, &[1]);
            run.join().unwrap();
            log
        });
        for (page, must_come) in must_come.iter_mut().enumerate() {
            // SAFETY: the address is within the memory, and no vCPU runs.
            let value = unsafe { logged.start.add(page * 4096).cast::<u16>().read() };
            let found = log[page / 64] >> (page % 64) & 1 != 0;
            assert!(found || !*must_come, "{page} is missing in {iteration}");
            assert!(
                !found || value == iteration || value == iteration - 1,
                "{page} is in {iteration}, but was last written in {value}"
            );
            *must_come = !found && value == iteration;
        }
    }
}
