//! One CPU with AMD's SVM (AMD64 APM volume 2, "Secure Virtual Machine" and appendix B, "VMCB Layout").

use core::arch::naked_asm;
use core::marker::PhantomData;
use core::mem::offset_of;

use metal_core::{Cause, Command, Cpu, Exit, Second};
use metal_x86::guest::{self, Registers};
use metal_x86::{SHOOTDOWN, Virtualization, msr};
use slat::format::{Npt, Npt5, X86};
use slat::{Access, Format, Gpa, Hpa, VmId};

use crate::vmcb::Vmcb;

const EFER_SVME: u64 = 1 << 12;
const VM_HSAVE_PA: u32 = 0xc001_0117;

const EXIT_CR3: u64 = 0x13;
const EXIT_PAGE_FAULT: u64 = 0x4e;
const EXIT_INTR: u64 = 0x60;
const EXIT_HLT: u64 = 0x78;
const EXIT_INVLPG: u64 = 0x79;
const EXIT_NPF: u64 = 0x400;

// EXITINFO1 of a page fault, or of a nested page fault, is the error code. The constants are bits of the error code.
const FAULT_PRESENT: u64 = 1 << 0;
const FAULT_WRITE: u64 = 1 << 1;
const FAULT_RESERVED: u64 = 1 << 3;
const FAULT_FETCH: u64 = 1 << 4;

/// A page of memory that the CPU uses.
#[repr(C, align(4096))]
struct Page([u8; 4096]);

/// A CPU, and the state of the guest that it runs through tables of `F`: nested tables, or shadow tables.
pub struct Svm<F> {
    number: usize,
    vmcb: alloc::boxed::Box<Vmcb>,
    registers: Registers,
    /// Whether the next VMRUN flushes the TLB.
    flush: bool,
    format: PhantomData<fn() -> F>,
}

impl<F: Format> Svm<F> {
    /// Turns SVM on, on the calling CPU.
    pub fn new(number: usize) -> Self {
        let host_save = alloc::boxed::Box::leak(alloc::boxed::Box::new(Page([0; 4096])));
        // SAFETY: `run` starts the emulator with SVM; the page is never freed.
        unsafe {
            msr::write(msr::EFER, msr::read(msr::EFER) | EFER_SVME);
            msr::write(VM_HSAVE_PA, host_save as *mut Page as u64);
        }
        Svm {
            number,
            vmcb: alloc::boxed::Box::new(Vmcb::for_guest(F::SHADOWS)),
            registers: Registers::default(),
            flush: false,
            format: PhantomData,
        }
    }

    /// Runs the guest by VMRUN until its next exit.
    fn enter(&mut self) {
        let vmcb = &raw mut *self.vmcb;
        self.vmcb.save.rax = self.registers.rax;
        // SAFETY: the VMCB belongs to this CPU, is complete, and is at its physical address.
        unsafe { vmrun(vmcb, &mut self.registers) };
        self.registers.rax = self.vmcb.save.rax;
    }
}

impl<F: Format> Cpu for Svm<F> {
    type Format = F;
    const RETURN: &'static [u8] = guest::RETURN;
    const REPORTS_MMIO: bool = true;

    fn program() -> &'static [u8] {
        guest::program()
    }

    fn begin(&mut self, entry: Gpa, command: &Command) {
        self.registers = Registers::begin(entry, command);
        self.vmcb.save.rip = entry.0;
    }

    fn run(&mut self, _: VmId, root: Hpa) -> Exit {
        let mut requested = false;
        SHOOTDOWN.enter(self.number, || requested = true);
        self.flush |= requested;
        if requested && F::SHADOWS {
            // The root may be gone.
            SHOOTDOWN.leave(self.number);
            return Exit::Kicked;
        }
        self.vmcb.set_root(F::SHADOWS, root.0);
        self.vmcb.control.tlb_control = match core::mem::take(&mut self.flush) {
            true => Vmcb::FLUSH_TLB,
            false => Vmcb::KEEP_TLB,
        };
        self.enter();
        SHOOTDOWN.leave(self.number);
        let control = &self.vmcb.control;
        let error = control.exit_info_1;
        match control.exit_code {
            EXIT_NPF | EXIT_PAGE_FAULT => Exit::Fault {
                gpa: Gpa(control.exit_info_2),
                access: match error {
                    _ if error & FAULT_FETCH != 0 => Access::Execute,
                    _ if error & FAULT_WRITE != 0 => Access::Write,
                    _ => Access::Read,
                },
                cause: match error {
                    _ if error & FAULT_RESERVED != 0 => Cause::Mmio,
                    _ if error & FAULT_PRESENT != 0 => Cause::Protection,
                    _ => Cause::NotPresent,
                },
            },
            EXIT_HLT => Exit::Done {
                result: self.registers.result(),
            },
            EXIT_INTR => Exit::Kicked,
            code @ (EXIT_INVLPG | EXIT_CR3) => {
                self.flush = true;
                self.vmcb.save.rip += guest::FLUSH_BYTES;
                let operand = self.registers.rdi;
                match code {
                    EXIT_INVLPG => Exit::Invalidate { gva: operand },
                    _ => Exit::Root { cr3: operand },
                }
            }
            code => Exit::Other { code, info: error },
        }
    }

    fn complete_mmio(&mut self, value: u32) {
        self.registers.rax = value.into();
        self.vmcb.save.rip += guest::ACCESS_BYTES;
    }
}

/// Defines the CPUs of a PC that walk tables of a format, and their name.
macro_rules! cpus {
    ($($name:literal: $format:ty,)*) => {$(
        impl Virtualization for Svm<$format> {
            const NAME: &'static str = $name;

            fn second() -> &'static Second<Self> {
                static SECOND: Second<Svm<$format>> = Second::new();
                &SECOND
            }
        }
    )*};
}

cpus! {
    "npt": Npt,
    "npt5": Npt5,
    "x86-la57": X86<5>,
}

/// Runs the guest of `vmcb` with `registers` until it exits.
///
/// Interrupts are masked by GIF, not by IF: a pending interrupt makes VMRUN exit at once, and the monitor's handler
/// takes it at STGI.
///
/// # Safety
/// - `vmcb` is its own physical address, and describes a state that VMRUN accepts;
/// - SVM is on, and no other code accesses `vmcb` and `registers` meanwhile.
#[unsafe(naked)]
unsafe extern "C" fn vmrun(vmcb: *mut Vmcb, registers: *mut Registers) {
    naked_asm!(
        "push rbx",
        "push rbp",
        "push rsi",
        "mov rax, rdi",
        "mov rbx, [rsi + {rbx}]",
        "mov rcx, [rsi + {rcx}]",
        "mov rdx, [rsi + {rdx}]",
        "mov rdi, [rsi + {rdi}]",
        "mov rbp, [rsi + {rbp}]",
        "mov rsi, [rsi + {rsi}]",
        "clgi",
        "sti",
        "vmrun rax",
        "push rsi",
        "mov rsi, [rsp + 8]",
        "mov [rsi + {rbx}], rbx",
        "mov [rsi + {rcx}], rcx",
        "mov [rsi + {rdx}], rdx",
        "mov [rsi + {rdi}], rdi",
        "mov [rsi + {rbp}], rbp",
        "pop [rsi + {rsi}]",
        "stgi",
        "cli",
        "pop rsi",
        "pop rbp",
        "pop rbx",
        "ret",
        rbx = const offset_of!(Registers, rbx),
        rcx = const offset_of!(Registers, rcx),
        rdx = const offset_of!(Registers, rdx),
        rsi = const offset_of!(Registers, rsi),
        rdi = const offset_of!(Registers, rdi),
        rbp = const offset_of!(Registers, rbp),
    )
}
