//! The policies of this process, which `slat run` passes in `SLAT_MMU`, `SLAT_FORMAT`, `SLAT_SET`, `SLAT_STATS` and
//! `SLAT_GUEST_SYMBOLS`.
//!
//! Invalid policies are refused with a message before any VM exists.

pub use crate::arch::{CpuPolicies, CpuPolicy};
use crate::engine::TableFormat;
use crate::errno::{Error, Result};
use crate::messages;
use crate::words::Switch;
use slat::{AtomicPolicy, MmuKind, Policy, PolicyError, Setting};
use slat_process::once::Computed;
use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

/// The values of `SLAT_FORMAT`: the formats of second-level tables.
pub const FORMATS: &[&str] = TableFormat::NAMES;

/// The policy of memslots with `KVM_MEM_USERFAULT`: whether clients may have them. No released Linux has this flag.
pub const USERFAULT: &str = "userfault";

/// An assignment `POLICY=VALUE`, as in `SLAT_SET`. The policy belongs to the engine, to the architecture's CPUs, or to
/// slat-kvm itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Assignment {
    /// A policy of the engine.
    Memory(Setting),
    /// A policy of the architecture's CPUs.
    Cpu(CpuPolicy),
    /// Whether memslots may have absent pages, which the client provides later.
    Userfault(Switch),
}

impl Assignment {
    /// Returns all policies, each with its default.
    pub fn defaults() -> Vec<Self> {
        let engine = Policy::default();
        let engine = engine.iter().map(Assignment::Memory);
        let cpu = CpuPolicy::DEFAULTS.iter().copied().map(Assignment::Cpu);
        let own = [Assignment::Userfault(Switch(false))];
        engine.chain(cpu).chain(own).collect()
    }

    /// Returns the name of the policy.
    pub fn name(&self) -> &'static str {
        match self {
            Assignment::Memory(setting) => setting.name(),
            Assignment::Cpu(policy) => policy.name(),
            Assignment::Userfault(_) => USERFAULT,
        }
    }

    /// Returns the values that the policy can have, as a list for a message.
    pub fn expected(&self) -> &'static str {
        match self {
            Assignment::Memory(setting) => setting.expected(),
            Assignment::Cpu(policy) => policy.expected(),
            Assignment::Userfault(_) => Switch::EXPECTED,
        }
    }

    /// Returns the value of the policy.
    pub fn value(&self) -> &dyn fmt::Display {
        match self {
            Assignment::Memory(setting) => setting.value(),
            Assignment::Cpu(policy) => policy.value(),
            Assignment::Userfault(value) => value,
        }
    }

    /// Parses a value of the policy `name`, which is not the engine's. `None`: the policy has no such value, or there
    /// is no such policy.
    fn parse_own(name: &str, value: &str) -> Option<Self> {
        match name {
            USERFAULT => Switch::parse(value).map(Assignment::Userfault),
            _ => CpuPolicy::parse(name, value).map(Assignment::Cpu),
        }
    }
}

/// Returns the name in `names` that is most similar to `word`, if `word` may be a misspelling of this name. `None`: no
/// name is similar enough.
fn most_like<'a>(word: &str, names: &[&'a str]) -> Option<&'a str> {
    // This similarity is between 0 and 1. clap uses the same function to suggest options.
    let likeness = |name: &&str| strsim::jaro(word, name);
    let names = names.iter().copied();
    let best = names.max_by(|a, b| likeness(a).total_cmp(&likeness(b)))?;
    (likeness(&best) > 0.75).then_some(best)
}

impl FromStr for Assignment {
    /// A message that lists the names of the policies, or the values of the policy.
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        let (name, value) = text
            .split_once('=')
            .ok_or_else(|| format!("\"{text}\" is not of the form POLICY=VALUE"))?;
        match Setting::parse(name, value) {
            Ok(setting) => return Ok(Assignment::Memory(setting)),
            Err(PolicyError::NoSuchPolicy) => {}
            Err(error) => return Err(format!("{name}={value}: {error}")),
        }
        if let Some(assignment) = Self::parse_own(name, value) {
            return Ok(assignment);
        }
        let known = Self::defaults();
        Err(match known.iter().find(|known| known.name() == name) {
            Some(known) => format!("{name}={value}: it takes {}", known.expected()),
            None => {
                let names: Vec<_> = known.iter().map(Self::name).collect();
                let meant = most_like(name, &names).map(|name| format!(" Did you mean {name}?"));
                let meant = meant.unwrap_or_default();
                let names = names.join(", ");
                format!("there is no policy \"{name}\".{meant} There are {names}")
            }
        })
    }
}

/// Writes the text that [`Assignment::from_str`] reads.
impl fmt::Display for Assignment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}={}", self.name(), self.value())
    }
}

/// The policies of every VM of this process.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Policies {
    settings: Vec<Setting>,
    /// The format of second-level tables.
    pub format: TableFormat,
    /// The MMU that makes second-level tables.
    pub mmu: MmuKind,
    /// The policies of the architecture's CPUs.
    pub cpu: CpuPolicies,
    /// Whether memslots may have the flag `KVM_MEM_USERFAULT`.
    pub userfault: bool,
    /// Whether to print statistics at the end of the process.
    pub stats: bool,
    /// The file with the names of the guests' code ([`crate::symbols`]).
    pub guest_symbols: Option<PathBuf>,
}

impl Policies {
    /// Reads the policies from variables. `variable` returns the value of the variable with a given name.
    ///
    /// # Errors
    /// A message that names the variable, its value, and the values that it can have.
    pub fn parse(variable: impl Fn(&str) -> Option<String>) -> std::result::Result<Self, String> {
        let one_of = |name: &str, known: &[&str]| match variable(name) {
            Some(value) if !value.is_empty() && !known.contains(&value.as_str()) => Err(format!(
                "{name}={value}: not supported; {name} can be {}",
                known.join(", ")
            )),
            _ => Ok(()),
        };
        let mmus: Vec<_> = MmuKind::ALL.iter().map(|mmu| mmu.name()).collect();
        one_of("SLAT_MMU", &mmus)?;
        one_of("SLAT_FORMAT", FORMATS)?;
        let mmu = variable("SLAT_MMU").and_then(|name| mmu_by_name(&name));
        let mmu = mmu.unwrap_or_default();
        let format = variable("SLAT_FORMAT").and_then(|name| TableFormat::by_name(&name));
        let format = format.unwrap_or(TableFormat::of(mmu));
        check_pair(mmu, format)?;
        let mut settings = Vec::new();
        let (mut cpu, mut userfault) = (CpuPolicies::default(), false);
        let set = variable("SLAT_SET").unwrap_or_default();
        for word in set.split(',').filter(|word| !word.is_empty()) {
            match word.parse() {
                Ok(Assignment::Memory(setting)) => settings.push(setting),
                Ok(Assignment::Cpu(policy)) => cpu.set(policy),
                Ok(Assignment::Userfault(Switch(value))) => userfault = value,
                Err(error) => return Err(format!("SLAT_SET: {error}")),
            }
        }
        let stats = variable("SLAT_STATS").is_some_and(|value| !value.is_empty() && value != "0");
        Ok(Policies {
            settings,
            format,
            mmu,
            cpu,
            userfault,
            stats,
            guest_symbols: variable("SLAT_GUEST_SYMBOLS").map(PathBuf::from),
        })
    }

    /// Returns the engine's policies for new VMs.
    fn of_new_vms(&self) -> Policy {
        let mut policy = Policy::default();
        for setting in &self.settings {
            policy.set(*setting);
        }
        policy
    }
}

/// Returns the MMU called `name`. `None`: there is no such MMU.
pub fn mmu_by_name(name: &str) -> Option<MmuKind> {
    MmuKind::ALL.iter().copied().find(|mmu| mmu.name() == name)
}

/// Checks that a VM with tables of `format` can have `mmu`.
///
/// # Errors
/// A message that names the formats that can have `mmu`.
pub fn check_pair(mmu: MmuKind, format: TableFormat) -> std::result::Result<(), String> {
    if format.has(mmu) {
        return Ok(());
    }
    let can = |name: &&&str| TableFormat::by_name(name).is_some_and(|format| format.has(mmu));
    let formats: Vec<_> = FORMATS.iter().filter(can).copied().collect();
    let others = match formats.is_empty() {
        true => "nor of any other format of this architecture".to_owned(),
        false => format!("it has {}", formats.join(", ")),
    };
    Err(format!(
        "the {} MMU has no tables of format {}; {others}",
        mmu.name(),
        format.name(),
    ))
}

/// Returns the policies of this process, which its environment sets.
///
/// # Errors
/// `EINVAL` for invalid policies; the first call prints a message on standard error.
pub fn current() -> Result<&'static Policies> {
    static CURRENT: Computed<std::result::Result<Policies, String>> = Computed::new();
    let parse = || Policies::parse(|name| std::env::var(name).ok());
    let parsed = CURRENT.get_or_init_then(parse, |parsed| {
        if let Err(message) = parsed {
            messages::say(format_args!("{message}"));
        }
    });
    parsed.as_ref().map_err(|_| Error::new(libc::EINVAL))
}

/// Returns the engine's policies of new VMs. Needs no lock, so a forked child can call this, too.
pub(crate) fn of_new_vms() -> Result<&'static AtomicPolicy> {
    static POLICIES: Computed<AtomicPolicy> = Computed::new();
    let given = current()?;
    Ok(POLICIES.get_or_init(|| AtomicPolicy::new(given.of_new_vms())))
}

/// Whether clients may have memslots with `KVM_MEM_USERFAULT`.
pub(crate) fn userfault() -> bool {
    current().is_ok_and(|policies| policies.userfault)
}

/// Returns the value of the policy `name` as a number: 1 for "on"; 0 for "off", and if there is no such policy.
pub(crate) fn number(name: &str) -> u64 {
    value(name).map_or(0, |value| match value.as_str() {
        "on" => 1,
        number => number.parse().unwrap_or(0),
    })
}

/// Returns the value of the policy `name` as text. `None`: there is no such policy.
pub(crate) fn value(name: &str) -> Option<String> {
    let policies = of_new_vms().ok()?.get();
    let setting = policies.iter().find(|known| known.name() == name)?;
    Some(setting.value().to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_policy_that_was_meant_is_named() {
        for (word, meant) in [
            ("prefech", Some("prefetch")),
            ("nx_hugepages", Some("nx_huge_pages")),
            ("huge-pages", Some("huge_pages")),
            ("mmio_cache", Some("mmio_caching")),
            ("eager_split", Some("eager_page_split")),
            ("dirty", Some("dirty_log")),
            ("vendor", None),
            ("colour", None),
            ("", None),
        ] {
            let error = format!("{word}=on").parse::<Assignment>().unwrap_err();
            match meant {
                Some(meant) => {
                    assert!(error.contains(&format!("Did you mean {meant}?")), "{error}")
                }
                None => assert!(!error.contains("mean"), "{error}"),
            }
        }
    }

    fn parse(pairs: &[(&str, &str)]) -> std::result::Result<Policies, String> {
        Policies::parse(|name| {
            pairs
                .iter()
                .find(|(known, _)| *known == name)
                .map(|(_, value)| (*value).to_owned())
        })
    }

    #[test]
    fn nothing_set_is_the_default() {
        assert_eq!(parse(&[]).unwrap(), Policies::default());
    }

    #[test]
    fn settings_are_taken() {
        let policies = parse(&[
            ("SLAT_SET", "mmio_caching=off,huge_pages=on"),
            ("SLAT_STATS", "1"),
        ])
        .unwrap();
        assert!(policies.stats);
        let lpa2 = parse(&[("SLAT_MMU", "tdp"), ("SLAT_FORMAT", "aarch64-lpa2")]).unwrap();
        assert_eq!(
            (lpa2.mmu, lpa2.format),
            (MmuKind::Tdp, TableFormat::Aarch64Lpa2)
        );
        assert!(!policies.of_new_vms().mmio_caching.is_on());
    }

    #[test]
    fn an_assignment_is_read_as_it_is_written() {
        for default in Assignment::defaults() {
            assert_eq!(default.to_string().parse(), Ok(default));
            let words = default.expected().split(", ");
            for word in words.filter(|word| !word.contains(' ')) {
                let text = format!("{}={word}", default.name());
                let parsed: Assignment = text.parse().unwrap();
                assert_eq!(parsed.to_string(), text);
            }
        }
    }

    #[test]
    fn what_does_not_work_is_refused_with_what_does() {
        assert!(
            parse(&[("SLAT_FORMAT", "sparc")])
                .unwrap_err()
                .contains(&FORMATS.join(", "))
        );
        assert!(
            parse(&[("SLAT_MMU", "nested")])
                .unwrap_err()
                .contains("tdp, direct")
        );
        assert!(
            parse(&[("SLAT_MMU", "direct"), ("SLAT_FORMAT", "aarch64")])
                .unwrap_err()
                .contains("the direct MMU has no tables of format aarch64")
        );
        assert!(
            parse(&[("SLAT_SET", "nonsense=on")])
                .unwrap_err()
                .contains("mmio_caching")
        );
        assert!(
            parse(&[("SLAT_SET", "mmio_caching")])
                .unwrap_err()
                .contains("POLICY=VALUE")
        );
        assert!(
            parse(&[("SLAT_SET", "mmio_caching=7")])
                .unwrap_err()
                .contains("on, off")
        );
    }
}
