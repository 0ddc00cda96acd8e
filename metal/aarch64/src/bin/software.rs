//! The monitor with tables of four levels, and 48 bits of IPA. Software sets the access flag and the dirty bit.
#![no_std]
#![no_main]

metal_aarch64::program!("aarch64", slat::format::Stage2<48>);
