//! Tests events and interrupts: injected, pending and virtual ones, and events that cause a #VMEXIT.

use super::*;

#[test]
fn vmrun_injects_an_event_before_the_first_instruction() {
    const VALID: u64 = 1 << 31;
    // The events: vector 0x80 as an interrupt and as INT n, #GP with an error code, and an NMI.
    for (event, vector, error) in [
        (VALID | 0x80, 0x80, None),
        (VALID | 4 << 8 | 0x80, 0x80, None),
        (VALID | 3 << 8 | 1 << 11 | 13 | 8 << 32, 13, Some(8)),
        (VALID | 2 << 8, 2, None),
    ] {
        let mut guest = hypervisor(b"\x0f\x0b");
        put(&guest, at::EVENT, event);
        put(&guest, at::NEXT_RIP, L2 + 0x50);
        assert_eq!(exit(&mut guest), 0x78);
        assert_eq!(get(&guest, at::RIP), HANDLERS + 16 * vector);
        assert_eq!(get(&guest, at::EVENT) & VALID, 0);
        let rsp = get(&guest, at::RSP);
        let has_error = u64::from(error.is_some());
        if let Some(error) = error {
            assert_eq!(guest.memory().read64(rsp), error);
        }
        let soft = event >> 8 & 7 == 4;
        let returns = guest.memory().read64(rsp + 8 * has_error);
        assert_eq!(returns, if soft { L2 + 0x50 } else { L2 });
        assert!(!guest.cpu.state.events.nmi_blocked, "for the hypervisor");
    }
}

#[test]
fn an_exit_in_the_delivery_of_an_event_tells_which() {
    let event = 1u64 << 31 | 0x80;
    let mut guest = hypervisor(b"\x90");
    // The stack is not present.
    guest.machine.absent(L2_STACK - 8);
    put(&guest, at::EVENT, event);
    put32(&guest, at::EXCEPTIONS, 1 << 14);
    assert_eq!(exit(&mut guest), 0x4e);
    assert_eq!(get(&guest, at::INT_INFO), event);
    assert_eq!(get(&guest, at::RIP), L2);
    // Neither the stack of the page fault nor that of the double fault is present.
    fill(&guest);
    put(&guest, at::EVENT, event);
    again(&mut guest);
    assert_eq!(exit(&mut guest), 0x7f, "a shutdown");
    // The guest executes INT n itself.
    guest.memory().write(L2, b"\xcd\x80");
    fill(&guest);
    put32(&guest, at::EXCEPTIONS, 1 << 14);
    again(&mut guest);
    assert_eq!(exit(&mut guest), 0x4e);
    assert_eq!(get(&guest, at::INT_INFO), event | 4 << 8);
}

/// Returns a hypervisor like [`hypervisor`], but its CPUID names Intel as the vendor and has all features.
fn intels_hypervisor(l2: &[u8]) -> Guest {
    let mut guest = hypervisor(l2);
    let told = |leaf, _| match leaf {
        0 => [0xd, u32::from_le_bytes(*b"Genu"), 0, 0],
        0x8000_0000 => [0x8000_000a, 0, 0, 0],
        0x8000_0008 => [0x3030, 0, 0, 0],
        _ => [!0; 4],
    };
    guest.cpu.set_features(Features::from_cpuid(told));
    guest
}

/// AMD's manual defines SVM. Where the vendors' CPUs differ, a nested guest sees AMD's behaviour,
/// whatever vendor CPUID names.
#[test]
fn a_guest_of_svm_runs_on_amds_processor() {
    // EXT is clear in the error code of a fault during the delivery of an exception: ud2, without an IDT.
    let mut guest = intels_hypervisor(b"\x0f\x0b");
    put32(&guest, 0x400 + 0x84, 0);
    put32(&guest, at::EXCEPTIONS, 1 << 13);
    assert_eq!(exit(&mut guest), 0x4d);
    assert_eq!(get(&guest, at::INFO_1), 6 << 3 | 2);
    // SYSENTER_ESP, SYSENTER_EIP and TSC_AUX have 32 bits: wrmsr; rdmsr; vmmcall.
    for msr in [0x175, 0x176, 0xc000_0103] {
        let mut guest = intels_hypervisor(b"\x0f\x30\x0f\x32\x0f\x01\xd9");
        put(&guest, at::RAX, 5);
        guest.cpu.state.gpr[RCX] = msr;
        guest.cpu.state.gpr[RDX] = 0x8000;
        assert_eq!(exit(&mut guest), 0x81, "{msr:#x}");
        assert_eq!(get(&guest, at::RAX), 5);
        assert_eq!(guest.cpu.state.gpr[RDX], 0);
    }
    // The shadow of MOV SS suppresses no breakpoint: mov ss,edx; nop; vmmcall.
    let mut guest = intels_hypervisor(b"\x8e\xd2\x90\x0f\x01\xd9");
    guest.cpu.state.gpr[RDX] = 16;
    guest.cpu.state.dr[0] = L2 + 2;
    put(&guest, at::DR7, 0x402);
    put32(&guest, at::EXCEPTIONS, 1 << 1);
    assert_eq!(exit(&mut guest), 0x41);
    // SYSCALL exists in compatibility mode, too.
    let mut guest = intels_hypervisor(b"\x0f\x05");
    guest.cpu.state.star = 8 << 32;
    guest.cpu.state.cstar = L2 + 0x100;
    guest.memory().write(L2 + 0x100, b"\x0f\x01\xd9");
    put(&guest, at::EFER, get(&guest, at::EFER) | 1);
    let mut cs = guest.cpu.state.cs;
    cs.rights = 0xc09b;
    put_segment(&guest, 0x410, &cs);
    assert_eq!(exit(&mut guest), 0x81);
}

#[test]
fn a_virtual_interrupt_waits_for_the_guest() {
    const IRQ: u64 = 1 << 8 | 5 << 16 | 0x80 << 32;
    // nop; sti; nop; vmmcall
    let l2 = b"\x90\xfb\x90\x0f\x01\xd9";
    let mut guest = hypervisor(l2);
    put(&guest, at::INTERRUPTS, IRQ | 1 << 24);
    assert_eq!(exit(&mut guest), 0x78);
    assert_eq!(get(&guest, at::RIP), HANDLERS + 16 * 0x80);
    assert_eq!(guest.memory().read64(get(&guest, at::RSP)), L2 + 3);
    assert_eq!(get(&guest, at::INTERRUPTS) & 1 << 8, 0, "it was taken");
    // The virtual interrupt has no higher priority than the task priority. It is delivered only if V_IGN_TPR is set.
    for (more, code) in [(5, 0x81), (5 | 1 << 20, 0x64)] {
        fill(&guest);
        put(&guest, at::INTERRUPTS, IRQ | more);
        intercept(&guest, 0x64);
        again(&mut guest);
        assert_eq!(exit(&mut guest), code);
        assert_ne!(get(&guest, at::INTERRUPTS) & 1 << 8, 0, "it waits");
    }
    // The same happens if the virtual GIF is clear.
    fill(&guest);
    put(&guest, at::INTERRUPTS, IRQ | 1 << 25);
    again(&mut guest);
    assert_eq!(exit(&mut guest), 0x81);
}

const NMI: u64 = 1 << 11;
const NMI_MASK: u64 = 1 << 12;
const NMI_ENABLE: u64 = 1 << 26;

/// Returns a hypervisor whose guest executes `l2` and has virtual NMIs. The guest counts the NMIs in RBX.
fn with_virtual_nmis(l2: &[u8]) -> Guest {
    let guest = hypervisor(l2);
    // inc rbx; iretq
    (guest.memory()).write(HANDLERS + 16 * 2, b"\x48\xff\xc3\x48\xcf");
    put(&guest, at::INTERRUPTS, NMI_ENABLE | NMI);
    intercept(&guest, 0x61);
    guest
}

#[test]
fn a_virtual_nmi_waits_for_the_end_of_another_ones_handler() {
    let mut guest = with_virtual_nmis(b"\x90\x0f\x01\xd9");
    guest.cpu.state.gpr[RBX] = 0;
    assert_eq!(exit(&mut guest), 0x81);
    assert_eq!(guest.cpu.state.gpr[RBX], 1);
    let pending = |guest: &Guest| get(guest, at::INTERRUPTS) & (NMI | NMI_MASK);
    assert_eq!(
        pending(&guest),
        0,
        "it was taken, and its handler has ended"
    );
    // The handler of an injected NMI runs first.
    let mut guest = with_virtual_nmis(b"\x90\x0f\x01\xd9");
    guest.cpu.state.gpr[RBX] = 0;
    put(&guest, at::EVENT, 1 << 31 | 2 << 8 | 2);
    assert_eq!(exit(&mut guest), 0x81);
    assert_eq!((guest.cpu.state.gpr[RBX], pending(&guest)), (2, 0));
    // The pending NMI waits until that handler has returned.
    guest.memory().write(HANDLERS + 16 * 2, b"\xf4");
    fill(&guest);
    put(&guest, at::INTERRUPTS, NMI_ENABLE | NMI);
    put(&guest, at::EVENT, 1 << 31 | 2 << 8 | 2);
    intercept(&guest, 0x61);
    again(&mut guest);
    assert_eq!(exit(&mut guest), 0x78);
    assert_eq!(pending(&guest), NMI | NMI_MASK);
    assert!(
        !guest.cpu.state.events.nmi_blocked,
        "the hypervisor's are not"
    );
    // The same happens if the virtual GIF is clear.
    fill(&guest);
    put(&guest, at::INTERRUPTS, NMI_ENABLE | NMI | 1 << 25);
    intercept(&guest, 0x61);
    again(&mut guest);
    assert_eq!((exit(&mut guest), pending(&guest)), (0x81, NMI));
}

#[test]
fn virtual_nmis_are_none_of_the_hypervisors() {
    let mut guest = with_virtual_nmis(b"\xeb\xfe");
    put(&guest, at::INTERRUPTS, NMI_ENABLE | NMI_MASK);
    guest.cpu.state.events.nmi_blocked = true;
    guest.cpu.inject_nmis(1);
    assert_eq!(exit(&mut guest), 0x61, "one of the hypervisor's");
    assert_eq!(guest.cpu.state.events.nmis, 1);
    // An exit during the delivery reports the virtual NMI, which is then no longer pending.
    let mut guest = with_virtual_nmis(b"\x90");
    guest.machine.absent(L2_STACK - 8);
    put32(&guest, at::EXCEPTIONS, 1 << 14);
    guest.cpu.state.events.nmis = 0;
    assert_eq!(exit(&mut guest), 0x4e);
    assert_eq!(get(&guest, at::INT_INFO), 1 << 31 | 2 << 8 | 2);
    assert_eq!(get(&guest, at::INTERRUPTS) & (NMI | NMI_MASK), 0);
    // A guest cannot have virtual NMIs unless NMIs are intercepted.
    fill(&guest);
    put(&guest, at::INTERRUPTS, NMI_ENABLE);
    again(&mut guest);
    assert_eq!(exit(&mut guest), u64::MAX);
}

#[test]
fn an_interrupt_makes_the_guest_leave_and_stays() {
    // jmp .
    let mut guest = hypervisor(b"\xeb\xfe");
    intercept(&guest, 0x60);
    guest.cpu.state.rflags |= flags::IF;
    put(&guest, at::INTERRUPTS, 1 << 24);
    guest
        .attention
        .store(2, std::sync::atomic::Ordering::Relaxed);
    assert_eq!(guest.run(), Exit::Attention);
    guest
        .attention
        .store(0, std::sync::atomic::Ordering::Relaxed);
    if !guest.cpu.is_in_guest_mode() {
        guest.cpu.requests.debugger.single_step = true;
        assert!(matches!(guest.run(), Exit::Debug { .. }));
        guest.cpu.requests.debugger.single_step = false;
    }
    assert!(guest.cpu.can_take_interrupt() && guest.cpu.exits_on_interrupt());
    guest.cpu.exit_on_interrupt();
    assert_eq!(exit(&mut guest), 0x60);
    assert!(!guest.cpu.can_take_interrupt(), "GIF is clear");
}

#[test]
fn an_nmi_makes_the_guest_leave_and_stays() {
    let mut guest = hypervisor(b"\xeb\xfe");
    intercept(&guest, 0x61);
    guest.cpu.state.events.nmi_blocked = true;
    guest.cpu.inject_nmis(1);
    assert_eq!(exit(&mut guest), 0x61);
    assert_eq!(guest.cpu.state.events.nmis, 1);
    // stgi; hlt
    guest.memory().write(CODE + 4, b"\x0f\x01\xdc\xf4");
    guest.cpu.state.events.nmi_blocked = false;
    guest.halt_in_handler(vector::NMI);
}

#[test]
fn an_init_that_makes_a_guest_leave_comes_after_the_instruction_that_has_read_a_device() {
    // mov eax,[rsi]; vmmcall
    let mut guest = hypervisor(b"\x8b\x06\x0f\x01\xd9");
    intercept(&guest, 0x63);
    guest.cpu.state.gpr[RSI] = MMIO;
    guest.read_device(&[5, 6, 7, 8]);
    assert!(guest.cpu.exit_on_init());
    assert_eq!(exit(&mut guest), 0x63);
    assert_eq!(guest.cpu.state.gpr[RAX], VMCB);
    let saved = (get(&guest, at::RIP), get(&guest, at::RAX));
    assert_eq!(saved, (L2 + 2, 0x0807_0605));
}

#[test]
fn data_for_a_page_that_the_hypervisor_took_away_make_its_guest_leave_once() {
    // insb; vmmcall. The page fault of INSB is intercepted.
    let mut guest = hypervisor(b"\x6c\x0f\x01\xd9");
    put32(&guest, at::EXCEPTIONS, 1 << 14);
    guest.cpu.state.gpr[RDI] = DATA;
    assert!(matches!(guest.run(), Exit::Io { .. }));
    guest.cpu.complete_io(&[1]);
    guest.machine.absent(DATA);
    guest.cpu.flush_tlb();
    assert_eq!(guest.complete(), None);
    assert_eq!(exit(&mut guest), 0x4e);
    assert_eq!((get(&guest, at::RIP), get(&guest, at::INFO_2)), (L2, DATA));
}
