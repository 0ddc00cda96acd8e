//! Measures the costs that a VMM sees: the signals of its devices, and Linux under QEMU.

mod guests;
mod irqfd;
mod kick;
mod linux;

use crate::arch::x86_64::machine::{Api, Failure, Slat};
use crate::compared::{Line, Rows};
use crate::report::Report;
use crate::rounds::Bench;
use crate::{Elsewhere, Experiment, Settable};

const NAME: &str = "vmm";

pub const EXPERIMENT: Experiment = Experiment {
    name: NAME,
    title: "what a VMM pays: signals of its devices, and Linux under QEMU",
    explain: "\
kick: a guest's write that signals an eventfd, from one to the next, the vCPU's processor time.
exit: the program gets an exit and signals. ioeventfd: KVM signals, without an exit. unread: no
thread waits for the eventfd. read: one polls and reads it, like a device's. Limit: a plain write.
irqfd/running: from an eventfd's signal on one thread until the handler of a guest that runs has
written (a processor must be free for the thread). Limit: a thread that waits for the eventfd.
linux, short, i386, debian: QEMU (pc, 1 CPU, 512 MiB), on slat and on its own software CPU, tcg:
processor time to a shell, of systemd for debian, for works (short: that end soon, and two more
boots); idle; reads of a disk. Only with --materials DIR, which conformance/vmm/materials fills.
Asked for: kick <= 1 us, irqfd <= 20 us; of tcg's time: boot 0.7 (debian 0.9), a work 0.6 (short 1,
i386 0.7, debian 0.9, all 0.6, floats 0.3); of a boot's, a later one 0.6; idle 0.5 %, read 200 MB/s.",
    settable: Settable::AllBut(&[]),
    elsewhere: Elsewhere::Nothing,
    run,
    compare,
    rows: Rows::Metrics,
};

fn run(bench: &mut Bench) -> Result<(), Failure> {
    kick::run(bench)?;
    irqfd::run(bench)?;
    linux::run(bench)
}

fn compare(report: &Report) -> Vec<Line> {
    let mut lines = Vec::new();
    for (case, _) in kick::CASES {
        let (before, after) = (kick::EXIT, kick::IOEVENTFD);
        let line = Line::compare(report, NAME, case, kick::NS_PER_KICK, before, after);
        let limit = report.value(NAME, case, kick::WRITE, kick::NS_PER_KICK);
        lines.extend(line.map(|line| {
            line.with_limit(kick::WRITE, limit)
                .at_most(1e3)
                .or_else("the limit is most of it".to_owned())
        }));
    }
    let irqfd = |metric| {
        let limit = report.value(NAME, irqfd::CASE, irqfd::THREAD, metric);
        let line = Line::of(report, NAME, irqfd::CASE, metric, Slat::NAME)?;
        Some(line.with_limit(irqfd::THREAD, limit))
    };
    lines.extend(irqfd(irqfd::NS_MEDIAN).map(|line| line.at_most(20e3)));
    lines.extend(irqfd(irqfd::NS_P99));
    lines.extend(linux::compare(report));
    lines
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Linux, Size};

    #[test]
    fn every_kick_and_every_interrupt_is_heard_at_a_tiny_size() {
        // `run` itself checks the number of signals.
        let report = crate::run(&[&EXPERIMENT], Size::Tiny).unwrap();
        assert_eq!(
            report.cases(NAME),
            ["kick/unread", "kick/read", irqfd::CASE]
        );
        assert_eq!(compare(&report).len(), 4);
    }

    #[test]
    fn without_a_kernel_a_sentence_says_what_to_do() {
        let linux = Linux {
            slat: "slat".into(),
            materials: "/nonexistent".into(),
            policies: Vec::new(),
        };
        let others = crate::Others {
            linux: Some(linux),
            ..Default::default()
        };
        let report = crate::run_with(&[&EXPERIMENT], Size::Tiny, others).unwrap();
        let notes = report.notes();
        assert_eq!(notes.len(), guests::GUESTS.len());
        assert!(report.is_partial());
        for (guest, note) in guests::GUESTS.iter().zip(notes) {
            let command = format!("conformance/vmm/materials /nonexistent {}", guest.what);
            assert!(note.contains(command.trim_end()), "{note}");
        }
    }
}
