//! The rules of SET requests, one by one: which values of a field KVM accepts.
//!
//! The last field of an entry says why the host's kernel may answer otherwise: another version, or another processor than the one
//! that slat offers.

use super::api::Controllers;
use super::edges::{Argument, On, Rule, Values};
use kvm_bindings::*;
use libc::{EINVAL, ENXIO, EPERM};
use slat_kvm::abi::*;
use slat_kvm::user::Plain;
use slat_model::Rng;
use std::mem::offset_of;

/// Returns the bytes of the field that `_read` reads.
const fn bytes_of_field<T, F>(_read: fn(&T) -> &F) -> usize {
    size_of::<F>()
}

/// Offset and bytes of a field.
macro_rules! field {
    ($type:ty, $($field:tt)+) => {
        (offset_of!($type, $($field)+), bytes_of_field::<$type, _>(|all| &all.$($field)+))
    };
}

/// Changes a struct in its bytes.
fn edit<T: Plain>(bytes: &mut [u8], change: fn(&mut T)) {
    assert!(bytes.len() >= size_of::<T>());
    // SAFETY: `Plain`: any bytes are a value, and there are enough.
    unsafe {
        let mut value = bytes.as_ptr().cast::<T>().read_unaligned();
        change(&mut value);
        bytes.as_mut_ptr().cast::<T>().write_unaligned(value);
    }
}

/// Where a rule of one request begins: it has CPUID, no controllers, and nothing is set besides the field.
const fn rule(request: u32, argument: Argument, words: &'static str) -> Rule {
    Rule {
        request,
        on: On::Vcpu,
        words,
        controllers: Controllers::None,
        cpuid: true,
        argument,
        with: |_| {},
        field: (0, 8),
        values: Values::Any,
        errno: EINVAL,
        differs: None,
    }
}

const fn sregs(words: &'static str) -> Rule {
    let read = Argument::Read(KVM_GET_SREGS, size_of::<kvm_sregs>());
    rule(KVM_SET_SREGS, read, words)
}

const fn sregs2(words: &'static str) -> Rule {
    let read = Argument::Read(KVM_GET_SREGS2, size_of::<kvm_sregs2>());
    rule(KVM_SET_SREGS2, read, words)
}

const fn events(words: &'static str) -> Rule {
    let read = Argument::Read(KVM_GET_VCPU_EVENTS, size_of::<kvm_vcpu_events>());
    rule(KVM_SET_VCPU_EVENTS, read, words)
}

const fn xsave(words: &'static str) -> Rule {
    rule(KVM_SET_XSAVE, Argument::Read(KVM_GET_XSAVE, 4096), words)
}

const fn xcrs(words: &'static str) -> Rule {
    let read = Argument::Read(KVM_GET_XCRS, size_of::<kvm_xcrs>());
    rule(KVM_SET_XCRS, read, words)
}

const fn debugregs(words: &'static str) -> Rule {
    let read = Argument::Read(KVM_GET_DEBUGREGS, size_of::<kvm_debugregs>());
    rule(KVM_SET_DEBUGREGS, read, words)
}

const fn msr(index: u32, words: &'static str) -> Rule {
    rule(KVM_SET_MSRS, Argument::Msr(index), words)
}

const fn of_vm(request: u32, argument: Argument, words: &'static str) -> Rule {
    Rule {
        on: On::Vm,
        cpuid: false,
        ..rule(request, argument, words)
    }
}

/// Long mode: the rest of the registers that it needs.
fn long_mode(bytes: &mut [u8]) {
    edit::<kvm_sregs>(bytes, |all| {
        (all.cr0, all.cr4, all.efer) = (0x8000_0011, 0x20, 0x500);
    });
}

const CR0: u64 = 0xffff_ffff & !(1 << 31 | 1 << 29);
const LME: u64 = 1 << 8;
const LMA: u64 = 1 << 10;
const NXE: u64 = 1 << 11;
/// Nested guests of AMD's CPUs. (The bits of their fast FXSAVE and automatic IBRS depend on the host's processor.)
const SVME: u64 = 1 << 12;
/// CR4: VME PVI TSD DE PSE PAE MCE PGE PCE OSFXSR OSXMMEXCPT, which no feature of CPUID gates.
const CR4_ALWAYS: u64 = 0x7ff;
const OTHER_CPU: Option<&str> = Some("the host's processor has other features");
const LAX_MODULE: Option<&str> = Some("a module without VMX and SVM does not look at all bits");
/// XSTATE_BV and XCOMP_BV in an XSAVE area.
const XSTATE_BV: (usize, usize) = (512, 8);
const XCOMP_BV: (usize, usize) = (520, 8);
const MXCSR: (usize, usize) = (24, 4);
const APIC_BASES: Values = Values::Listed(
    // Disabled, enabled, x2APIC, elsewhere; for the bootstrap processor and another one.
    &[
        0xfee0_0000,
        0xfee0_0800,
        0xfee0_0d00,
        0xfee0_0900,
        0x1_0000_0900,
        0,
    ],
    // x2APIC mode of a disabled APIC, each reserved bit, addresses that the guest does not have.
    &[
        0xfee0_0400,
        0xfee0_0500,
        0xfee0_0901,
        0xfee0_0a00,
        0xfee0_0980,
        1 << 48 | 0x900,
        1 << 63 | 0x900,
    ],
);

/// All rules.
pub const RULES: &[Rule] = &[
    Rule {
        field: field!(kvm_regs, rflags),
        ..rule(
            KVM_SET_REGS,
            Argument::Read(KVM_GET_REGS, size_of::<kvm_regs>()),
            "any value; bits that do not exist are dropped",
        )
    },
    Rule {
        field: field!(kvm_sregs, cr0),
        values: Values::Bits(CR0),
        ..sregs("CR0: 32 bits; NW needs CD, and PG needs PE")
    },
    Rule {
        with: |bytes| edit::<kvm_sregs>(bytes, |all| all.cr0 = 0x11),
        field: field!(kvm_sregs, cr4),
        values: Values::Listed(
            &[0, 1, 0x20, CR4_ALWAYS],
            &[
                1 << 11,
                1 << 12,
                1 << 13,
                1 << 14,
                1 << 15,
                1 << 19,
                1 << 23,
                1 << 32,
                u64::MAX,
            ],
        ),
        cpuid: false,
        differs: LAX_MODULE,
        ..sregs("CR4 of a guest without CPUID: no bit of a feature")
    },
    Rule {
        field: field!(kvm_sregs, efer),
        values: Values::Listed(&[0, 1, LME, NXE], &[LMA, 2, 4, 1 << 9, SVME, 1 << 32]),
        cpuid: false,
        differs: LAX_MODULE,
        ..sregs(
            "EFER of a guest without CPUID: any feature, as before Linux 7; no LMA without paging",
        )
    },
    Rule {
        field: field!(kvm_sregs, efer),
        values: Values::Listed(
            &[0, 1, LME, NXE, 1 | LME | NXE],
            &[LMA, 2, 4, 1 << 9, SVME, 1 << 13, 1 << 16, 1 << 32, 1 << 63],
        ),
        differs: LAX_MODULE,
        ..sregs("EFER without paging: no LMA, and the bits of the guest's CPUID")
    },
    Rule {
        with: long_mode,
        field: field!(kvm_sregs, efer),
        values: Values::Listed(&[0x500, 0x501, 0xd00], &[LME, LMA, 0x502, 0x1500]),
        differs: LAX_MODULE,
        ..sregs("EFER with paging: LME and LMA together")
    },
    Rule {
        with: long_mode,
        field: field!(kvm_sregs, cr4),
        values: Values::Listed(&[0x20, 0x7ff], &[0, 0x10]),
        ..sregs("CR4 in long mode: PAE")
    },
    Rule {
        with: long_mode,
        field: field!(kvm_sregs, cr3),
        values: Values::UpTo((1 << 48) - 1),
        ..sregs("CR3 in long mode: the guest's physical addresses")
    },
    Rule {
        field: field!(kvm_sregs, cr3),
        ..sregs("CR3 outside long mode: any value")
    },
    Rule {
        field: field!(kvm_sregs, cs.l),
        values: Values::Listed(&[0], &[1]),
        ..sregs("CS.L outside long mode: 0")
    },
    Rule {
        with: long_mode,
        field: field!(kvm_sregs, cs.l),
        values: Values::Listed(&[0, 1], &[]),
        ..sregs("CS.L in long mode")
    },
    Rule {
        field: field!(kvm_sregs, cr8),
        ..sregs("CR8: any value; one beyond 15 has no effect")
    },
    Rule {
        field: field!(kvm_sregs, apic_base),
        values: APIC_BASES,
        ..sregs("APIC_BASE without a local APIC")
    },
    Rule {
        controllers: Controllers::Pc,
        field: field!(kvm_sregs, apic_base),
        values: APIC_BASES,
        ..sregs("APIC_BASE with a local APIC")
    },
    Rule {
        field: field!(kvm_sregs, apic_base),
        values: Values::Listed(
            &[0xfee0_0900, 0xf_0000_0900],
            &[0xfee0_0d00, 1 << 36 | 0x900],
        ),
        cpuid: false,
        ..sregs("APIC_BASE of a guest without CPUID: 36 bits, no x2APIC")
    },
    Rule {
        field: field!(kvm_sregs2, flags),
        values: Values::Bits(0),
        ..sregs2("flags: PDPTEs need PAE paging")
    },
    Rule {
        with: |bytes| {
            edit::<kvm_sregs2>(bytes, |all| (all.cr0, all.cr4) = (0x8000_0011, 0x20));
        },
        field: field!(kvm_sregs2, flags),
        values: Values::Bits(1),
        ..sregs2("flags with PAE paging: PDPTEs")
    },
    Rule {
        field: field!(kvm_fpu, mxcsr),
        ..rule(
            KVM_SET_FPU,
            Argument::Read(KVM_GET_FPU, size_of::<kvm_fpu>()),
            "any value; MXCSR has no effect",
        )
    },
    Rule {
        field: XSTATE_BV,
        values: Values::Listed(&[0, 1, 2, 3], &[8, 1 << 10, 1 << 20, 1 << 62, 1 << 63]),
        ..xsave("XSTATE_BV: components that guests can have")
    },
    Rule {
        field: XCOMP_BV,
        values: Values::Listed(&[0], &[1, 1 << 63]),
        ..xsave("XCOMP_BV: only the standard format")
    },
    Rule {
        field: (528, 8),
        values: Values::Listed(&[0], &[1, 1 << 63]),
        ..xsave("the reserved words of the header: 0")
    },
    Rule {
        with: |bytes| bytes[XSTATE_BV.0] = 3,
        field: MXCSR,
        values: Values::Listed(&[0, 0x1f80, 0xffff], &[1 << 16, 1 << 18, 1 << 31]),
        ..xsave("MXCSR with a component that uses it: no reserved bit")
    },
    Rule {
        with: |bytes| bytes[XSTATE_BV.0] = 0,
        field: MXCSR,
        ..xsave("MXCSR without such a component: ignored")
    },
    Rule {
        field: field!(kvm_xcrs, nr_xcrs),
        values: Values::UpTo(16),
        ..xcrs("at most 16 registers")
    },
    Rule {
        field: field!(kvm_xcrs, flags),
        values: Values::Bits(0),
        ..xcrs("no flags")
    },
    Rule {
        field: (offset_of!(kvm_xcrs, xcrs) + offset_of!(kvm_xcr, value), 8),
        values: Values::Listed(&[1, 3], &[0, 2, 5, 8, 9, 1 << 63 | 1]),
        ..xcrs("XCR0: x87, SSE if AVX, and components of the guest's CPUID")
    },
    Rule {
        cpuid: false,
        field: (offset_of!(kvm_xcrs, xcrs) + offset_of!(kvm_xcr, value), 8),
        values: Values::Listed(&[1], &[0, 2, 3]),
        ..xcrs("XCR0 of a guest without CPUID: x87")
    },
    Rule {
        field: field!(kvm_debugregs, flags),
        values: Values::Bits(0),
        ..debugregs("no flags")
    },
    Rule {
        field: field!(kvm_debugregs, dr6),
        values: Values::UpTo(0xffff_ffff),
        ..debugregs("DR6: 32 bits")
    },
    Rule {
        field: field!(kvm_debugregs, dr7),
        values: Values::UpTo(0xffff_ffff),
        ..debugregs("DR7: 32 bits")
    },
    Rule {
        field: (offset_of!(kvm_debugregs, db), 8),
        ..debugregs("addresses of breakpoints: any value")
    },
    Rule {
        field: field!(kvm_vcpu_events, flags),
        // NMI pending, SIPI vector, shadow, SMM; not payload and triple fault, whose capabilities are not enabled.
        values: Values::Bits(0xf),
        ..events("flags that exist and are enabled")
    },
    Rule {
        with: |bytes| edit::<kvm_vcpu_events>(bytes, |all| all.exception.injected = 1),
        field: field!(kvm_vcpu_events, exception.nr),
        values: Values::Listed(&[0, 1, 3, 31], &[2, 32, 255]),
        ..events("an exception's vector: below 32, and not the NMI's")
    },
    Rule {
        field: field!(kvm_vcpu_events, exception.nr),
        ..events("the vector without exception: ignored")
    },
    Rule {
        values: Values::Listed(&[0], &[1, 2, 3, 4, 5, 9, 10, u32::MAX as u64]),
        field: field!(kvm_mp_state, mp_state),
        ..rule(
            KVM_SET_MP_STATE,
            Argument::Read(KVM_GET_MP_STATE, size_of::<kvm_mp_state>()),
            "without a local APIC: runnable",
        )
    },
    Rule {
        controllers: Controllers::Pc,
        values: Values::Listed(&[0, 1, 2, 3, 4, 9], &[5, 6, 7, 8, 10, u32::MAX as u64]),
        field: field!(kvm_mp_state, mp_state),
        ..rule(
            KVM_SET_MP_STATE,
            Argument::Read(KVM_GET_MP_STATE, size_of::<kvm_mp_state>()),
            "with a local APIC: x86's states, and the halt until a reset",
        )
    },
    Rule {
        values: Values::Listed(&[], &[0, 1]),
        ..rule(
            KVM_SET_LAPIC,
            Argument::Zeros(size_of::<kvm_lapic_state>()),
            "needs a local APIC",
        )
    },
    Rule {
        controllers: Controllers::Pc,
        ..rule(
            KVM_SET_LAPIC,
            Argument::Read(KVM_GET_LAPIC, size_of::<kvm_lapic_state>()),
            "any registers",
        )
    },
    Rule {
        cpuid: false,
        with: |bytes| {
            bytes[0] = 1;
            bytes[8..12].copy_from_slice(&0x8000_0008u32.to_le_bytes());
        },
        // The second byte of EAX, which follows function, index and flags.
        field: (8 + 12 + 1, 1),
        values: Values::Listed(&[0, 48, 57], &[1, 32, 47, 49, 56, 58, 64, 255]),
        ..rule(
            KVM_SET_CPUID2,
            Argument::Zeros(8 + size_of::<kvm_cpuid_entry2>()),
            "linear addresses of 48 or 57 bits",
        )
    },
    Rule {
        cpuid: false,
        with: |bytes| {
            bytes[0] = 1;
            bytes[8] = 0xd;
            // The index is significant.
            bytes[16] = 1;
        },
        field: (8 + 12, 4),
        values: Values::Listed(&[0, 1, 3, 7, 0x207], &[1 << 18, 0x6_0007]),
        errno: EPERM,
        differs: Some("the processor has no AMX, or the process may use it"),
        ..rule(
            KVM_SET_CPUID2,
            Argument::Zeros(8 + size_of::<kvm_cpuid_entry2>()),
            "no state component that the process has to request",
        )
    },
    Rule {
        field: field!(kvm_signal_mask, len),
        values: Values::Listed(&[8], &[0, 4, 7, 9, 16]),
        ..rule(
            KVM_SET_SIGNAL_MASK,
            Argument::Zeros(16),
            "8 bytes of signals",
        )
    },
    Rule {
        field: (0, 8),
        // Banks, MCG_CTL_P, extended registers, MCG_SER_P.
        values: Values::Listed(
            &[1, 32, 0x101, 0xff_0101, 0x100_0101],
            &[0, 33, 255, 0x100, 1 << 31 | 1, 1 << 32 | 1],
        ),
        differs: OTHER_CPU,
        ..rule(
            KVM_X86_SETUP_MCE,
            Argument::Zeros(8),
            "1 to 32 banks, supported capabilities",
        )
    },
    Rule {
        with: |bytes| edit::<kvm_x86_mce>(bytes, |all| all.status = 1 << 63),
        field: field!(kvm_x86_mce, bank),
        values: Values::UpTo(31),
        ..rule(
            KVM_X86_SET_MCE,
            Argument::Zeros(size_of::<kvm_x86_mce>()),
            "a bank that exists",
        )
    },
    Rule {
        field: field!(kvm_x86_mce, status),
        values: Values::Listed(&[1 << 63], &[0, 1 << 61]),
        ..rule(
            KVM_X86_SET_MCE,
            Argument::Zeros(size_of::<kvm_x86_mce>()),
            "an error that is valid",
        )
    },
    Rule {
        values: Values::Listed(&[], &[0, 0x1000]),
        ..rule(KVM_SET_VAPIC_ADDR, Argument::Zeros(8), "needs a local APIC")
    },
    Rule {
        controllers: Controllers::Pc,
        values: Values::Listed(&[0], &[0x1000, 1 << 40]),
        ..rule(
            KVM_SET_VAPIC_ADDR,
            Argument::Zeros(8),
            "an address with memory, or 0",
        )
    },
    Rule {
        values: Values::Listed(&[], &[256, u32::MAX as u64]),
        field: (0, 4),
        ..rule(KVM_INTERRUPT, Argument::Zeros(4), "a vector of 8 bits")
    },
    Rule {
        controllers: Controllers::Pc,
        values: Values::Listed(&[], &[32, 255]),
        field: (0, 4),
        errno: ENXIO,
        ..rule(KVM_INTERRUPT, Argument::Zeros(4), "no 8259 of KVM's")
    },
    Rule {
        values: Values::Listed(
            &[0, 1, LME, LMA, NXE],
            &[2, 4, 1 << 9, SVME, 1 << 16, 1 << 32, 1 << 63],
        ),
        differs: OTHER_CPU,
        ..msr(
            0xc000_0080,
            "EFER of a client: bits that some guest can have",
        )
    },
    Rule {
        values: Values::Listed(
            &[0x0007_0406_0007_0406, 0, 0x0101_0101_0606_0505],
            &[2, 3, 8, 0x0200_0000_0000_0000, 0x80],
        ),
        differs: LAX_MODULE,
        ..msr(0x277, "PAT: memory types that exist")
    },
    Rule {
        values: Values::Listed(&[0, 6, 0xc06, 0x800], &[2, 3, 7, 0x106, 1 << 12, 1 << 32]),
        ..msr(
            0x2ff,
            "MTRR default type: enable bits and a type that exists",
        )
    },
    Rule {
        values: Values::Listed(
            &[0, 6, 0xf000_0006, (1 << 48) - 0x1000],
            &[2, 7, 0x106, 0x800, 1 << 48],
        ),
        ..msr(
            0x200,
            "MTRR base: a type that exists, and the guest's physical addresses",
        )
    },
    Rule {
        values: Values::Listed(&[0, 0x800, (1 << 48) - 0x800], &[1, 0x400, 1 << 48]),
        ..msr(
            0x201,
            "MTRR mask: a valid bit, and the guest's physical addresses",
        )
    },
    Rule {
        values: Values::Listed(&[0, 0x0606_0606_0606_0606, 0x0504_0100], &[2, 0x0700, 0x80]),
        ..msr(0x250, "fixed MTRR: types that exist")
    },
    Rule {
        values: Values::Listed(
            &[0, 0x7fff_ffff_ffff, 0xffff_8000_0000_0000],
            &[1 << 47, 1 << 63, 0x8000_0000_0000],
        ),
        ..msr(0xc000_0082, "LSTAR: canonical")
    },
    Rule {
        values: Values::Listed(
            &[0, 0x7fff_ffff_ffff, 0xffff_8000_0000_0000],
            &[1 << 47, 1 << 63, 0x8000_0000_0000],
        ),
        ..msr(0xc000_0102, "kernel's GS base: canonical")
    },
    msr(0x176, "SYSENTER_EIP: any value, made canonical"),
    Rule {
        values: Values::Bits(1 << 3 | 1 << 6 | 1 << 8 | 1 << 18 | 1 << 24),
        differs: OTHER_CPU,
        ..msr(
            0xc001_0015,
            "HWCR: bits that have an effect, or that old firmware sets",
        )
    },
    Rule {
        values: Values::Listed(&[0, 1], &[2, 1 << 63]),
        differs: LAX_MODULE,
        ..msr(0x140, "MISC_FEATURES: CPUID faulting")
    },
    Rule {
        values: Values::Listed(&[], &[0, 1]),
        ..msr(0xfe, "MTRR capabilities: read-only")
    },
    Rule {
        controllers: Controllers::None,
        values: APIC_BASES,
        ..msr(0x1b, "APIC_BASE")
    },
    Rule {
        values: Values::UpTo(0xffff_d000),
        ..of_vm(
            KVM_SET_TSS_ADDR,
            Argument::Number,
            "three pages below 4 GiB",
        )
    },
    Rule {
        values: Values::Listed(&[], &[0, 0xfffb_c000]),
        ..of_vm(
            KVM_SET_IDENTITY_MAP_ADDR,
            Argument::Zeros(8),
            "before there are vCPUs",
        )
    },
    Rule {
        values: Values::Listed(&[], &[0, 1]),
        errno: libc::EBUSY,
        ..of_vm(
            KVM_SET_BOOT_CPU_ID,
            Argument::Number,
            "before there are vCPUs",
        )
    },
    Rule {
        values: Values::From(64),
        ..of_vm(KVM_SET_NR_MMU_PAGES, Argument::Number, "at least 64 pages")
    },
    Rule {
        values: Values::Listed(&[], &[0, 1_000_000]),
        differs: Some("before Linux 6.17 the call concerns later vCPUs"),
        ..of_vm(KVM_SET_TSC_KHZ, Argument::Number, "before there are vCPUs")
    },
    Rule {
        field: field!(kvm_clock_data, flags),
        // TSC stable, real time, host's TSC.
        values: Values::Bits(0xe),
        ..of_vm(
            KVM_SET_CLOCK,
            Argument::Read(KVM_GET_CLOCK, size_of::<kvm_clock_data>()),
            "flags that KVM_GET_CLOCK returns",
        )
    },
    Rule {
        values: Values::Listed(&[], &[0, 1, 2]),
        field: (0, 4),
        errno: ENXIO,
        ..of_vm(
            KVM_SET_IRQCHIP,
            Argument::Zeros(size_of::<kvm_irqchip>()),
            "needs controllers",
        )
    },
    Rule {
        controllers: Controllers::Pc,
        values: Values::UpTo(2),
        field: field!(kvm_irqchip, chip_id),
        ..of_vm(
            KVM_SET_IRQCHIP,
            Argument::Zeros(size_of::<kvm_irqchip>()),
            "two 8259 and an I/O APIC",
        )
    },
    Rule {
        values: Values::Listed(&[], &[0]),
        field: (0, 4),
        errno: ENXIO,
        ..of_vm(
            KVM_SET_PIT2,
            Argument::Zeros(size_of::<kvm_pit_state2>()),
            "needs an 8254",
        )
    },
    Rule {
        values: Values::Listed(&[], &[0]),
        field: (0, 4),
        ..of_vm(KVM_SET_GSI_ROUTING, Argument::Zeros(8), "needs controllers")
    },
    Rule {
        controllers: Controllers::Pc,
        values: Values::Bits(0),
        field: (4, 4),
        ..of_vm(KVM_SET_GSI_ROUTING, Argument::Zeros(8), "no flags")
    },
    Rule {
        controllers: Controllers::Pc,
        with: |bytes| bytes[0] = 1,
        // One route: GSI, type (interrupt controller, message), flags, controller and pin.
        field: (8, 4),
        values: Values::Listed(&[], &[4096, u32::MAX as u64]),
        ..of_vm(KVM_SET_GSI_ROUTING, Argument::Zeros(56), "GSIs below 4096")
    },
    Rule {
        controllers: Controllers::Pc,
        with: |bytes| (bytes[0], bytes[12]) = (1, 1),
        field: (24 + 4, 4),
        values: Values::UpTo(7),
        ..of_vm(
            KVM_SET_GSI_ROUTING,
            Argument::Zeros(56),
            "8 pins of an 8259",
        )
    },
    Rule {
        controllers: Controllers::Pc,
        with: |bytes| (bytes[0], bytes[12], bytes[24]) = (1, 1, 2),
        field: (24 + 4, 4),
        values: Values::UpTo(23),
        ..of_vm(
            KVM_SET_GSI_ROUTING,
            Argument::Zeros(56),
            "24 pins of the I/O APIC",
        )
    },
    Rule {
        controllers: Controllers::Pc,
        with: |bytes| (bytes[0], bytes[12]) = (1, 1),
        field: (24, 4),
        values: Values::UpTo(2),
        ..of_vm(
            KVM_SET_GSI_ROUTING,
            Argument::Zeros(56),
            "three controllers",
        )
    },
    Rule {
        controllers: Controllers::Pc,
        with: |bytes| (bytes[0], bytes[12]) = (1, 1),
        field: (16, 4),
        values: Values::Bits(0),
        ..of_vm(
            KVM_SET_GSI_ROUTING,
            Argument::Zeros(56),
            "a route without flags",
        )
    },
    Rule {
        field: field!(kvm_enable_cap, flags),
        with: |bytes| edit::<kvm_enable_cap>(bytes, |all| all.cap = KVM_CAP_EXCEPTION_PAYLOAD),
        values: Values::Bits(0),
        ..of_vm(
            KVM_ENABLE_CAP,
            Argument::Zeros(size_of::<kvm_enable_cap>()),
            "no flags",
        )
    },
    Rule {
        field: (offset_of!(kvm_enable_cap, args), 8),
        with: |bytes| edit::<kvm_enable_cap>(bytes, |all| all.cap = KVM_CAP_X86_DISABLE_EXITS),
        values: Values::Listed(&[], &[0, 2, 1 << 32]),
        ..of_vm(
            KVM_ENABLE_CAP,
            Argument::Zeros(size_of::<kvm_enable_cap>()),
            "DISABLE_EXITS before there are vCPUs",
        )
    },
    Rule {
        field: (offset_of!(kvm_enable_cap, args), 8),
        with: |bytes| edit::<kvm_enable_cap>(bytes, |all| all.cap = KVM_CAP_MAX_VCPU_ID),
        values: Values::Listed(&[4096], &[0, 1, 4095, 4097, 1 << 32]),
        differs: Some("the largest id depends on the kernel's configuration"),
        ..of_vm(
            KVM_ENABLE_CAP,
            Argument::Zeros(size_of::<kvm_enable_cap>()),
            "MAX_VCPU_ID: the first vCPU sets the largest limit",
        )
    },
    Rule {
        field: (offset_of!(kvm_enable_cap, args), 8),
        with: |bytes| {
            edit::<kvm_enable_cap>(bytes, |all| all.cap = KVM_CAP_EXIT_ON_EMULATION_FAILURE);
        },
        values: Values::Bits(1),
        ..of_vm(
            KVM_ENABLE_CAP,
            Argument::Zeros(size_of::<kvm_enable_cap>()),
            "EXIT_ON_EMULATION_FAILURE: 0 or 1",
        )
    },
];

/// Sets a field in the argument of a request to a value at the edge of one of the request's rules. Does nothing if it has none, or
/// the argument is too short.
pub fn to_an_edge(rng: &mut Rng, request: u32, bytes: &mut [u8]) {
    let in_struct = |rule: &&Rule| {
        let is_struct = matches!(rule.argument, Argument::Read(..) | Argument::Zeros(_));
        is_struct && rule.request == request && rule.range().end <= bytes.len()
    };
    let rules: Vec<_> = RULES.iter().filter(in_struct).collect();
    if !rules.is_empty() {
        let rule = rules[rng.below(rules.len() as u64) as usize];
        let edges = rule.edges();
        let (value, _) = edges[rng.below(edges.len() as u64) as usize];
        rule.set(bytes, value);
    }
}
