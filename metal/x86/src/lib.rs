//! The common part of the x86 monitors: everything except the instructions that run a guest.
//!
//! A monitor defines `extern "C" fn monitor(cpu: usize) -> !`. Each CPU reaches this function in long mode, on its own
//! stack, with the first 4 GiB mapped one to one and interrupts masked.
#![no_std]
#![warn(missing_docs)]

pub mod apic;
mod boot;
pub mod guest;
mod interrupts;
pub mod la57;
mod memory;
pub mod msr;

use core::arch::asm;
use core::arch::x86_64::__cpuid;
use core::fmt::Write;
use core::marker::PhantomData;
use core::ops::Range;
use core::panic::PanicInfo;

use metal_core::{Console, Cpu, Machine, Memory, Second, Shootdown};
use slat::{Gfn, Hpa, Stale, VmId};

/// The number of CPUs of the machine.
pub const CPUS: usize = 2;

/// The emulators are started with 2 GiB of memory. The monitor itself, with its stacks, ends below 16 MiB.
pub const MEMORY: Memory = Memory {
    monitor: Hpa(16 << 20)..Hpa(128 << 20),
    data: Hpa(1 << 30),
};

/// The state of flushes by interrupts: an x86 CPU cannot flush another CPU's TLB.
pub static SHOOTDOWN: Shootdown<CPUS> = Shootdown::new();

/// A CPU with one of the two ways to run a guest.
pub trait Virtualization: Cpu {
    /// The value of [`Machine::NAME`] for a PC with such CPUs.
    const NAME: &'static str;

    /// Returns the queue of work for the second CPU.
    fn second() -> &'static Second<Self>;
}

/// A PC. `C` is the type of its CPUs, which run guests by SVM or VMX.
pub struct Pc<C>(PhantomData<fn() -> C>);

impl<C: Virtualization> Machine for Pc<C> {
    type Cpu = C;
    const NAME: &'static str = C::NAME;

    fn physical_bits() -> u32 {
        const ADDRESS_SIZES: u32 = 0x8000_0008;
        __cpuid(ADDRESS_SIZES).eax & 0xff
    }

    fn print(text: &str) {
        print(text);
    }

    fn flush_guests(_: VmId, _: &Range<Gfn>, _: Stale) {
        SHOOTDOWN.flush(apic::kick);
    }

    fn kick(cpu: usize) {
        apic::kick(cpu);
    }

    fn second() -> &'static Second<C> {
        C::second()
    }

    fn power_off() -> ! {
        power_off()
    }
}

/// Makes the program a monitor that only runs the scenarios, on CPUs of the type `$cpu`. Defines the heap, and the
/// entry point, where each CPU calls `$before` first.
#[macro_export]
macro_rules! monitor {
    ($cpu:ty $(, $before:path)?) => {
        #[global_allocator]
        static HEAP: ::metal_core::Heap = ::metal_core::Heap::new();

        /// The entry point of each CPU, on a stack of its own.
        #[unsafe(no_mangle)]
        extern "C" fn monitor(cpu: usize) -> ! {
            $($before();)?
            // SAFETY: only the first CPU calls this, and calls it once. `MEMORY` describes memory that no other code
            // uses.
            let host = (cpu == 0).then(|| unsafe {
                ::metal_core::Host::<$crate::Pc<$cpu>>::new($crate::MEMORY, &HEAP)
            });
            $crate::start(cpu);
            let this = <$cpu>::new(cpu);
            match host {
                Some(host) => ::metal_core::run(this, host),
                None => <$cpu as $crate::Virtualization>::second().serve(this),
            }
        }
    };
}

/// Prepares the calling CPU for interrupts. The first CPU also starts the second one. Call once on each CPU.
pub fn start(cpu: usize) {
    interrupts::load();
    apic::enable();
    if cpu == 0 {
        interrupts::mask_legacy();
        boot::prepare_second();
        apic::start(1);
    }
}

/// Prints to port 0xe9, which both emulators show.
pub fn print(text: &str) {
    for byte in text.bytes() {
        // SAFETY: the emulator's port does nothing but print.
        unsafe { asm!("out 0xe9, al", in("al") byte, options(nomem, nostack)) };
    }
}

/// Ends the emulator: QEMU by isa-debug-exit, Bochs by its shutdown port.
pub fn power_off() -> ! {
    for byte in *b"Shutdown" {
        // SAFETY: the port ends the emulator, or does not exist.
        unsafe { asm!("out dx, al", in("dx") 0x8900u16, in("al") byte, options(nomem, nostack)) };
    }
    // SAFETY: the port ends the emulator, or does not exist.
    unsafe { asm!("out dx, eax", in("dx") 0xf4u16, in("eax") 0, options(nomem, nostack)) };
    loop {
        core::hint::spin_loop();
    }
}

#[panic_handler]
fn panic(info: &PanicInfo<'_>) -> ! {
    let _ = writeln!(Console(print), "{info}");
    power_off()
}
