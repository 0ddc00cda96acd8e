//! The monitor on AMD's SVM with nested tables of five levels, which the walker reads while the host itself has five.
//! `metal/run --arch npt5` runs it.
#![no_std]
#![no_main]

metal_x86::monitor!(metal_npt::Svm<slat::format::Npt5>, metal_x86::la57::enter);
