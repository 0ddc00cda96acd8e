//! Tests guests that are hypervisors by SVM: the state that a client sees, saves and restores.

use crate::common::*;
use crate::smm::{map, smram};
use kvm_bindings::*;
use slat_kvm::{KvmNestedStateBuffer, VcpuExit, VcpuFd};

const EFER: u32 = 0xc000_0080;
const EFER_SVME: u64 = 1 << 12;
const VM_HSAVE_PA: u32 = 0xc001_0117;
const VMCB: u64 = 0x2000;
/// The address at which the nested guest begins.
const L2: u64 = CODE + 0x100;
/// The intercepts of VMRUN and VMMCALL, in the fourth vector of intercepts.
const LEAVES: u32 = 3;

/// vmrun; mov al, 2; out 0x11, al; hlt
const L1_CODE: &[u8] = &[0x0f, 0x01, 0xd8, 0xb0, 2, 0xe6, 0x11, 0xf4];
/// mov al, 1; out 0x10, al; vmmcall
const L2_CODE: &[u8] = &[0xb0, 1, 0xe6, 0x10, 0x0f, 0x01, 0xd9];

fn flat(kind: u8) -> kvm_segment {
    kvm_segment {
        selector: 8,
        limit: u32::MAX,
        type_: kind,
        present: 1,
        s: 1,
        db: 1,
        g: 1,
        ..Default::default()
    }
}

/// Puts the vCPU into protected mode, at the VMRUN of a hypervisor.
fn start(vcpu: &VcpuFd) {
    tell_features(vcpu);
    let mut sregs = vcpu.get_sregs().unwrap();
    sregs.cr0 = 0x11;
    sregs.efer = EFER_SVME;
    sregs.cs = flat(11);
    (sregs.ds, sregs.es, sregs.ss) = (flat(3), flat(3), flat(3));
    vcpu.set_sregs(&sregs).unwrap();
    let mut regs = vcpu.get_regs().unwrap();
    (regs.rip, regs.rax) = (CODE, VMCB);
    vcpu.set_regs(&regs).unwrap();
    assert!(set_msr(vcpu, VM_HSAVE_PA, DATA));
}

/// Creates a VM whose guest is a hypervisor. The nested guest begins with the registers of the hypervisor.
fn hypervisor() -> Guest {
    let guest = Guest::new(L1_CODE);
    start(&guest.vcpu);
    let memory = &guest.memory;
    memory.write(L2, L2_CODE);
    memory.write(VMCB, &[0; 4096]);
    let put = |at: u64, value: u64| memory.write(VMCB + at, &value.to_le_bytes());
    put(0x10, LEAVES.into());
    put(0x58, 1);
    // The segments are flat: code and data.
    for (at, attributes) in [
        (0x400, 0xc93),
        (0x410, 0xc9b),
        (0x420, 0xc93),
        (0x430, 0xc93),
    ] {
        put(at, 8 | attributes << 16 | 0xffff_ffff << 32);
    }
    for (at, value) in [
        (0xd0, EFER_SVME),
        (0x158, 0x11),
        (0x160, 0x400),
        (0x168, 0xffff_0ff0),
        (0x170, 2),
        (0x178, L2),
    ] {
        put(0x400 + at, value);
    }
    guest
}

/// Runs to an OUT, and checks its port and whether the nested guest runs.
fn expect_out(vcpu: &mut VcpuFd, port: u16, nested: bool) {
    match vcpu.run().unwrap() {
        VcpuExit::IoOut(at, _) => assert_eq!(at, port),
        other => panic!("{other:?}"),
    }
    let flags = vcpu.get_kvm_run().flags;
    assert_eq!(flags & KVM_RUN_X86_GUEST_MODE as u16 != 0, nested);
}

fn state(vcpu: &VcpuFd) -> KvmNestedStateBuffer {
    let mut state = KvmNestedStateBuffer::empty();
    vcpu.nested_state(&mut state).unwrap();
    state
}

#[test]
fn a_hypervisor_is_saved_and_restored_while_its_guest_runs() {
    let mut guest = hypervisor();
    expect_out(&mut guest.vcpu, 0x10, true);
    let saved = state(&guest.vcpu);
    assert_eq!(u32::from(saved.format), KVM_STATE_NESTED_FORMAT_SVM);
    let flags = KVM_STATE_NESTED_GUEST_MODE | KVM_STATE_NESTED_GIF_SET;
    assert_eq!((u32::from(saved.flags), saved.size), (flags, 4224));
    let regs = guest.vcpu.get_regs().unwrap();
    let sregs = guest.vcpu.get_sregs().unwrap();
    // Makes another VM with a copy of the memory.
    let other = Guest::new(L1_CODE);
    let mut bytes = vec![0; MEMORY];
    guest.memory.read(0, &mut bytes);
    other.memory.write(0, &bytes);
    let mut vcpu = other.vcpu;
    tell_features(&vcpu);
    assert!(vcpu.set_nested_state(&saved).is_err(), "without EFER.SVME");
    vcpu.set_sregs(&sregs).unwrap();
    assert!(set_msr(&vcpu, VM_HSAVE_PA, DATA));
    vcpu.set_nested_state(&saved).unwrap();
    vcpu.set_regs(&regs).unwrap();
    let again = state(&vcpu);
    assert_eq!((again.flags, again.size), (saved.flags, saved.size));
    // The first VM also continues.
    for vcpu in [&mut vcpu, &mut guest.vcpu] {
        // The restored guest may execute its OUT twice, because its client has not completed the OUT.
        loop {
            match vcpu.run().unwrap() {
                VcpuExit::IoOut(0x10, _) => {}
                VcpuExit::IoOut(0x11, data) => break assert_eq!(data, [2]),
                other => panic!("{other:?}"),
            }
        }
        let state = state(vcpu);
        assert_eq!((state.flags, state.size), (0, 128), "GIF is clear");
    }
    let mut code = [0; 8];
    guest.memory.read(VMCB + 0x70, &mut code);
    assert_eq!(u64::from_le_bytes(code), 0x81);
}

/// The nested tables of a hypervisor in 32-bit mode have no entry for an address beyond 4 GiB. The tables of its
/// guest may refer to such an address.
#[test]
fn an_address_beyond_the_nested_tables_is_a_nested_page_fault() {
    const BEYOND: u64 = 1 << 32;
    let mut guest = hypervisor();
    let mut sregs = guest.vcpu.get_sregs().unwrap();
    // CR4.PSE enables pages of 4 MiB. The hypervisor uses its own tables as the nested tables, too.
    let [nested, directory, pointers] = [0, DATA, DATA + 0x800];
    (sregs.cr0, sregs.cr3, sregs.cr4) = (0x8000_0011, nested, 0x10);
    guest.vcpu.set_sregs(&sregs).unwrap();
    let memory = &guest.memory;
    let put = |at: u64, value: u64| memory.write(at, &value.to_le_bytes());
    // The hypervisor's table maps a page of 4 MiB, and the guest's tables map two of 2 MiB.
    put(nested, 0x87);
    put(pointers, directory | 1);
    put(directory, 0x87);
    put(directory + 8, BEYOND | 0x87);
    put(VMCB + 0x90, 1);
    put(VMCB + 0xb0, nested);
    for (at, value) in [(0x148, 0x20), (0x150, pointers), (0x158, 0x8000_0011)] {
        put(VMCB + 0x400 + at, value);
    }
    // mov eax, [0x200123]
    memory.write(L2, &[0xa1, 0x23, 1, 0x20, 0]);
    expect_out(&mut guest.vcpu, 0x11, false);
    let mut exit = [0; 24];
    guest.memory.read(VMCB + 0x70, &mut exit);
    let exit = exit
        .as_chunks()
        .0
        .iter()
        .map(|bytes| u64::from_le_bytes(*bytes));
    // The error code says: the fault was at the final page, by a user access.
    assert_eq!(
        exit.collect::<Vec<_>>(),
        [0x400, 1 << 32 | 4, BEYOND | 0x123]
    );
}

/// The nested entry of a guest's table changes. Then the table is read where the current nested entry leads, or the
/// access is a nested page fault. It is not read where the earlier entry, which did not allow writing, has led.
#[test]
fn a_table_whose_nested_entry_has_changed_is_read_in_one_place() {
    let mut guest = hypervisor();
    // The hypervisor uses its own tables as the nested tables, too: a directory, and a table.
    let [nested, table] = [0, DATA];
    let mut sregs = guest.vcpu.get_sregs().unwrap();
    (sregs.cr0, sregs.cr3, sregs.cr4) = (0x8000_0011, nested, 0x10);
    guest.vcpu.set_sregs(&sregs).unwrap();
    let memory = &guest.memory;
    let put = |at: u64, value: u64| memory.write(at, &(value as u32).to_le_bytes());
    put(nested, table | 7);
    (0..4).for_each(|page| put(table + 4 * page, page << 12 | 7));
    // The nested tables also map the page of the nested guest's code a second time, read-only.
    const AGAIN: u64 = 4;
    put(table + 4 * AGAIN, CODE | 5);
    put(VMCB + 0x90, 1);
    put(VMCB + 0xb0, nested);
    // The hypervisor intercepts page faults.
    put(VMCB + 8, 1 << 14);
    // vmrun; mov dword [0x3010], 0x10007; out 0x11, al; hlt. After the store, the nested entry of that page is
    // writable, and leads to no memory.
    memory.write(
        CODE,
        b"\x0f\x01\xd8\xc7\x05\x10\x30\0\0\x07\0\x01\0\xe6\x11\xf4",
    );
    // mov eax, [0x4000]; vmmcall
    memory.write(L2, b"\xa1\0\x40\0\0\x0f\x01\xd9");
    let exit_code = || {
        let mut code = [0; 8];
        memory.read(VMCB + 0x70, &mut code);
        u64::from_le_bytes(code)
    };
    expect_out(&mut guest.vcpu, 0x11, false);
    assert_eq!(exit_code(), 0x81);
    // The guest now uses paging. Its first table is in the page that is mapped twice. The table would map the code by
    // a page of 2 MiB.
    const POINTERS: u64 = 0x800;
    const ENTRY: u64 = POINTERS / 8 + 1;
    put(CODE + POINTERS, CODE | 1);
    put(CODE + 8 * ENTRY, 0xe7);
    for (at, value) in [
        (0x148, 0x20),
        (0x150, AGAIN << 12 | POINTERS),
        (0x158, 0x8000_0011),
        (0x178, ENTRY << 21 | (L2 + 5)),
    ] {
        put(VMCB + 0x400 + at, value);
    }
    let mut regs = guest.vcpu.get_regs().unwrap();
    (regs.rip, regs.rax) = (CODE, VMCB);
    guest.vcpu.set_regs(&regs).unwrap();
    expect_out(&mut guest.vcpu, 0x11, false);
    assert_eq!(exit_code(), 0x4e, "a page fault");
}

#[test]
fn a_state_that_no_cpu_is_in_is_refused() {
    let mut guest = hypervisor();
    expect_out(&mut guest.vcpu, 0x10, true);
    let vcpu = &guest.vcpu;
    let refused = |change: &dyn Fn(&mut KvmNestedStateBuffer)| {
        let mut state = state(vcpu);
        change(&mut state);
        match vcpu.set_nested_state(&state) {
            Ok(()) => false,
            Err(error) => error.errno() == libc::EINVAL,
        }
    };
    assert!(!refused(&|_| {}));
    assert!(refused(&|state| state.flags |= 4));
    assert!(refused(&|state| state.format = 0));
    assert!(refused(&|state| state.size = 128));
    assert!(refused(&|state| state.hdr.svm.vmcb_pa = VMCB + 8));
    assert!(refused(&|state| state.hdr.svm.vmcb_pa = 1 << 60));
    assert!(refused(&|state| state.flags = 2), "a run without a guest");
    let efer = |value: u64| {
        move |state: &mut KvmNestedStateBuffer| {
            // SAFETY: the state has this format, whose data is a page of bytes.
            let page = unsafe { &mut state.data.svm.vmcb12 };
            page[0x4d0..0x4d8].copy_from_slice(&value.to_le_bytes());
        }
    };
    assert!(!refused(&efer(EFER_SVME)));
    assert!(refused(&efer(EFER_SVME | 1 << 10)), "LMA without LME");
    // When EFER.SVME is cleared, there is no nested guest, and GIF is set.
    assert!(set_msr(vcpu, EFER, 0));
    let after = state(vcpu);
    assert_eq!(u32::from(after.flags), KVM_STATE_NESTED_GIF_SET);
    assert!(!refused(&|state| state.flags = 0));
    assert_eq!(state(vcpu).flags, 0, "GIF can be clear");
}

/// When the nested guest exits, no memory is at the address of the control block any more.
#[test]
fn a_hypervisor_without_its_control_block_shuts_down() {
    let mut guest = hypervisor();
    expect_out(&mut guest.vcpu, 0x10, true);
    set_slot(&guest.vm, &guest.memory, 0, 0);
    set_slot(&guest.vm, &guest.memory, 0, VMCB);
    assert!(matches!(guest.vcpu.run().unwrap(), VcpuExit::Shutdown));
    let state = state(&guest.vcpu);
    assert_eq!(u32::from(state.flags) & KVM_STATE_NESTED_GUEST_MODE, 0);
}

#[test]
fn a_control_block_in_a_read_only_slot_cannot_be_left_to() {
    let mut guest = hypervisor();
    set_slot(&guest.vm, &guest.memory, 0, 0);
    set_slot(&guest.vm, &guest.memory, 0, VMCB);
    let region = kvm_userspace_memory_region {
        slot: 1,
        flags: KVM_MEM_READONLY,
        guest_phys_addr: VMCB,
        memory_size: MEMORY as u64 - VMCB,
        userspace_addr: guest.memory.start as u64 + VMCB,
    };
    // SAFETY: the memory belongs to the test, and outlives the VM's use of it.
    unsafe { guest.vm.set_user_memory_region(region) }.unwrap();
    expect_out(&mut guest.vcpu, 0x10, true);
    assert!(matches!(guest.vcpu.run().unwrap(), VcpuExit::Shutdown));
}

#[test]
fn init_ends_guest_mode() {
    let mut guest = hypervisor();
    expect_out(&mut guest.vcpu, 0x10, true);
    let mut sregs = guest.vcpu.get_sregs().unwrap();
    sregs.efer = 0;
    guest.vcpu.set_sregs(&sregs).unwrap();
    assert_eq!(
        u32::from(state(&guest.vcpu).flags),
        KVM_STATE_NESTED_GIF_SET
    );
}

/// mov al, 0xfe; out 0x12, al; rsm
const TELL: &[u8] = &[0xb0, 0xfe, 0xe6, 0x12, 0x0f, 0xaa];

fn exit_code(memory: &Memory) -> u64 {
    let mut code = [0; 8];
    memory.read(VMCB + 0x70, &mut code);
    u64::from_le_bytes(code)
}

/// The handler of the SMI runs outside the nested guest. The hypervisor's registers are saved in its own memory, and
/// not in SMRAM. RSM returns to the nested guest.
#[test]
fn an_smi_interrupts_a_nested_guest() {
    let mut guest = hypervisor();
    let _smram = smram(&guest.vm, TELL, 0);
    let other = Memory::new(MEMORY);
    map(&guest.vm, 1 << 16, 0, &other, 0).unwrap();
    expect_out(&mut guest.vcpu, 0x10, true);
    guest.vcpu.smi().unwrap();
    expect_out(&mut guest.vcpu, 0x12, false);
    let is_used = |memory: &Memory| {
        let mut page = [0; 4096];
        memory.read(DATA, &mut page);
        page.iter().any(|byte| *byte != 0)
    };
    assert!(is_used(&guest.memory) && !is_used(&other));
    // The nested guest executes VMMCALL, as if there had been no SMI.
    expect_out(&mut guest.vcpu, 0x11, false);
    assert_eq!(exit_code(&guest.memory), 0x81);
}

/// The handler of an SMI may change the hypervisor's nested tables, if its address space contains the same memory.
#[test]
fn a_nested_entry_that_changes_in_system_management_mode_has_changed() {
    const TABLE: u64 = 0x4000;
    let mut guest = hypervisor();
    // mov dword [TABLE + 4 * 3], 0x6007; rsm
    let handler = [0x66, 0xc7, 6, 0x0c, 0x40, 7, 0x60, 0, 0, 0x0f, 0xaa];
    let _smram = smram(&guest.vm, &handler, 0);
    let more = Memory::new(MEMORY);
    for space in [0, 1 << 16] {
        map(&guest.vm, space | 2, TABLE, &more, 0).unwrap();
    }
    map(&guest.vm, 1 << 16, 0, &guest.memory, 0).unwrap();
    assert!(set_msr(&guest.vcpu, VM_HSAVE_PA, 0x7000));
    guest.memory.write(0, &(TABLE as u32 | 7).to_le_bytes());
    for page in 0..4 {
        let entry = if page == 3 { 0x5007 } else { page << 12 | 7 };
        more.write(4 * page, &(entry as u32).to_le_bytes());
    }
    more.write(0x1000, &[0x11]);
    more.write(0x2000, &[0x22]);
    guest.memory.write(VMCB + 0x90, &[1]);
    guest.memory.write(VMCB + 0xb0, &[0; 8]);
    let mut sregs = guest.vcpu.get_sregs().unwrap();
    (sregs.cr0, sregs.cr3) = (0x8000_0011, 0);
    // The hypervisor uses the nested tables as its own tables, too.
    guest.vcpu.set_sregs(&sregs).unwrap();
    // mov al, [0x3000]; out 0x10, al; both once more; vmmcall
    let read = [0xa0, 0, 0x30, 0, 0, 0xe6, 0x10];
    guest
        .memory
        .write(L2, &[&read[..], &read, &[0x0f, 0x01, 0xd9]].concat());
    for byte in [0x11, 0x22] {
        match guest.vcpu.run().unwrap() {
            VcpuExit::IoOut(0x10, data) => assert_eq!(data, [byte]),
            other => panic!("{other:?}"),
        }
        guest.vcpu.smi().unwrap();
    }
    expect_out(&mut guest.vcpu, 0x11, false);
    assert_eq!(exit_code(&guest.memory), 0x81);
}
