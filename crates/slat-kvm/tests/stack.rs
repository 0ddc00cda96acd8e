//! Tests how much of its caller's stack `KVM_RUN` uses.
#![cfg(target_arch = "x86_64")]

mod common;
mod long_mode;

use long_mode::{EXITS, Machine, ROUNDS, answer};

/// The stack size of the threads that run vCPUs in this test. The C library uses a part of the stack.
const THREAD: usize = 64 << 10;
/// The most bytes of the stack that `KVM_RUN` may use. Without optimisation, frames are larger.
const BOUND: usize = if cfg!(debug_assertions) {
    32 << 10
} else {
    16 << 10
};
const PAINT: u64 = 0x5a5a_a5a5_5a5a_a5a5;

/// Returns the lowest address of this thread's stack that may be written.
fn lowest() -> usize {
    // SAFETY: the calls store the attributes of this thread in local variables.
    unsafe {
        let mut attributes = std::mem::zeroed();
        assert_eq!(
            libc::pthread_getattr_np(libc::pthread_self(), &mut attributes),
            0
        );
        let (mut start, mut len, mut guard) = (std::ptr::null_mut(), 0, 0);
        libc::pthread_attr_getstack(&attributes, &mut start, &mut len);
        libc::pthread_attr_getguardsize(&attributes, &mut guard);
        libc::pthread_attr_destroy(&mut attributes);
        start as usize + guard
    }
}

/// Calls `work`. Returns how many bytes of the stack it used.
#[inline(never)]
fn depth(work: impl FnOnce()) -> usize {
    let here = 0u64;
    let top = (&raw const here as usize & !7) - 1024;
    let painted = (lowest()..top).step_by(8);
    for at in painted.clone() {
        // SAFETY: the address is below this function's frame and above the guard page. Nothing uses this memory while
        // this function calls no other function.
        unsafe { (at as *mut u64).write_volatile(PAINT) };
    }
    work();
    // SAFETY: the addresses are below this function's frame and above the guard page, and nothing uses this memory now.
    let used = painted
        .clone()
        .find(|at| unsafe { (*at as *const u64).read_volatile() } != PAINT);
    top - used.unwrap_or(top) + 1024
}

#[test]
fn kvm_run_takes_little_of_the_stack() {
    let machine = Machine::new();
    let mut vcpu = machine.vm.create_vcpu(0).unwrap();
    machine.start(&vcpu);
    let run = || {
        let mut exits = 0;
        let used = depth(|| {
            while answer(vcpu.run().unwrap()) {
                exits += 1;
            }
        });
        (exits, used)
    };
    let (exits, used) = std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().stack_size(THREAD);
        thread.spawn_scoped(scope, run).unwrap().join().unwrap()
    });
    println!("{used} bytes of stack, {exits} exits");
    assert_eq!(exits, ROUNDS * EXITS);
    machine.check_end(&vcpu);
    assert!(used <= BOUND, "{used} bytes of stack");
}
