//! The monitor with tables of format Sv48x4.
#![no_std]
#![no_main]

metal_riscv::program!("riscv-sv48x4", slat::format::Sv48x4);
