//! The CPUID leaves of Hyper-V's interface: the leaves that a VMM may give its guest, and the rights that a guest's
//! leaves grant.

use crate::code;
use crate::msr::*;

/// The first leaf. This leaf has the number of the last leaf, and the vendor.
pub const VENDOR: u32 = 0x4000_0000;
/// The leaf whose EAX identifies the interface.
pub const INTERFACE: u32 = 0x4000_0001;
const VERSION: u32 = 0x4000_0002;
/// The leaf of the partition's privileges and features.
pub const FEATURES: u32 = 0x4000_0003;
/// The leaf with the features that a guest is recommended to use.
pub const RECOMMENDATIONS: u32 = 0x4000_0004;
const LIMITS: u32 = 0x4000_0005;
const NESTED: u32 = 0x4000_000a;
const DEBUGGER_VENDOR: u32 = 0x4000_0080;
const DEBUGGER_INTERFACE: u32 = 0x4000_0081;
/// The leaf of the synthetic debugger's capabilities.
pub const DEBUGGER: u32 = 0x4000_0082;

/// The value of EAX in the leaf [`INTERFACE`]: "Hv#1".
pub const SIGNATURE: u32 = u32::from_le_bytes(*b"Hv#1");

/// Bits of EAX of [`FEATURES`]: the MSRs of the partition.
pub mod features_a {
    #![allow(missing_docs)]
    pub const VP_RUNTIME: u32 = 1;
    pub const TIME_REF_COUNT: u32 = 1 << 1;
    pub const SYNIC: u32 = 1 << 2;
    pub const STIMERS: u32 = 1 << 3;
    pub const APIC: u32 = 1 << 4;
    pub const HYPERCALL: u32 = 1 << 5;
    pub const VP_INDEX: u32 = 1 << 6;
    pub const RESET: u32 = 1 << 7;
    pub const REFERENCE_TSC: u32 = 1 << 9;
    pub const FREQUENCIES: u32 = 1 << 11;
    pub const REENLIGHTENMENT: u32 = 1 << 13;
    pub const TSC_INVARIANT: u32 = 1 << 15;
}

/// Bits of EBX of [`FEATURES`]: the hypercalls of the partition.
pub mod features_b {
    #![allow(missing_docs)]
    pub const POST_MESSAGES: u32 = 1 << 4;
    pub const SIGNAL_EVENTS: u32 = 1 << 5;
    pub const DEBUGGING: u32 = 1 << 11;
    pub const EXTENDED_HYPERCALLS: u32 = 1 << 20;
}

/// Bits of EDX of [`FEATURES`]: other features.
pub mod features_d {
    #![allow(missing_docs)]
    pub const GUEST_DEBUGGING: u32 = 1 << 1;
    pub const XMM_INPUT: u32 = 1 << 4;
    pub const FREQUENCY_MSRS: u32 = 1 << 8;
    pub const CRASH_MSRS: u32 = 1 << 10;
    pub const DEBUG_MSRS: u32 = 1 << 11;
    pub const EXTENDED_GVA_RANGES: u32 = 1 << 14;
    pub const DIRECT_TIMERS: u32 = 1 << 19;
}

/// Bits of EAX of [`RECOMMENDATIONS`].
pub mod recommended {
    #![allow(missing_docs)]
    pub const REMOTE_TLB_FLUSH: u32 = 1 << 2;
    pub const APIC_MSRS: u32 = 1 << 3;
    pub const RELAXED_TIMING: u32 = 1 << 5;
    pub const NO_AUTO_EOI: u32 = 1 << 9;
    pub const CLUSTER_IPI: u32 = 1 << 10;
    pub const EX_PROCESSOR_MASKS: u32 = 1 << 11;
    pub const NO_NONARCH_CORESHARING: u32 = 1 << 18;
}

/// A bit in EAX of the leaf [`DEBUGGER`]: a kernel debugger may be used.
const ALLOW_KERNEL_DEBUGGING: u32 = 1 << 1;
/// The number of times that a guest should try to get a spinlock before it notifies the host. The value is that of
/// Hyper-V 2016.
const SPINLOCK_RETRIES: u32 = 0xfff;
/// The number of logical processors of a machine. The value is Hyper-V 2016's.
const LOGICAL_PROCESSORS: u32 = 64;

/// A CPUID leaf: EAX, EBX, ECX, EDX.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Leaf {
    /// The leaf's number.
    pub function: u32,
    /// The leaf's registers.
    pub registers: [u32; 4],
}

/// The properties of a machine that the leaves depend on.
#[derive(Clone, Copy, Debug)]
pub struct Machine {
    /// Whether virtual processors have local APICs that the host emulates.
    pub has_apic: bool,
    /// Whether two virtual processors can run on threads of one core without the guest knowing.
    pub shares_cores: bool,
    /// The greatest number of virtual processors of a partition.
    pub max_vps: u32,
}

fn text(text: [u8; 12]) -> [u32; 3] {
    let word = |at: usize| u32::from_le_bytes([text[at], text[at + 1], text[at + 2], text[at + 3]]);
    [word(0), word(4), word(8)]
}

/// Returns the leaves that a VMM may give its guest. These leaves are the same as KVM's.
pub fn supported(machine: Machine) -> [Leaf; 10] {
    let vendor = text(*b"Linux KVM Hv");
    let leaf = |function, registers| Leaf {
        function,
        registers,
    };
    let features = [
        {
            use features_a::*;
            VP_RUNTIME
                | TIME_REF_COUNT
                | SYNIC
                | STIMERS
                | APIC
                | HYPERCALL
                | VP_INDEX
                | RESET
                | REFERENCE_TSC
                | FREQUENCIES
                | REENLIGHTENMENT
                | TSC_INVARIANT
        },
        {
            use features_b::*;
            POST_MESSAGES | SIGNAL_EVENTS | DEBUGGING | EXTENDED_HYPERCALLS
        },
        0,
        {
            use features_d::*;
            GUEST_DEBUGGING
                | XMM_INPUT
                | FREQUENCY_MSRS
                | CRASH_MSRS
                | DEBUG_MSRS
                | EXTENDED_GVA_RANGES
                | if machine.has_apic { DIRECT_TIMERS } else { 0 }
        },
    ];
    let recommendations = {
        use recommended::*;
        REMOTE_TLB_FLUSH
            | APIC_MSRS
            | RELAXED_TIMING
            | NO_AUTO_EOI
            | EX_PROCESSOR_MASKS
            | if machine.has_apic { CLUSTER_IPI } else { 0 }
            | if machine.shares_cores {
                0
            } else {
                NO_NONARCH_CORESHARING
            }
    };
    // The leaf of nested features offers direct flushes and the MSR bitmap of nested guests. Only hypervisors in the
    // guest use this leaf, and they need VMX or SVM.
    let nested = [1 << 17 | 1 << 19, 1, 0, 0];
    [
        leaf(VENDOR, [DEBUGGER, vendor[0], vendor[1], vendor[2]]),
        leaf(INTERFACE, [SIGNATURE, 0, 0, 0]),
        // The build and version are those of Windows Server 2016.
        leaf(VERSION, [0x3839, 10 << 16, 0, 0]),
        leaf(FEATURES, features),
        leaf(RECOMMENDATIONS, [recommendations, SPINLOCK_RETRIES, 0, 0]),
        leaf(LIMITS, [machine.max_vps, LOGICAL_PROCESSORS, 0, 0]),
        leaf(DEBUGGER_VENDOR, [0, vendor[0], vendor[1], vendor[2]]),
        leaf(DEBUGGER_INTERFACE, [u32::from_le_bytes(*b"VS#1"), 0, 0, 0]),
        leaf(DEBUGGER, [ALLOW_KERNEL_DEBUGGING, 0, 0, 0]),
        leaf(NESTED, nested),
    ]
}

/// The parts of the interface that the guest's CPUID lets the guest use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Privileges {
    /// EAX, EBX, ECX and EDX of the leaf [`FEATURES`].
    features: [u32; 4],
    /// EAX and EBX of the leaf [`RECOMMENDATIONS`].
    recommendations: [u32; 2],
    /// EAX of the leaf [`DEBUGGER`].
    debugger: u32,
}

impl Privileges {
    /// Reads the privileges from a guest's CPUID leaves. `leaf` returns the registers of a leaf that the guest has.
    /// Returns `None` if the guest has no Hyper-V interface.
    pub fn from_cpuid(leaf: impl Fn(u32) -> Option<[u32; 4]>) -> Option<Self> {
        leaf(INTERFACE).filter(|registers| registers[0] == SIGNATURE)?;
        let [eax, ebx, ..] = leaf(RECOMMENDATIONS).unwrap_or_default();
        Some(Privileges {
            features: leaf(FEATURES).unwrap_or_default(),
            recommendations: [eax, ebx],
            debugger: leaf(DEBUGGER).unwrap_or_default()[0],
        })
    }

    fn has(&self, [a, b, d]: [u32; 3]) -> bool {
        self.features[0] & a != 0 || self.features[1] & b != 0 || self.features[3] & d != 0
    }

    fn recommends(&self, bits: u32) -> bool {
        self.recommendations[0] & bits == bits
    }

    /// Whether the guest may use the synthetic debugger.
    pub fn has_debugger(&self) -> bool {
        self.debugger & ALLOW_KERNEL_DEBUGGING != 0
    }

    /// Whether the guest sees an invariant TSC only after it has asked for one.
    pub fn controls_invariant_tsc(&self) -> bool {
        self.has([features_a::TSC_INVARIANT, 0, 0])
    }

    /// Whether timers may send interrupts directly to the local APIC.
    pub fn has_direct_timers(&self) -> bool {
        self.has([0, 0, features_d::DIRECT_TIMERS])
    }

    /// Whether XMM registers may hold the input of a hypercall.
    pub fn has_xmm_input(&self) -> bool {
        self.has([0, 0, features_d::XMM_INPUT])
    }

    /// Whether the guest may access the synthetic MSR `index`.
    pub fn allows_msr(&self, index: u32) -> bool {
        use features_a::{
            APIC, FREQUENCIES, REENLIGHTENMENT, STIMERS, SYNIC, TSC_INVARIANT, VP_RUNTIME,
        };
        self.has(match index {
            GUEST_OS_ID | crate::msr::HYPERCALL => [features_a::HYPERCALL, 0, 0],
            crate::msr::VP_RUNTIME => [VP_RUNTIME, 0, 0],
            crate::msr::TIME_REF_COUNT => [features_a::TIME_REF_COUNT, 0, 0],
            crate::msr::VP_INDEX => [features_a::VP_INDEX, 0, 0],
            crate::msr::RESET => [features_a::RESET, 0, 0],
            crate::msr::REFERENCE_TSC => [features_a::REFERENCE_TSC, 0, 0],
            SCONTROL..=EOM | SINT0..=SINT15 => [SYNIC, 0, 0],
            STIMER0_CONFIG..=STIMER3_COUNT => [STIMERS, 0, 0],
            EOI | ICR | TPR | VP_ASSIST_PAGE => [APIC, 0, 0],
            TSC_FREQUENCY | APIC_FREQUENCY => [FREQUENCIES, 0, 0],
            REENLIGHTENMENT_CONTROL | TSC_EMULATION_CONTROL | TSC_EMULATION_STATUS => {
                [REENLIGHTENMENT, 0, 0]
            }
            TSC_INVARIANT_CONTROL => [TSC_INVARIANT, 0, 0],
            CRASH_P0..=CRASH_CTL => [0, 0, features_d::CRASH_MSRS],
            SYNDBG_OPTIONS | SYNDBG_CONTROL..=SYNDBG_PENDING_BUFFER => {
                [0, 0, features_d::DEBUG_MSRS]
            }
            _ => return false,
        })
    }

    /// Whether the guest may make the hypercall `code`. Also returns `true` if no hypercall has this code, because such
    /// a call fails later with another status.
    pub fn allows_call(&self, code: u16) -> bool {
        use features_b::{DEBUGGING, EXTENDED_HYPERCALLS, POST_MESSAGES, SIGNAL_EVENTS};
        use recommended::{CLUSTER_IPI, EX_PROCESSOR_MASKS, REMOTE_TLB_FLUSH};
        match code {
            code::NOTIFY_LONG_SPIN_WAIT => !matches!(self.recommendations[1], 0 | u32::MAX),
            code::POST_MESSAGE => self.has([0, POST_MESSAGES, 0]),
            code::SIGNAL_EVENT => self.has([0, SIGNAL_EVENTS, 0]),
            code::POST_DEBUG_DATA..=code::RESET_DEBUG_SESSION => {
                !self.has_debugger() || self.has([0, DEBUGGING, 0])
            }
            code::FLUSH_SPACE | code::FLUSH_LIST => self.recommends(REMOTE_TLB_FLUSH),
            code::FLUSH_SPACE_EX | code::FLUSH_LIST_EX => {
                self.recommends(REMOTE_TLB_FLUSH | EX_PROCESSOR_MASKS)
            }
            code::SEND_IPI => self.recommends(CLUSTER_IPI),
            code::SEND_IPI_EX => self.recommends(CLUSTER_IPI | EX_PROCESSOR_MASKS),
            code::EXTENDED_FIRST..=code::EXTENDED_LAST => self.has([0, EXTENDED_HYPERCALLS, 0]),
            _ => true,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MACHINE: Machine = Machine {
        has_apic: true,
        shares_cores: true,
        max_vps: 1024,
    };

    fn guest(leaves: &[Leaf]) -> Option<Privileges> {
        Privileges::from_cpuid(|function| {
            let leaf = leaves.iter().find(|leaf| leaf.function == function)?;
            Some(leaf.registers)
        })
    }

    #[test]
    fn a_guest_with_all_leaves_may_use_all() {
        let all = guest(&supported(MACHINE)).unwrap();
        for index in 0x4000_0000..0x4000_0200 {
            let exists = is_synthetic(index)
                && !matches!(index, 0x4000_0004..=0x4000_000f | 0x4000_0011..=0x4000_001f
                    | 0x4000_0024..=0x4000_006f | 0x4000_0074..=0x4000_007f | 0x4000_0085..=0x4000_008f);
            assert_eq!(all.allows_msr(index), exists, "{index:#x}");
        }
        assert!((0..=u16::MAX).all(|code| all.allows_call(code)));
        assert!(all.has_debugger() && all.has_direct_timers() && all.has_xmm_input());
    }

    #[test]
    fn a_guest_with_the_interface_alone_may_use_nothing() {
        let [_, interface, ..] = supported(MACHINE);
        let none = guest(&[interface]).unwrap();
        assert!((0x4000_0000..0x4000_0200).all(|index| !none.allows_msr(index)));
        let allowed = [code::FLUSH_SPACE, code::SEND_IPI_EX, code::POST_MESSAGE]
            .map(|code| none.allows_call(code));
        assert_eq!(allowed, [false; 3]);
        assert!(none.allows_call(0xbeef), "it does not exist");
        assert_eq!(guest(&[]), None);
        let other = Leaf {
            registers: [0; 4],
            ..interface
        };
        assert_eq!(guest(&[other]), None);
    }

    #[test]
    fn some_features_need_an_apic() {
        let without = supported(Machine {
            has_apic: false,
            ..MACHINE
        });
        let guest = guest(&without).unwrap();
        assert!(!guest.has_direct_timers() && !guest.allows_call(code::SEND_IPI));
        assert!(guest.allows_call(code::FLUSH_LIST_EX));
    }
}
