//! Tests the translations of a hypervisor and of its guests.

use super::*;

/// A linear address is mapped to another page in each world.
#[test]
fn translations_of_the_worlds_never_mix() {
    // mov ebx, [DATA]; vmrun; mov ecx, [DATA]; hlt
    let load = |modrm: u8| {
        let mut code = vec![0x8b, modrm, 0x25];
        code.extend((DATA as u32).to_le_bytes());
        code
    };
    let code = [load(0x1c), vec![0x0f, 0x01, 0xd8], load(0x0c), vec![0xf4]].concat();
    let mut guest = hypervisor(&[load(0x14), vec![0x0f, 0x01, 0xd9]].concat());
    guest.memory().write(CODE, &code);
    guest.machine.spaces.insert((0x7000, DATA >> 12), 0x300);
    put(&guest, at::CR3, 0x7000);
    guest.memory().write64(DATA, 1);
    guest.memory().write64(0x30_0000, 2);
    guest.halt();
    let gpr = guest.cpu.state.gpr;
    assert_eq!((gpr[RBX], gpr[RDX], gpr[RCX]), (1, 2, 1));
}

/// Translations of an ASID stay until the hypervisor flushes them. That includes a global page, which is not
/// global in another world.
#[test]
fn translations_are_kept_for_an_asid_until_they_are_flushed() {
    // mov edx, [DATA]; vmmcall
    let mut l2 = vec![0x8b, 0x14, 0x25];
    l2.extend((DATA as u32).to_le_bytes());
    l2.extend(b"\x0f\x01\xd9");
    const INVLPGA: u32 = 0x100;
    // The ASIDs of two runs, TLB_CONTROL or INVLPGA before the second run, and the page that the second run reads.
    for (first, second, how, seen) in [
        (1, 1, 0, 2),
        (1, 1, 1, 3),
        (1, 1, 3, 3),
        (1, 1, 7, 3),
        (1, 1, INVLPGA, 3),
        (2, 1, INVLPGA, 3),
        (1, 2, 0, 3),
        (2, 1, 0, 3),
        (7, 7, 0, 2),
        (9, 9, 0, 3),
    ] {
        for global in [false, true] {
            let mut guest = hypervisor(&l2);
            guest.cpu.state.cr4 |= 1 << 7;
            put(&guest, at::CR4, guest.cpu.state.cr4);
            put(&guest, at::CR3, 0x7000);
            if global {
                guest.machine.globals.insert(DATA >> 12);
            }
            guest.memory().write64(DATA, 1);
            for page in [2, 3] {
                guest.memory().write64(0x30_0000 + page * 0x1000, page);
            }
            let own = |guest: &mut Guest| {
                guest.cpu.state.rip = CODE + 0x100;
                guest.halt();
                assert_eq!(guest.cpu.state.gpr[RBX], 1);
            };
            let mut load = vec![0x8b, 0x1c, 0x25];
            load.extend((DATA as u32).to_le_bytes());
            load.push(0xf4);
            guest.memory().write(CODE + 0x100, &load);
            // invlpga; hlt
            guest.memory().write(CODE + 0x200, b"\x0f\x01\xdf\xf4");
            own(&mut guest);
            guest.machine.spaces.insert((0x7000, DATA >> 12), 0x302);
            put32(&guest, at::ASID, first);
            again(&mut guest);
            assert_eq!(exit(&mut guest), 0x81);
            assert_eq!(guest.cpu.state.gpr[RDX], 2);
            own(&mut guest);
            guest.machine.spaces.insert((0x7000, DATA >> 12), 0x303);
            if how == INVLPGA {
                guest.cpu.state.rip = CODE + 0x200;
                guest.cpu.state.gpr[RAX] = DATA;
                guest.cpu.state.gpr[RCX] = second.into();
                guest.halt();
            }
            let case = (first, second, how, global);
            // The machine's nested translations are void, even if the TLB has no translation of the ASID.
            let mut told = guest.machine.flushes.len();
            if how == INVLPGA {
                assert_eq!(guest.machine.flushes.last(), Some(&GuestFlush::Nested));
                told -= 1;
            }
            put(&guest, at::RIP, L2);
            put32(&guest, at::ASID, second);
            put32(&guest, at::TLB_CONTROL, how & 0xff);
            again(&mut guest);
            assert_eq!(exit(&mut guest), 0x81);
            assert_eq!(guest.cpu.state.gpr[RDX], seen, "{case:?}");
            let is_told = guest.machine.flushes[told..].contains(&GuestFlush::Nested);
            assert_eq!(is_told, seen != 2, "{case:?}");
            own(&mut guest);
        }
    }
}

/// An address of L2. The next constant is the address in L1 of the page to which it is mapped.
const BLOCK: u64 = 0x28_0000;
const NESTED_BLOCK: u64 = 0x30_0000;

/// Returns a hypervisor with nested paging, which maps [`BLOCK`] for VMLOAD and VMSAVE. Its guest executes `l2` with
/// that address in RAX.
fn with_virtual_vmload(l2: &[u8]) -> Guest {
    const NESTED_TABLES: u64 = 0x9000;
    let mut guest = hypervisor(l2);
    (guest.machine.spaces).insert((NESTED_TABLES, BLOCK >> 12), NESTED_BLOCK >> 12);
    for (at, value) in [
        (at::NESTED, 1),
        (at::NESTED_CR3, NESTED_TABLES),
        (at::PAT, 0x0007_0406_0007_0406),
        (at::VIRTUAL_EXTENSIONS, 2),
        (at::RAX, BLOCK),
    ] {
        put(&guest, at, value);
    }
    guest
}

/// The offset at which VMSAVE stores STAR.
const STAR: u64 = 0x600;

#[test]
fn a_guest_has_vmload_and_vmsave_at_addresses_of_its_own() {
    // vmsave; vmmcall
    let vmsave = b"\x0f\x01\xdb\x0f\x01\xd9";
    let mut guest = with_virtual_vmload(vmsave);
    guest.cpu.state.star = 0x1234;
    assert_eq!(exit(&mut guest), 0x81);
    assert_eq!(guest.memory().read64(NESTED_BLOCK + STAR), 0x1234);
    assert_eq!(guest.memory().read64(BLOCK + STAR), 0);
    // vmload; vmmcall
    let mut guest = with_virtual_vmload(b"\x0f\x01\xda\x0f\x01\xd9");
    guest.memory().write64(NESTED_BLOCK + STAR, 0x5678);
    guest.memory().write64(BLOCK + STAR, 1);
    assert_eq!(exit(&mut guest), 0x81);
    assert_eq!(guest.cpu.state.star, 0x5678);
    // Without nested paging, or without the bit, the address is translated as an address of the hypervisor.
    for field in [at::NESTED, at::VIRTUAL_EXTENSIONS] {
        let mut guest = with_virtual_vmload(vmsave);
        guest.cpu.state.star = 0x1234;
        put(&guest, field, 0);
        assert_eq!(exit(&mut guest), 0x81);
        assert_eq!(guest.memory().read64(BLOCK + STAR), 0x1234, "{field:#x}");
        assert_eq!(guest.memory().read64(NESTED_BLOCK + STAR), 0, "{field:#x}");
    }
}

#[test]
fn a_virtual_vmsave_leaves_as_any_access_does() {
    let vmsave = b"\x0f\x01\xdb";
    let mut guest = with_virtual_vmload(vmsave);
    put(&guest, at::RAX, BLOCK + 0x1000);
    assert_eq!(exit(&mut guest), 0x400, "no nested entry");
    assert_eq!(get(&guest, at::INFO_2) & !0xfff, BLOCK + 0x1000);
    assert_eq!(get(&guest, at::RIP), L2);
    let mut guest = with_virtual_vmload(vmsave);
    intercept(&guest, 0x83);
    assert_eq!(exit(&mut guest), 0x83);
    // The guest is outside long mode.
    let mut guest = with_virtual_vmload(vmsave);
    let state = &guest.cpu.state;
    put(&guest, at::EFER, state.efer & !(1 << 8));
    put(&guest, at::CR0, state.cr0 & !(1 << 31));
    let code = Segment {
        rights: 0xc09b,
        ..state.cs
    };
    put_segment(&guest, 0x410, &code);
    assert_eq!(exit(&mut guest), 0x83);
}
