//! The monitor with a granule of 16 KiB, and a root of two concatenated tables of level 1.
#![no_std]
#![no_main]

metal_aarch64::program!("aarch64-16k", slat::format::Stage2Kib16<48>);
