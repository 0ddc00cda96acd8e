//! Tables of format Sv48x4.
#![no_std]
#![no_main]

use metal_core::Second;
use metal_riscv::{Hart, Monitor};
use slat::format::Sv48x4;

struct Program;

static SECOND: Second<Hart<Sv48x4>> = Second::new();

impl Monitor for Program {
    const NAME: &'static str = "riscv-sv48x4";
    type Tables = Sv48x4;

    fn second() -> &'static Second<Hart<Sv48x4>> {
        &SECOND
    }
}

/// Entry point of Rust, which `boot.S` jumps to.
#[unsafe(no_mangle)]
extern "C" fn main(cpu: usize, hart: u64) -> ! {
    metal_riscv::main::<Program>(cpu, hart)
}
