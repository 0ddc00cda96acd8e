//! Rules for the values of MSRs (KVM_SET_MSRS).

use super::*;

const fn msr(index: u32, words: &'static str) -> Rule {
    rule(KVM_SET_MSRS, Argument::Msr(index), words)
}

pub(super) const RULES: &[Rule] = &[
    Rule {
        values: Values::Listed(
            &[0, 1, LME, LMA, NXE, SVME],
            &[2, 4, 1 << 9, 1 << 16, 1 << 32, 1 << 63],
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
            &[1 << 47, 1 << 56, 1 << 63],
        ),
        differs: LINEAR_WIDTH,
        ..msr(0xc000_0082, "LSTAR: canonical")
    },
    Rule {
        values: Values::Listed(
            &[0, 0x7fff_ffff_ffff, 0xffff_8000_0000_0000],
            &[1 << 47, 1 << 56, 1 << 63],
        ),
        differs: LINEAR_WIDTH,
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
];
