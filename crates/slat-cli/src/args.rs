//! The command line. Only options that work are accepted; the refusal names planned ones.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::builder::PossibleValuesParser;
use clap::{Args as ClapArgs, Parser, Subcommand};
use slat::{MmuKind, Policy, PolicyError, Setting};
use slat_kvm::policy::{FORMATS, JIT, Jit, mmu_by_name};

/// Runs KVM programs in userspace: no /dev/kvm, no root, no virtualization hardware.
#[derive(Parser)]
#[command(name = "slat", version, max_term_width = 100)]
pub struct Args {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// The commands.
#[derive(Subcommand)]
pub enum Command {
    /// Run a KVM program on slat; without PROGRAM, a small built-in one that shows what happens
    Run(Run),
    /// Measure what each mechanism of the memory system is worth, beside the published numbers
    Bench(Bench),
    /// Show what slat supports, and what this host allows
    Info,
}

/// `slat run`.
#[derive(ClapArgs)]
pub struct Run {
    /// What makes the tables: tdp (a tree), direct (shadow pages and a reverse map; ept and npt), shadow (tables that shadow
    /// the guest's own; x86)
    #[arg(long, value_name = "MMU", default_value = "tdp", value_parser = mmu)]
    pub mmu: String,

    /// Format of the tables; usually ept, with the shadow MMU x86
    #[arg(long, value_name = "FORMAT", value_parser = format)]
    pub format: Option<String>,

    /// Set a policy of the memory system (`slat info` lists them); may be given several times
    #[arg(long = "set", value_name = "POLICY=VALUE", value_parser = policy)]
    pub set: Vec<String>,

    /// When PROGRAM ends, print on stderr what the memory system did
    #[arg(long)]
    pub stats: bool,

    /// The KVM program, found as a shell finds it, and its arguments
    #[arg(
        value_name = "PROGRAM",
        trailing_var_arg = true,
        allow_hyphen_values = true
    )]
    pub program: Vec<OsString>,
}

/// `slat bench`.
#[derive(ClapArgs)]
pub struct Bench {
    /// What to measure
    #[arg(value_name = "EXPERIMENT", default_value = ALL, value_parser = experiments())]
    pub experiment: String,

    /// Use the published sizes (up to 20 GiB of memory, minutes)
    #[arg(long)]
    pub full: bool,

    /// Also write the measurements as JSON; without FILE, to standard output
    #[arg(long, value_name = "FILE", num_args = 0..=1, default_missing_value = "-")]
    pub json: Option<PathBuf>,

    /// Also write a page with charts, which needs nothing but a browser
    #[arg(long, value_name = "FILE")]
    pub html: Option<PathBuf>,

    /// Where conformance/vmm/materials has put the kernel and the initrd of `vmm`
    #[arg(long, value_name = "DIR", default_value = "target/conformance/vmm")]
    pub materials: PathBuf,

    /// Say what is measured and why, and measure nothing
    #[arg(long, conflicts_with_all = ["full", "json", "html"])]
    pub explain: bool,
}

/// All experiments.
pub const ALL: &str = "all";

fn experiments() -> PossibleValuesParser {
    let names = slat_bench::EXPERIMENTS.iter().map(|known| known.name);
    PossibleValuesParser::new(names.chain([ALL]))
}

fn mmu(name: &str) -> Result<String, String> {
    match mmu_by_name(name) {
        Some(_) => Ok(name.to_owned()),
        None => Err(format!("this slat has: {}", mmus())),
    }
}

/// The names of all MMUs.
pub fn mmus() -> String {
    let names: Vec<_> = MmuKind::ALL.iter().map(|mmu| mmu.name()).collect();
    names.join(", ")
}

fn format(format: &str) -> Result<String, String> {
    if FORMATS.contains(&format) {
        Ok(format.to_owned())
    } else {
        Err(format!("this slat has: {}", FORMATS.join(", ")))
    }
}

fn policy(assignment: &str) -> Result<String, String> {
    let Some((name, value)) = assignment.split_once('=') else {
        return Err("a policy is set as NAME=VALUE".to_owned());
    };
    if name == JIT {
        return Jit::parse(value).map(|_| assignment.to_owned());
    }
    match Setting::parse(name, value) {
        Ok(_) => Ok(assignment.to_owned()),
        Err(PolicyError::NoSuchPolicy) => {
            let known = Policy::default();
            let names: Vec<_> = known.iter().map(|known| known.name()).collect();
            let names = names.join(", ");
            Err(format!(
                "there is no policy '{name}'; this slat has: {names}, {JIT}"
            ))
        }
        Err(error) => Err(format!("{name}={value}: {error}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    fn parse(words: &[&str]) -> Result<Args, clap::Error> {
        Args::try_parse_from([&["slat"], words].concat())
    }

    #[test]
    fn the_command_line_is_consistent() {
        Args::command().debug_assert();
    }

    #[test]
    fn options_after_the_program_belong_to_the_program() {
        let args = parse(&["run", "--stats", "--", "prog", "--stats", "-x"]).unwrap();
        let Command::Run(run) = args.command else {
            panic!("not run")
        };
        assert!(run.stats);
        assert_eq!(run.program, ["prog", "--stats", "-x"]);
    }

    #[test]
    fn policies_have_the_names_and_values_of_the_engine() {
        let args = parse(&["run", "--set", "mmio_caching=N", "--set", "huge_pages=1"]).unwrap();
        let Command::Run(run) = args.command else {
            panic!("not run")
        };
        assert_eq!(run.set, ["mmio_caching=N", "huge_pages=1"]);
        assert!(parse(&["run", "--set", "mmio_caching=maybe"]).is_err());
    }

    fn bench(words: &[&str]) -> Bench {
        match parse(&[&["bench"], words].concat()).unwrap().command {
            Command::Bench(bench) => bench,
            _ => panic!("not bench"),
        }
    }

    #[test]
    fn bench_measures_everything_unless_told_what() {
        assert_eq!(bench(&[]).experiment, ALL);
        for experiment in slat_bench::EXPERIMENTS {
            assert_eq!(bench(&[experiment.name]).experiment, experiment.name);
        }
        assert!(parse(&["bench", "nothing"]).is_err());
        assert!(parse(&["bench", "--explain", "--full"]).is_err());
    }

    #[test]
    fn json_goes_to_a_file_or_to_standard_output() {
        assert_eq!(bench(&["cpu"]).json, None);
        assert_eq!(bench(&["cpu", "--json"]).json, Some("-".into()));
        assert_eq!(
            bench(&["cpu", "--json", "a.json"]).json,
            Some("a.json".into())
        );
    }

    #[test]
    fn a_page_goes_to_a_file() {
        assert_eq!(bench(&["cpu"]).html, None);
        assert_eq!(
            bench(&["--html", "a.html", "cpu"]).html,
            Some("a.html".into())
        );
        assert!(parse(&["bench", "--html"]).is_err());
    }

    #[test]
    fn what_does_not_exist_is_refused_by_name() {
        for (words, message) in [
            (
                ["run", "--mmu", "ept"],
                "this slat has: tdp, direct, shadow",
            ),
            (
                ["run", "--format", "sv39"],
                "this slat has: ept, npt, aarch64, riscv, x86",
            ),
            (
                ["run", "--set", "nx_hugepages=1"],
                "no policy 'nx_hugepages'",
            ),
            (["run", "--set", "nx_huge_pages"], "NAME=VALUE"),
        ] {
            let error = parse(&words).err().expect("refused").to_string();
            assert!(error.contains(message), "{error}");
        }
    }
}
