//! Rules for the values of registers (KVM_SET_REGS, KVM_SET_SREGS, KVM_SET_SREGS2).

use super::*;

const CR0: u64 = 0xffff_ffff & !(1 << 31 | 1 << 29);
/// The bits of CR4 that are valid with any CPUID: VME PVI TSD DE PSE PAE MCE PGE PCE OSFXSR OSXMMEXCPT.
const CR4_ALWAYS: u64 = 0x7ff;

const fn sregs(words: &'static str) -> Rule {
    of_struct::<kvm_sregs>(KVM_SET_SREGS, KVM_GET_SREGS, words)
}

const fn sregs2(words: &'static str) -> Rule {
    of_struct::<kvm_sregs2>(KVM_SET_SREGS2, KVM_GET_SREGS2, words)
}

/// Sets the other register bits that long mode needs.
fn long_mode(bytes: &mut [u8]) {
    edit::<kvm_sregs>(bytes, |all| {
        (all.cr0, all.cr4, all.efer) = (0x8000_0011, 0x20, 0x500);
    });
}

pub(super) const RULES: &[Rule] = &[
    Rule {
        field: field!(kvm_regs, rflags),
        ..of_struct::<kvm_regs>(
            KVM_SET_REGS,
            KVM_GET_REGS,
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
            &[0, 1, 0x20, CR4_ALWAYS, 1 << 11, 1 << 18, 1 << 20],
            &[1 << 13, 1 << 14, 1 << 15, 1 << 19, 1 << 32, u64::MAX],
        ),
        cpuid: false,
        differs: LAX_MODULE,
        ..sregs("CR4 of a guest without CPUID: any feature, as before Linux 7.3")
    },
    Rule {
        field: field!(kvm_sregs, efer),
        values: Values::Listed(&[0, 1, LME, NXE, SVME], &[LMA, 2, 4, 1 << 9, 1 << 32]),
        cpuid: false,
        differs: LAX_MODULE,
        ..sregs(
            "EFER of a guest without CPUID: any feature, as before Linux 7.3; no LMA without paging",
        )
    },
    Rule {
        field: field!(kvm_sregs, efer),
        values: Values::Listed(
            &[0, 1, LME, NXE, SVME, 1 | LME | NXE],
            &[LMA, 2, 4, 1 << 9, 1 << 13, 1 << 16, 1 << 32, 1 << 63],
        ),
        differs: LAX_MODULE,
        ..sregs("EFER without paging: no LMA, and the bits of the guest's CPUID")
    },
    Rule {
        with: long_mode,
        field: field!(kvm_sregs, efer),
        values: Values::Listed(&[0x500, 0x501, 0xd00, 0x1500], &[LME, LMA, 0x502, 0x2500]),
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
];
