//! One CPU with Intel's VMX and EPT (Intel SDM volume 3, "Introduction to Virtual-Machine Extensions" and
//! the chapters after it).

use alloc::boxed::Box;
use core::arch::{asm, naked_asm};
use core::mem::offset_of;
use core::sync::atomic::{AtomicU64, Ordering::Relaxed};

use metal_core::{Cause, Command, Cpu, Exit, Second};
use metal_x86::guest::{self, Registers};
use metal_x86::{SHOOTDOWN, Virtualization, apic, msr};
use slat::{Access, Ept, Gpa, Hpa, VmId};

use crate::vmcs::{self, Field};

const FEATURE_CONTROL: u32 = 0x3a;
const VMX_BASIC: u32 = 0x480;
const EPT_VPID_CAP: u32 = 0x48c;

/// The capabilities that [`Ept::eptp`] and the leaves need: walks of four levels, write-back, leaves of 2 MiB and 1
/// GiB, INVEPT (all contexts), accessed and dirty flags.
const EPT_NEEDED: u64 = 1 << 6 | 1 << 14 | 1 << 16 | 1 << 17 | 1 << 20 | 1 << 21 | 1 << 26;

const EXIT_INTERRUPT: u64 = 1;
const EXIT_HLT: u64 = 12;
const EXIT_EPT_VIOLATION: u64 = 48;
const EXIT_EPT_MISCONFIGURATION: u64 = 49;
const EXIT_PML_FULL: u64 = 62;

// The exit qualification of an EPT violation.
const VIOLATION_WRITE: u64 = 1 << 1;
const VIOLATION_FETCH: u64 = 1 << 2;
/// Bits 5:3 are the rights that all entries on the path grant. They are 0 if an entry is not present.
const VIOLATION_RIGHTS: u64 = 7 << 3;

/// A region of memory that the CPU uses: the VMXON region, or a VMCS.
#[repr(C, align(4096))]
struct Region {
    revision: u32,
    data: [u8; 4092],
}

impl Region {
    /// Allocates a region for the CPU that is never freed. Returns its physical address.
    ///
    /// # Safety
    /// - the CPU has VMX.
    unsafe fn leak() -> u64 {
        // SAFETY: the CPU has VMX and therefore the register, as this function's `# Safety` asks of its caller.
        let basic = unsafe { msr::read(VMX_BASIC) };
        let region = Box::new(Region {
            revision: basic as u32 & 0x7fff_ffff,
            data: [0; 4092],
        });
        Box::leak(region) as *mut Region as u64
    }
}

/// The buffer of page-modification logging, which the CPU fills from the last entry on.
#[repr(C, align(4096))]
struct Modified([AtomicU64; 512]);

/// A CPU, and the state of the guest that it runs.
pub struct Vmx {
    number: usize,
    modified: &'static Modified,
    registers: Registers,
    launched: bool,
}

impl Vmx {
    /// Turns VMX on, with a VMCS for the guest, on the calling CPU. Call once on each.
    pub fn new(number: usize) -> Self {
        const LOCKED: u64 = 1 << 0;
        const VMXON_ALLOWED: u64 = 1 << 2;
        const CR4_VMXE: u64 = 1 << 13;
        let mut entered: u8;
        let modified = Modified([const { AtomicU64::new(0) }; 512]);
        let modified: &'static Modified = Box::leak(Box::new(modified));
        // SAFETY: `run` starts the emulator with VMX; the regions are never freed. CR0 and CR4 have the bits that VMX
        // requires: paging, protection, NE (`boot`), and VMXE.
        unsafe {
            if msr::read(FEATURE_CONTROL) & LOCKED == 0 {
                msr::write(FEATURE_CONTROL, LOCKED | VMXON_ALLOWED);
            }
            let missing = EPT_NEEDED & !msr::read(EPT_VPID_CAP);
            assert!(missing == 0, "EPT capabilities {missing:#x} are missing");
            asm!("mov {0}, cr4", "or {0}, {1}", "mov cr4, {0}",
                out(reg) _, const CR4_VMXE, options(nostack));
            asm!("vmxon [{}]", "seta {}", in(reg) &Region::leak(), out(reg_byte) entered);
            assert!(entered != 0, "VMXON fails");
            let vmcs = Region::leak();
            asm!("vmclear [{}]", "seta {}", in(reg) &vmcs, out(reg_byte) entered);
            assert!(entered != 0, "VMCLEAR fails");
            asm!("vmptrld [{}]", "seta {}", in(reg) &vmcs, out(reg_byte) entered);
            assert!(entered != 0, "VMPTRLD fails");
            vmcs::describe_guest(&raw const *modified as u64);
        }
        Vmx {
            number,
            modified,
            registers: Registers::default(),
            launched: false,
        }
    }

    fn violation(gpa: Gpa, qualification: u64) -> Exit {
        Exit::Fault {
            gpa,
            access: match qualification {
                _ if qualification & VIOLATION_FETCH != 0 => Access::Execute,
                _ if qualification & VIOLATION_WRITE != 0 => Access::Write,
                _ => Access::Read,
            },
            cause: match qualification & VIOLATION_RIGHTS {
                0 => Cause::NotPresent,
                _ => Cause::Protection,
            },
        }
    }
}

/// Drops all translations that this CPU has cached of any EPT.
///
/// # Safety
/// - this CPU is in VMX operation.
unsafe fn flush() {
    const ALL_CONTEXTS: u64 = 2;
    let descriptor = [0u64; 2];
    // SAFETY: this CPU is in VMX operation, as this function's `# Safety` asks of its caller. The descriptor is a local
    // variable.
    unsafe {
        asm!("invept {}, [{}]", in(reg) ALL_CONTEXTS, in(reg) &descriptor, options(nostack));
    }
}

impl Cpu for Vmx {
    type Format = Ept;
    const RETURN: &'static [u8] = guest::RETURN;
    const REPORTS_MMIO: bool = true;
    const FILLS_BUFFER: bool = true;

    fn program() -> &'static [u8] {
        guest::program()
    }

    fn begin(&mut self, entry: Gpa, command: &Command) {
        self.registers = Registers::begin(entry, command);
        // SAFETY: `new` has made a VMCS current.
        unsafe { vmcs::write(Field::GuestRip, entry.0) };
    }

    fn run(&mut self, _: VmId, root: Hpa) -> Exit {
        // SAFETY: `new` has made a VMCS current. Interrupts are masked here, and an exit takes them.
        unsafe {
            vmcs::write(Field::EptPointer, Ept::eptp(root.pfn()));
            SHOOTDOWN.enter(self.number, || flush());
            let ran = vmrun(&mut self.registers, self.launched);
            SHOOTDOWN.leave(self.number);
            if !ran {
                return Exit::Other {
                    code: u64::MAX,
                    info: vmcs::read(Field::InstructionError),
                };
            }
        }
        self.launched = true;
        // SAFETY: `new` has made a VMCS current.
        let (reason, qualification, gpa) = unsafe {
            (
                vmcs::read(Field::ExitReason),
                vmcs::read(Field::ExitQualification),
                Gpa(vmcs::read(Field::GuestPhysicalAddress)),
            )
        };
        match reason {
            EXIT_EPT_VIOLATION => Self::violation(gpa, qualification),
            // The exit does not report the kind of access, so a read is reported. If memory is mapped at the address
            // meanwhile, a write or an execution exits once more.
            EXIT_EPT_MISCONFIGURATION => Exit::Fault {
                gpa,
                access: Access::Read,
                cause: Cause::Mmio,
            },
            EXIT_HLT => Exit::Done {
                result: self.registers.result(),
            },
            EXIT_INTERRUPT => {
                // The exit has acknowledged the interrupt.
                apic::end_of_interrupt();
                Exit::Kicked
            }
            EXIT_PML_FULL => Exit::BufferFull,
            code => Exit::Other {
                code,
                info: qualification,
            },
        }
    }

    fn drain(&mut self, note: &mut dyn FnMut(Gpa)) {
        // SAFETY: `new` has made a VMCS current.
        let next = unsafe { vmcs::read(Field::PmlIndex) } as u16;
        let written = &self.modified.0[usize::from(next.wrapping_add(1))..];
        if written.is_empty() {
            return;
        }
        for entry in written {
            note(Gpa(entry.load(Relaxed)));
        }
        // SAFETY: `new` has made a VMCS current.
        unsafe { vmcs::write(Field::PmlIndex, vmcs::FIRST_MODIFIED) };
    }

    fn complete_mmio(&mut self, value: u32) {
        self.registers.rax = value.into();
        // SAFETY: `new` has made a VMCS current.
        unsafe {
            let rip = vmcs::read(Field::GuestRip);
            vmcs::write(Field::GuestRip, rip + guest::ACCESS_BYTES);
        }
    }
}

impl Virtualization for Vmx {
    const NAME: &'static str = "ept";

    fn second() -> &'static Second<Self> {
        static SECOND: Second<Vmx> = Second::new();
        &SECOND
    }
}

/// Runs the guest of the current VMCS with `registers` until it exits. `false`: the entry failed.
///
/// # Safety
/// - an exit restores the state in which this function is called, except RSP and RIP, which this function sets;
///   `launched` says whether the VMCS has run before.
#[unsafe(naked)]
unsafe extern "C" fn vmrun(registers: *mut Registers, launched: bool) -> bool {
    naked_asm!(
        "push rbx",
        "push rbp",
        "push rdi",
        "lea rax, [rip + 3f]",
        "mov edx, {host_rip}",
        "vmwrite rdx, rax",
        "mov edx, {host_rsp}",
        "vmwrite rdx, rsp",
        "test sil, sil",
        "mov rax, [rdi + {rax}]",
        "mov rbx, [rdi + {rbx}]",
        "mov rcx, [rdi + {rcx}]",
        "mov rdx, [rdi + {rdx}]",
        "mov rsi, [rdi + {rsi}]",
        "mov rbp, [rdi + {rbp}]",
        "mov rdi, [rdi + {rdi}]",
        "jnz 2f",
        "vmlaunch",
        "jmp 4f",
        "2: vmresume",
        "4: xor eax, eax",
        "jmp 5f",
        "3: push rdi",
        "mov rdi, [rsp + 8]",
        "mov [rdi + {rax}], rax",
        "mov [rdi + {rbx}], rbx",
        "mov [rdi + {rcx}], rcx",
        "mov [rdi + {rdx}], rdx",
        "mov [rdi + {rsi}], rsi",
        "mov [rdi + {rbp}], rbp",
        "pop [rdi + {rdi}]",
        "mov eax, 1",
        "5: pop rdi",
        "pop rbp",
        "pop rbx",
        "ret",
        host_rip = const Field::HostRip as u64,
        host_rsp = const Field::HostRsp as u64,
        rax = const offset_of!(Registers, rax),
        rbx = const offset_of!(Registers, rbx),
        rcx = const offset_of!(Registers, rcx),
        rdx = const offset_of!(Registers, rdx),
        rsi = const offset_of!(Registers, rsi),
        rdi = const offset_of!(Registers, rdi),
        rbp = const offset_of!(Registers, rbp),
    )
}
