//! A root of two concatenated tables, 40 bits of IPA; hardware sets access flag and dirty state.
#![no_std]
#![no_main]

use metal_aarch64::{El2, Monitor};
use metal_core::Second;
use slat::format::Stage2;

struct Program;

type Tables = Stage2<40, true>;

static SECOND: Second<El2<Tables>> = Second::new();

impl Monitor for Program {
    const NAME: &'static str = "aarch64-hafdbs";
    type Tables = Tables;

    fn second() -> &'static Second<El2<Tables>> {
        &SECOND
    }
}

/// Entry point of Rust, which `boot.S` jumps to.
#[unsafe(no_mangle)]
extern "C" fn main(cpu: usize) -> ! {
    metal_aarch64::main::<Program>(cpu)
}
