//! Counts stacks, and formats the lines that programs for flame graphs read: `outermost;…;innermost COUNT`.

use super::samples::{Origin, Samples};
use crate::symbols::Symbols;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt::Write as _;

/// The greatest number of different stacks. Samples with further stacks are dropped, and their number is counted.
const MOST: usize = 1 << 16;

#[derive(Default)]
pub(super) struct Stacks {
    counts: BTreeMap<Origin, HashMap<Box<[u64]>, u64>>,
    /// The number of different stacks.
    different: usize,
    lost: u64,
}

impl Stacks {
    /// Counts samples.
    pub(super) fn add(&mut self, samples: &Samples) {
        self.lost += samples.lost;
        for (origin, stack) in samples.iter() {
            let counts = self.counts.entry(origin).or_default();
            match counts.get_mut(stack) {
                Some(count) => *count += 1,
                None if self.different < MOST => {
                    self.different += 1;
                    counts.insert(stack.into(), 1);
                }
                None => self.lost += 1,
            }
        }
    }

    /// Returns the lines of the profile. If there are several VMs or vCPUs, each stack begins with the VM and the vCPU.
    pub(super) fn text(&self, symbols: Option<&Symbols>) -> String {
        let vcpus: BTreeSet<_> = (self.counts.keys())
            .map(|origin| (origin.vm, origin.vcpu))
            .collect();
        let vms: BTreeSet<_> = vcpus.iter().map(|(vm, _)| *vm).collect();
        let mut lines: BTreeMap<String, u64> = BTreeMap::new();
        for (origin, counts) in &self.counts {
            let mut begin = String::new();
            if vms.len() > 1 {
                let _ = write!(begin, "VM {};", origin.vm);
            }
            if vcpus.len() > vms.len() {
                let _ = write!(begin, "vCPU {};", origin.vcpu);
            }
            if origin.is_nested {
                begin += "[nested guest];";
            }
            // `symbols` has no names for the code of a nested guest.
            let symbols = symbols.filter(|_| !origin.is_nested);
            for (stack, count) in counts {
                let mut line = begin.clone();
                for address in stack.iter().rev() {
                    let _ = match symbols.and_then(|symbols| symbols.find(*address)) {
                        Some((name, _)) => write!(line, "{name};"),
                        None => write!(line, "{address:#x};"),
                    };
                }
                line.pop();
                *lines.entry(line).or_default() += count;
            }
        }
        if self.lost != 0 {
            lines.insert("[lost]".to_owned(), self.lost);
        }
        let mut text = String::new();
        for (line, count) in lines {
            let _ = writeln!(text, "{line} {count}");
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn origin(vm: u64, vcpu: u32, is_nested: bool) -> Origin {
        Origin {
            vm,
            vcpu,
            is_nested,
        }
    }

    fn of(pushed: &[(Origin, &[u64])]) -> Stacks {
        let (mut stacks, mut samples) = (Stacks::default(), Samples::default());
        for (origin, stack) in pushed {
            samples.push(*origin, stack);
        }
        stacks.add(&samples);
        stacks
    }

    fn symbols() -> Symbols {
        Symbols::parse(b"0000000000000100 T inner\n0000000000000200 T outer\n").unwrap()
    }

    #[test]
    fn equal_names_are_one_line_with_the_outermost_first() {
        let first = origin(0, 0, false);
        let stacks = of(&[
            (first, &[0x110, 0x210]),
            (first, &[0x120, 0x220]),
            (first, &[0x10, 0x210]),
        ]);
        assert_eq!(
            stacks.text(Some(&symbols())),
            "outer;0x10 1\nouter;inner 2\n"
        );
        assert_eq!(
            stacks.text(None),
            "0x210;0x10 1\n0x210;0x110 1\n0x220;0x120 1\n"
        );
        assert_eq!(Stacks::default().text(None), "");
    }

    #[test]
    fn a_stack_begins_with_what_there_are_several_of() {
        let cases: [(&[Origin], &str); 4] = [
            (&[origin(4, 2, false)], "0x1 1\n"),
            (
                &[origin(0, 0, false), origin(1, 0, false)],
                "VM 0;0x1 1\nVM 1;0x1 1\n",
            ),
            (
                &[origin(0, 0, false), origin(0, 3, false)],
                "vCPU 0;0x1 1\nvCPU 3;0x1 1\n",
            ),
            (
                &[
                    origin(0, 0, false),
                    origin(1, 0, false),
                    origin(1, 1, false),
                ],
                "VM 0;vCPU 0;0x1 1\nVM 1;vCPU 0;0x1 1\nVM 1;vCPU 1;0x1 1\n",
            ),
        ];
        for (origins, text) in cases {
            let pushed: Vec<_> = origins.iter().map(|origin| (*origin, &[1][..])).collect();
            assert_eq!(of(&pushed).text(None), text);
        }
    }

    #[test]
    fn code_of_a_nested_guest_has_no_names_of_the_outer_one() {
        let stacks = of(&[
            (origin(0, 0, false), &[0x100]),
            (origin(0, 0, true), &[0x100]),
        ]);
        assert_eq!(
            stacks.text(Some(&symbols())),
            "[nested guest];0x100 1\ninner 1\n"
        );
    }

    #[test]
    fn stacks_are_bounded_and_what_is_lost_is_counted() {
        let (mut stacks, mut samples) = (Stacks::default(), Samples::default());
        let first = origin(0, 0, false);
        for address in (0..MOST as u64 + 3).chain([5]) {
            samples.push(first, &[address]);
            stacks.add(&samples);
            samples.clear();
        }
        samples.lost = 2;
        stacks.add(&samples);
        let text = stacks.text(None);
        assert!(text.contains("\n0x5 2\n") && text.ends_with("\n[lost] 5\n"));
        assert_eq!(text.lines().count(), MOST + 1);
    }
}
