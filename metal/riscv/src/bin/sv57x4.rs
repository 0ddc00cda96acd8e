//! The monitor with tables of format Sv57x4.
#![no_std]
#![no_main]

metal_riscv::program!("riscv-sv57x4", slat::format::Sv57x4);
