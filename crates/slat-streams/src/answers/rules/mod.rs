//! The rules of requests that set state. Each rule says which values of a field KVM accepts.
//!
//! The last field of a rule says why the host's kernel may return another result: it may be another version, or run on
//! another processor than the one that slat offers.

mod msrs;
mod registers;
mod vcpu;
mod vm;

use super::api::Controllers;
use super::edges::{Argument, Differs, On, Rule, Values};
use kvm_bindings::*;
use libc::{EINVAL, ENXIO, EPERM};
use slat_kvm::abi::*;
use slat_kvm::user::Plain;
use slat_model::Rng;
use std::mem::offset_of;

/// Returns the size in bytes of the field to which `_read` returns a reference.
const fn bytes_of_field<T, F>(_read: fn(&T) -> &F) -> usize {
    size_of::<F>()
}

/// The offset and the size of a field.
macro_rules! field {
    ($type:ty, $($field:tt)+) => {
        (offset_of!($type, $($field)+), bytes_of_field::<$type, _>(|all| &all.$($field)+))
    };
}
use field;

/// Changes a struct that is given by its bytes.
fn edit<T: Plain>(bytes: &mut [u8], change: fn(&mut T)) {
    assert!(bytes.len() >= size_of::<T>());
    // SAFETY: any bytes are a value of a `Plain` type, and there are enough bytes.
    unsafe {
        let mut value = bytes.as_ptr().cast::<T>().read_unaligned();
        change(&mut value);
        bytes.as_mut_ptr().cast::<T>().write_unaligned(value);
    }
}

/// Returns a rule with default settings: the guest has CPUID leaves, the VM has no interrupt controllers, and only the
/// field is set.
const fn rule(request: u32, argument: Argument, words: &'static str) -> Rule {
    Rule {
        request,
        on: On::Vcpu,
        words,
        controllers: Controllers::None,
        cpuid: true,
        argument,
        with: |_| {},
        field: (0, 8),
        values: Values::Any,
        errno: EINVAL,
        differs: None,
    }
}

/// Returns a rule of the request `set`, which sets a `T` that the request `get` reads.
const fn of_struct<T>(set: u32, get: u32, words: &'static str) -> Rule {
    rule(set, Argument::Read(get, size_of::<T>()), words)
}

/// Bits of the MSR EFER.
const LME: u64 = 1 << 8;
const LMA: u64 = 1 << 10;
const NXE: u64 = 1 << 11;
/// The bit of EFER that turns on SVM. (Whether the bits for fast FXSAVE and automatic IBRS are valid depends on the
/// host's processor.)
const SVME: u64 = 1 << 12;

// The reasons why the host's kernel may return another result.
const OTHER_CPU: Option<Differs> = Some(Differs::Always("the host's processor has other features"));
const LAX_MODULE: Option<Differs> = Some(Differs::Always(
    "a module without VMX and SVM does not look at all bits",
));
const LINEAR_WIDTH: Option<Differs> = Some(Differs::LinearWidth);

const APIC_BASES: Values = Values::Listed(
    // Valid values: APIC disabled, enabled, in x2APIC mode, at another address; as the bootstrap processor and as
    // another one.
    &[
        0xfee0_0000,
        0xfee0_0800,
        0xfee0_0d00,
        0xfee0_0900,
        0x1_0000_0900,
        0,
    ],
    // Invalid values: x2APIC mode of a disabled APIC, each reserved bit, addresses beyond the guest's physical
    // addresses.
    &[
        0xfee0_0400,
        0xfee0_0500,
        0xfee0_0901,
        0xfee0_0a00,
        0xfee0_0980,
        1 << 48 | 0x900,
        1 << 63 | 0x900,
    ],
);

/// Returns all rules.
pub fn all() -> impl Iterator<Item = &'static Rule> {
    [registers::RULES, vcpu::RULES, msrs::RULES, vm::RULES]
        .into_iter()
        .flatten()
}

/// Sets a field in a request's argument to a value at an edge of one of the request's rules. Does nothing if the
/// request has no rule, or if the argument is too short.
pub fn to_an_edge(rng: &mut Rng, request: u32, bytes: &mut [u8]) {
    let in_struct = |rule: &&Rule| {
        let is_struct = matches!(rule.argument, Argument::Read(..) | Argument::Zeros(_));
        is_struct && rule.request == request && rule.range().end <= bytes.len()
    };
    let rules: Vec<_> = all().filter(in_struct).collect();
    if !rules.is_empty() {
        let rule = rules[rng.below(rules.len() as u64) as usize];
        let edges = rule.edges();
        let (value, _) = edges[rng.below(edges.len() as u64) as usize];
        rule.set(bytes, value);
    }
}
