//! A CPU that runs the guest in VS mode, and reports each exit of the guest.

use core::arch::{asm, global_asm};
use core::marker::PhantomData;

use metal_core::{Cause, Command, Cpu, Exit, Vmids, guest_program};
use slat::{Access, Gpa, Hpa, Pfn, VmId};

use crate::csr::{read, write};
use crate::{Tables, marks};

global_asm!(include_str!("world.S"));
global_asm!(include_str!("guest.S"));

/// The guest's registers while it is not running, and the monitor's registers that an exit restores, at offsets
/// that `world.S` uses.
#[repr(C)]
struct Context {
    x: [u64; 32],
    pc: u64,
    host_sp_gp_tp: [u64; 3],
}

unsafe extern "C" {
    fn enter_guest(context: &mut Context);
}

const A0: usize = 10;

/// A hart in HS mode whose guest's memory is translated by tables of format `F`.
pub struct Hart<F> {
    number: usize,
    guest: Context,
    /// The address of an access that an entry refused. The walker may have cached that entry.
    refused: Option<Gpa>,
    format: PhantomData<F>,
}

impl<F: Tables> Hart<F> {
    /// Sets up the calling hart, which is CPU `number`.
    pub(crate) fn new(number: usize) -> Self {
        const SOFTWARE_INTERRUPT: u64 = 1 << 1;
        // SAFETY: these registers control how guests run, and which interrupts make the hart leave one; the monitor
        // itself is in HS mode with interrupts masked.
        unsafe {
            write!(vsatp, 0u64);
            write!(hedeleg, 0u64);
            write!(hideleg, 0u64);
            write!(hvip, 0u64);
            write!(sie, SOFTWARE_INTERRUPT);
            // If the hart does not have the mode, the write leaves the register unchanged.
            write!(hgatp, 0u64);
            write!(hgatp, F::hgatp(Pfn(0), LAST_VMID));
        }
        assert_eq!(
            read!(hgatp),
            F::hgatp(Pfn(0), LAST_VMID),
            "these tables, and 7 bits of VMID"
        );
        fence_all();
        Hart {
            number,
            guest: Context {
                x: [0; 32],
                pc: 0,
                host_sp_gp_tp: [0; 3],
            },
            refused: None,
            format: PhantomData,
        }
    }

    /// Runs the guest through the tables of `hgatp`, until it leaves.
    pub(crate) fn run_with(&mut self, hgatp: u64) -> Exit {
        const INTERRUPT: u64 = 1 << 63;
        // SAFETY: the tables do not translate the monitor's own accesses. The context belongs to the guest, and the
        // guest can access only memory that the tables map.
        unsafe {
            write!(hgatp, hgatp);
            if let Some(gpa) = self.refused.take() {
                fence(gpa);
            }
            enter_guest(&mut self.guest);
        }
        let cause = read!(scause);
        match cause {
            ECALL_FROM_GUEST => Exit::Done {
                result: self.guest.x[A0] as u32,
            },
            FETCH_FAULT => self.fault(Access::Execute),
            LOAD_FAULT => self.fault(Access::Read),
            STORE_FAULT => self.fault(Access::Write),
            _ if cause == INTERRUPT | SOFTWARE => {
                // SAFETY: the instruction only clears the pending interrupt.
                unsafe { asm!("csrc sip, {}", in(reg) 1u64 << SOFTWARE, options(nostack)) };
                Exit::Kicked
            }
            _ => Exit::Other {
                code: cause,
                info: self.guest.pc,
            },
        }
    }

    /// Returns the exit of a guest-page fault. The fault does not report the entry that the walker found.
    fn fault(&mut self, access: Access) -> Exit {
        // htval has the address without its two low bits. The two low bits are those of the guest's own address.
        let gpa = Gpa(read!(htval) << 2 | read!(stval) & 0b11);
        self.refused = Some(gpa);
        Exit::Fault {
            gpa,
            access,
            cause: Cause::NotPresent,
        }
    }
}

/// The cause of an ECALL. The next constants are other causes that leave the guest (volume II, "Hypervisor Cause
/// Register").
const ECALL_FROM_GUEST: u64 = 10;
const FETCH_FAULT: u64 = 20;
const LOAD_FAULT: u64 = 21;
const STORE_FAULT: u64 = 23;
const SOFTWARE: u64 = 1;

/// Makes this hart drop all translations of every guest.
pub(crate) fn fence_all() {
    // SAFETY: a TLB may be fenced at any time.
    unsafe {
        asm!(
            ".option push",
            ".option arch, +h",
            "hfence.gvma",
            ".option pop",
            options(nostack)
        )
    };
}

/// Makes this hart drop a page of every guest. A hart may also have cached entries that were invalid, or allowed less.
/// So call this after a fault whose handling changed the table.
fn fence(gpa: Gpa) {
    // SAFETY: a TLB may be fenced at any time. The address has the form of htval, without its two low bits.
    unsafe {
        asm!(
            ".option push",
            ".option arch, +h",
            "hfence.gvma {}, zero",
            ".option pop",
            in(reg) gpa.0 >> 2,
            options(nostack)
        )
    };
}

/// Reads the guest's instruction at `pc`, as the guest fetches it. `None`: the read faults. The register htinst need
/// not hold the instruction.
fn fetch(pc: u64) -> Option<u32> {
    let (low, high): (u64, u64);
    let mut faulted = 1u64;
    // SAFETY: the instructions read guest memory, through the tables under which the guest ran last. A fault continues
    // after the reads; it overwrites only registers that an exit sets and the next entry sets again.
    unsafe {
        asm!(
            ".option push",
            ".option arch, +h",
            "la {vector}, 2f",
            "csrrw {vector}, stvec, {vector}",
            "hlvx.hu {low}, ({pc})",
            "hlvx.hu {high}, ({behind})",
            "li {faulted}, 0",
            ".balign 4",
            "2: csrw stvec, {vector}",
            ".option pop",
            vector = out(reg) _,
            low = out(reg) low,
            high = out(reg) high,
            pc = in(reg) pc,
            behind = in(reg) pc + 2,
            faulted = inout(reg) faulted,
            options(nostack)
        );
    }
    (faulted == 0).then_some((high << 16 | low) as u32)
}

const VMID_BITS: u32 = 7;
const LAST_VMID: u16 = (1 << VMID_BITS) - 1;

/// The VMIDs of both harts.
pub(crate) static VMIDS: Vmids<VMID_BITS, 2> = Vmids::new();

impl<F: Tables> Cpu for Hart<F> {
    type Format = F;
    const REPORTS_MMIO: bool = false;

    fn program() -> &'static [u8] {
        guest_program!()
    }

    /// The instruction `jalr zero, 0(ra)`.
    const RETURN: &'static [u8] = &0x0000_8067u32.to_le_bytes();

    fn begin(&mut self, entry: Gpa, command: &Command) {
        let arguments = [
            command.op as u64,
            command.gpa.0,
            command.step,
            command.count,
            command.value.into(),
        ];
        self.guest.x[A0..A0 + arguments.len()].copy_from_slice(&arguments);
        self.guest.pc = entry.0;
        // SAFETY: the instruction makes this hart drop instructions that it may have fetched before the code was
        // changed.
        unsafe { asm!("fence.i", options(nostack)) };
    }

    fn run(&mut self, vm: VmId, root: Hpa) -> Exit {
        VMIDS.enter(self.number, vm, fence_all, |vmid| {
            self.run_with(F::hgatp(root.pfn(), vmid))
        })
    }

    fn complete_mmio(&mut self, value: u32) {
        const LOAD: u32 = 0b00000;
        // If the instruction's page is unmapped by now, the guest executes the access again.
        let Some(instruction) = fetch(self.guest.pc) else {
            return;
        };
        assert!(
            instruction & 0b11 == 0b11,
            "the program has no compressed instructions"
        );
        let register = (instruction >> 7 & 0x1f) as usize;
        if instruction >> 2 & 0x1f == LOAD && register != 0 {
            self.guest.x[register] = value as i32 as u64;
        }
        self.guest.pc += 4;
    }

    fn sets_accessed(&self) -> bool {
        marks::are_set_by_hardware()
    }

    fn sets_dirty(&self) -> bool {
        marks::are_set_by_hardware()
    }
}
