//! A monitor at EL2 of QEMU's virt machine: AArch64's page walker walks the engine's tables.
//!
//! The host runs at EL2 with identity-mapped addresses. The guest runs at EL1 with its own MMU off, so each address
//! that the guest accesses is the intermediate physical address that stage 2 translates. CPUs are flushed by broadcast
//! (`tlb`), for which Arm needs no interrupt. The monitor nevertheless has an interrupt, which makes a CPU leave the
//! guest.
//!
//! Several programs are built from this crate. The programs differ in their tables ([`Tables`]). `aarch64` has four
//! levels, and software sets the access flag. `aarch64-hafdbs` begins at two concatenated tables of level 1, and
//! hardware manages access flag and dirty state. `aarch64-lpa2` begins at 16 concatenated tables of level 0, whose
//! descriptors have 52 bits of address. `aarch64-16k` and `aarch64-64k` have tables of these granules, the first with a
//! concatenated root, the second with 52 bits of address and hardware dirty state; the monitor's own tables stay those
//! of 4 KiB.
#![no_std]
#![warn(missing_docs)]

mod boot;
mod cpu;
mod devices;
mod sysreg;
mod tlb;

use core::fmt::Write;
use core::marker::PhantomData;
use core::ops::Range;
use core::panic::PanicInfo;

use metal_core::{Console, Heap, Host, Machine, Memory, Second};
use slat::format::Stage2;
use slat::{Format, Gfn, Hpa, Pfn, Stale, VmId};

pub use cpu::El2;
use devices::{console, gic, psci};
use sysreg::read;

/// Tables that a CPU at EL2 can walk.
pub trait Tables: Format {
    /// Returns VTCR_EL2: [`Stage2::vtcr`].
    fn vtcr(pa_range: u64) -> u64;
    /// Returns VTTBR_EL2: [`Stage2::vttbr`].
    fn vttbr(root: Pfn, vmid: u8) -> u64;
}

impl<const IPA_BITS: u32, const HARDWARE_DIRTY: bool, const PAGE_SHIFT: u32> Tables
    for Stage2<IPA_BITS, HARDWARE_DIRTY, PAGE_SHIFT>
{
    fn vtcr(pa_range: u64) -> u64 {
        Self::vtcr(pa_range)
    }

    fn vttbr(root: Pfn, vmid: u8) -> u64 {
        Self::vttbr(root, vmid)
    }
}

/// One test program: the format of its tables, and the code that depends on the format.
pub trait Monitor: Send + Sync + 'static {
    /// The name of the machine ([`Machine::NAME`]).
    const NAME: &'static str;
    /// The tables that the machine's walkers walk.
    type Tables: Tables;
    /// Returns the queue of work for the second CPU: [`Machine::second`].
    fn second() -> &'static Second<El2<Self::Tables>>;
}

/// Defines the program of a file: the monitor called `$name`, with tables of `$tables`.
#[macro_export]
macro_rules! program {
    ($name:literal, $tables:ty) => {
        struct Program;

        static SECOND: metal_core::Second<$crate::El2<$tables>> = metal_core::Second::new();

        impl $crate::Monitor for Program {
            const NAME: &'static str = $name;
            type Tables = $tables;

            fn second() -> &'static metal_core::Second<$crate::El2<$tables>> {
                &SECOND
            }
        }

        /// The entry point of Rust, to which `boot.S` jumps.
        #[unsafe(no_mangle)]
        extern "C" fn main(cpu: usize) -> ! {
            $crate::main::<Program>(cpu)
        }
    };
}

/// QEMU's virt machine under the monitor `M`.
pub struct Virt<M>(PhantomData<M>);

#[global_allocator]
static HEAP: Heap = Heap::new();

/// Memory begins at 1 GiB, where the monitor is. The guest's data is in the second of two GiB.
const DATA: Hpa = Hpa(0x8000_0000);

/// Runs each CPU after its start.
pub fn main<M: Monitor>(cpu: usize) -> ! {
    unsafe extern "C" {
        static image_end: u8;
    }
    gic::enable();
    let this = El2::new(cpu);
    if cpu != 0 {
        M::second().serve(this)
    }
    psci::start(1);
    let memory = Memory {
        monitor: Hpa((&raw const image_end).addr() as u64)..DATA,
        data: DATA,
    };
    // SAFETY: the memory after the image is unused, and this is called once.
    let host = unsafe { Host::<Virt<M>>::new(memory, &HEAP) };
    metal_core::run(this, host)
}

impl<M: Monitor> Machine for Virt<M> {
    type Cpu = El2<M::Tables>;
    const NAME: &'static str = M::NAME;

    fn physical_bits() -> u32 {
        48
    }

    fn print(text: &str) {
        console::print(text);
    }

    fn flush_guests(vm: VmId, range: &Range<Gfn>, stale: Stale) {
        // A TLBI that names no VMID uses the VMID of VTTBR_EL2, which belongs to this CPU's last guest.
        match cpu::VMIDS.number(vm) {
            None => {}
            Some(number) if read!(vttbr_el2) >> 48 == number.into() => {
                tlb::flush_range(range, stale, M::Tables::GRANULE);
            }
            Some(_) => tlb::flush_everything(),
        }
    }

    fn end_vm(vm: VmId) {
        cpu::VMIDS.end(vm);
    }

    fn kick(cpu: usize) {
        gic::kick(cpu);
    }

    fn second() -> &'static Second<Self::Cpu> {
        M::second()
    }

    fn power_off() -> ! {
        psci::power_off()
    }
}

/// Reports an exception of EL2 itself; called by the vectors.
#[unsafe(no_mangle)]
extern "C" fn own_exception(vector: u64) -> ! {
    panic!(
        "exception at EL2: vector {vector}, ESR {:#x}, ELR {:#x}, FAR {:#x}",
        read!(esr_el2),
        read!(elr_el2),
        read!(far_el2)
    )
}

#[panic_handler]
fn panic(info: &PanicInfo<'_>) -> ! {
    let _ = writeln!(Console(console::print), "{info}");
    psci::power_off()
}
