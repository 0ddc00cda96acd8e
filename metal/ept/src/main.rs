//! The monitor on Intel's VMX and EPT, for Bochs (`ept/bochsrc`). `metal/run --arch ept` runs it.
#![no_std]
#![no_main]

extern crate alloc;

mod vmcs;
mod vmx;

use metal_core::{Heap, Host};
use metal_x86::{MEMORY, Pc, Virtualization};

use vmx::Vmx;

#[global_allocator]
static HEAP: Heap = Heap::new();

/// Entry point of each CPU, on a stack of its own.
#[unsafe(no_mangle)]
extern "C" fn monitor(cpu: usize) -> ! {
    // SAFETY: once, by the first CPU; the memory is described as it is.
    let host = (cpu == 0).then(|| unsafe { Host::<Pc<Vmx>>::new(MEMORY, &HEAP) });
    metal_x86::start(cpu);
    let vmx = Vmx::new(cpu);
    match host {
        Some(host) => metal_core::run(vmx, host),
        None => Vmx::second().serve(vmx),
    }
}
