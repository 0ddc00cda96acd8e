//! The command line, parsed into types. An option that would have no effect is rejected.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use clap::{Args as ClapArgs, Parser, Subcommand};
use clap_complete::Shell;
use slat::MmuKind;
use slat_kvm::engine::TableFormat;
use slat_kvm::policy::{Assignment, FORMATS, mmu_by_name};
use slat_kvm::publish::MOST_CELLS;
use slat_trace::{Buffer, Selection};

use crate::arch::host;
use crate::gdb::Address;

/// Runs KVM programs in userspace: no /dev/kvm, no root, no virtualization hardware.
#[derive(Parser)]
#[command(name = "slat", version = env!("VERSION_AND_COMMIT"), max_term_width = 100, after_help = EXIT_STATUS)]
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
    /// Watch what the VMs on slat count, live: faults, exits, leaves, instructions
    Stat(Stat),
    /// Read what `slat run --trace` has recorded: exits by reason, hot addresses, faults by memslot
    #[command(
        subcommand,
        override_usage = "slat trace report [OPTIONS] <FILE>\n       slat trace convert <FILE> <OUTPUT>"
    )]
    Trace(Trace),
    /// Show how the memory of VMs on slat is mapped, live: memslots, leaves, dirty and accessed pages, MMIO entries
    Map(Map),
    /// Debug the guest of a VM on slat with GDB, while its VMM notices nothing
    Gdb(Gdb),
    /// Show what slat supports, and what this host allows
    Info,
    /// Print a shell's completion of this command line
    Completions(Completions),
    /// Print a manual page, in the form that `man -l -` reads
    Man(Man),
}

/// The exit statuses of all commands except `run`, which has its own: [`EXIT_STATUS_OF_RUN`].
const EXIT_STATUS: &str = "\
Exit status:
  0  the command did its work
  1  it failed; a line on standard error says why
  2  the command line is wrong
`slat run` has PROGRAM's: see `slat run --help`.";

const EXIT_STATUS_OF_RUN: &str = "\
Exit status:
  PROGRAM's own; a signal that ends PROGRAM ends slat. Without PROGRAM, 0 or 1.
  2    the command line is wrong
  126  PROGRAM cannot be run on slat; a line on standard error says why
  127  PROGRAM, its interpreter or its dynamic linker was not found

Environment of PROGRAM:
  LD_PRELOAD begins with slat's library. Only runtimes of sanitizers (libasan,
  libtsan, ...) are before it: those that you name there, and those that PROGRAM
  is linked with. ASAN_OPTIONS and TSAN_OPTIONS begin with settings without
  which sanitizers refuse child processes; yours, after them, take precedence.";

/// `slat run`.
#[derive(ClapArgs)]
#[command(after_help = EXIT_STATUS_OF_RUN)]
pub struct Run {
    // The help of these options names the architecture's MMUs and formats.
    #[arg(long, value_name = "MMU", default_value = "tdp", help = host::MMU, value_parser = mmu())]
    pub mmu: MmuKind,

    #[arg(long, value_name = "FORMAT", help = host::FORMAT, value_parser = format())]
    pub format: Option<TableFormat>,

    /// Set a policy of the memory system (`slat info` lists them); may be given several times
    #[arg(long = "set", value_name = "POLICY=VALUE")]
    pub set: Vec<Assignment>,

    /// The names of the guests' code, for profiles: vmlinux, another ELF file with symbols, or System.map
    #[arg(long, value_name = "FILE")]
    pub guest_symbols: Option<PathBuf>,

    /// Sample which guest code runs, and write its stacks to FILE, from which flame graphs are drawn; a further process
    /// that runs a guest writes FILE.PID
    #[arg(long, value_name = "FILE")]
    pub profile: Option<PathBuf>,

    /// When PROGRAM ends, print on stderr what the memory system did
    #[arg(long)]
    pub stats: bool,

    /// Record KVM's tracepoints in FILE, for `slat trace`; a further process that uses KVM writes FILE.PID
    #[arg(long, value_name = "FILE")]
    pub trace: Option<PathBuf>,

    /// With --trace, record only these: names between commas, or kvm, kvmmmu, slat for all of one kind
    #[arg(long, value_name = "LIST", requires = "trace")]
    pub trace_events: Option<Selection>,

    /// With --trace, the MiB that hold the latest records of each thread; usually 4, which is 65,000 records
    #[arg(long, value_name = "MIB", requires = "trace")]
    pub trace_buffer: Option<Buffer>,

    /// Let the first VM wait for `slat gdb` before its first instruction
    #[arg(long, requires = "program")]
    pub gdb_wait: bool,

    /// The KVM program, found as a shell finds it, and its arguments
    // Options after the program's name are the program's. Options before it are slat's, unless `--` precedes them.
    #[arg(value_name = "PROGRAM", trailing_var_arg = true)]
    pub program: Vec<OsString>,
}

impl Run {
    /// Returns the format that the user asked for, or else the usual format of the MMU.
    pub fn table_format(&self) -> TableFormat {
        self.format.unwrap_or(TableFormat::of(self.mmu))
    }
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

    /// Set a policy of all VMs (`slat info` lists them), unless EXPERIMENT sets it itself; may be given several times
    #[arg(long = "set", value_name = "POLICY=VALUE")]
    pub set: Vec<Assignment>,

    /// Measure the tables (only `split`) or the guests (only `cpu`) of this architecture, on this machine's processor
    #[arg(long, value_name = "ARCH", value_parser = architectures())]
    pub arch: Option<String>,

    /// Also write the measurements as JSON; without FILE, to standard output
    #[arg(long, value_name = "FILE", num_args = 0..=1, default_missing_value = "-")]
    pub json: Option<PathBuf>,

    /// Also write a page with charts, which needs nothing but a browser
    #[arg(long, value_name = "FILE")]
    pub html: Option<PathBuf>,

    /// For `vmm`: also boot Linux, with the kernel and the initrd that conformance/vmm/materials (in slat's
    /// sources) has put into DIR
    #[arg(long, value_name = "DIR")]
    pub materials: Option<PathBuf>,

    /// Say what is measured and why, and measure nothing
    #[arg(long, conflicts_with_all = ["full", "set", "json", "html", "materials"])]
    pub explain: bool,
}

/// `slat stat`.
#[derive(ClapArgs)]
pub struct Stat {
    /// Only the VMs of this process
    #[arg(value_name = "PID", value_parser = pid)]
    pub pid: Option<i32>,

    /// Look once, and print a table; with PID, also all counters that are not 0
    #[arg(long)]
    pub once: bool,

    /// Look once, and print all counters as JSON
    #[arg(long, requires = "once")]
    pub json: bool,

    /// Print a line for each counter at each look: seconds,pid,vm,vcpu,counter,value,per_second
    #[arg(long, conflicts_with = "json")]
    pub csv: bool,

    /// List vCPUs in place of VMs
    #[arg(long)]
    pub by_vcpu: bool,

    /// Seconds between two looks
    #[arg(long, value_name = "SECONDS", default_value = "1", value_parser = seconds)]
    pub interval: f64,

    /// With --csv, end after N looks
    #[arg(long, value_name = "N", requires = "csv", value_parser = clap::value_parser!(u64).range(1..))]
    pub count: Option<u64>,
}

/// `slat trace`.
#[derive(Subcommand)]
pub enum Trace {
    /// Print how often and how long vCPUs left the guest, by reason, and where
    Report(Report),
    /// Write a file that https://ui.perfetto.dev opens: a track for each thread
    Convert(Convert),
}

/// `slat trace report`.
#[derive(ClapArgs)]
pub struct Report {
    /// What `slat run --trace` has written; the process may be running, or may have been killed
    #[arg(value_name = "FILE")]
    pub file: PathBuf,

    /// Print it as JSON
    #[arg(long)]
    pub json: bool,

    /// Name the guest's code: vmlinux, another ELF file with symbols, or System.map
    #[arg(long, value_name = "FILE")]
    pub guest_symbols: Option<PathBuf>,

    /// How many of the most frequent addresses to print
    #[arg(long, value_name = "N", default_value = "10")]
    pub top: usize,
}

/// `slat trace convert`.
#[derive(ClapArgs)]
pub struct Convert {
    /// What `slat run --trace` has written
    #[arg(value_name = "FILE")]
    pub file: PathBuf,

    /// The file to write, in Perfetto's format
    #[arg(value_name = "OUTPUT")]
    pub output: PathBuf,
}

/// `slat map`.
#[derive(ClapArgs)]
pub struct Map {
    /// The process
    #[arg(value_name = "PID", value_parser = pid)]
    pub pid: i32,

    /// Only the VM of this number, as `slat stat` shows it
    #[arg(long, value_name = "N")]
    pub vm: Option<u64>,

    /// Look once, and print the picture
    #[arg(long)]
    pub once: bool,

    /// Look once, and print the cells as JSON: numbers of 4 KiB pages
    #[arg(long, requires = "once")]
    pub json: bool,

    /// Look once, and write a page that needs nothing but a browser
    #[arg(long, value_name = "FILE", conflicts_with = "json")]
    pub html: Option<PathBuf>,

    /// The most cells of a memslot
    #[arg(long, value_name = "N", default_value = "64", value_parser = clap::value_parser!(u64).range(1..=MOST_CELLS))]
    pub cells: u64,

    /// Seconds between two looks
    #[arg(long, value_name = "SECONDS", default_value = "1", value_parser = seconds)]
    pub interval: f64,
}

/// `slat gdb`.
#[derive(ClapArgs)]
pub struct Gdb {
    /// The process
    #[arg(value_name = "PID", value_parser = pid)]
    pub pid: i32,

    /// The VM of this number, as `slat stat` shows it; the first one if not given
    #[arg(long, value_name = "N")]
    pub vm: Option<u64>,

    /// Where gdb connects: a port of 127.0.0.1, ADDRESS:PORT, the path of a Unix socket, or - if gdb has
    /// started this command
    #[arg(long, value_name = "WHERE", default_value = "1234")]
    pub listen: Address,
}

/// Parses the number of a process.
fn pid(text: &str) -> Result<i32, String> {
    match text.parse() {
        Ok(pid) if pid > 0 => Ok(pid),
        _ => {
            Err("give the number of a process; `slat stat --once` lists those with VMs".to_owned())
        }
    }
}

/// Parses a number of seconds.
fn seconds(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(seconds) if (0.01..=86_400.0).contains(&seconds) => Ok(seconds),
        _ => Err("give seconds, from 0.01 to 86400".to_owned()),
    }
}

/// `slat completions`.
#[derive(ClapArgs)]
pub struct Completions {
    /// The shell, which reads the output as its documentation says; bash: `source <(slat completions bash)`
    #[arg(value_name = "SHELL")]
    pub shell: Shell,
}

/// `slat man`.
#[derive(ClapArgs)]
pub struct Man {
    /// The command that the page is about; without it, slat itself
    // The type is text, because the enumeration of all commands cannot contain a command that names the enumeration.
    #[arg(value_name = "COMMAND")]
    pub command: Option<String>,
}

/// The name that selects all experiments.
pub const ALL: &str = "all";

fn experiments() -> PossibleValuesParser {
    let names = slat_bench::EXPERIMENTS.iter().map(|known| known.name);
    // An experiment that this architecture lacks gets an error of its own.
    let missing = slat_bench::missing().into_iter();
    let missing = missing.map(|name| PossibleValue::new(name).hide(true));
    let names = names.chain([ALL]).map(PossibleValue::new);
    PossibleValuesParser::new(names.chain(missing))
}

fn architectures() -> PossibleValuesParser {
    PossibleValuesParser::new(host::TABLES.iter().map(|(name, _)| *name))
}

/// Returns the MMUs that have tables of a format of this architecture.
pub fn mmus() -> impl Iterator<Item = MmuKind> {
    let formats = || FORMATS.iter().filter_map(|name| TableFormat::by_name(name));
    let mmus = MmuKind::ALL.iter().copied();
    mmus.filter(move |mmu| formats().any(|format| format.has(*mmu)))
}

fn mmu() -> impl TypedValueParser<Value = MmuKind> {
    let names = mmus().map(|mmu| mmu.name());
    PossibleValuesParser::new(names).map(|name| mmu_by_name(&name).expect("a possible value"))
}

fn format() -> impl TypedValueParser<Value = TableFormat> {
    PossibleValuesParser::new(FORMATS)
        .map(|name| TableFormat::by_name(&name).expect("a possible value"))
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

    fn run(words: &[&str]) -> Run {
        match parse(&[&["run"], words].concat()).unwrap().command {
            Command::Run(run) => run,
            _ => panic!("not run"),
        }
    }

    #[test]
    fn options_after_the_program_belong_to_the_program() {
        for words in [
            &["--stats", "--", "prog", "--stats", "-x", "--"][..],
            &["--stats", "prog", "--stats", "-x", "--"],
        ] {
            let run = run(words);
            assert!(run.stats);
            assert_eq!(run.program, ["prog", "--stats", "-x", "--"]);
        }
        assert_eq!(run(&["--", "--stats"]).program, ["--stats"]);
    }

    #[test]
    fn a_word_like_an_option_before_the_program_is_one_or_an_error() {
        for (word, nearest) in [("--staats", "--stats"), ("--fromat", "--format")] {
            for rest in [&["--", "true"][..], &["true"], &[]] {
                let error = parse(&[&["run", word], rest].concat()).err().unwrap();
                assert_eq!(error.exit_code(), 2);
                let error = error.to_string();
                assert!(error.contains(word) && error.contains(nearest), "{error}");
            }
        }
        assert!(parse(&["run", "-x", "--", "true"]).is_err());
    }

    #[test]
    fn values_are_parsed_into_types() {
        let (mmu, name) = (mmus().last().unwrap(), FORMATS[1]);
        let set = ["--set", "userfault=on"];
        let run = run(&[&["--mmu", mmu.name(), "--format", name], &set[..]].concat());
        assert_eq!(run.mmu, mmu);
        assert_eq!(run.format, TableFormat::by_name(name));
        assert_eq!(run.set, ["userfault=on".parse().unwrap()]);
    }

    #[test]
    fn policies_have_the_names_and_values_of_the_engine() {
        let run = run(&["--set", "mmio_caching=N", "--set", "huge_pages=1"]);
        let set: Vec<_> = run.set.iter().map(Assignment::to_string).collect();
        assert_eq!(set, ["mmio_caching=off", "huge_pages=on"]);
        assert!(parse(&["run", "--set", "mmio_caching=maybe"]).is_err());
    }

    fn bench(words: &[&str]) -> Bench {
        match parse(&[&["bench"], words].concat()).unwrap().command {
            Command::Bench(bench) => bench,
            _ => panic!("not bench"),
        }
    }

    #[test]
    fn what_needs_a_guest_that_is_missing_is_accepted_for_an_error_of_its_own() {
        for name in slat_bench::missing() {
            assert_eq!(bench(&[name]).experiment, name);
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
    fn tables_are_those_of_a_known_architecture() {
        assert_eq!(bench(&["split", "--arch", "arm64"]).arch.unwrap(), "arm64");
        assert!(parse(&["bench", "split", "--arch", "vax"]).is_err());
    }

    #[test]
    fn json_goes_to_a_file_or_to_standard_output() {
        assert_eq!(bench(&["split"]).json, None);
        assert_eq!(bench(&["split", "--json"]).json, Some("-".into()));
        assert_eq!(
            bench(&["split", "--json", "a.json"]).json,
            Some("a.json".into())
        );
    }

    #[test]
    fn a_page_goes_to_a_file() {
        assert_eq!(bench(&["split"]).html, None);
        assert_eq!(
            bench(&["--html", "a.html", "split"]).html,
            Some("a.html".into())
        );
        assert!(parse(&["bench", "--html"]).is_err());
    }

    #[test]
    fn what_does_not_exist_is_refused_by_name() {
        let names: Vec<_> = mmus().map(|mmu| mmu.name()).collect();
        let values = |names: &[&str]| format!("possible values: {}]", names.join(", "));
        let (mmus, formats) = (values(&names), values(FORMATS));
        for (words, message) in [
            (["run", "--mmu", "ept"], mmus.as_str()),
            (["run", "--format", "sv39"], formats.as_str()),
            (
                ["run", "--set", "nx_hugepages=1"],
                "no policy \"nx_hugepages\". Did you mean nx_huge_pages?",
            ),
            (["run", "--set", "prefech=off"], "Did you mean prefetch?"),
            (
                ["run", "--set", "colour=red"],
                "no policy \"colour\". There are",
            ),
            (["run", "--set", "nx_huge_pages"], "POLICY=VALUE"),
        ] {
            let error = parse(&words).err().expect("refused").to_string();
            assert!(error.contains(message), "{error}");
        }
    }
}
