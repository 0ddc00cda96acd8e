//! Tests nested virtualization by SVM: VMRUN and #VMEXIT, the checks of VMRUN, and hypervisors with random control
//! blocks.

mod events;
mod intercepts;
mod translations;

use crate::common::*;
use slat_x86::state::flags;
use slat_x86::*;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

const VMCB: u64 = 0x20_0000;
const SAVE: u64 = VMCB + 0x400;
const IO_MAP: u64 = 0x22_0000;
const MSR_MAP: u64 = 0x23_0000;
/// The nested guest's code, and its stack.
const L2: u64 = 0x24_0000;
const L2_STACK: u64 = 0x26_0000;

/// Offsets in the control block.
mod at {
    pub const EXCEPTIONS: u64 = 8;
    pub const THIRD: u64 = 0xc;
    pub const FOURTH: u64 = 0x10;
    pub const ASID: u64 = 0x58;
    pub const TLB_CONTROL: u64 = 0x5c;
    pub const INTERRUPTS: u64 = 0x60;
    pub const CODE: u64 = 0x70;
    pub const INFO_1: u64 = 0x78;
    pub const INFO_2: u64 = 0x80;
    pub const INT_INFO: u64 = 0x88;
    pub const NESTED: u64 = 0x90;
    pub const EVENT: u64 = 0xa8;
    pub const NESTED_CR3: u64 = 0xb0;
    pub const VIRTUAL_EXTENSIONS: u64 = 0xb8;
    pub const NEXT_RIP: u64 = 0xc8;
    pub const EFER: u64 = 0x400 + 0xd0;
    pub const CR4: u64 = 0x400 + 0x148;
    pub const CR3: u64 = 0x400 + 0x150;
    pub const CR0: u64 = 0x400 + 0x158;
    pub const DR7: u64 = 0x400 + 0x160;
    pub const DR6: u64 = 0x400 + 0x168;
    pub const RFLAGS: u64 = 0x400 + 0x170;
    pub const RIP: u64 = 0x400 + 0x178;
    pub const RSP: u64 = 0x400 + 0x1d8;
    pub const RAX: u64 = 0x400 + 0x1f8;
    pub const CR2: u64 = 0x400 + 0x240;
    pub const PAT: u64 = 0x400 + 0x268;
}

fn put(guest: &Guest, at: u64, value: u64) {
    guest.memory().write64(VMCB + at, value);
}

fn put32(guest: &Guest, at: u64, value: u32) {
    guest.memory().write(VMCB + at, &value.to_le_bytes());
}

fn get(guest: &Guest, at: u64) -> u64 {
    guest.memory().read64(VMCB + at)
}

/// Intercepts the event with exit code `code`.
fn intercept(guest: &Guest, code: u64) {
    let at = code / 32 * 4;
    let word = u32::from_le_bytes(guest.memory().read(VMCB + at));
    put32(guest, at, word | 1 << (code % 32));
}

fn put_segment(guest: &Guest, at: u64, segment: &Segment) {
    let attributes = segment.rights & 0xff | segment.rights >> 4 & 0xf00;
    let first = u64::from(segment.selector) | u64::from(attributes) << 16;
    put(guest, at, first | u64::from(segment.limit) << 32);
    put(guest, at + 8, segment.base);
}

/// Fills the control block with a guest at [`L2`] in the CPU's own state, and intercepts of VMMCALL, HLT and shutdown.
fn fill(guest: &Guest) {
    guest.memory().write(VMCB, &[0; 4096]);
    let state = &guest.cpu.state;
    for (at, segment) in [
        (0, &state.es),
        (0x10, &state.cs),
        (0x20, &state.ss),
        (0x30, &state.ds),
    ] {
        put_segment(guest, 0x400 + at, segment);
    }
    for (at, table) in [(0x60, state.gdtr), (0x80, state.idtr)] {
        put32(guest, 0x400 + at + 4, table.limit.into());
        put(guest, 0x400 + at + 8, table.base);
    }
    for (at, value) in [
        (at::EFER, state.efer),
        (at::CR4, state.cr4),
        (at::CR3, state.cr3),
        (at::CR0, state.cr0),
        (at::DR7, 0x400),
        (at::DR6, 0xffff_0ff0),
        (at::RFLAGS, 2),
        (at::RIP, L2),
        (at::RSP, L2_STACK),
        (at::RAX, 0x1111),
        (0x40, IO_MAP),
        (0x48, MSR_MAP),
        (at::ASID, 1),
    ] {
        put(guest, at, value);
    }
    for code in [0x80, 0x81, 0x78, 0x7f] {
        intercept(guest, code);
    }
}

/// Returns a hypervisor that runs `l2` once and halts.
fn hypervisor(l2: &[u8]) -> Guest {
    // vmrun; hlt
    let mut guest = Guest::new(b"\x0f\x01\xd8\xf4");
    guest.cpu.state.efer |= 1 << 12;
    guest.cpu.state.vm_hsave_pa = 0x21_0000;
    guest.cpu.state.gpr[RAX] = VMCB;
    guest.memory().write(L2, l2);
    fill(&guest);
    guest
}

/// Runs until the hypervisor halts after a #VMEXIT. Returns the exit code.
fn exit(guest: &mut Guest) -> u64 {
    guest.halt();
    assert_eq!(guest.cpu.state.rip, CODE + 4, "the hypervisor's own HLT");
    assert!(!guest.cpu.is_in_guest_mode());
    assert!(guest.cpu.state.events.gif_clear);
    get(guest, at::CODE)
}

/// Makes the hypervisor run its guest once more.
fn again(guest: &mut Guest) {
    guest.cpu.state.rip = CODE;
    guest.cpu.state.gpr[RAX] = VMCB;
}

#[test]
fn a_guest_leaves_by_vmmcall_and_its_hypervisor_goes_on() {
    // mov ecx, 5; mov eax, 7; vmmcall
    let mut guest = hypervisor(b"\xb9\x05\x00\x00\x00\xb8\x07\x00\x00\x00\x0f\x01\xd9");
    guest.cpu.state.rflags = 2 | flags::CF;
    let before = guest.cpu.state.clone();
    assert_eq!(exit(&mut guest), 0x81);
    let state = &guest.cpu.state;
    assert_eq!(state.gpr[RAX], VMCB, "RAX is the hypervisor's");
    assert_eq!(state.gpr[RCX], 5, "RCX is the guest's");
    assert_eq!(state.gpr[RSP], before.gpr[RSP]);
    assert_eq!(state.rflags & flags::CF, flags::CF);
    assert_eq!((state.cs, state.efer), (before.cs, before.efer));
    assert_eq!(state.dr7, 0x400);
    assert_eq!(get(&guest, at::RAX), 7);
    assert_eq!(get(&guest, at::RIP), L2 + 10);
    assert_eq!(get(&guest, at::NEXT_RIP), L2 + 13);
    assert_eq!(get(&guest, at::INT_INFO), 0);
    // The guest continues after the VMMCALL.
    again(&mut guest);
    put(&guest, at::RIP, L2);
    assert_eq!(exit(&mut guest), 0x81);
}

/// A nested guest's loop is compiled, too, and intercepts work in compiled code.
#[test]
fn a_guest_computes_as_anything_else() {
    // mov ecx, 20000; xor edx, edx; l: add edx, ecx; pushfq; popfq; dec ecx; jnz l; vmmcall
    let mut guest =
        hypervisor(b"\xb9\x20\x4e\x00\x00\x31\xd2\x01\xca\x9c\x9d\xff\xc9\x75\xf8\x0f\x01\xd9");
    assert_eq!(exit(&mut guest), 0x81);
    assert_eq!(guest.cpu.state.gpr[RDX], 200_010_000);
    for (code, at) in [(0x70, 9), (0x71, 10)] {
        fill(&guest);
        intercept(&guest, code);
        again(&mut guest);
        assert_eq!(exit(&mut guest), code);
        assert_eq!(get(&guest, at::RIP), L2 + at);
    }
}

#[test]
fn vmrun_refuses_states_that_no_cpu_has() {
    let refused = |change: &dyn Fn(&mut Guest)| {
        let mut guest = hypervisor(b"\x0f\x01\xd9");
        change(&mut guest);
        let code = exit(&mut guest);
        assert_eq!(guest.cpu.state.gpr[RAX], VMCB);
        code == u64::MAX
    };
    assert!(!refused(&|_| {}));
    let set = |at: u64, value: u64| move |guest: &mut Guest| put(guest, at, value);
    let flip = |at: u64, bits: u64| move |guest: &mut Guest| put(guest, at, get(guest, at) ^ bits);
    assert!(refused(&flip(at::EFER, 1 << 12)), "EFER.SVME");
    assert!(refused(&flip(at::EFER, 1 << 63)));
    assert!(refused(&flip(at::CR0, 1 << 29)), "NW without CD");
    assert!(refused(&flip(at::CR0, 1 << 32)));
    assert!(refused(&flip(at::CR0, 1)), "long mode without PE");
    assert!(refused(&flip(at::CR4, 1 << 5)), "long mode without PAE");
    assert!(refused(&flip(at::CR4, 1 << 40)));
    assert!(refused(&flip(at::CR3, 1 << 60)));
    assert!(refused(&flip(at::DR6, 1 << 32)));
    assert!(refused(&flip(at::DR7, 1 << 32)));
    assert!(refused(&flip(0x410, 1 << (16 + 10))), "CS.L and CS.D");
    assert!(refused(&flip(at::FOURTH, 1)), "VMRUN is not intercepted");
    assert!(refused(&set(at::ASID, 0)));
    assert!(refused(&flip(at::TLB_CONTROL, 2)));
    assert!(refused(&set(0x40, 1 << 52)), "the map of ports");
    assert!(refused(&set(0x48, 1 << 48)), "the map of MSRs");
    assert!(refused(&set(0x40, !0xfff)), "a map that ends at 0");
    assert!(refused(&set(0x48, !0xfff)), "a map that ends at 0");
    assert!(refused(&set(at::NESTED, 2)), "SEV");
    assert!(refused(&set(at::EVENT, 1 << 31 | 1 << 8)));
    assert!(refused(&set(at::EVENT, 1 << 31 | 3 << 8 | 2)));
    assert!(refused(&set(at::EVENT, 1 << 31 | 3 << 8 | 32)));
    assert!(refused(&set(at::INTERRUPTS, 1 << 31)), "AVIC");
}

#[test]
fn the_instructions_are_checked() {
    for instruction in [0xd8, 0xda, 0xdb, 0xdc, 0xdd, 0xdf] {
        let code = [0x0f, 0x01, instruction, 0xf4];
        let mut guest = Guest::new(&code);
        guest.cpu.state.gpr[RAX] = VMCB;
        guest.halt_in_handler(vector::UD);
        let mut guest = hypervisor(b"");
        guest.memory().write(CODE, &code);
        guest.cpu.state.gpr[RAX] = VMCB + 8;
        if matches!(instruction, 0xd8 | 0xda | 0xdb) {
            guest.halt_in_handler(vector::GP);
            let mut guest = hypervisor(b"");
            guest.memory().write(CODE, &code);
            guest.cpu.state.gpr[RAX] = MMIO;
            let exit = guest.run();
            assert!(matches!(exit, Exit::Emulation { .. }), "{exit:?}");
        }
    }
    let mut guest = hypervisor(b"");
    guest.cpu.state.vm_hsave_pa = 0;
    guest.halt_in_handler(vector::GP);
}

#[test]
fn a_guest_that_disables_svm_ends_its_hypervisor() {
    // mov ecx, 0xc0000080; rdmsr; btr eax, 12; wrmsr
    let mut guest = hypervisor(b"\xb9\x80\x00\x00\xc0\x0f\x32\x0f\xba\xf0\x0c\x0f\x30");
    assert_eq!(guest.run(), Exit::Shutdown);
    assert!(!guest.cpu.is_in_guest_mode());
}

#[test]
fn a_guest_has_a_time_stamp_counter_of_its_own() {
    // rdtsc; vmmcall
    let mut guest = hypervisor(b"\x0f\x31\x0f\x01\xd9");
    guest.machine.tsc = 999;
    guest.cpu.state.tsc_ratio = 3 << 31;
    put(&guest, 0x50, 7);
    assert_eq!(exit(&mut guest), 0x81);
    assert_eq!(get(&guest, at::RAX), 1500 + 7);
}

#[test]
fn vmsave_and_vmload_move_the_rest() {
    // vmsave; vmload; hlt
    let mut guest = hypervisor(b"");
    guest.memory().write(CODE, b"\x0f\x01\xdb\x0f\x01\xda\xf4");
    guest.cpu.state.star = 0x1234;
    guest.cpu.state.fs.base = 0x5000;
    let before = guest.cpu.state.clone();
    guest.halt();
    let after = &guest.cpu.state;
    assert_eq!((after.fs, after.gs), (before.fs, before.gs));
    assert_eq!((after.tr, after.star), (before.tr, before.star));
    assert_eq!(guest.memory().read64(SAVE + 0x200), 0x1234);
    assert_eq!(guest.memory().read64(SAVE + 0x48), 0x5000);
}

#[test]
fn a_saved_guest_goes_on_in_another_cpu() {
    // hlt (not intercepted); vmmcall
    let mut guest = hypervisor(b"\xf4\x0f\x01\xd9");
    put32(&guest, at::THIRD, 1 << 31);
    assert_eq!(guest.run(), Exit::Hlt);
    assert_eq!(guest.cpu.vmcb(), Some(VMCB));
    let page = guest.cpu.saved_vmcb();
    let mut other = Guest::with_memory(guest.machine.memory.clone(), b"\x0f\x01\xd8\xf4");
    other.cpu.state = guest.cpu.state.clone();
    assert_eq!(
        other.cpu.restore_guest_mode(VMCB, &[0; 4096]),
        Err(svm::BadVmcb)
    );
    assert!(!other.cpu.is_in_guest_mode());
    other.cpu.restore_guest_mode(VMCB, &page).unwrap();
    assert_eq!(other.cpu.saved_vmcb(), page);
    assert_eq!(exit(&mut other), 0x81);
    assert_eq!(other.cpu.state.gpr[RAX], VMCB);
}

/// A retry at any translation does not change the result.
#[test]
fn a_world_switch_that_is_interrupted_starts_again() {
    for at in 0..40 {
        let mut guest = hypervisor(b"\xb9\x05\x00\x00\x00\x0f\x01\xd9");
        guest.machine.retry_at = Some(at);
        assert_eq!(exit(&mut guest), 0x81);
        assert_eq!(get(&guest, at::RIP), L2 + 5);
        assert_eq!(guest.cpu.state.gpr[RCX], 5);
    }
}

/// Runs hypervisors with random control blocks. Each run ends, and then the CPU is either in the hypervisor or in its
/// guest.
#[test]
fn a_hypervisor_that_knows_nothing_does_no_harm() {
    let rounds = std::env::var("SLAT_TEST_ROUNDS").ok();
    let rounds = rounds.map_or(60, |rounds| rounds.parse().unwrap());
    let mut random = Random(0x5eed_0001);
    let memory = Memory::new(MMIO as usize);
    // A guest may loop for ever. So this stores the word that ends the current run, and the time when the run began.
    let running = Arc::new(Mutex::new(None::<(Arc<AtomicU32>, Instant)>));
    let watched = Arc::downgrade(&running);
    std::thread::spawn(move || {
        while let Some(running) = watched.upgrade() {
            if let Some((attention, since)) = &*running.lock().unwrap()
                && since.elapsed() > Duration::from_millis(2)
            {
                attention.store(2, Relaxed);
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    });
    for round in 0..rounds {
        let mut guest = Guest::with_memory(memory.clone(), b"\x0f\x01\xd8\xf4");
        guest.cpu.state.efer |= 1 << 12;
        guest.cpu.state.vm_hsave_pa = 0x1000;
        fill(&guest);
        let mut l2 = [0; 64];
        l2.iter_mut().for_each(|byte| *byte = random.next() as u8);
        guest.memory().write(L2, &l2);
        for _ in 0..random.below(6) {
            // Most random values are written to fields that have a meaning.
            let at = match random.below(3) {
                0 => random.below(0x100),
                1 => 0x400 + random.below(0x2a0),
                _ => random.below(0xff8),
            };
            let value = match random.below(3) {
                0 => random.next(),
                1 => 1 << random.below(64),
                _ => get(&guest, at) ^ 1 << random.below(64),
            };
            put(&guest, at, value);
        }
        // Special addresses: the guest's code, MMIO, and the guest's own tables.
        guest.cpu.state.gpr[RAX] = match random.below(8) {
            0 => random.pick(&[CODE, MMIO - 0x1000, MMIO, GDT, IDT, L2, 1 << 47]),
            _ => VMCB,
        };
        match random.below(8) {
            0 => guest.machine.read_only(VMCB),
            1 => guest.machine.track(VMCB),
            _ => {}
        }
        for _ in 0..4 {
            let attention = guest.attention.clone();
            attention.store(0, Relaxed);
            *running.lock().unwrap() = Some((attention, Instant::now()));
            let _any = guest.run();
            *running.lock().unwrap() = None;
            guest.cpu.complete_io(&[0; 4]);
            guest.cpu.complete_mmio_read(&[0; 8]);
            let state = &guest.cpu.state;
            assert!(
                guest.cpu.is_in_guest_mode() || state.cr0 & 1 != 0,
                "{round}"
            );
        }
    }
}
