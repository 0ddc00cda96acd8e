//! The monitor with a root of 16 concatenated tables, and 52 bits of IPA and of physical addresses.
#![no_std]
#![no_main]

metal_aarch64::program!("aarch64-lpa2", slat::format::Stage2<52>);
