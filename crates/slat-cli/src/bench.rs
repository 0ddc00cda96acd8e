//! `slat bench`: measures, and prints what came out beside what was published.

use std::io::{self, Write};
use std::path::Path;
use std::process::ExitCode;

use slat_bench::{EXPERIMENTS, Experiment, Failure, Report, Size, html, show};

use crate::args::{ALL, Bench};
use crate::info::say;

/// What a terminal shows in a line without breaking it.
const COLUMNS: u16 = 100;

/// Measures, or explains.
pub fn run(options: &Bench) -> ExitCode {
    let selection: Vec<_> = EXPERIMENTS
        .iter()
        .filter(|known| [ALL, known.name].contains(&options.experiment.as_str()))
        .collect();
    if options.explain {
        for experiment in selection {
            say(&format!(
                "{}: {}\n\n{}\n\n",
                experiment.name, experiment.title, experiment.explain
            ));
        }
        return ExitCode::SUCCESS;
    }
    match measure(&selection, options) {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("slat: bench: {e}");
            ExitCode::FAILURE
        }
    }
}

fn measure(selection: &[&Experiment], options: &Bench) -> Result<(), Failure> {
    let size = if options.full {
        Size::Full
    } else {
        Size::Usual
    };
    let report = slat_bench::run(selection, size)?;
    let text = tables(selection, &report);
    match options.json.as_deref() {
        // Standard output is the JSON's then: somebody reads it by program.
        Some(path) if path == Path::new("-") => {
            say(&report.to_json());
            let _ = io::stderr().write_all(text.as_bytes());
        }
        Some(path) => {
            say(&text);
            write(path, &report.to_json())?;
        }
        None => say(&text),
    }
    if let Some(path) = &options.html {
        write(path, &html::page(selection, &report, size))?;
    }
    Ok(())
}

fn write(path: &Path, text: &str) -> Result<(), Failure> {
    std::fs::write(path, text).map_err(|e| format!("{}: {e}", path.display()).into())
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
        text += "Everything that was asked for was reached.\n";
    } else {
        text += "Missed:\n";
        for line in missed {
            text += &format!("  {line}\n");
        }
    }
    text
}
