//! Tables of format Sv39x4.
#![no_std]
#![no_main]

use metal_core::Second;
use metal_riscv::{Hart, Monitor};
use slat::format::Sv39x4;

struct Program;

static SECOND: Second<Hart<Sv39x4>> = Second::new();

impl Monitor for Program {
    const NAME: &'static str = "riscv";
    type Tables = Sv39x4;

    fn second() -> &'static Second<Hart<Sv39x4>> {
        &SECOND
    }
}

/// Entry point of Rust, which `boot.S` jumps to.
#[unsafe(no_mangle)]
extern "C" fn main(cpu: usize, hart: u64) -> ! {
    metal_riscv::main::<Program>(cpu, hart)
}
