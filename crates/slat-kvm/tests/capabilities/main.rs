//! Tests every capability that slat claims, by a call that uses it. A claimed capability without an entry in these
//! lists fails the test.
#![cfg(target_arch = "x86_64")]

#[path = "../common/mod.rs"]
mod common;
mod cpu;
mod exits;
mod hyperv;
mod interrupts;
mod memory;
mod objects;
mod time;

use common::protected;
use slat_kvm::Kvm;
use std::collections::BTreeMap;

/// A capability, and a function that uses it, with the value that KVM_CHECK_EXTENSION returns as argument.
type Use = (u32, fn(i32));

fn uses() -> impl Iterator<Item = Use> {
    let tables = [
        cpu::USES,
        exits::USES,
        hyperv::USES,
        interrupts::USES,
        memory::USES,
        objects::USES,
        time::USES,
    ];
    tables.into_iter().flatten().copied()
}

#[test]
fn what_is_claimed_works_and_what_works_is_claimed() {
    let (kvm, protected) = (Kvm::new().unwrap(), protected());
    let uses: BTreeMap<u32, fn(i32)> = uses().collect();
    assert_eq!(uses.len(), self::uses().count(), "one entry for each");
    let mut without_entry = Vec::new();
    for cap in 0..1000 {
        let of_system = kvm.check_extension_raw(cap.into());
        let claimed = match of_system {
            0 => protected.check_extension_raw(cap.into()),
            value => value,
        };
        match (claimed, uses.get(&cap)) {
            (0, None) => {}
            // The host may not count how long threads wait for CPUs. Then slat does not claim the capability.
            (0, Some(_)) if cap == kvm_bindings::KVM_CAP_STEAL_TIME => {}
            (0, Some(_)) => panic!("capability {cap} works, and is not claimed"),
            (_, None) => without_entry.push(cap),
            (value, Some(use_it)) => {
                println!("capability {cap}: {value}");
                use_it(value);
            }
        }
    }
    assert!(
        without_entry.is_empty(),
        "claimed, and not used here: {without_entry:?}"
    );
}
