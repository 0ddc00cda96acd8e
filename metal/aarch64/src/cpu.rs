//! A CPU that runs the guest at EL1, and reports each exit of the guest.

use core::arch::{asm, global_asm};
use core::marker::PhantomData;

use metal_core::{Cause, Command, Cpu, Exit, Vmids, guest_program};
use slat::{Access, Gpa, Hpa, VmId};

use crate::devices::gic;
use crate::sysreg::{read, write};
use crate::{Tables, tlb};

global_asm!(include_str!("world.S"));
global_asm!(include_str!("guest.S"));

/// The guest's registers while it is not running, at offsets that `world.S` uses.
#[repr(C)]
struct Context {
    x: [u64; 31],
    pc: u64,
}

unsafe extern "C" {
    fn enter_guest(context: &mut Context) -> u64;
}

/// The vectors through which a CPU leaves the guest, in the order of the vector table.
const SYNCHRONOUS: u64 = 8;
const IRQ: u64 = 9;

/// A CPU at EL2 whose guest's memory is translated by tables of format `F`.
pub struct El2<F> {
    number: usize,
    guest: Context,
    vtcr: u64,
    /// The page of the last access, if a leaf refused the access. The TLB of this CPU may hold that leaf.
    refused: Option<Gpa>,
    format: PhantomData<F>,
}

/// The value of HCR_EL2 for the guest.
const HCR: u64 = {
    const VM: u64 = 1 << 0;
    /// The monitor takes physical FIQs, IRQs and SErrors.
    const FMO_IMO_AMO: u64 = 0b111 << 3;
    /// The guest's stage 1 is off. Without this bit, the guest's accesses would be Device accesses, not cached like the
    /// monitor's accesses to the same memory. With this bit, stage 2 alone decides the memory type.
    const DC: u64 = 1 << 12;
    /// EL1 is AArch64.
    const RW: u64 = 1 << 31;
    VM | FMO_IMO_AMO | DC | RW
};

impl<F: Tables> El2<F> {
    /// Sets up the calling CPU, which is CPU `number`.
    pub(crate) fn new(number: usize) -> Self {
        let vtcr = F::vtcr(read!(id_aa64mmfr0_el1) & 0xf);
        // SAFETY: these registers control how guests run; the monitor itself does not depend on them.
        unsafe {
            write!(vtcr_el2, vtcr);
            write!(hcr_el2, HCR);
            // The MMU is off. The other bits are RES1 without the features that define them.
            write!(sctlr_el1, 0x30d0_0800u64);
            asm!("isb", options(nostack, preserves_flags));
        }
        El2 {
            number,
            guest: Context { x: [0; 31], pc: 0 },
            vtcr,
            refused: None,
            format: PhantomData,
        }
    }

    /// Whether the CPU sets the access flag and, by ID_AA64MMFR1_EL1.HAFDBS, could set the dirty state.
    fn manages(&self) -> (bool, bool) {
        let hafdbs = read!(id_aa64mmfr1_el1) & 0xf;
        let told = |bit: u32| self.vtcr >> bit & 1 != 0;
        (told(21) && hafdbs >= 1, told(22) && hafdbs >= 2)
    }

    /// Runs the guest through the tables of `vttbr`, until it leaves.
    fn run_with(&mut self, vttbr: u64) -> Exit {
        // SAFETY: the register refers to the engine's tables, which do not translate the monitor's own accesses. The
        // barriers make the walker see the stores to the tables, and this CPU the register.
        unsafe {
            write!(vttbr_el2, vttbr);
            asm!("dsb ishst", "isb", options(nostack, preserves_flags));
        }
        if let Some(gpa) = self.refused.take() {
            tlb::forget(gpa);
        }
        loop {
            // SAFETY: the context belongs to the guest, and the guest can access only memory that the tables map.
            match unsafe { enter_guest(&mut self.guest) } {
                SYNCHRONOUS => return self.decode(),
                IRQ if gic::take_kick() => return Exit::Kicked,
                IRQ => {}
                vector => {
                    return Exit::Other {
                        code: vector,
                        info: self.guest.pc,
                    };
                }
            }
        }
    }

    /// Returns the reason of a synchronous exception (Arm ARM, "ESR_EL2").
    fn decode(&mut self) -> Exit {
        const HVC: u64 = 0x16;
        const INSTRUCTION_ABORT: u64 = 0x20;
        const DATA_ABORT: u64 = 0x24;
        const WRITE_NOT_READ: u64 = 1 << 6;
        let esr = read!(esr_el2);
        let access = match esr >> 26 {
            HVC => {
                return Exit::Done {
                    result: self.guest.x[0] as u32,
                };
            }
            INSTRUCTION_ABORT => Access::Execute,
            DATA_ABORT if esr & WRITE_NOT_READ != 0 => Access::Write,
            DATA_ABORT => Access::Read,
            _ => return self.other(esr),
        };
        let far = read!(far_el2);
        // The two low bits of the fault status are the level.
        let (gpa, cause) = match esr & 0x3f {
            0b00_0100..=0b00_0111 => (faulting_ipa(far), Cause::NotPresent),
            0b00_1000..=0b00_1011 => (faulting_ipa(far), Cause::Protection),
            // HPFAR_EL2 has no valid value for this fault. The guest's stage 1 is off, so the address is the IPA. (With
            // stage 1 on, AT S1E1R finds the IPA.)
            0b00_1100..=0b00_1111 => (Gpa(far), Cause::Protection),
            _ => return self.other(esr),
        };
        if cause == Cause::Protection {
            self.refused = Some(gpa);
        }
        Exit::Fault { gpa, access, cause }
    }

    fn other(&self, esr: u64) -> Exit {
        Exit::Other {
            code: esr,
            info: self.guest.pc,
        }
    }
}

/// Returns the faulting IPA. HPFAR_EL2 has its page, and FAR_EL2 its offset in the page.
fn faulting_ipa(far: u64) -> Gpa {
    Gpa((read!(hpfar_el2) >> 4) << 12 | far & 0xfff)
}

/// The VMIDs of both CPUs. They have 8 bits, which every CPU at EL2 supports.
pub(crate) static VMIDS: Vmids<8, 2> = Vmids::new();

impl<F: Tables> Cpu for El2<F> {
    type Format = F;
    const REPORTS_MMIO: bool = false;

    fn program() -> &'static [u8] {
        guest_program!()
    }

    /// The instruction `ret`.
    const RETURN: &'static [u8] = &0xd65f_03c0u32.to_le_bytes();

    fn begin(&mut self, entry: Gpa, command: &Command) {
        let x = &mut self.guest.x;
        x[0] = command.op as u64;
        x[1] = command.gpa.0;
        x[2] = command.step;
        x[3] = command.count;
        x[4] = command.value.into();
        self.guest.pc = entry.0;
        // SAFETY: the instructions make this CPU drop instructions that it may have fetched before the code was
        // changed.
        unsafe {
            asm!(
                "ic iallu",
                "dsb nsh",
                "isb",
                options(nostack, preserves_flags)
            )
        };
    }

    fn run(&mut self, vm: VmId, root: Hpa) -> Exit {
        VMIDS.enter(self.number, vm, tlb::flush_this_cpu, |vmid| {
            self.run_with(F::vttbr(F::GRANULE.pfn(root), vmid as u8))
        })
    }

    fn complete_mmio(&mut self, value: u32) {
        const SYNDROME_VALID: u64 = 1 << 24;
        const WRITE_NOT_READ: u64 = 1 << 6;
        let esr = read!(esr_el2);
        assert!(
            esr & SYNDROME_VALID != 0,
            "no load or store of one register"
        );
        let register = esr >> 16 & 0x1f;
        // Register number 31 is the zero register.
        if esr & WRITE_NOT_READ == 0 && register < 31 {
            self.guest.x[register as usize] = value.into();
        }
        self.guest.pc += 4;
    }

    fn sets_accessed(&self) -> bool {
        self.manages().0
    }

    fn sets_dirty(&self) -> bool {
        F::SETS_DIRTY && self.manages().1
    }
}
