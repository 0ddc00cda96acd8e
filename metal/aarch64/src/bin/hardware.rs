//! The monitor with a root of two concatenated tables, and 40 bits of IPA. Hardware sets the access flag and the
//! dirty state.
#![no_std]
#![no_main]

metal_aarch64::program!("aarch64-hafdbs", slat::format::Stage2<40, true>);
