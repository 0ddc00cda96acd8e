//! Four levels, 48 bits of IPA; the access flag and the dirty bit are set by software.
#![no_std]
#![no_main]

use metal_aarch64::{El2, Monitor};
use metal_core::Second;
use slat::format::Stage2;

struct Program;

type Tables = Stage2<48>;

static SECOND: Second<El2<Tables>> = Second::new();

impl Monitor for Program {
    const NAME: &'static str = "aarch64";
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
