//! Tests Hyper-V's interface: interrupts of SynIC sources, synthetic timers, and the state that a client saves.

use crate::common::{
    DATA, Guest, Memory, SPIN, msr as get, set_msr as set, set_slot, start_at_code, x2apic_leaf,
};
use kvm_bindings::*;
use slat::MmuKind;
use slat_kvm::{Kvm, VcpuExit, VcpuFd};
use vmm_sys_util::eventfd::EventFd;

const APIC_BASE: u32 = 0x1b;
const SPURIOUS: u32 = 0x80f;
const IN_SERVICE: u32 = 0x810;
const EOI: u32 = 0x80b;
const GUEST_OS_ID: u32 = 0x4000_0000;
const SIMP: u32 = 0x4000_0083;
const EOM: u32 = 0x4000_0084;
const SINT2: u32 = 0x4000_0092;
const STIMER0_CONFIG: u32 = 0x4000_00b0;
const STIMER0_COUNT: u32 = 0x4000_00b1;
const AUTO_EOI: u64 = 1 << 17;
const VECTOR: u8 = 0x41;
const HANDLER: u64 = 0x2000;
const GSI: u32 = 30;

/// Returns the 16-bit code `mov ecx, msr; xor edx, edx; mov eax, value; wrmsr`.
fn wrmsr(msr: u32, value: u32) -> Vec<u8> {
    let (msr, value) = (msr.to_le_bytes(), value.to_le_bytes());
    [
        &[0x66, 0xb9][..],
        &msr,
        &[0x66, 0x31, 0xd2, 0x66, 0xb8],
        &value,
        &[0x0f, 0x30],
    ]
    .concat()
}

/// Creates a guest with SynIC that waits for [`VECTOR`], the vector of SINT 2. The vector's handler is `handler`.
fn guest(sint: u64, handler: &[u8]) -> Guest {
    // sti; hlt; jmp back
    let guest = Guest::with(&[0xfb, 0xf4, 0xeb, 0xfc], |vm| {
        vm.create_irq_chip().unwrap();
    });
    let vector = u64::from(VECTOR) * 4;
    guest.memory.write(vector, &HANDLER.to_le_bytes()[..4]);
    guest.memory.write(HANDLER, handler);
    let vcpu = &guest.vcpu;
    let mut leaves = guest.kvm.get_supported_hv_cpuid(11).unwrap();
    leaves.push(x2apic_leaf()).unwrap();
    vcpu.set_cpuid2(&leaves).unwrap();
    let synic = kvm_enable_cap {
        cap: KVM_CAP_HYPERV_SYNIC,
        ..Default::default()
    };
    vcpu.enable_cap(&synic).unwrap();
    assert!(set(vcpu, APIC_BASE, get(vcpu, APIC_BASE) | 1 << 10));
    assert!(set(vcpu, SPURIOUS, 0x1ff));
    assert!(set(vcpu, SINT2, sint | u64::from(VECTOR)));
    guest
}

fn in_service(vcpu: &VcpuFd) -> bool {
    get(vcpu, IN_SERVICE + u32::from(VECTOR) / 32) >> (VECTOR % 32) & 1 != 0
}

/// Routes [`GSI`] to source 2 of the vCPU.
fn route(guest: &Guest) {
    let mut entry = kvm_irq_routing_entry {
        gsi: GSI,
        type_: KVM_IRQ_ROUTING_HV_SINT,
        ..Default::default()
    };
    entry.u.hv_sint = kvm_irq_routing_hv_sint { vcpu: 0, sint: 2 };
    let table = KvmIrqRouting::from_entries(&[entry]).unwrap();
    guest.vm.set_gsi_routing(&table).unwrap();
}

fn runs_to(guest: &mut Guest, port: u16) {
    let exit = guest.vcpu.run().unwrap();
    assert!(
        matches!(exit, VcpuExit::IoOut(at, _) if at == port),
        "{exit:?}"
    );
}

#[test]
fn an_interrupt_of_a_source_ends_as_the_source_says() {
    for sint in [0, AUTO_EOI] {
        let mut guest = guest(sint, &[0xe6, 0x10]);
        route(&guest);
        guest.vm.set_irq_line(GSI, true).unwrap();
        runs_to(&mut guest, 0x10);
        assert_eq!(in_service(&guest.vcpu), sint == 0);
    }
}

#[test]
fn a_source_tells_its_irqfd_when_the_guest_has_read() {
    // The resample eventfd is signalled by a write to EOI, or, with AUTO_EOI, by a write to EOM.
    for (sint, end) in [(0, EOI), (AUTO_EOI, EOM)] {
        let handler = [wrmsr(end, 0), vec![0xe6, 0x10]].concat();
        let mut guest = guest(sint, &handler);
        route(&guest);
        let [signal, read] = [(); 2].map(|()| EventFd::new(libc::EFD_NONBLOCK).unwrap());
        (guest.vm)
            .register_irqfd_with_resample(&signal, &read, GSI)
            .unwrap();
        signal.write(1).unwrap();
        runs_to(&mut guest, 0x10);
        assert!(read.read().is_ok());
    }
}

#[test]
fn a_timer_that_was_restored_sends_its_message() {
    const EXPIRED: u32 = 0x8000_0010;
    let mut guest = guest(0, &[0xe6, 0x10]);
    let vcpu = &guest.vcpu;
    assert!(set(vcpu, SIMP, DATA | 1));
    // Sets a one-shot timer that sends its message to SINT 2, at a time in the past.
    assert!(set(vcpu, STIMER0_CONFIG, 2 << 16 | 1));
    assert!(set(vcpu, STIMER0_COUNT, 5));
    assert_eq!(get(vcpu, STIMER0_CONFIG), 2 << 16 | 1);
    runs_to(&mut guest, 0x10);
    let mut message = [0; 40];
    guest.memory.read(DATA + 0x200, &mut message);
    assert_eq!(message[..4], EXPIRED.to_le_bytes());
    assert_eq!(message[24..32], 5u64.to_le_bytes());
    assert_eq!(get(&guest.vcpu, STIMER0_CONFIG), 2 << 16, "it is disabled");
}

#[test]
fn a_client_saves_and_restores_every_msr() {
    // MSRs that show the time, or a constant, do not read back as they were written.
    const OTHERS: [u32; 6] = [
        0x4000_0003,
        0x4000_0010,
        0x4000_0020,
        0x4000_0022,
        0x4000_0023,
        0x4000_0073,
    ];
    let new = || guest(0, SPIN);
    let list = new().kvm.get_msr_index_list().unwrap();
    let others = [SINT2, SIMP, 0x4000_0082, STIMER0_COUNT, 0x4000_00b6];
    let listed = list.as_slice().iter().copied();
    let saved: Vec<u32> = listed
        .filter(|index| index >> 28 == 4 && index >> 16 == 0x4000)
        .filter(|index| !OTHERS.contains(index))
        .chain(others)
        .collect();
    assert!(saved.len() > 20, "{saved:x?}");
    let value = |index: u32| match index {
        // The control of the invariant TSC has one bit. The next MSR reports a crash, and the last one is the VP index.
        0x4000_0118 => 1,
        0x4000_0105 => 1 << 63,
        0x4000_0002 => 3,
        // This value enables no page, so slat does not touch guest memory.
        _ => 0x5_6000,
    };
    let (one, other) = (new(), new());
    for index in &saved {
        assert!(set(&one.vcpu, *index, value(*index)), "{index:#x}");
    }
    for index in saved {
        let found = get(&one.vcpu, index);
        assert_eq!(found, value(index), "{index:#x}");
        assert!(set(&other.vcpu, index, found), "{index:#x}");
        assert_eq!(get(&other.vcpu, index), found, "{index:#x}");
    }
}

/// The memory of two vCPUs: the code of both, a stack, a page directory, a page table, two pages, and the values that
/// the second vCPU has read. Virtual page 9 is mapped to one of the two pages. All other pages are mapped to
/// themselves.
mod flush {
    pub const SENDER: u64 = 0x1000;
    pub const READER: u64 = 0x2000;
    pub const STACK: u64 = 0x4000;
    pub const DIRECTORY: u64 = 0x4000;
    pub const TABLE: u64 = 0x5000;
    pub const PAGES: [u64; 2] = [0x6000, 0x7000];
    pub const STOP: u64 = 0x8008;
    pub const MEMORY: u64 = 0x9000;
    pub const ENTRY: u64 = TABLE + 9 * 4;
    pub const PRESENT: u32 = 3;

    /// Does this 100 times: changes the entry of page 9, flushes page 9 on all vCPUs, waits until the reader has read
    /// the page twice, and compares the byte that it has read with the new page. Writes to port 0x10 if all bytes
    /// were right, and to 0x11 if not. The first instruction is `mov cx, 100`.
    pub const SENDER_CODE: &[&[u8]] = &[
        b"\xb9\x64\x00",
        // mov eax,[0x5024]; xor eax,0x1000; mov [0x5024],eax; push cx
        b"\x66\xa1\x24\x50\x66\x35\x00\x10\x00\x00\x66\xa3\x24\x50\x51",
        // The registers of a fast HvFlushVirtualAddressSpace: EDX:EAX, EBX:ECX, EDI:ESI
        b"\x66\x31\xd2\x66\xb8\x02\x00\x01\x00\x66\x31\xdb\x66\x31\xc9\x66\x31\xff\x66\xbe\x03\x00\x00\x00",
        // vmcall; test ax,ax; jnz fail
        b"\x0f\x01\xc1\x85\xc0\x75\x28",
        // pop cx; mov eax,[0x8004]; add eax,2
        b"\x59\x66\xa1\x04\x80\x66\x83\xc0\x02",
        // pause; cmp eax,[0x8004]; jg back
        b"\xf3\x90\x66\x3b\x06\x04\x80\x7f\xf7",
        // mov ebx,[0x5024]; and bx,0xf000; mov al,[bx]; cmp al,[0x8000]; jne fail
        b"\x66\x8b\x1e\x24\x50\x81\xe3\x00\xf0\x8a\x07\x3a\x06\x00\x80\x75\x05",
        // dec cx; jnz back; out 0x10,al
        b"\x49\x75\xac\xe6\x10",
        // fail: out 0x11,al
        b"\xe6\x11",
    ];
    /// Reads page 9 again and again, and counts the reads. Writes to port 0x12 at the end.
    // mov al,[0x9000]; mov [0x8000],al; inc dword [0x8004]; cmp byte [0x8008],0; je back; out 0x12,al
    pub const READER_CODE: &[u8] =
        b"\xa0\x00\x90\xa2\x00\x80\x66\xff\x06\x04\x80\x80\x3e\x08\x80\x00\x74\xee\xe6\x12";
}

#[test]
fn no_vcpu_uses_an_old_translation_after_a_flush() {
    flushes(MmuKind::Tdp);
}

/// Shadow paging compares its tables with the guest's tables when a vCPU flushes. Here another vCPU requests the flush.
#[test]
fn no_vcpu_uses_an_old_shadow_after_a_flush() {
    flushes(MmuKind::Shadow);
}

fn flushes(mmu: MmuKind) {
    use flush::*;
    let kvm = Kvm::new().unwrap().with_mmu(mmu);
    let vm = kvm.create_vm().unwrap();
    let memory = Memory::new(MEMORY as usize);
    set_slot(&vm, &memory, 0, MEMORY);
    memory.write(SENDER, &SENDER_CODE.concat());
    memory.write(READER, READER_CODE);
    let entry = |at: u64, to: u64| memory.write(at, &(to as u32 | PRESENT).to_le_bytes());
    entry(DIRECTORY, TABLE);
    (0..9).for_each(|page| entry(TABLE + 4 * page, page << 12));
    entry(ENTRY, PAGES[0]);
    memory.write(PAGES[0], &[0xa]);
    memory.write(PAGES[1], &[0xb]);
    let vcpu = |id, rip| {
        let vcpu = vm.create_vcpu(id).unwrap();
        vcpu.set_cpuid2(&kvm.get_supported_hv_cpuid(10).unwrap())
            .unwrap();
        start_at_code(&vcpu);
        let mut sregs = vcpu.get_sregs().unwrap();
        sregs.cr3 = DIRECTORY;
        sregs.cr0 |= 1 << 31 | 1;
        vcpu.set_sregs(&sregs).unwrap();
        let mut regs = vcpu.get_regs().unwrap();
        (regs.rip, regs.rsp) = (rip, STACK);
        vcpu.set_regs(&regs).unwrap();
        vcpu
    };
    let (mut sender, mut reader) = (vcpu(0, SENDER), vcpu(1, READER));
    assert!(set(&sender, GUEST_OS_ID, 1));
    let ended = std::thread::scope(|scope| {
        let reading = scope.spawn(|| match reader.run().unwrap() {
            VcpuExit::IoOut(port, _) => port,
            other => panic!("{other:?}"),
        });
        let sent = match sender.run().unwrap() {
            VcpuExit::IoOut(port, _) => port,
            other => panic!("{other:?}"),
        };
        memory.write(STOP, &[1]);
        (sent, reading.join().unwrap())
    });
    assert_eq!(ended, (0x10, 0x12));
}
