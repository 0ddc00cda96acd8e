//! Tests a host that does not allow executable memory: the interpreter executes all code.
#![cfg(feature = "jit")]

mod common;
use common::*;
use slat_x86::{Compile, Compiler, Tier};

/// Forbids this process to make memory executable. Returns whether the host supports that: Linux 6.3 and later.
fn forbid() -> bool {
    const PR_SET_MDWE: libc::c_int = 65;
    const REFUSE_EXEC_GAIN: libc::c_ulong = 1;
    let zero: libc::c_ulong = 0;
    // SAFETY: the call takes no pointer.
    unsafe { libc::prctl(PR_SET_MDWE, REFUSE_EXEC_GAIN, zero, zero, zero) == 0 }
}

#[test]
fn without_executable_memory_code_is_interpreted() {
    // dec ecx; jne $-2; hlt
    let mut guest = Guest::new(b"\xff\xc9\x75\xfc\xf4");
    let compiler = Compiler::try_new().unwrap();
    (guest.cpu)
        .set_compiler(compiler.clone(), Compile::AtOnce(Tier::Full))
        .unwrap();
    let is_forbidden = forbid();
    for _ in 0..2 {
        guest.cpu.state.rip = CODE;
        guest.cpu.state.gpr[RCX] = 100_000;
        guest.halt();
        assert_eq!(guest.cpu.state.gpr[RCX], 0);
    }
    let counters = guest.cpu.counters();
    assert!(counters.instructions > 400_000);
    assert_eq!(counters.regions == 0, is_forbidden, "{counters:?}");
    assert_eq!(compiler.is_forbidden(), is_forbidden);
}
