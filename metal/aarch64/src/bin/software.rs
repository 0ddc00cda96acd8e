//! Four levels, 48 bits of IPA; the access flag and the dirty bit are set by software.
#![no_std]
#![no_main]

metal_aarch64::program!("aarch64", slat::format::Stage2<48>);
