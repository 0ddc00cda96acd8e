//! Tests that slat has what other programs require of KVM (`conformance/requirements`), and that the tables name each
//! difference between slat's answers and the kernel's.
#![cfg(target_arch = "x86_64")]

#[path = "../common/mod.rs"]
mod common;
mod kvm;
mod table;

use kvm::{Kvm, On};
use std::collections::{BTreeMap, BTreeSet};
use std::io::Write;
use table::{Condition, Difference, Program, Tables};

/// The numbers of the capabilities whose values are compared with the kernel's.
const CAPABILITIES: std::ops::Range<u32> = 0..400;

/// The oldest kernel with which slat is compared. Older kernels lack capabilities, and the tables do not say which.
const OLDEST_KERNEL: (u32, u32) = (6, 8);

/// slat's KVM, and the tables that describe its answers.
struct Slat {
    kvm: Kvm,
    tables: Tables,
}

impl Slat {
    fn new() -> Self {
        Slat {
            kvm: Kvm::slat(),
            tables: Tables::read(),
        }
    }

    fn number(&self, capability: &str) -> u32 {
        let number = self.tables.capabilities.get(capability);
        *number.unwrap_or_else(|| panic!("no number of KVM_CAP_{capability}"))
    }

    /// Returns the two values of a capability: the system-wide value, and the value for a VM.
    fn values(&self, capability: &str) -> [i32; 2] {
        let number = self.number(capability);
        On::WITH_CAPABILITIES.map(|on| self.kvm.check_extension(on, number))
    }

    fn holds(&self, condition: &Condition) -> bool {
        let values = self.values(&condition.capability);
        values.into_iter().all(|value| condition.holds(value))
    }

    /// Returns whether slat has an ioctl on each kind of object that has it in KVM.
    fn has(&self, ioctl: &str) -> bool {
        let on_each = self.tables.ioctls.iter().filter_map(|(on, numbers)| {
            let number = numbers.get(ioctl)?;
            Some(self.kvm.has(*on, *number))
        });
        let on_each: Vec<_> = on_each.collect();
        assert!(!on_each.is_empty(), "no number of KVM_{ioctl}");
        on_each.into_iter().all(|has| has)
    }

    /// Returns the capabilities and ioctls that a program requires and that slat does not have.
    fn lacks(&self, program: &Program) -> Vec<String> {
        let unmet = program.requires.iter().filter(|c| !self.holds(c));
        let mut lacks: Vec<_> = unmet.map(|c| format!("KVM_CAP_{c}")).collect();
        let missing = program.calls.iter().filter(|ioctl| !self.has(ioctl));
        lacks.extend(missing.map(|ioctl| format!("KVM_{ioctl}")));
        for capability in &program.must_fail {
            if self.kvm.enable(self.number(capability)) != Err(libc::EINVAL) {
                lacks.push(format!("an error for enabling KVM_CAP_{capability}"));
            }
        }
        lacks
    }

    /// Returns the capabilities, and the ioctls, that a program would use and that slat does not have.
    fn goes_without<'a>(&self, program: &'a Program) -> (BTreeSet<&'a str>, BTreeSet<&'a str>) {
        let capabilities = program.uses.iter().filter(|c| !self.holds(c));
        let ioctls = program.may_call.iter().filter(|ioctl| !self.has(ioctl));
        (
            capabilities.map(|c| c.capability.as_str()).collect(),
            ioctls.map(String::as_str).collect(),
        )
    }

    /// Returns, by name, the lines of the tables. `names` returns the names in a line.
    fn lines(&self, names: impl Fn(&Difference) -> &[String]) -> BTreeMap<&str, &Difference> {
        let mut lines = BTreeMap::new();
        for difference in &self.tables.differences {
            for name in names(difference) {
                let before = lines.insert(name.as_str(), difference);
                assert!(before.is_none(), "two lines about {name}");
            }
        }
        lines
    }

    fn lines_of_capabilities(&self) -> BTreeMap<&str, &Difference> {
        self.lines(|difference| &difference.capabilities)
    }

    fn lines_of_ioctls(&self) -> BTreeMap<&str, &Difference> {
        self.lines(|difference| &difference.ioctls)
    }
}

/// Fails if `wrong` contains errors, and prints all of them.
fn report(wrong: &[String]) {
    assert!(wrong.is_empty(), "\n{}", wrong.join("\n"));
}

#[test]
fn every_program_gets_what_it_requires() {
    let slat = Slat::new();
    let mut wrong = Vec::new();
    for program in &slat.tables.programs {
        let lacks = slat.lacks(program);
        wrong.extend(
            lacks
                .iter()
                .map(|what| format!("{} does not get {what}", program.name)),
        );
    }
    report(&wrong);
}

#[test]
fn what_a_program_goes_without_has_a_line_that_says_why() {
    let slat = Slat::new();
    let (capabilities, ioctls) = (slat.lines_of_capabilities(), slat.lines_of_ioctls());
    let mut wrong = Vec::new();
    for program in &slat.tables.programs {
        let name = &program.name;
        let without = slat.goes_without(program);
        let unexplained = without.0.iter().filter(|c| !capabilities.contains_key(**c));
        wrong.extend(unexplained.map(|c| format!("{name} goes without KVM_CAP_{c}")));
        let unexplained = without
            .1
            .iter()
            .filter(|ioctl| !ioctls.contains_key(**ioctl));
        wrong.extend(unexplained.map(|ioctl| format!("{name} goes without KVM_{ioctl}")));
    }
    report(&wrong);
}

#[test]
fn a_line_says_what_slat_answers_today() {
    let slat = Slat::new();
    let mut wrong = Vec::new();
    for difference in &slat.tables.differences {
        let Some(said) = difference.slat else {
            continue;
        };
        for capability in &difference.capabilities {
            let values = slat.values(capability);
            if values != said {
                wrong.push(format!("KVM_CAP_{capability} is {values:?}, not {said:?}"));
            }
        }
        for ioctl in &difference.ioctls {
            let has = slat.has(ioctl);
            if has != (said[0] != 0) {
                wrong.push(format!("KVM_{ioctl}: slat has it: {has}"));
            }
        }
    }
    report(&wrong);
}

#[test]
fn what_slat_claims_is_asked_for_by_a_program_or_has_a_line_that_says_why() {
    let slat = Slat::new();
    let programs = slat.tables.programs.iter();
    let asked: BTreeSet<_> = programs
        .flat_map(|program| program.requires.iter().chain(&program.uses))
        .map(|condition| condition.capability.as_str())
        .collect();
    let mut wrong = Vec::new();
    for number in CAPABILITIES {
        if slat.kvm.check_extension(On::System, number) == 0 {
            continue;
        }
        match slat.tables.capability(number) {
            None => wrong.push(format!("claimed, without a name: {number}")),
            Some(name) if asked.contains(name) => {}
            Some(name) if slat.tables.unasked.contains(name) => {}
            Some(name) => wrong.push(format!("claimed, and nobody asks for it: KVM_CAP_{name}")),
        }
    }
    for name in &slat.tables.unasked {
        if asked.contains(name.as_str()) {
            wrong.push(format!("a program asks for it: KVM_CAP_{name}"));
        } else if slat.values(name)[0] == 0 {
            wrong.push(format!("not claimed: KVM_CAP_{name}"));
        }
    }
    report(&wrong);
}

/// Opens the kernel's KVM. Returns `None` if there is none or it is too old, and prints that.
fn kernel() -> Option<Kvm> {
    let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap();
    let mut numbers = release
        .split(['.', '-'])
        .map(|number| number.parse().unwrap_or(0));
    let version = (numbers.next().unwrap(), numbers.next().unwrap_or(0));
    let kernel = Kvm::kernel().filter(|_| version >= OLDEST_KERNEL);
    if kernel.is_none() {
        eprintln!("skipped: /dev/kvm does not open, or the kernel is older than {OLDEST_KERNEL:?}");
    }
    kernel
}

#[test]
fn the_kernel_answers_the_same_or_a_line_says_why_not() {
    let Some(kernel) = kernel() else {
        return;
    };
    let slat = Slat::new();
    let mut wrong = Vec::new();
    let mut unlike = BTreeSet::new();
    let lines = slat.lines_of_capabilities();
    for number in CAPABILITIES {
        let answers = |kvm: &Kvm| On::WITH_CAPABILITIES.map(|on| kvm.check_extension(on, number));
        let (ours, theirs) = (answers(&slat.kvm), answers(&kernel));
        if ours == theirs {
            continue;
        }
        let name = slat.tables.capability(number).unwrap_or("(no name)");
        unlike.insert(name);
        if !lines.contains_key(name) {
            wrong.push(format!(
                "KVM_CAP_{name} ({number}): slat {ours:?}, the kernel {theirs:?}"
            ));
        }
    }
    let lines_of_ioctls = slat.lines_of_ioctls();
    for (on, numbers) in &slat.tables.ioctls {
        for (name, number) in numbers {
            let [ours, theirs] = [&slat.kvm, &kernel].map(|kvm| kvm.has(*on, *number));
            if ours == theirs {
                continue;
            }
            unlike.insert(name);
            if !lines_of_ioctls.contains_key(name.as_str()) {
                wrong.push(format!(
                    "KVM_{name} on {on:?}: slat {ours}, the kernel {theirs}"
                ));
            }
        }
    }
    for (name, line) in lines.iter().chain(&lines_of_ioctls) {
        if line.when.is_none() && !unlike.contains(name) {
            wrong.push(format!("the kernel answers the same for {name}"));
        }
    }
    // The kernel is that of this machine, which may be any. So differences fail the test only on request.
    match std::env::var("SLAT_TEST_KERNEL") {
        Ok(value) if value == "strict" => report(&wrong),
        // Does not use `eprintln!`, because the test harness would hide its output.
        _ if !wrong.is_empty() => {
            let _ = writeln!(std::io::stderr(), "the host's kernel, unknown: {wrong:#?}");
        }
        _ => {}
    }
}

/// Prints, for each program, which capabilities and ioctls it gets, and why it does not get the others:
/// `conformance/requirements/show`.
#[test]
#[ignore = "checks nothing"]
fn summary() {
    let slat = Slat::new();
    let (of_capabilities, of_ioctls) = (slat.lines_of_capabilities(), slat.lines_of_ioctls());
    for program in &slat.tables.programs {
        let count = program.requires.len() + program.calls.len() + program.must_fail.len();
        let lacks = slat.lacks(program);
        let got = count - lacks.len();
        println!(
            "{}: gets {got} of the {count} that it requires",
            program.name
        );
        lacks.iter().for_each(|what| println!("    not: {what}"));
        let (capabilities, ioctls) = slat.goes_without(program);
        let mut by_reason = BTreeMap::<_, Vec<_>>::new();
        for (prefix, names, lines) in [
            ("", capabilities, &of_capabilities),
            ("KVM_", ioctls, &of_ioctls),
        ] {
            for name in names {
                let why = lines.get(name).map_or("", |line| &line.why);
                let name = format!("{prefix}{name}");
                by_reason.entry(why).or_default().push(name);
            }
        }
        for (why, names) in by_reason {
            println!("    goes without {}: {why}", names.join(" "));
        }
    }
}
