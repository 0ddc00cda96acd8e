//! A monitor in HS mode of QEMU's virt machine, above OpenSBI: RISC-V's G-stage walker walks the
//! engine's tables.
//!
//! The host runs without translation, and the guest runs in VS mode with vsatp bare, so that each address that the
//! guest accesses is the guest-physical address that the G-stage translates. The firmware flushes the TLBs of all harts
//! (SBI's remote fences).
//!
//! Three programs are built from this crate: `riscv` with Sv39x4 tables, `riscv-sv48x4` and `riscv-sv57x4`. The
//! monitor finds out by a test which bits the walker sets (`marks`). The engine sets the bits that the walker does not
//! set.
#![no_std]
#![warn(missing_docs)]

mod cpu;
mod csr;
mod marks;
mod sbi;

use core::arch::global_asm;
use core::fmt::Write;
use core::marker::PhantomData;
use core::ops::Range;
use core::panic::PanicInfo;
use core::sync::atomic::{AtomicU64, Ordering::*};

use metal_core::{Console, Heap, Host, Machine, Memory, Second};
use slat::format::GStage;
use slat::{Format, Gfn, Hpa, Pfn, Stale, VmId};

pub use cpu::Hart;
use csr::read;

global_asm!(include_str!("boot.S"));

/// Tables that a hart in HS mode can walk.
pub trait Tables: Format {
    /// Returns hgatp: [`GStage::hgatp`].
    fn hgatp(root: Pfn, vmid: u16) -> u64;
}

impl<const LEVELS: u8> Tables for GStage<LEVELS> {
    fn hgatp(root: Pfn, vmid: u16) -> u64 {
        Self::hgatp(root, vmid)
    }
}

/// One test program: the format of its tables, and the code that depends on the format.
pub trait Monitor: Send + Sync + 'static {
    /// The name of the machine ([`Machine::NAME`]).
    const NAME: &'static str;
    /// The tables that the machine's walkers walk.
    type Tables: Tables;
    /// Returns the queue of work for the second CPU: [`Machine::second`].
    fn second() -> &'static Second<Hart<Self::Tables>>;
}

/// Defines the program of a file: the monitor called `$name`, with tables of `$tables`.
#[macro_export]
macro_rules! program {
    ($name:literal, $tables:ty) => {
        struct Program;

        static SECOND: metal_core::Second<$crate::Hart<$tables>> = metal_core::Second::new();

        impl $crate::Monitor for Program {
            const NAME: &'static str = $name;
            type Tables = $tables;

            fn second() -> &'static metal_core::Second<$crate::Hart<$tables>> {
                &SECOND
            }
        }

        /// The entry point of Rust, to which `boot.S` jumps.
        #[unsafe(no_mangle)]
        extern "C" fn main(cpu: usize, hart: u64) -> ! {
            $crate::main::<Program>(cpu, hart)
        }
    };
}

/// QEMU's virt machine under the monitor `M`.
pub struct Virt<M>(PhantomData<M>);

#[global_allocator]
static HEAP: Heap = Heap::new();

/// Memory begins at 2 GiB, where firmware and monitor are. The guest's data is in the second of two GiB.
const DATA: Hpa = Hpa(0xc000_0000);

/// The hart of each CPU. Firmware may start any hart first.
static HARTS: [AtomicU64; 2] = [AtomicU64::new(0), AtomicU64::new(0)];

/// Runs each hart after its start.
pub fn main<M: Monitor>(cpu: usize, hart: u64) -> ! {
    unsafe extern "C" {
        static image_end: u8;
    }
    let mut this = Hart::new(cpu);
    HARTS[cpu].store(hart, SeqCst);
    sbi::ask_for_hardware_marks();
    if cpu != 0 {
        M::second().serve(this)
    }
    marks::learn(&mut this);
    HARTS[1].store(1 - hart, SeqCst);
    sbi::start(1 - hart, 1);
    let memory = Memory {
        monitor: Hpa((&raw const image_end).addr() as u64)..DATA,
        data: DATA,
    };
    // SAFETY: the memory after the image is unused, and this is called once.
    let host = unsafe { Host::<Virt<M>>::new(memory, &HEAP) };
    metal_core::run(this, host)
}

impl<M: Monitor> Machine for Virt<M> {
    type Cpu = Hart<M::Tables>;
    const NAME: &'static str = M::NAME;

    fn physical_bits() -> u32 {
        56
    }

    fn print(text: &str) {
        sbi::print(text);
    }

    fn flush_guests(vm: VmId, range: &Range<Gfn>, _: Stale) {
        if let Some(number) = cpu::VMIDS.number(vm) {
            sbi::fence_guest(number, range);
        }
    }

    fn end_vm(vm: VmId) {
        cpu::VMIDS.end(vm);
    }

    fn kick(cpu: usize) {
        sbi::interrupt(HARTS[cpu].load(SeqCst));
    }

    fn second() -> &'static Second<Self::Cpu> {
        M::second()
    }

    fn power_off() -> ! {
        sbi::power_off()
    }
}

/// Reports a trap that was taken in the monitor itself.
#[unsafe(no_mangle)]
extern "C" fn own_exception() -> ! {
    panic!(
        "trap in HS mode: scause {:#x}, sepc {:#x}, stval {:#x}",
        read!(scause),
        read!(sepc),
        read!(stval)
    )
}

#[panic_handler]
fn panic(info: &PanicInfo<'_>) -> ! {
    let _ = writeln!(Console(sbi::print), "{info}");
    sbi::power_off()
}
