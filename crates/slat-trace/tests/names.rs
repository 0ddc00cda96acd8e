//! Checks that the tracepoints have Linux's names and fields.

use slat_trace::POINTS;
use std::collections::BTreeMap;

/// Linux 6.12's tracepoints, as `conformance/tracepoints` prints them: in each line a name and the fields.
const X86: &str = include_str!("../../../conformance/tracepoints.txt");
const ARM64: &str = include_str!("../../../conformance/tracepoints-arm64.txt");

#[test]
fn names_and_fields_are_those_of_linux() {
    let table = match std::env::consts::ARCH {
        "aarch64" => ARM64,
        _ => X86,
    };
    let lines = table.lines().map(|line| line.split_once(' ').unwrap());
    let linux: BTreeMap<_, Vec<_>> = lines
        .map(|(name, rest)| (name, rest.split(' ').collect()))
        .collect();
    let ours = POINTS.iter().filter(|point| point.system != "slat");
    assert_eq!(ours.clone().count(), linux.len());
    for point in ours {
        let name = format!("{}:{}", point.system, point.name);
        let mut theirs = linux[name.as_str()].iter();
        // Some fields may be missing, but the others are in the same order.
        for field in point.fields {
            assert!(
                theirs.any(|their| *their == field.name),
                "{name}: {}",
                field.name
            );
        }
    }
}

#[test]
fn no_two_fields_of_a_point_overlap() {
    for point in POINTS {
        let mut places: Vec<_> = point
            .fields
            .iter()
            .map(|field| (field.offset, field.size))
            .collect();
        places.sort_unstable();
        assert!(
            places
                .windows(2)
                .all(|pair| pair[0].0 + pair[0].1 <= pair[1].0)
        );
    }
}
