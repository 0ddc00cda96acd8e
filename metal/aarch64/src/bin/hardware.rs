//! A root of two concatenated tables, 40 bits of IPA; hardware sets access flag and dirty state.
#![no_std]
#![no_main]

metal_aarch64::program!("aarch64-hafdbs", slat::format::Stage2<40, true>);
