//! Capabilities of Hyper-V's interface.

use crate::Use;
use crate::common::*;
use kvm_bindings::*;
use slat_kvm::ioctl::Object;
use slat_kvm::{VcpuExit, VcpuFd, abi};
use std::os::fd::AsRawFd;
use vmm_sys_util::eventfd::EventFd;

const GUEST_OS_ID: u32 = 0x4000_0000;
const HYPERCALL: u32 = 0x4000_0001;
const VP_INDEX: u32 = 0x4000_0002;
const RESET: u32 = 0x4000_0003;
const TIME_REF_COUNT: u32 = 0x4000_0020;
const REFERENCE_TSC: u32 = 0x4000_0021;
const VP_ASSIST_PAGE: u32 = 0x4000_0073;
const SCONTROL: u32 = 0x4000_0080;
const SIMP: u32 = 0x4000_0083;
const CRASH_CTL: u32 = 0x4000_0105;
/// CR0.PE. The guests execute 16-bit code in protected mode, because hypercalls are #UD in real mode.
const PROTECTED: u64 = 1;
const LEAVES: usize = 10;
/// The connection id of the event that the guests signal.
const CONNECTION: u32 = 0x12;

/// A sequence of 16-bit instructions.
#[derive(Default)]
struct Code(Vec<u8>);

impl Code {
    fn bytes(mut self, bytes: &[u8]) -> Self {
        self.0.extend(bytes);
        self
    }

    /// Appends a move of `value` to a 32-bit register.
    fn set(self, register: u8, value: u32) -> Self {
        self.bytes(&[0x66, 0xb8 + register])
            .bytes(&value.to_le_bytes())
    }

    fn set_pair(self, high: u8, low: u8, value: u64) -> Self {
        self.set(high, (value >> 32) as u32).set(low, value as u32)
    }

    fn wrmsr(self, msr: u32, value: u64) -> Self {
        self.set_pair(2, 0, value).set(1, msr).bytes(&[0x0f, 0x30])
    }

    /// Appends RDMSR, and a store of EAX at `at`.
    fn rdmsr(self, msr: u32, at: u16) -> Self {
        self.set(1, msr).bytes(&[0x0f, 0x32]).store(at)
    }

    fn store(self, at: u16) -> Self {
        self.bytes(&[0x66, 0xa3]).bytes(&at.to_le_bytes())
    }

    /// Appends a hypercall, and a store of its status at [`DATA`].
    fn call(self, input: u64, parameters: [u64; 2]) -> Self {
        let [first, second] = parameters;
        self.wrmsr(GUEST_OS_ID, 1)
            .set_pair(7, 6, second)
            .set_pair(3, 1, first)
            .set_pair(2, 0, input)
            .bytes(&[0x0f, 0x01, 0xc1])
            .store(DATA as u16)
    }
}

fn hv_cpuid(object: &Object, leaves: usize) -> Result<Vec<kvm_cpuid_entry2>, i32> {
    let entries = vec![kvm_cpuid_entry2::default(); leaves];
    let mut cpuid = CpuId::from_entries(&entries).unwrap();
    let address = cpuid.as_mut_fam_struct_ptr() as u64;
    let given = object.ioctl(abi::KVM_GET_SUPPORTED_HV_CPUID, address);
    given.map_err(|error| error.errno())?;
    Ok(cpuid.as_slice().to_vec())
}

/// `out 0x10, al`, with which the code of each guest here ends: it makes `KVM_RUN` return.
const END: &[u8] = &[0xe6, 0x10];

/// Creates a guest whose CPUID offers all of Hyper-V's interface. The guest executes `code` and then [`END`].
fn guest(code: Code) -> Guest {
    let code = code.bytes(END);
    let guest = Guest::with(&code.0, |vm| vm.create_irq_chip().unwrap());
    set_up(&guest.vcpu, |_| {});
    guest
}

/// Gives the vCPU Hyper-V's CPUID leaves, after `change` has changed each, and puts the vCPU into protected mode.
fn set_up(vcpu: &VcpuFd, change: impl Fn(&mut kvm_cpuid_entry2)) {
    let mut leaves = hv_cpuid(&Object::system(), LEAVES).unwrap();
    leaves.iter_mut().for_each(change);
    leaves.push(x2apic_leaf());
    vcpu.set_cpuid2(&CpuId::from_entries(&leaves).unwrap())
        .unwrap();
    let mut sregs = vcpu.get_sregs().unwrap();
    sregs.cr0 |= PROTECTED;
    vcpu.set_sregs(&sregs).unwrap();
}

fn enable_on(vcpu: &VcpuFd, cap: u32, argument: u64) -> Result<(), i32> {
    let mut enable = kvm_enable_cap {
        cap,
        ..Default::default()
    };
    enable.args[0] = argument;
    vcpu.enable_cap(&enable).map_err(|error| error.errno())
}

/// Runs the guest to the end of its code.
fn run(guest: &mut Guest) {
    let exit = guest.vcpu.run().unwrap();
    assert!(matches!(exit, VcpuExit::IoOut(0x10, _)), "{exit:?}");
}

fn word(guest: &Guest, at: u64) -> u32 {
    let mut word = [0; 4];
    guest.memory.read(at, &mut word);
    u32::from_le_bytes(word)
}

/// Runs a guest with one hypercall. Returns its status.
fn status_of(input: u64, parameters: [u64; 2]) -> u32 {
    let mut guest = guest(Code::default().call(input, parameters));
    run(&mut guest);
    word(&guest, DATA)
}

fn hyperv(vcpu: &mut VcpuFd) -> kvm_hyperv_exit {
    assert!(matches!(vcpu.run().unwrap(), VcpuExit::Hyperv));
    // SAFETY: the exit has filled in this part of the union.
    unsafe { vcpu.get_kvm_run().__bindgen_anon_1.hyperv }
}

fn eventfd(guest: &Guest, flags: u32, event: &EventFd) -> Result<(), i32> {
    let asked = kvm_hyperv_eventfd {
        conn_id: CONNECTION,
        fd: event.as_raw_fd(),
        flags,
        ..Default::default()
    };
    guest
        .vm
        .hyperv_eventfd(&asked)
        .map_err(|error| error.errno())
}

fn enables_synic(cap: u32) {
    let clears = cap == KVM_CAP_HYPERV_SYNIC;
    let code = Code::default().wrmsr(SIMP, DATA | 1);
    let mut guest = guest(code);
    guest.memory.write(DATA, &[7]);
    assert_eq!(enable_on(&guest.vcpu, cap, 0), Ok(()));
    let exit = hyperv(&mut guest.vcpu);
    assert_eq!(exit.type_, KVM_EXIT_HYPERV_SYNIC);
    // SAFETY: the exit has this kind, so KVM has filled in this field.
    let synic = unsafe { exit.u.synic };
    let shown = (synic.msr, synic.control, synic.msg_page);
    assert_eq!(shown, (SIMP, 1, DATA | 1));
    assert_eq!(word(&guest, DATA), if clears { 0 } else { 7 });
}

pub const USES: &[Use] = &[
    (KVM_CAP_HYPERV, |_| {
        // The hypercall page contains the hypercall instruction of the processor's vendor.
        let code = Code::default()
            .wrmsr(GUEST_OS_ID, 1)
            .wrmsr(HYPERCALL, DATA | 1);
        let mut guest = guest(code);
        run(&mut guest);
        let code = word(&guest, DATA);
        assert!(matches!(code, 0xc3c1_010f | 0xc3d9_010f), "{code:#x}");
        // The guest requests a reset, and reports a crash.
        for (msr, value, event) in [
            (RESET, 1, KVM_SYSTEM_EVENT_RESET),
            (CRASH_CTL, 1 << 63, KVM_SYSTEM_EVENT_CRASH),
        ] {
            let mut guest = self::guest(Code::default().wrmsr(msr, value));
            let exit = guest.vcpu.run().unwrap();
            assert!(matches!(exit, VcpuExit::SystemEvent(found, []) if found == event));
        }
    }),
    (KVM_CAP_HYPERV_VAPIC, |_| {
        let mut guest = guest(Code::default().wrmsr(VP_ASSIST_PAGE, DATA | 1));
        guest.memory.write(DATA, &[7; 8]);
        run(&mut guest);
        assert_eq!(
            [word(&guest, DATA), word(&guest, DATA + 4)],
            [0, 0x0707_0707]
        );
    }),
    (KVM_CAP_HYPERV_SPIN, |_| {
        assert_eq!(status_of(0x08, [0; 2]), 0)
    }),
    (KVM_CAP_HYPERV_TIME, |_| {
        let code = Code::default()
            .wrmsr(REFERENCE_TSC, DATA | 1)
            .rdmsr(TIME_REF_COUNT, DATA as u16 + 0x100)
            .rdmsr(TIME_REF_COUNT, DATA as u16 + 0x104);
        let mut guest = guest(code);
        run(&mut guest);
        assert_ne!(word(&guest, DATA), 0, "the page is valid");
        let times = [0x100, 0x104].map(|at| word(&guest, DATA + at));
        assert!(times[0] <= times[1], "{times:?}");
        // When the client sets the clock, the sequence number in the page changes before the guest continues.
        let before = word(&guest, DATA);
        guest.vm.set_clock(&kvm_clock_data::default()).unwrap();
        start_at_code(&guest.vcpu);
        guest.memory.write(CODE, END);
        run(&mut guest);
        assert_eq!(word(&guest, DATA), before + 1);
    }),
    (KVM_CAP_HYPERV_SYNIC, |_| {
        enables_synic(KVM_CAP_HYPERV_SYNIC);
        let without_apic = Guest::new(SPIN);
        let refused = enable_on(&without_apic.vcpu, KVM_CAP_HYPERV_SYNIC, 0);
        assert_eq!(refused, Err(libc::EINVAL));
    }),
    (KVM_CAP_HYPERV_SYNIC2, |_| {
        enables_synic(KVM_CAP_HYPERV_SYNIC2);
        let guest = guest(Code::default());
        let refused = enable_on(&guest.vcpu, KVM_CAP_HYPERV_SYNIC2, 1);
        assert_eq!(refused, Err(libc::EINVAL));
    }),
    (KVM_CAP_HYPERV_VP_INDEX, |_| {
        let mut guest = guest(Code::default().rdmsr(VP_INDEX, DATA as u16));
        assert!(set_msr(&guest.vcpu, VP_INDEX, 5));
        run(&mut guest);
        assert_eq!(word(&guest, DATA), 5);
    }),
    (KVM_CAP_HYPERV_EVENTFD, |_| {
        let code = Code::default().call(0x5d | 1 << 16, [CONNECTION.into(), 0]);
        let mut guest = guest(code);
        let event = EventFd::new(libc::EFD_NONBLOCK).unwrap();
        assert_eq!(eventfd(&guest, 0, &event), Ok(()));
        assert_eq!(eventfd(&guest, 0, &event), Err(libc::EEXIST));
        run(&mut guest);
        assert_eq!((word(&guest, DATA), event.read().unwrap()), (0, 1));
        assert_eq!(eventfd(&guest, KVM_HYPERV_EVENTFD_DEASSIGN, &event), Ok(()));
        let gone = eventfd(&guest, KVM_HYPERV_EVENTFD_DEASSIGN, &event);
        assert_eq!(gone, Err(libc::ENOENT));
        assert_eq!(eventfd(&guest, 2, &event), Err(libc::EINVAL));
        // The guest makes a hypercall that the client carries out.
        let mut guest = self::guest(Code::default().call(0x5d | 1 << 16, [7, 0]));
        assert_eq!(enable_on(&guest.vcpu, KVM_CAP_HYPERV_SYNIC, 0), Ok(()));
        let exit = hyperv(&mut guest.vcpu);
        assert_eq!(exit.type_, KVM_EXIT_HYPERV_HCALL);
        // SAFETY: the exit has this kind, so KVM has filled in this field.
        let call = unsafe { exit.u.hcall };
        assert_eq!((call.input, call.params), (0x5d | 1 << 16, [7, 0]));
        // SAFETY: the exit has this kind, so KVM has filled in this field.
        let output = unsafe { &mut guest.vcpu.get_kvm_run().__bindgen_anon_1.hyperv };
        output.u.hcall.result = 0x1234;
        run(&mut guest);
        assert_eq!(word(&guest, DATA), 0x1234);
    }),
    (KVM_CAP_HYPERV_TLBFLUSH, |_| {
        // The guest flushes the TLBs of all processors. The parameters are first in memory, and then at an address
        // without memory.
        let mut guest = guest(Code::default().call(0x02, [DATA + 0x100, 0]));
        guest.memory.write(DATA + 0x108, &[1]);
        run(&mut guest);
        assert_eq!(word(&guest, DATA), 0);
        assert_eq!(status_of(0x02, [DEVICE, 0]), 3);
    }),
    (KVM_CAP_HYPERV_SEND_IPI, |_| {
        // The guest sends an IPI to processor 0.
        let mut guest = guest(Code::default().call(0x0b | 1 << 16, [0x41, 1]));
        let apic = [(0x1b, 0xfee0_0d00), (0x80f, 0x1ff)].map(|(index, data)| kvm_msr_entry {
            index,
            data,
            ..Default::default()
        });
        let msrs = Msrs::from_entries(&apic).unwrap();
        assert_eq!(guest.vcpu.set_msrs(&msrs).unwrap(), 2);
        run(&mut guest);
        assert_eq!(word(&guest, DATA), 0);
        let pending = guest.vcpu.get_lapic().unwrap().regs[0x220];
        assert_eq!(pending, 1 << 1, "vector 0x41");
        assert_eq!(status_of(0x0b | 1 << 16, [0xf, 1]), 3);
    }),
    (KVM_CAP_HYPERV_CPUID, |_| {
        let (_, vcpu) = objects();
        let leaves = hv_cpuid(&vcpu, LEAVES).unwrap();
        let features = leaves.iter().find(|leaf| leaf.function == 0x4000_0003);
        assert_eq!(features.unwrap().edx & 1 << 19, 0, "no APIC for its timers");
        assert_eq!(hv_cpuid(&vcpu, LEAVES - 1).unwrap_err(), libc::E2BIG);
    }),
    (KVM_CAP_SYS_HYPERV_CPUID, |_| {
        let leaves = hv_cpuid(&Object::system(), LEAVES + 5).unwrap();
        assert_eq!(leaves.len(), LEAVES);
        assert_eq!(leaves[1].eax, u32::from_le_bytes(*b"Hv#1"));
        let features = leaves.iter().find(|leaf| leaf.function == 0x4000_0003);
        assert_ne!(features.unwrap().edx & 1 << 19, 0);
    }),
    (KVM_CAP_HYPERV_ENFORCE_CPUID, |_| {
        // The guest makes a hypercall that its CPUID does not offer. The call fails only if CPUID is enforced.
        for (enforced, status) in [(0, 0), (1, 6)] {
            let code = Code::default().call(0x02 | 1 << 16, [0, 1]);
            let mut guest = guest(code);
            set_up(&guest.vcpu, |leaf| {
                if leaf.function == 0x4000_0004 {
                    leaf.eax = 0;
                }
            });
            let cap = KVM_CAP_HYPERV_ENFORCE_CPUID;
            assert_eq!(enable_on(&guest.vcpu, cap, enforced), Ok(()));
            run(&mut guest);
            assert_eq!(word(&guest, DATA), status);
        }
        let mut guest = guest(Code::default().rdmsr(SCONTROL, DATA as u16));
        set_up(&guest.vcpu, |leaf| leaf.eax &= !4);
        assert_eq!(enable_on(&guest.vcpu, KVM_CAP_HYPERV_SYNIC, 0), Ok(()));
        run(&mut guest);
        assert_eq!(word(&guest, DATA), 1);
    }),
];
