//! The virtual-machine control structure (Intel SDM volume 3, "Virtual Machine Control Structures" and
//! appendix B, "Field Encoding in VMCS"), and the guest it describes.

use core::arch::asm;

use metal_x86::{guest, msr};

/// A field of the current VMCS, by its encoding.
#[derive(Clone, Copy)]
#[repr(u64)]
pub enum Field {
    Vpid = 0x0000,
    PmlIndex = 0x0812,
    HostEs = 0x0c00,
    HostCs = 0x0c02,
    HostSs = 0x0c04,
    HostDs = 0x0c06,
    HostTr = 0x0c0c,
    PmlAddress = 0x200e,
    EptPointer = 0x201a,
    GuestPhysicalAddress = 0x2400,
    LinkPointer = 0x2800,
    HostEfer = 0x2c02,
    PinBased = 0x4000,
    Primary = 0x4002,
    Exit = 0x400c,
    Entry = 0x4012,
    Secondary = 0x401e,
    InstructionError = 0x4400,
    ExitReason = 0x4402,
    GuestGdtrLimit = 0x4810,
    GuestIdtrLimit = 0x4812,
    ExitQualification = 0x6400,
    GuestCr0 = 0x6800,
    GuestCr4 = 0x6804,
    GuestDr7 = 0x681a,
    GuestRip = 0x681e,
    GuestRflags = 0x6820,
    HostCr0 = 0x6c00,
    HostCr3 = 0x6c02,
    HostCr4 = 0x6c04,
    HostGdtrBase = 0x6c0c,
    HostIdtrBase = 0x6c0e,
    HostRsp = 0x6c14,
    HostRip = 0x6c16,
}

/// Encodings of the first segment's fields. Each segment has four fields, and the encodings of the next segment are
/// larger by 2.
const GUEST_SELECTOR: u64 = 0x0800;
const GUEST_LIMIT: u64 = 0x4800;
const GUEST_RIGHTS: u64 = 0x4814;

/// Reads a field.
///
/// # Safety
/// - this CPU has a current VMCS.
pub unsafe fn read(field: Field) -> u64 {
    let value;
    // SAFETY: this CPU has a current VMCS, as this function's `# Safety` asks of its caller.
    unsafe {
        asm!("vmread {}, {}", out(reg) value, in(reg) field as u64, options(nostack));
    }
    value
}

/// Writes a field.
///
/// # Safety
/// - this CPU has a current VMCS, and its guest can continue with `value` in it.
pub unsafe fn write(field: Field, value: u64) {
    // SAFETY: this CPU has a current VMCS, and its guest can continue with `value` in the field, as this function's
    // `# Safety` asks of its caller.
    unsafe { write_at(field as u64, value) };
}

/// # Safety
/// - the requirements of [`write()`] hold for the field with this encoding.
unsafe fn write_at(encoding: u64, value: u64) {
    let written: u8;
    // SAFETY: this CPU has a current VMCS, and its guest can continue with `value` in the field, as `write` asks of its
    // caller.
    unsafe {
        asm!("vmwrite {}, {}", "seta {}", in(reg) encoding, in(reg) value,
            out(reg_byte) written, options(nostack));
    }
    assert!(written != 0, "VMWRITE of field {encoding:#x} fails");
}

/// Returns the controls `wanted`, and the controls that must be on according to the capability register `msr`.
///
/// # Safety
/// - the CPU has VMX, and `msr` is one of VMX's capability registers that the CPU has.
unsafe fn controls(msr: u32, wanted: u64) -> u64 {
    // SAFETY: the CPU has the register `msr`, as this function's `# Safety` asks of its caller.
    let allowed = unsafe { msr::read(msr) };
    let (must, may) = (allowed & 0xffff_ffff, allowed >> 32);
    assert!(wanted & !may == 0, "a control that is needed is not there");
    wanted | must
}

/// The index of the first entry that the CPU writes to a buffer of page-modification logging; the next ones have lower
/// indices.
pub const FIRST_MODIFIED: u64 = 511;

/// Describes a guest in 32-bit protected mode without paging, with flat segments, in EPT. The pages that it modifies
/// are written to the page at `modified`.
///
/// # Safety
/// - this CPU has a current VMCS, and is in the state that an exit is to restore; no other code uses the page.
pub unsafe fn describe_guest(modified: u64) {
    const CODE32: u64 = 0xc09b;
    const DATA32: u64 = 0xc093;
    const BUSY_TSS: u64 = 0x8b;
    const UNUSABLE: u64 = 1 << 16;
    // The segments are ES, CS, SS, DS, FS, GS, LDTR and TR. Selectors and bases are 0, as in a new VMCS.
    let segments = [
        DATA32, CODE32, DATA32, DATA32, DATA32, DATA32, UNUSABLE, BUSY_TSS,
    ];
    // SAFETY: this CPU has a current VMCS and is in the state that an exit is to restore, and no other code uses the
    // page at `modified`, as this function's `# Safety` asks of its caller. The values describe a guest that can run.
    unsafe {
        write_controls();
        write(Field::PmlAddress, modified);
        write(Field::PmlIndex, FIRST_MODIFIED);
        write_host();
        for (i, rights) in (0..).zip(segments) {
            let large = rights & 0x8000 != 0;
            write_at(GUEST_SELECTOR + 2 * i, 0);
            write_at(
                GUEST_LIMIT + 2 * i,
                if large { 0xffff_ffff } else { 0xffff },
            );
            write_at(GUEST_RIGHTS + 2 * i, rights);
        }
        write(Field::GuestGdtrLimit, 0xffff);
        write(Field::GuestIdtrLimit, 0xffff);
        const NE: u64 = 1 << 5;
        const VMXE: u64 = 1 << 13;
        write(Field::GuestCr0, guest::CR0 | NE);
        write(Field::GuestCr4, VMXE);
        write(Field::GuestDr7, 0x400);
        // Set IF, although interrupts exit with and without IF: in Bochs 2.7, interrupts that the guest masks stay
        // masked.
        const IF: u64 = 1 << 9;
        write(Field::GuestRflags, 2 | IF);
        write(Field::LinkPointer, u64::MAX);
    }
}

/// # Safety
/// - this CPU has a current VMCS.
unsafe fn write_controls() {
    const EXTERNAL_INTERRUPTS_EXIT: u64 = 1 << 0;
    const HLT_EXITS: u64 = 1 << 7;
    const SECONDARY: u64 = 1 << 31;
    const EPT: u64 = 1 << 1;
    const VPID: u64 = 1 << 5;
    /// The control that allows the guest to turn paging off.
    const UNRESTRICTED: u64 = 1 << 7;
    /// The control that enables page-modification logging.
    const PML: u64 = 1 << 17;
    const HOST_IS_64_BIT: u64 = 1 << 9;
    const ACKNOWLEDGE_INTERRUPT: u64 = 1 << 15;
    const LOAD_EFER: u64 = 1 << 21;
    // SAFETY: this CPU has a current VMCS, as this function's `# Safety` asks of its caller. The registers are those of
    // appendix A for these controls. The CPU has 0x48b, because it has secondary controls, which the second line
    // asserts.
    unsafe {
        write(Field::PinBased, controls(0x481, EXTERNAL_INTERRUPTS_EXIT));
        write(Field::Primary, controls(0x482, HLT_EXITS | SECONDARY));
        write(
            Field::Secondary,
            controls(0x48b, EPT | VPID | UNRESTRICTED | PML),
        );
        let exit = HOST_IS_64_BIT | ACKNOWLEDGE_INTERRUPT | LOAD_EFER;
        write(Field::Exit, controls(0x483, exit));
        write(Field::Entry, controls(0x484, 0));
        write(Field::Vpid, 1);
    }
}

/// # Safety
/// - this CPU has a current VMCS, and is in the state that an exit is to restore.
unsafe fn write_host() {
    let (cr0, cr3, cr4): (u64, u64, u64);
    let mut gdt = [0u16; 5];
    let mut idt = [0u16; 5];
    let base = |table: [u16; 5]| {
        let words = table[1..].iter().rev();
        words.fold(0, |base, word| base << 16 | u64::from(*word))
    };
    // SAFETY: these instructions store the descriptor tables' registers, and change nothing else.
    unsafe {
        asm!("mov {}, cr0", "mov {}, cr3", "mov {}, cr4",
            out(reg) cr0, out(reg) cr3, out(reg) cr4, options(nomem, nostack));
        asm!("sgdt [{}]", "sidt [{}]", in(reg) &mut gdt, in(reg) &mut idt, options(nostack));
    }
    // SAFETY: this CPU has a current VMCS and is in the state that an exit is to restore, as this function's `# Safety`
    // asks of its caller.
    unsafe {
        write(Field::HostCr0, cr0);
        write(Field::HostCr3, cr3);
        write(Field::HostCr4, cr4);
        write(Field::HostEfer, msr::read(msr::EFER));
        write(Field::HostCs, 0x08);
        for data in [Field::HostEs, Field::HostSs, Field::HostDs] {
            write(data, 0x10);
        }
        // The selector must not be null; the monitor uses no task state.
        write(Field::HostTr, 0x20);
        write(Field::HostGdtrBase, base(gdt));
        write(Field::HostIdtrBase, base(idt));
    }
}
