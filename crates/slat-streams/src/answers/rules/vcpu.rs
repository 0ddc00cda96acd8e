//! Rules for a vCPU's other state: FPU, debug registers, events, local APIC, CPUID, interrupts.

use super::*;

// The offset and the size of a field of an XSAVE area.
const MXCSR: (usize, usize) = (24, 4);
const XSTATE_BV: (usize, usize) = (512, 8);
const XCOMP_BV: (usize, usize) = (520, 8);

const fn xsave(words: &'static str) -> Rule {
    rule(KVM_SET_XSAVE, Argument::Read(KVM_GET_XSAVE, 4096), words)
}

const fn xcrs(words: &'static str) -> Rule {
    of_struct::<kvm_xcrs>(KVM_SET_XCRS, KVM_GET_XCRS, words)
}

const fn debugregs(words: &'static str) -> Rule {
    of_struct::<kvm_debugregs>(KVM_SET_DEBUGREGS, KVM_GET_DEBUGREGS, words)
}

const fn events(words: &'static str) -> Rule {
    of_struct::<kvm_vcpu_events>(KVM_SET_VCPU_EVENTS, KVM_GET_VCPU_EVENTS, words)
}

pub(super) const RULES: &[Rule] = &[
    Rule {
        field: field!(kvm_fpu, mxcsr),
        ..of_struct::<kvm_fpu>(KVM_SET_FPU, KVM_GET_FPU, "any value; MXCSR has no effect")
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
        // The valid flags say which fields are set: pending NMI, SIPI vector, interrupt shadow, SMM. The flags for
        // payload and triple fault are invalid, because their capabilities are not enabled.
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
        ..of_struct::<kvm_mp_state>(
            KVM_SET_MP_STATE,
            KVM_GET_MP_STATE,
            "without a local APIC: runnable",
        )
    },
    Rule {
        controllers: Controllers::Pc,
        values: Values::Listed(&[0, 1, 2, 3, 4, 9], &[5, 6, 7, 8, 10, u32::MAX as u64]),
        field: field!(kvm_mp_state, mp_state),
        ..of_struct::<kvm_mp_state>(
            KVM_SET_MP_STATE,
            KVM_GET_MP_STATE,
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
        ..of_struct::<kvm_lapic_state>(KVM_SET_LAPIC, KVM_GET_LAPIC, "any registers")
    },
    Rule {
        cpuid: false,
        with: |bytes| {
            bytes[0] = 1;
            bytes[8..12].copy_from_slice(&0x8000_0008u32.to_le_bytes());
        },
        // The field is the second byte of EAX in a CPUID leaf. EAX follows function, index and flags.
        field: (8 + 12 + 1, 1),
        values: Values::Listed(&[0, 48, 57], &[1, 32, 47, 49, 52, 56, 58, 64, 255]),
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
            // Sets the flag that the leaf's index is significant.
            bytes[16] = 1;
        },
        field: (8 + 12, 4),
        values: Values::Listed(&[0, 1, 3, 7, 0x207], &[1 << 18, 0x6_0007]),
        errno: EPERM,
        differs: Some(Differs::Always(
            "the processor has no AMX, or the process may use it",
        )),
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
        // Each value has the number of banks and perhaps a flag: MCG_CTL_P, extended registers, MCG_SER_P.
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
];
