//! `slat bench`: measures, and prints the results beside the published ones.

use std::env;
use std::io::{self, Write};
use std::path::Path;
use std::process::ExitCode;

use slat_bench::{EXPERIMENTS, Experiment, Failure, Linux, Report, Size, html, show};

use crate::args::{ALL, Bench};
use crate::output::{Pending, complain, print, say};

/// Characters that a terminal shows in a line without breaking it.
const COLUMNS: u16 = 100;

/// Measures, or prints the explanations.
pub fn run(options: &Bench) -> ExitCode {
    let selection: Vec<_> = EXPERIMENTS
        .iter()
        .filter(|known| [ALL, known.name].contains(&options.experiment.as_str()))
        .collect();
    if options.explain {
        let sections = selection.iter().map(|experiment| {
            format!(
                "{}: {}\n\n{}\n\n",
                experiment.name, experiment.title, experiment.explain
            )
        });
        return print(&sections.collect::<String>());
    }
    match measure(&selection, options) {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            complain(&format!("bench: {e}"));
            ExitCode::FAILURE
        }
    }
}

/// Destination of the JSON.
enum Json {
    Nowhere,
    /// Standard output: a program reads it. The tables go to standard error.
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
    // Opened first: minutes of measuring must not end in a file that cannot be written.
    let json = Json::open(options.json.as_deref())?;
    let page = options.html.as_deref().map(Pending::open).transpose()?;
    let report = slat_bench::run_with(selection, size, linux(selection, options)?)?;
    // The files before the tables: the files are kept whether or not anything reads standard
    // output.
    let text = tables(selection, &report);
    if let Some(page) = page {
        page.write(&html::page(selection, &report, size))?;
    }
    match json {
        Json::Nowhere => say(&text)?,
        Json::Printed => {
            let _ = io::stderr().write_all(text.as_bytes());
            say(&report.to_json())?;
        }
        Json::File(file) => {
            file.write(&report.to_json())?;
            say(&text)?;
        }
    }
    Ok(())
}

/// Returns the files that boot Linux, if that is to be measured. It takes minutes, so `all` leaves
/// it out.
fn linux(selection: &[&Experiment], options: &Bench) -> io::Result<Option<Linux>> {
    let [_] = selection else {
        return Ok(None);
    };
    Ok(Some(Linux {
        slat: env::current_exe()?,
        materials: options.materials.clone(),
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
        text += "All goals were reached.\n";
    } else {
        text += "Missed:\n";
        for line in missed {
            text += &format!("  {line}\n");
        }
    }
    text
}
