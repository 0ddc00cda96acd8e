//! The state of a new VM and a new vCPU in KVM, as the requests that read state return it. Except for the x87 unit,
//! this is the state of a processor after RESET.

use super::api::{Controllers, Handle, Machine, Who};
use super::edges::{Difference, On};
use kvm_bindings::*;
use slat_kvm::abi::*;
use slat_kvm::user::Plain;
use std::ops::Range;

/// A request that reads state, and its result for a new object.
pub struct Fresh {
    /// The number of the request (`KVM_GET_…`).
    pub request: u32,
    /// The kind of object that serves the request.
    pub on: On,
    /// The interrupt controllers of the VM.
    pub controllers: Controllers,
    /// The argument of the request. The bytes that are not zero select the state to read.
    pub asked: Vec<u8>,
    /// The result that KVM returns.
    pub answer: Result<Vec<u8>, i32>,
    /// The bytes that are not compared, because they vary.
    pub varies: &'static [Range<usize>],
    /// The bytes in which the host's kernel may return other values, and why.
    pub differs: &'static [(Range<usize>, &'static str)],
}

fn bytes<T: Plain>(value: &T) -> Vec<u8> {
    // SAFETY: a `Plain` value has no padding that matters, and the value is live.
    unsafe { std::slice::from_raw_parts(std::ptr::from_ref(value).cast::<u8>(), size_of::<T>()) }
        .to_vec()
}

/// Returns the list's entry for a vCPU's request that reads a struct. KVM returns `value`.
fn vcpu<T: Plain>(request: u32, value: &T) -> Fresh {
    Fresh {
        request,
        on: On::Vcpu,
        controllers: Controllers::None,
        asked: vec![0; size_of::<T>()],
        answer: Ok(bytes(value)),
        varies: &[],
        differs: &[],
    }
}

fn vm<T: Plain>(request: u32, value: &T) -> Fresh {
    Fresh {
        on: On::Vm,
        controllers: Controllers::Pc,
        ..vcpu(request, value)
    }
}

/// Returns a real-mode segment of 64 KiB.
fn segment(type_: u8, s: u8) -> kvm_segment {
    kvm_segment {
        limit: 0xffff,
        type_,
        present: 1,
        s,
        ..Default::default()
    }
}

/// Returns the special registers of the bootstrap processor.
fn sregs() -> kvm_sregs {
    let data = segment(3, 1);
    let table = kvm_dtable {
        limit: 0xffff,
        ..Default::default()
    };
    kvm_sregs {
        cs: kvm_segment {
            selector: 0xf000,
            base: 0xffff_0000,
            ..segment(11, 1)
        },
        ds: data,
        es: data,
        fs: data,
        gs: data,
        ss: data,
        tr: segment(11, 0),
        ldt: segment(2, 0),
        gdt: table,
        idt: table,
        cr0: 0x6000_0010,
        apic_base: 0xfee0_0900,
        ..Default::default()
    }
}

fn sregs2() -> kvm_sregs2 {
    let all = sregs();
    kvm_sregs2 {
        cs: all.cs,
        ds: all.ds,
        es: all.es,
        fs: all.fs,
        gs: all.gs,
        ss: all.ss,
        tr: all.tr,
        ldt: all.ldt,
        gdt: all.gdt,
        idt: all.idt,
        cr0: all.cr0,
        apic_base: all.apic_base,
        ..Default::default()
    }
}

/// Returns the XSAVE area. FCW has the value that FNINIT sets, and MXCSR the value after RESET.
fn xsave() -> [u32; 1024] {
    let mut area = [0; 1024];
    area[0] = 0x37f;
    area[6] = 0x1f80;
    area
}

/// Returns the registers of the bootstrap processor's local APIC. Because of a quirk of KVM, LINT0 is enabled.
fn lapic() -> kvm_lapic_state {
    let mut state = kvm_lapic_state::default();
    let registers = [
        (0x30, 0x0005_0014u32),
        (0xe0, u32::MAX),
        (0xf0, 0xff),
        (0x320, 1 << 16),
        (0x330, 1 << 16),
        (0x340, 1 << 16),
        (0x350, 0x700),
        (0x360, 1 << 16),
        (0x370, 1 << 16),
    ];
    for (at, value) in registers {
        for (to, from) in state.regs[at..].iter_mut().zip(value.to_le_bytes()) {
            *to = from as _;
        }
    }
    state
}

/// Returns the list's entry for a chip's state: the mask of edge/level bits of an 8259, or the masked pins of the I/O
/// APIC.
fn chip(id: u32) -> Fresh {
    let mut answer = vec![0; size_of::<kvm_irqchip>()];
    answer[0] = id as u8;
    match id {
        0 => answer[8 + 15] = 0xf8,
        1 => answer[8 + 15] = 0xde,
        _ => {
            answer[8..16].copy_from_slice(&0xfec0_0000u64.to_le_bytes());
            for pin in 0..24 {
                answer[8 + 24 + 8 * pin + 2] = 1;
            }
        }
    }
    let mut asked = vec![0; answer.len()];
    asked[0] = id as u8;
    Fresh {
        asked,
        answer: Ok(answer),
        ..vm(KVM_GET_IRQCHIP, &kvm_irqchip::default())
    }
}

fn pit() -> kvm_pit_state2 {
    let mut state = kvm_pit_state2::default();
    for channel in &mut state.channels {
        (channel.count, channel.mode, channel.gate) = (0x1_0000, 0xff, 1);
    }
    state.channels[2].gate = 0;
    state
}

/// Returns the entries of all requests that read state.
pub fn all() -> Vec<Fresh> {
    let regs = kvm_regs {
        // RDX has the processor's signature. Without CPUID leaves, KVM uses its own default.
        rdx: 0x600,
        rip: 0xfff0,
        rflags: 2,
        ..Default::default()
    };
    let fpu = kvm_fpu {
        fcw: 0x37f,
        ..Default::default()
    };
    let mut xcrs = kvm_xcrs {
        nr_xcrs: 1,
        ..Default::default()
    };
    xcrs.xcrs[0].value = 1;
    let debugregs = kvm_debugregs {
        dr6: 0xffff_0ff0,
        dr7: 0x400,
        ..Default::default()
    };
    let events = kvm_vcpu_events {
        flags: KVM_VCPUEVENT_VALID_NMI_PENDING
            | KVM_VCPUEVENT_VALID_SHADOW
            | KVM_VCPUEVENT_VALID_SMM,
        ..Default::default()
    };
    let no_lapic = Fresh {
        answer: Err(libc::EINVAL),
        ..vcpu(KVM_GET_LAPIC, &lapic())
    };
    let no_chips = Fresh {
        controllers: Controllers::None,
        answer: Err(libc::ENXIO),
        ..chip(0)
    };
    let no_timer = Fresh {
        controllers: Controllers::None,
        answer: Err(libc::ENXIO),
        ..vm(KVM_GET_PIT2, &pit())
    };
    const SEGMENT_TYPES: &[(Range<usize>, &str)] =
        &[(0..192, "AMD's segments begin without the accessed bit")];
    let mut all = vec![
        vcpu(KVM_GET_REGS, &regs),
        Fresh {
            differs: SEGMENT_TYPES,
            ..vcpu(KVM_GET_SREGS, &sregs())
        },
        Fresh {
            differs: SEGMENT_TYPES,
            ..vcpu(KVM_GET_SREGS2, &sregs2())
        },
        vcpu(KVM_GET_FPU, &fpu),
        Fresh {
            // MXCSR's mask, the bytes for software, and XSTATE_BV depend on the processor and its components.
            varies: &[28..32, 464..472, 512..520],
            ..vcpu(KVM_GET_XSAVE, &xsave())
        },
        vcpu(KVM_GET_XCRS, &xcrs),
        vcpu(KVM_GET_DEBUGREGS, &debugregs),
        vcpu(KVM_GET_VCPU_EVENTS, &events),
        vcpu(KVM_GET_MP_STATE, &kvm_mp_state::default()),
        no_lapic,
        Fresh {
            controllers: Controllers::Pc,
            ..vcpu(KVM_GET_LAPIC, &lapic())
        },
        no_chips,
        chip(0),
        chip(1),
        chip(2),
        no_timer,
        Fresh {
            // The times at which each channel was loaded vary.
            varies: &[16..24, 40..48, 64..72],
            ..vm(KVM_GET_PIT2, &pit())
        },
        Fresh {
            controllers: Controllers::None,
            // These fields vary: the clock; the flags, which depend on the host's clock; the real time; the host's TSC.
            varies: &[Range { start: 0, end: 40 }],
            ..vm(KVM_GET_CLOCK, &kvm_clock_data::default())
        },
    ];
    // A vCPU without CPUID leaves returns a count of 0.
    let cpuid = vec![0; 8 + 4 * size_of::<kvm_cpuid_entry2>()];
    let mut asked = cpuid.clone();
    asked[0] = 4;
    all.push(Fresh {
        asked,
        answer: Ok(cpuid),
        ..vcpu(KVM_GET_CPUID2, &0u64)
    });
    all
}

impl Fresh {
    /// Compares the result for a new object with the list. Returns a difference. `None`: there is no difference, or no
    /// /dev/kvm.
    pub fn check(&self, who: Who) -> Option<Difference> {
        let machine = Machine::new(who, self.controllers)?;
        let object = match self.on {
            On::Vm => &machine.vm,
            On::Vcpu => &machine.vcpu,
        };
        let mut found = self.asked.clone();
        let found = object.bytes(self.request, &mut found).map(|_| found);
        let name = slat_kvm::abi::name(self.request).unwrap_or("?");
        let (expected, found) = match (&self.answer, found) {
            (Ok(expected), Ok(found)) => (expected, found),
            (Err(expected), Err(found)) if *expected == found => return None,
            (expected, found) => {
                let (expected, found) = (expected.as_ref().map(drop), found.map(drop));
                let what = format!("{name}: {found:?}, not {expected:?}");
                return Some(Difference { what, why: None });
            }
        };
        let why = |at: usize| {
            let differs = (self.differs.iter()).filter(|_| who == Who::Kernel);
            differs
                .clone()
                .find(|(range, _)| range.contains(&at))
                .map(|(_, why)| *why)
        };
        let wrong = (0..found.len()).filter(|at| {
            found[*at] != expected[*at] && !self.varies.iter().any(|range| range.contains(at))
        });
        // If there are several differences, report one for which no reason is known, if there is one.
        let wrong = wrong.min_by_key(|at| why(*at).is_some())?;
        Some(Difference {
            what: format!(
                "{name}: byte {wrong:#x} is {:#x}, not {:#x}",
                found[wrong], expected[wrong]
            ),
            why: why(wrong),
        })
    }
}

/// An MSR of KVM's index list that is not 0 in a new vCPU without CPUID leaves.
pub struct FreshMsr {
    /// The MSR's number.
    pub index: u32,
    /// The MSR's value. `None`: the MSR has a time, which varies.
    pub value: Option<u64>,
    /// The reason why the host's kernel may have another value.
    pub differs: Option<&'static str>,
}

/// Returns the MSRs of KVM's index list that are not 0 in a new vCPU without CPUID leaves. All other MSRs of the list
/// are 0.
pub fn msrs() -> Vec<FreshMsr> {
    let msr = |index, value| FreshMsr {
        index,
        value,
        differs: None,
    };
    let amd = slat_kvm::cpuid::is_amd();
    vec![
        msr(0x10, None),
        msr(0x1b, Some(0xfee0_0900)),
        FreshMsr {
            differs: Some("each vendor module has its own"),
            ..msr(0x8b, Some(if amd { 0x0100_0065 } else { 1 << 32 }))
        },
        // IA32_SMBASE: clients read SMBASE as this MSR.
        msr(0x9e, Some(0x3_0000)),
        msr(0xce, Some(1 << 31)),
        FreshMsr {
            differs: Some("a module may say that there are fast strings"),
            ..msr(0x1a0, Some(0x1800))
        },
        msr(0x277, Some(0x0007_0406_0007_0406)),
        // TSC_RATIO: the TSC of nested guests has the same rate as the guest's TSC.
        msr(0xc000_0104, Some(1 << 32)),
        // MSRs of Hyper-V: how long the vCPU has run; the VM's time; the frequencies of the TSC and of the APIC timer.
        msr(0x4000_0010, None),
        msr(0x4000_0020, None),
        msr(0x4000_0022, None),
        msr(0x4000_0023, None),
        // MSR_KVM_POLL_CONTROL: polling in halts is enabled.
        msr(0x4b56_4d05, Some(1)),
    ]
}

/// Compares all MSRs of KVM's index list. Returns the differences.
pub fn check_msrs(who: Who) -> Vec<Difference> {
    let Some(machine) = Machine::new(who, Controllers::None) else {
        return Vec::new();
    };
    let listed = index_list(&machine.system);
    assert!(listed.len() > 20);
    let known = msrs();
    let mut wrong = Vec::new();
    for index in listed {
        let mut table = vec![0; 24];
        table[0] = 1;
        table[8..12].copy_from_slice(&index.to_le_bytes());
        let read = machine.vcpu.bytes(KVM_GET_MSRS, &mut table);
        let value = u64::from_le_bytes(table[16..].try_into().expect("8 bytes"));
        let entry = known.iter().find(|msr| msr.index == index);
        let (expected, differs) = match entry {
            Some(msr) => (msr.value, msr.differs),
            None => (Some(0), None),
        };
        let is_right = read == Ok(1) && expected.is_none_or(|expected| expected == value);
        if !is_right {
            wrong.push(Difference {
                what: format!("MSR {index:#x}: {read:?} {value:#x}, not {expected:x?}"),
                why: differs.filter(|_| who == Who::Kernel),
            });
        }
    }
    wrong
}

/// Returns the numbers of the MSRs that a client must save (KVM_GET_MSR_INDEX_LIST).
fn index_list(system: &Handle) -> Vec<u32> {
    const MOST: usize = 1024;
    let mut table = vec![0; 4 + 4 * MOST];
    table[..4].copy_from_slice(&(MOST as u32).to_le_bytes());
    (system.bytes(KVM_GET_MSR_INDEX_LIST, &mut table)).expect("a list");
    let words = table.chunks_exact(4);
    let mut words = words.map(|word| u32::from_le_bytes(word.try_into().expect("4 bytes")));
    let count = words.next().expect("the count") as usize;
    words.take(count).collect()
}
