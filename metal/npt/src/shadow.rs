//! The monitor on AMD's SVM with nested paging off: QEMU's one-dimensional walker walks shadow tables of the engine's, while the
//! guest has tables of its own, which it changes. `metal/run --arch x86` runs it.
#![no_std]
#![no_main]

extern crate alloc;

use metal_core::{Heap, Host};
use metal_npt::Svm;
use metal_x86::{MEMORY, Pc, Virtualization};
use slat::format::X86;

type Cpus = Svm<X86<5>>;

#[global_allocator]
static HEAP: Heap = Heap::new();

/// Entry point of each CPU, on a stack of its own.
#[unsafe(no_mangle)]
extern "C" fn monitor(cpu: usize) -> ! {
    // SAFETY: once, by the first CPU; the memory is described as it is.
    let host = (cpu == 0).then(|| unsafe { Host::<Pc<Cpus>>::new(MEMORY, &HEAP) });
    metal_x86::start(cpu);
    let svm = Svm::new(cpu);
    match host {
        Some(host) => metal_core::run(svm, host),
        None => Cpus::second().serve(svm),
    }
}
