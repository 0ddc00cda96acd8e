//! The initial registers of a vCPU. Except for a few random changes, they are valid for the vCPU's mode.

use super::layout::*;
use super::tables::{GDT_LEN, Mode, selector};
use kvm_bindings::{Msrs, kvm_dtable, kvm_msr_entry, kvm_regs, kvm_segment, kvm_sregs};
use slat_kvm::VcpuFd;
use slat_model::Rng;

const PE: u64 = 1;
const MP_ET_NE: u64 = 0x32;
const WP: u64 = 1 << 16;
const PG: u64 = 1 << 31;
const PSE: u64 = 1 << 4;
const PAE: u64 = 1 << 5;
const PGE_OSFXSR: u64 = 3 << 7 | 3 << 9;
const LA57: u64 = 1 << 12;
const SCE: u64 = 1;
const LME_LMA: u64 = 5 << 8;
const NXE: u64 = 1 << 11;

fn segment(selector: u16, type_: u8, dpl: u8) -> kvm_segment {
    kvm_segment {
        selector,
        limit: u32::MAX,
        type_,
        present: 1,
        dpl,
        db: 1,
        s: 1,
        g: 1,
        ..Default::default()
    }
}

fn code_segment(rng: &mut Rng, mode: Mode, user: bool) -> kvm_segment {
    let dpl = if user { 3 } else { 0 };
    match mode {
        Mode::Real => kvm_segment {
            db: 0,
            limit: 0xffff,
            g: 0,
            ..segment(0, 11, 0)
        },
        Mode::Long | Mode::Level5 => {
            let selector = if user {
                selector::USER_CODE64
            } else {
                selector::CODE64
            };
            kvm_segment {
                l: 1,
                db: 0,
                ..segment(selector, 11, dpl)
            }
        }
        _ if !user && rng.one_in(3) => kvm_segment {
            db: 0,
            ..segment(selector::CODE16, 11, 0)
        },
        _ => segment(
            if user {
                selector::USER_CODE32
            } else {
                selector::CODE32
            },
            11,
            dpl,
        ),
    }
}

/// Changes a few bits of a segment at random.
fn disturb(rng: &mut Rng, segment: &mut kvm_segment) {
    match rng.below(5) {
        0 => segment.base = linear(rng),
        1 => segment.limit = rng.pick(&[0, 0xfff, 0xffff, 0x1_4fff]),
        2 => segment.type_ = rng.below(16) as u8,
        3 => segment.unusable = 1,
        _ => segment.selector = rng.below(0x80) as u16,
    }
}

fn special(rng: &mut Rng, mode: Mode, mut sregs: kvm_sregs) -> (kvm_sregs, kvm_sregs) {
    let user = mode != Mode::Real && rng.one_in(4);
    sregs.cs = code_segment(rng, mode, user);
    let data = match mode {
        Mode::Real => kvm_segment {
            db: 0,
            limit: 0xffff,
            g: 0,
            ..segment(0, 3, 0)
        },
        _ if user => segment(selector::USER_DATA, 3, 3),
        _ => segment(selector::DATA, 3, 0),
    };
    (sregs.ds, sregs.es, sregs.fs, sregs.gs, sregs.ss) = (data, data, data, data, data);
    sregs.tr = kvm_segment {
        base: TSS,
        limit: 0x67,
        s: 0,
        db: 0,
        g: 0,
        ..segment(selector::TSS, 11, 0)
    };
    sregs.gdt = kvm_dtable {
        base: GDT,
        limit: GDT_LEN as u16 - 1,
        ..Default::default()
    };
    sregs.idt = match mode {
        Mode::Real => kvm_dtable {
            base: 0,
            limit: 0x3ff,
            ..Default::default()
        },
        _ => kvm_dtable {
            base: IDT,
            limit: 0xfff,
            ..Default::default()
        },
    };
    sregs.cr3 = mode.root();
    (sregs.cr0, sregs.cr4, sregs.efer) = (MP_ET_NE, PGE_OSFXSR, SCE | NXE);
    if mode != Mode::Real {
        sregs.cr0 |= PE;
    }
    if !matches!(mode, Mode::Real | Mode::Flat) {
        sregs.cr0 |= PG | WP;
    }
    sregs.cr4 |= match mode {
        Mode::Bits32 => PSE,
        Mode::Level5 => PAE | LA57,
        _ => PAE,
    };
    if mode.is_long() {
        sregs.efer |= LME_LMA;
    }
    let valid = sregs;
    for _ in 0..rng.below(4) {
        match rng.below(6) {
            0 => sregs.cr0 ^= rng.pick(&[WP, 1 << 2, 1 << 3, 1 << 18, 1 << 29, 1 << 30]),
            1 => {
                sregs.cr4 ^= rng.pick(&[
                    PSE,
                    1 << 2,
                    1 << 3,
                    1 << 11,
                    1 << 16,
                    1 << 20,
                    1 << 21,
                    3 << 9,
                ])
            }
            2 => sregs.efer ^= rng.pick(&[NXE, SCE]),
            3 => disturb(rng, &mut sregs.cs),
            4 => disturb(rng, &mut sregs.ss),
            _ => {
                let mut segment = sregs.ds;
                disturb(rng, &mut segment);
                (sregs.ds, sregs.es) = (segment, segment);
            }
        }
    }
    (sregs, valid)
}

fn general(rng: &mut Rng, vcpu: u64) -> kvm_regs {
    let mut value = || match rng.below(4) {
        0 => rng.word(),
        1 => rng.below(64),
        _ => linear(rng),
    };
    kvm_regs {
        rax: value(),
        rbx: value(),
        rcx: value(),
        rdx: value(),
        rsi: value(),
        rdi: value(),
        rbp: value(),
        r8: value(),
        r9: value(),
        r12: value(),
        r15: value(),
        rsp: if rng.one_in(6) {
            linear(rng)
        } else {
            STACK + vcpu * 0x1000
        },
        rip: if rng.one_in(16) {
            linear(rng)
        } else {
            CODE + vcpu * 0x1000
        },
        rflags: 2 | rng.pick(&[
            0, 0, 0x200, 0x200, 0x100, 0x3000, 0x2_0000, 0x4_0000, 0x4000, 0x400,
        ]),
        ..Default::default()
    }
}

/// The MSR (MSR_KVM_SYSTEM_TIME_NEW) that makes KVM write the time to guest memory.
const CLOCK: u32 = 0x4b56_4d01;

/// Sets a vCPU's registers, and sometimes a pending event. If `may_tell_time`, KVM may write the time to the guest's
/// memory.
pub fn set(rng: &mut Rng, mode: Mode, index: u64, vcpu: &VcpuFd, may_tell_time: bool) {
    let now = vcpu.get_sregs().expect("registers can be read");
    let (sregs, valid) = special(rng, mode, now);
    // If KVM refuses the changed registers, the valid registers are set. If KVM refuses these, too, 5-level paging is
    // not supported, and the vCPU gets 4-level paging.
    if vcpu.set_sregs(&sregs).is_err() && vcpu.set_sregs(&valid).is_err() {
        let four = kvm_sregs {
            cr4: valid.cr4 & !LA57,
            cr3: PML4,
            ..valid
        };
        vcpu.set_sregs(&four)
            .expect("a state that every CPU can be in");
    }
    vcpu.set_regs(&general(rng, index))
        .expect("registers can be set");
    if rng.one_in(2) {
        let entry = |index: u32, data: u64| kvm_msr_entry {
            index,
            data,
            ..Default::default()
        };
        let mut msrs = vec![
            entry(0xc000_0081, 0x0013_0008 << 32),
            entry(0xc000_0082, linear(rng)),
            entry(0xc000_0084, 0x200),
            entry(0x174, 8),
            entry(0x175, linear(rng)),
            entry(0x176, CODE),
            entry(CLOCK, linear(rng) | 1),
        ];
        msrs.retain(|entry| may_tell_time || entry.index != CLOCK);
        let msrs = Msrs::from_entries(&msrs).expect("a few entries");
        // If an MSR's value is a non-canonical address, KVM refuses the value, and sets none of the MSRs after it.
        vcpu.set_msrs(&msrs).expect("MSRs can be set");
    }
    if rng.one_in(4) {
        let mut events = vcpu.get_vcpu_events().expect("events can be read");
        match rng.below(3) {
            0 => {
                events.exception.injected = 1;
                events.exception.nr = rng.below(32) as u8;
                events.exception.has_error_code = rng.below(2) as u8;
                events.exception.error_code = rng.below(0x1_0000) as u32;
            }
            1 => {
                events.interrupt.injected = 1;
                events.interrupt.nr = rng.below(256) as u8;
                events.interrupt.soft = rng.below(2) as u8;
            }
            _ => {
                events.nmi.injected = rng.below(2) as u8;
                events.nmi.pending = 1;
            }
        }
        // KVM refuses events that contradict each other.
        let _ = vcpu.set_vcpu_events(&events);
    }
}
