//! Tests hypercalls in each of their forms.

use super::*;
use crate::cpuid::{Leaf, Machine, supported};
use std::vec::Vec;

const CALLER: Caller = Caller {
    enforced: None,
    has_synic: true,
    has_debugger: true,
    debugs_by_hypercalls: true,
};
const FAST: u64 = 1 << 16;
const MOST: u32 = 1024;

fn header(words: u64) -> u64 {
    words << 17
}

fn reps(count: u64) -> u64 {
    count << 32
}

fn decode(input: u64) -> Result<Request, Refusal> {
    Request::decode(Input(input), &CALLER)
}

fn refused(status: Status) -> Result<Request, Refusal> {
    Err(Refusal::Status(status))
}

/// Returns a closure that reads words of a list like words of a caller's memory.
fn in_memory(words: &[u64]) -> impl FnMut(usize) -> Result<u64, Status> + '_ {
    |index| words.get(index).copied().ok_or(Status::InvalidParameter)
}

fn indexes(set: &VpSet) -> Vec<u32> {
    (0..2000).filter(|index| set.contains(*index)).collect()
}

#[test]
fn a_call_has_one_form() {
    let invalid = refused(Status::InvalidInput);
    for (input, expected) in [
        (0x08, Ok(Request::SpinWait)),
        (0x08 | reps(1), invalid),
        (0x08 | header(1), invalid),
        (0x08 | 1 << 27, invalid),
        (0x08 | 1 << 47, invalid),
        (0x08 | 1 << 63, invalid),
        (0x02, Ok(Request::Flush)),
        (0x02 | reps(1), invalid),
        (0x02 | header(1), invalid),
        (0x03, invalid),
        (0x03 | reps(1), Ok(Request::Flush)),
        (0x03 | reps(1) | 1 << 48, invalid),
        (0x03 | reps(1) | header(1), invalid),
        (0x13 | header(1), Ok(Request::Flush)),
        (0x14 | header(1) | reps(2), Ok(Request::Flush)),
        (0x0b, Ok(Request::SendIpi)),
        (0x0b | header(1), invalid),
        (0x15 | header(1), Ok(Request::SendIpi)),
        (0x15 | reps(1), invalid),
        (0x5c, Ok(Request::Client)),
        (0x5d | FAST, Ok(Request::SignalEvent)),
        (0x5d | reps(1), invalid),
        (0x6b, Ok(Request::Client)),
        (0x69 | FAST, refused(Status::InvalidParameter)),
        (0x8001, Ok(Request::Client)),
        (0x8041 | FAST, refused(Status::InvalidParameter)),
        (0x8042, refused(Status::InvalidCode)),
        (0xbeef, refused(Status::InvalidCode)),
    ] {
        assert_eq!(decode(input), expected, "{input:#x}");
    }
}

#[test]
fn a_caller_may_lack_what_a_call_needs() {
    let caller = Caller {
        has_synic: false,
        debugs_by_hypercalls: false,
        ..CALLER
    };
    let decode = |code, caller| Request::decode(Input(code), caller);
    assert_eq!(decode(0x5c, &caller), refused(Status::InvalidInput));
    assert_eq!(decode(0x5d, &caller), Ok(Request::SignalEvent));
    assert_eq!(client_event(&caller), Err(Status::InvalidInput));
    assert_eq!(decode(0x6b, &caller), refused(Status::OperationDenied));
    let caller = Caller {
        has_debugger: false,
        ..caller
    };
    assert_eq!(decode(0x6b, &caller), refused(Status::InvalidCode));
}

#[test]
fn privileges_count_if_they_are_enforced() {
    let leaves = supported(Machine {
        has_apic: true,
        shares_cores: true,
        max_vps: 1024,
    });
    let with = |change: fn(&mut Leaf)| {
        let leaves = leaves.map(|mut leaf| {
            change(&mut leaf);
            leaf
        });
        let leaf = |function| leaves.iter().find(|leaf| leaf.function == function);
        Caller {
            enforced: Privileges::from_cpuid(|function| Some(leaf(function)?.registers)),
            ..CALLER
        }
    };
    let decode = |code, caller| Request::decode(Input(code), caller);
    let all = with(|_| {});
    assert_eq!(decode(0x02 | FAST, &all), Ok(Request::Flush));
    let no_features = with(|leaf| {
        if leaf.function == crate::cpuid::FEATURES {
            leaf.registers = [0; 4];
        }
    });
    assert_eq!(decode(0x02 | FAST, &no_features), Err(Refusal::Undefined));
    assert_eq!(decode(0x02, &no_features), Ok(Request::Flush));
    assert_eq!(decode(0x5c, &no_features), refused(Status::AccessDenied));
}

#[test]
fn a_flush_names_processors_by_mask_or_by_set() {
    let read = |input, words: &[u64]| Flush::read(Input(input), MOST, in_memory(words));
    let targets = |input, words: &[u64]| indexes(&read(input, words).unwrap().targets.unwrap());
    assert_eq!(targets(0x02, &[0, 2, 1 << 7]), [7]);
    assert_eq!(targets(0x02, &[0, 1, 1 << 7]).len(), 2000);
    assert_eq!(targets(0x02, &[0, 2, 0]).len(), 2000, "no processor is all");
    assert_eq!(
        targets(0x13 | header(2), &[0, 2, 0, 1 | 1 << 2, 1 << 7, 1 << 9]),
        [7, 2 * 64 + 9]
    );
    assert_eq!(targets(0x13, &[0, 2, 1, 0]).len(), 2000);
    assert_eq!(read(0x13, &[0, 2, 0, 0]).unwrap().targets, None);
    let contradiction = read(0x13 | header(1), &[0, 2, 0, 3, 1, 1]);
    assert_eq!(contradiction, Err(Status::InvalidInput));
}

#[test]
fn a_list_of_addresses_follows_the_set() {
    let read = |input, words: &[u64]| Flush::read(Input(input), MOST, in_memory(words));
    let missing = Err(Status::InvalidParameter);
    assert!(read(0x03 | reps(1), &[0, 2, 1, 0x1000]).is_ok());
    assert_eq!(read(0x03 | reps(2), &[0, 2, 1, 0x1000]), missing);
    assert!(read(0x14 | header(1) | reps(1), &[0, 2, 0, 1, 1, 0x1000]).is_ok());
    assert_eq!(read(0x14 | header(1) | reps(1), &[0, 2, 0, 1, 1]), missing);
    assert!(read(0x03 | reps(100), &[0, 2, 1]).is_ok(), "not read");
}

#[test]
fn fast_calls_have_twelve_words_beside_two_registers() {
    let fast = Fast {
        registers: [10, 2],
        xmm: [1 | 1 << 64, 5 << 64, 0, 0, 0, 0],
    };
    assert_eq!((fast.word(0), fast.word(3)), (Some(10), Some(1)));
    assert_eq!((fast.word(13), fast.word(14)), (Some(0), None));
    let word = |index| fast.word(index).ok_or(Status::InvalidInput);
    let most = reps(11);
    assert!(Flush::read(Input(0x03 | FAST | most), MOST, word).is_ok());
    let more = Flush::read(Input(0x03 | FAST | reps(12)), MOST, word);
    assert_eq!(more, Err(Status::InvalidInput));
    // The registers must also have the banks in which no processor exists.
    let all = Fast {
        registers: [0x30, 0],
        xmm: [u128::from(u64::MAX >> 50); 6],
    };
    let word = |index| all.word(index).ok_or(Status::InvalidInput);
    let ipi = Ipi::read(Input(0x15 | FAST | header(14)), MOST, word);
    assert_eq!(ipi, Err(Status::InvalidInput));
}

#[test]
fn an_ipi_has_a_vector_and_targets() {
    let read = |input, words: &[u64]| Ipi::read(Input(input), MOST, in_memory(words));
    let ipi = read(0x0b, &[0x141, 1 << 3]);
    assert_eq!(ipi, Err(Status::InvalidInput), "a vector has 8 bits");
    let ipi = read(0x0b, &[7 << 32 | 0x41, 1 << 3]).unwrap().unwrap();
    assert_eq!((ipi.vector, indexes(&ipi.targets)), (0x41, [3].into()));
    let reserved = read(0x0b | FAST, &[7 << 32 | 0x41, 1 << 3]);
    assert_eq!(reserved, Err(Status::InvalidInput));
    assert_eq!(read(0x0b, &[0xf, 1]), Err(Status::InvalidInput));
    let ipi = read(0x15 | header(1), &[0x41, 0, 2, 1]).unwrap().unwrap();
    assert_eq!(indexes(&ipi.targets), [64]);
    assert_eq!(read(0x15, &[0xf, 0, 0]), Ok(None), "nobody is told");
    let all = read(0x15, &[0x41, 1, 0]).unwrap().unwrap();
    assert_eq!(all.targets, VpSet::all());
}

#[test]
fn an_event_has_a_connection_of_24_bits() {
    assert_eq!(connection(0x12_3456), Ok(0x12_3456));
    assert_eq!(connection(1 << 32 | 5), Err(Status::InvalidPortId));
    assert_eq!(connection(1 << 24), Err(Status::InvalidInput));
    assert_eq!(connection(1 << 48), Err(Status::InvalidInput));
}

#[test]
fn the_output_counts_repetitions() {
    assert_eq!(Status::Success.output(7), 7 << 32);
    assert_eq!(Status::InvalidPortId.output(0), 0x11);
}
