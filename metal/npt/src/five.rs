//! The monitor on AMD's SVM with nested tables of five levels. The walker reads five levels because the host itself
//! uses five. `metal/run --arch npt5` runs this monitor.
#![no_std]
#![no_main]

metal_x86::monitor!(metal_npt::Svm<slat::format::Npt5>, metal_x86::la57::enter);
