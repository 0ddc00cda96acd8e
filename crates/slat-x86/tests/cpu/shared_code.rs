//! Tests compiled code that CPUs share, and regions that continue in other regions.
#![cfg(feature = "jit")]

use crate::common::*;

/// The addresses of the code. No other test has code at these addresses. Otherwise its compiled code might be found.
const FIRST: u64 = 0x9_3000;
const SECOND: u64 = FIRST + 7;

/// Makes a guest with two blocks that add `a` and `b` to EAX, on compiled code.
fn adds(a: u8, b: u8) -> Guest {
    let mut guest = Guest::new(b"");
    compiled::always(&mut guest.cpu);
    // add eax,A; jmp to the next
    guest.memory().write(FIRST, &[0x05, a, 0, 0, 0, 0xeb, 0]);
    // add eax,B; hlt
    guest.memory().write(SECOND, &[0x05, b, 0, 0, 0, 0xf4]);
    guest
}

/// Runs the guest from `rip`. Returns the sum that it has added.
fn sum(guest: &mut Guest, rip: u64) -> u64 {
    guest.cpu.state.rip = rip;
    guest.cpu.state.gpr[RAX] = 0;
    guest.halt();
    guest.cpu.state.gpr[RAX]
}

#[test]
fn code_is_compiled_once_for_all_cpus_whose_memory_holds_it() {
    let mut compiles = adds(1, 2);
    // When the first block is compiled, the second is known, so one region has both.
    assert_eq!(sum(&mut compiles, SECOND), 2);
    assert_eq!(sum(&mut compiles, FIRST), 3);
    assert_eq!(compiles.cpu.counters().regions_shared, 0);

    let mut same = adds(1, 2);
    assert_eq!(sum(&mut same, FIRST), 3);
    let counters = same.cpu.counters();
    assert_eq!((counters.regions, counters.regions_shared), (1, 1));
    assert_eq!(
        counters.instructions,
        counters.instructions_compiled + 1,
        "HLT ends the region"
    );

    // Shared code is checked like the CPU's own: a change of memory is seen.
    same.memory().write(SECOND + 1, &[40]);
    assert_eq!(sum(&mut same, FIRST), 41);
    assert_eq!(sum(&mut compiles, FIRST), 3);

    // All of a region is compared with memory, not only the requested block.
    let mut other = adds(1, 7);
    assert_eq!(sum(&mut other, FIRST), 8);
    assert_eq!(other.cpu.counters().regions_shared, 0);
}

/// The regions end with calls, returns, and jumps to constant and to computed addresses. Each leads into another
/// page, which has a region of its own.
#[test]
fn a_region_continues_in_another_one_that_is_known() {
    const TURNS: u64 = 1000;
    let pages = [FIRST + 0x2000, FIRST + 0x3000, FIRST + 0x5000];
    let mut guest = Guest::new(b"");
    compiled::always(&mut guest.cpu);
    let write = |at: u64, code: &[&[u8]]| guest.memory().write(at, &code.concat());
    let to = |from: u64, target: u64| (target.wrapping_sub(from) as i32).to_le_bytes();
    let [first, second, third] = pages;
    // call second; dec ecx; jnz to the call; hlt
    let call = to(first + 5, second);
    write(first, &[b"\xe8", &call, b"\xff\xc9\x75\xf7\xf4"]);
    // jmp third
    write(second, &[b"\xe9", &to(second + 5, third)]);
    // lea rdx,[rip+0x100]; jmp rdx, where: ret
    write(third, &[b"\x48\x8d\x15\0\x01\0\0\xff\xe2"]);
    write(third + 0x107, &[b"\xc3"]);
    guest.cpu.state.rip = first;
    guest.cpu.state.gpr[RCX] = TURNS;
    guest.halt();
    let counters = guest.cpu.counters();
    assert!(
        counters.regions_chained > 4 * (TURNS - 10) && counters.blocks < 100,
        "{counters:?}"
    );
}
