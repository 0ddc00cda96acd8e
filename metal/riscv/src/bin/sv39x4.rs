//! The monitor with tables of format Sv39x4.
#![no_std]
#![no_main]

metal_riscv::program!("riscv", slat::format::Sv39x4);
