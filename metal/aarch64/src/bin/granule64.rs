//! The monitor with a granule of 64 KiB, 52 bits of IPA and of physical addresses, and hardware dirty state.
#![no_std]
#![no_main]

metal_aarch64::program!("aarch64-64k", slat::format::Stage2Kib64<52, true>);
