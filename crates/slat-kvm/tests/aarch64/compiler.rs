//! The thread that compiles the guests' code.

use super::guests::{CODE, Guest, PC, X0, code, get, set};
use slat_kvm::{VcpuExit, report};
use std::arch::global_asm;
use std::time::{Duration, Instant};

// Adds all numbers from X1 down to 1, by a word of memory. A device ends the run.
global_asm!(
    r"
    .pushsection .rodata
    .balign 4
    .globl slat_test_sum
slat_test_sum:
    ldr x2, [x3]
    add x2, x2, x1
    str x2, [x3]
    subs x1, x1, #1
    b.ne slat_test_sum
    mov x0, x2
    mov x4, #0x09000000
    str x0, [x4]
    .globl slat_test_sum_end
slat_test_sum_end:
    .popsection
"
);

/// Returns the number of instructions that compiled code has executed for all vCPUs.
fn compiled() -> u64 {
    // `instructions_compiled` is the second of the CPUs' counters.
    report::totals().cpu[1]
}

#[test]
fn hot_code_is_compiled_and_computes_what_the_interpreter_computes() {
    const TURNS: u64 = 200_000;
    let guest = Guest::new(code!(slat_test_sum, slat_test_sum_end));
    let mut vcpu = guest.vcpu(0, 0);
    let x = |n: u64| X0 + 2 * n;
    let before = compiled();
    let began = Instant::now();
    while compiled() - before < TURNS {
        assert!(
            began.elapsed() < Duration::from_secs(60),
            "nothing is compiled"
        );
        guest.memory.write(0x1000, &[0; 8]);
        set(&vcpu, PC, CODE);
        set(&vcpu, x(1), TURNS);
        set(&vcpu, x(3), CODE + 0x1000);
        let exit = vcpu.run().unwrap();
        assert!(matches!(exit, VcpuExit::MmioWrite(..)), "{exit:?}");
        assert_eq!(get(&vcpu, X0), TURNS * (TURNS + 1) / 2);
    }
}
