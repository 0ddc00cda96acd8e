//! Tests MSR accesses that a client forbids or completes: `KVM_X86_SET_MSR_FILTER` and `KVM_CAP_X86_USER_SPACE_MSR`.

use crate::common::{CODE, MEMORY, Memory, create};
use kvm_bindings::*;
use slat_kvm::abi;
use slat_kvm::ioctl::{Answer, Object};
use slat_kvm::run_page::RunPage;

const PAT: u32 = 0x277;
const FS_BASE: u32 = 0xc000_0100;
const STAR: u32 = 0xc000_0081;
const UNKNOWN: u32 = 0x1234_5678;
/// The address of the handler of #GP, which halts.
const HANDLER: u64 = 0x2000;
const RDMSR: [u8; 2] = [0x0f, 0x32];
const WRMSR: [u8; 2] = [0x0f, 0x30];

/// A guest, and a client that uses ioctls.
struct Client {
    vm: Object,
    vcpu: Object,
    run: RunPage,
    memory: Memory,
}

/// The result of a run.
#[derive(Debug, PartialEq, Eq)]
enum Ended {
    /// The guest has executed the access and halted.
    Done,
    /// The access was #GP.
    Refused,
    /// The access exited to the client. The fields are the exit reason, the reason for which the MSR exited, the MSR,
    /// and the value.
    Asked(u32, u32, u32, u64),
}

impl Client {
    fn new() -> Self {
        let (vm, _) = create(&Object::system(), abi::KVM_CREATE_VM, 0);
        let memory = Memory::new(MEMORY);
        memory.write(13 * 4, &HANDLER.to_le_bytes()[..4]);
        memory.write(HANDLER, &[0xf4]);
        let region = kvm_userspace_memory_region {
            memory_size: MEMORY as u64,
            userspace_addr: memory.start as u64,
            ..Default::default()
        };
        let address = &raw const region as u64;
        vm.ioctl(abi::KVM_SET_USER_MEMORY_REGION, address).unwrap();
        let (vcpu, fd) = create(&vm, abi::KVM_CREATE_VCPU, 0);
        let run = RunPage::map(&fd).unwrap();
        Client {
            vm,
            vcpu,
            run,
            memory,
        }
    }

    fn answers(&self, reasons: u32) {
        let mut cap = kvm_enable_cap {
            cap: KVM_CAP_X86_USER_SPACE_MSR,
            ..Default::default()
        };
        cap.args[0] = reasons.into();
        let address = &raw const cap as u64;
        self.vm.ioctl(abi::KVM_ENABLE_CAP, address).unwrap();
    }

    /// Installs a filter that denies reads of the MSR `base`.
    fn denies_reads(&self, base: u32) {
        let mut none = [0u8; 8];
        let mut filter = kvm_msr_filter::default();
        filter.ranges[0] = kvm_msr_filter_range {
            flags: KVM_MSR_FILTER_READ,
            nmsrs: 1,
            base,
            bitmap: none.as_mut_ptr(),
        };
        let address = &raw const filter as u64;
        self.vm.ioctl(abi::KVM_X86_SET_MSR_FILTER, address).unwrap();
    }

    /// Makes the guest read or write an MSR, and halt.
    fn accesses(&self, msr: u32, value: u64, access: [u8; 2]) -> Ended {
        self.memory.write(CODE, &[access[0], access[1], 0xf4]);
        let mut sregs = [0u8; size_of::<kvm_sregs>()];
        let address = sregs.as_mut_ptr() as u64;
        self.vcpu.ioctl(abi::KVM_GET_SREGS, address).unwrap();
        // SAFETY: both structs are plain data of the same size.
        let mut sregs: kvm_sregs = unsafe { std::mem::transmute(sregs) };
        (sregs.cs.base, sregs.cs.selector) = (0, 0);
        let address = &raw mut sregs as u64;
        self.vcpu.ioctl(abi::KVM_SET_SREGS, address).unwrap();
        let regs = kvm_regs {
            rip: CODE,
            rflags: 2,
            rsp: 0x1800,
            rcx: msr.into(),
            rax: value & 0xffff_ffff,
            rdx: value >> 32,
            ..Default::default()
        };
        let address = &raw const regs as u64;
        self.vcpu.ioctl(abi::KVM_SET_REGS, address).unwrap();
        self.runs()
    }

    fn regs(&self) -> kvm_regs {
        let mut regs = kvm_regs::default();
        let address = &raw mut regs as u64;
        self.vcpu.ioctl(abi::KVM_GET_REGS, address).unwrap();
        regs
    }

    fn runs(&self) -> Ended {
        self.vcpu.ioctl(abi::KVM_RUN, 0).unwrap();
        // SAFETY: `run` is this client's mapping of the shared page, and the guest does not run.
        let run = unsafe { &*self.run.ptr() };
        match run.exit_reason {
            KVM_EXIT_HLT if self.regs().rip == HANDLER + 1 => Ended::Refused,
            KVM_EXIT_HLT => Ended::Done,
            reason => {
                // SAFETY: exits with these reasons fill in this field.
                let msr = unsafe { run.__bindgen_anon_1.msr };
                assert_eq!(self.regs().rip, CODE);
                Ended::Asked(reason, msr.reason, msr.index, msr.data)
            }
        }
    }

    /// Completes the access with `error` and `data`, and runs the guest again.
    fn answered(&self, error: u8, data: u64) -> Ended {
        // SAFETY: `run` is this client's mapping of the shared page, and the guest does not run.
        let run = unsafe { &mut *self.run.ptr() };
        // SAFETY: the exit has filled in this field.
        let msr = unsafe { &mut run.__bindgen_anon_1.msr };
        (msr.error, msr.data) = (error, data);
        self.runs()
    }
}

#[test]
fn a_client_that_answers_nothing_has_refused_accesses_fault() {
    let client = Client::new();
    assert_eq!(client.accesses(UNKNOWN, 0, RDMSR), Ended::Refused);
    assert_eq!(client.accesses(STAR, 5, WRMSR), Ended::Done);
    assert_eq!(client.accesses(STAR, 0, RDMSR), Ended::Done);
    assert_eq!(client.regs().rax, 5);
    client.denies_reads(STAR);
    assert_eq!(client.accesses(STAR, 0, RDMSR), Ended::Refused);
    assert_eq!(client.accesses(STAR, 6, WRMSR), Ended::Done);
}

#[test]
fn a_client_answers_what_it_asked_for() {
    let (unknown, invalid) = (KVM_MSR_EXIT_REASON_UNKNOWN, KVM_MSR_EXIT_REASON_INVAL);
    let (read, write) = (KVM_EXIT_X86_RDMSR, KVM_EXIT_X86_WRMSR);
    let client = Client::new();
    client.answers(unknown);
    let asked = Ended::Asked(write, unknown, UNKNOWN, 1 << 32 | 2);
    assert_eq!(client.accesses(UNKNOWN, 1 << 32 | 2, WRMSR), asked);
    assert_eq!(client.answered(0, 0), Ended::Done);
    assert_eq!(
        client.accesses(UNKNOWN, 0, WRMSR),
        Ended::Asked(write, unknown, UNKNOWN, 0)
    );
    assert_eq!(client.answered(1, 0), Ended::Refused);
    // The value names a memory type that does not exist.
    assert_eq!(client.accesses(PAT, 2, WRMSR), Ended::Refused);
    client.answers(invalid);
    assert_eq!(client.accesses(UNKNOWN, 0, RDMSR), Ended::Refused);
    assert_eq!(
        client.accesses(PAT, 2, WRMSR),
        Ended::Asked(write, invalid, PAT, 2)
    );
    assert_eq!(client.answered(0, 0), Ended::Done);
    assert_eq!(
        client.accesses(FS_BASE, 1 << 60, WRMSR),
        Ended::Asked(write, invalid, FS_BASE, 1 << 60)
    );
    assert_eq!(client.answered(0, 0), Ended::Done);

    client.answers(KVM_MSR_EXIT_REASON_FILTER);
    client.denies_reads(FS_BASE);
    let asked = Ended::Asked(read, KVM_MSR_EXIT_REASON_FILTER, FS_BASE, 0);
    assert_eq!(client.accesses(FS_BASE, 0, RDMSR), asked);
    assert_eq!(client.answered(0, 3 << 32 | 4), Ended::Done);
    let regs = client.regs();
    assert_eq!((regs.rdx, regs.rax), (3, 4));
    // The filter applies only to the guest, and not to the client.
    let mut list = [0u64; 3];
    list[0] = 1;
    list[1] = FS_BASE.into();
    let address = list.as_mut_ptr() as u64;
    let done = client.vcpu.ioctl(abi::KVM_GET_MSRS, address);
    assert!(matches!(done, Ok(Answer::Value(1))));
}

#[test]
fn a_filter_that_cannot_be_read_leaves_the_old_one() {
    let client = Client::new();
    client.denies_reads(STAR);
    let mut filter = kvm_msr_filter::default();
    filter.ranges[0] = kvm_msr_filter_range {
        flags: KVM_MSR_FILTER_READ,
        nmsrs: 1,
        base: STAR,
        bitmap: std::ptr::without_provenance_mut(8),
    };
    let address = &raw const filter as u64;
    let refused = client.vm.ioctl(abi::KVM_X86_SET_MSR_FILTER, address);
    assert_eq!(refused.unwrap_err().errno(), libc::EFAULT);
    assert_eq!(client.accesses(STAR, 0, RDMSR), Ended::Refused);
}
