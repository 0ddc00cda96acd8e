//! Rules for requests to a VM.

use super::*;

const fn of_vm(request: u32, argument: Argument, words: &'static str) -> Rule {
    Rule {
        on: On::Vm,
        cpuid: false,
        ..rule(request, argument, words)
    }
}

/// Returns a rule for a routing table with one route.
const fn one_route(words: &'static str) -> Rule {
    Rule {
        controllers: Controllers::Pc,
        ..of_vm(KVM_SET_GSI_ROUTING, Argument::Zeros(56), words)
    }
}

const fn enable_cap(words: &'static str) -> Rule {
    let zeros = Argument::Zeros(size_of::<kvm_enable_cap>());
    of_vm(KVM_ENABLE_CAP, zeros, words)
}

pub(super) const RULES: &[Rule] = &[
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
        differs: Some(Differs::Always(
            "before Linux 6.17 the call concerns later vCPUs",
        )),
        ..of_vm(KVM_SET_TSC_KHZ, Argument::Number, "before there are vCPUs")
    },
    Rule {
        field: field!(kvm_clock_data, flags),
        // The valid flags are: TSC stable, real time, host's TSC.
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
        with: |bytes| bytes[0] = 1,
        // The table has one route. Its fields are GSI, type (interrupt controller or message), flags, controller and
        // pin.
        field: (8, 4),
        values: Values::Listed(&[], &[4096, u32::MAX as u64]),
        ..one_route("GSIs below 4096")
    },
    Rule {
        with: |bytes| (bytes[0], bytes[12]) = (1, 1),
        field: (24 + 4, 4),
        values: Values::UpTo(7),
        ..one_route("8 pins of an 8259")
    },
    Rule {
        with: |bytes| (bytes[0], bytes[12], bytes[24]) = (1, 1, 2),
        field: (24 + 4, 4),
        values: Values::UpTo(23),
        ..one_route("24 pins of the I/O APIC")
    },
    Rule {
        with: |bytes| (bytes[0], bytes[12]) = (1, 1),
        field: (24, 4),
        values: Values::UpTo(2),
        ..one_route("three controllers")
    },
    Rule {
        with: |bytes| (bytes[0], bytes[12]) = (1, 1),
        field: (16, 4),
        values: Values::Bits(0),
        ..one_route("a route without flags")
    },
    Rule {
        field: field!(kvm_enable_cap, flags),
        with: |bytes| edit::<kvm_enable_cap>(bytes, |all| all.cap = KVM_CAP_EXCEPTION_PAYLOAD),
        values: Values::Bits(0),
        ..enable_cap("no flags")
    },
    Rule {
        field: (offset_of!(kvm_enable_cap, args), 8),
        with: |bytes| edit::<kvm_enable_cap>(bytes, |all| all.cap = KVM_CAP_X86_DISABLE_EXITS),
        values: Values::Listed(&[], &[0, 2, 1 << 32]),
        ..enable_cap("DISABLE_EXITS before there are vCPUs")
    },
    Rule {
        field: (offset_of!(kvm_enable_cap, args), 8),
        with: |bytes| edit::<kvm_enable_cap>(bytes, |all| all.cap = KVM_CAP_MAX_VCPU_ID),
        values: Values::Listed(&[4096], &[0, 1, 4095, 4097, 1 << 32]),
        differs: Some(Differs::Always(
            "the largest id depends on the kernel's configuration",
        )),
        ..enable_cap("MAX_VCPU_ID: the first vCPU sets the largest limit")
    },
    Rule {
        field: (offset_of!(kvm_enable_cap, args), 8),
        with: |bytes| {
            edit::<kvm_enable_cap>(bytes, |all| all.cap = KVM_CAP_EXIT_ON_EMULATION_FAILURE);
        },
        values: Values::Bits(1),
        ..enable_cap("EXIT_ON_EMULATION_FAILURE: 0 or 1")
    },
];
