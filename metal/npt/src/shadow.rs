//! The monitor on AMD's SVM with nested paging off: QEMU's one-dimensional walker walks shadow tables of the engine's,
//! while the guest has tables of its own, which it changes. `metal/run --arch x86` runs it.
#![no_std]
#![no_main]

metal_x86::monitor!(metal_npt::Svm<slat::format::X86<5>>);
