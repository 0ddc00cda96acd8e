//! `slat bench`: measures, and prints the results beside the published numbers.

use std::env;
use std::io::{self, Write};
use std::path::Path;
use std::process::ExitCode;

use slat_bench::{
    EXPERIMENTS, Elsewhere, Experiment, Failure, Linux, Others, Report, Size, html, show,
};
use slat_kvm::policy::Assignment;

use crate::arch::host;
use crate::args::{ALL, Bench};
use crate::output::{Pending, complain, print, say};
use crate::run;

/// The experiment that boots Linux.
const LINUX: &str = "vmm";

/// The width of the tables in characters. A terminal must be this wide to show them without breaking lines.
const COLUMNS: u16 = 100;

/// Measures, or prints the experiments' explanations.
pub fn run(options: &Bench) -> ExitCode {
    if let Some(done) = slat_bench::as_client() {
        return match done {
            Ok(lines) => print(&lines),
            Err(e) => {
                complain(&format!("bench: {e}"));
                ExitCode::FAILURE
            }
        };
    }
    let missing = slat_bench::missing();
    if missing.contains(&options.experiment.as_str()) {
        complain(&format!("bench: {}", not_measured(&[&options.experiment])));
        return ExitCode::FAILURE;
    }
    let selection = match select(options) {
        Ok(selection) => selection,
        Err(message) => {
            complain(&format!("bench: {message}"));
            return ExitCode::from(2);
        }
    };
    if options.explain {
        let sections = selection.iter().map(|experiment| {
            format!(
                "{}: {}\n\n{}\n\n",
                experiment.name, experiment.title, experiment.explain
            )
        });
        let mut text: String = sections.collect();
        if options.experiment == ALL && !missing.is_empty() {
            text += &format!("{}\n", not_measured(&missing));
        }
        return print(&text);
    }
    if let Err(message) = check(&selection, options) {
        complain(&format!("bench: {message}"));
        return ExitCode::from(2);
    }
    // The measured VMs run in this process, so the policies are set in its own environment.
    if let (name, Some(policies)) = run::policies(&options.set) {
        // SAFETY: this process has no other thread yet.
        unsafe { env::set_var(name, policies) };
    }
    if let Some(format) = other_tables(options) {
        // SAFETY: this process has no other thread yet.
        unsafe { env::set_var("SLAT_FORMAT", format) };
    }
    match measure(&selection, options) {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            complain(&format!("bench: {e}"));
            ExitCode::FAILURE
        }
    }
}

/// Returns a sentence that says which experiments exist only on other architectures.
fn not_measured(names: &[&str]) -> String {
    let names = names.join(", ");
    format!(
        "not measured here, because there are no programs for guests of this architecture yet: {names}"
    )
}

/// Returns the experiments that the options name. For another architecture than the host's, they are those of that
/// architecture.
///
/// # Errors
/// A message that names the experiments without such ones.
fn select(options: &Bench) -> Result<Vec<&'static Experiment>, String> {
    let mut selection: Vec<_> = EXPERIMENTS
        .iter()
        .filter(|known| [ALL, known.name].contains(&options.experiment.as_str()))
        .collect();
    if other_tables(options).is_none() {
        return Ok(selection);
    }
    let mut refusing = Vec::new();
    for known in &mut selection {
        match known.elsewhere() {
            Elsewhere::Nothing => refusing.push(known.name),
            Elsewhere::Tables => {}
            Elsewhere::Guests(other) => *known = other,
        }
    }
    match refusing.is_empty() {
        true => Ok(selection),
        false => Err(format!(
            "--arch of another architecture is only for `split` and `cpu`, and not for {}",
            refusing.join(", ")
        )),
    }
}

/// Returns the format of the tables, if they are not those of this machine's architecture.
fn other_tables(options: &Bench) -> Option<&'static str> {
    let asked = options.arch.as_deref()?;
    let (_, format) = host::TABLES.iter().find(|(name, _)| *name == asked)?;
    *format
}

/// Checks that the options make sense for every selected experiment.
///
/// # Errors
/// A message that names the option and the experiment.
fn check(selection: &[&Experiment], options: &Bench) -> Result<(), String> {
    for policy in &options.set {
        let refuses = |known: &&&Experiment| !known.takes_policy(policy.name());
        let refusing: Vec<_> = selection.iter().filter(refuses).map(|e| e.name).collect();
        if !refusing.is_empty() {
            return Err(format!(
                "--set {policy} does not apply to what these experiments measure: {}",
                refusing.join(", ")
            ));
        }
    }
    if options.materials.is_some() && !selection.iter().any(|known| known.name == LINUX) {
        return Err(format!("--materials is for the experiment {LINUX}"));
    }
    Ok(())
}

/// The destination of the JSON.
enum Json {
    Nowhere,
    /// The JSON goes to standard output, and the tables go to standard error.
    Printed,
    File(Pending),
}

impl Json {
    fn open(path: Option<&Path>) -> Result<Self, String> {
        match path {
            None => Ok(Json::Nowhere),
            Some(path) if path == Path::new("-") => Ok(Json::Printed),
            Some(path) => Pending::open(path).map(Json::File),
        }
    }
}

fn measure(selection: &[&Experiment], options: &Bench) -> Result<(), Failure> {
    let size = if options.full {
        Size::Full
    } else {
        Size::Usual
    };
    // The file is opened before the measurements, which take minutes, so that an error is reported at once.
    let json = Json::open(options.json.as_deref())?;
    let page = options.html.as_deref().map(Pending::open).transpose()?;
    let others = Others {
        slat: Some(env::current_exe()?),
        linux: linux(options)?,
    };
    let report = slat_bench::run_with(selection, size, others)?;
    // The files are written before the tables are printed, so that they exist even if printing fails because the reader
    // has closed standard output.
    let mut text = tables(selection, &report);
    let missing = slat_bench::missing();
    if options.experiment == ALL && !missing.is_empty() {
        text += &format!("{}\n", not_measured(&missing));
    }
    if let Some(page) = page {
        page.write(html::page(selection, &report, size))?;
    }
    match json {
        Json::Nowhere => say(&text)?,
        Json::Printed => {
            let _ = io::stderr().write_all(text.as_bytes());
            say(&report.to_json())?;
        }
        Json::File(file) => {
            file.write(report.to_json())?;
            say(&text)?;
        }
    }
    Ok(())
}

/// Returns the files for booting Linux, if the options ask for this measurement. (It takes minutes.)
fn linux(options: &Bench) -> io::Result<Option<Linux>> {
    let Some(materials) = options.materials.clone() else {
        return Ok(None);
    };
    Ok(Some(Linux {
        slat: env::current_exe()?,
        materials,
        policies: options.set.iter().map(Assignment::to_string).collect(),
    }))
}

fn tables(selection: &[&Experiment], report: &Report) -> String {
    let mut text = String::new();
    let mut missed = Vec::new();
    for experiment in selection {
        text += &show::table(experiment, report, COLUMNS);
        text.push('\n');
        missed.extend(show::missed(experiment, report));
    }
    for note in report.notes() {
        text += &format!("{note}\n");
    }
    if missed.is_empty() {
        text += match report.is_partial() {
            true => "All goals of what was measured were reached.\n",
            false => "All goals were reached.\n",
        };
    } else {
        text += "Missed:\n";
        for line in missed {
            text += &format!("  {line}\n");
        }
    }
    text
}
