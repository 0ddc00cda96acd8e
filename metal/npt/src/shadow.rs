//! The monitor on AMD's SVM with nested paging off. QEMU's one-dimensional walker walks the engine's shadow tables.
//! The guest has its own tables, and changes them. `metal/run --arch x86` runs this monitor.
#![no_std]
#![no_main]

metal_x86::monitor!(metal_npt::Svm<slat::format::X86<5>>);
