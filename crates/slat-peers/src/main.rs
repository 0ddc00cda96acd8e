//! Measures slat, and page tables and guest memory maps of other crates, in turns in one process.
//!
//! `slat-peers [--rounds N] [--json FILE] [--only PREFIX]`
//!
//! Every round measures every crate once, so that a disturbance of the machine affects all crates alike. The reported
//! value is the median of all rounds. All tables get their frames from the same source ([`frames`]), whose memory was
//! touched before. The documentation of each case's module says exactly what is compared, and which operations another
//! crate lacks.

mod embed;
mod faults;
mod frames;
mod machine;
mod report;
mod slots;
mod tables;

extern crate alloc;

use std::process::ExitCode;

use report::{Report, Samples};

struct Options {
    rounds: usize,
    json: Option<String>,
    only: String,
}

fn options() -> Result<Options, String> {
    let mut options = Options {
        rounds: 7,
        json: None,
        only: String::new(),
    };
    let mut args = std::env::args().skip(1);
    while let Some(arg) = args.next() {
        let mut value = || args.next().ok_or(format!("{arg} takes a value"));
        match arg.as_str() {
            "--rounds" => {
                options.rounds = value()?
                    .parse()
                    .ok()
                    .filter(|n| *n > 0)
                    .ok_or("--rounds takes a number above 0")?;
            }
            "--json" => options.json = Some(value()?),
            "--only" => options.only = value()?,
            _ => {
                return Err(format!(
                    "unknown argument {arg}\n\
                     usage: slat-peers [--rounds N] [--json FILE] [--only tables|slots|faults|embed[/CASE]]"
                ));
            }
        }
    }
    Ok(options)
}

fn main() -> ExitCode {
    let options = match options() {
        Ok(options) => options,
        Err(message) => {
            eprintln!("slat-peers: {message}");
            return ExitCode::from(2);
        }
    };
    let mut samples = Samples::new(&options.only);
    let mut tables = tables::Tables::new();
    let mut slots = slots::Slots::new(&samples);
    let mut faults = faults::Faults::new();
    // The first round only warms the caches. Its samples are dropped.
    for round in 0..=options.rounds {
        tables.round(&mut samples);
        slots.round(&mut samples);
        faults.round(&mut samples);
        embed::round(&mut samples);
        if round == 0 {
            samples.clear();
        }
    }
    let report = Report::of(&samples);
    print!("{report}");
    if let Some(path) = &options.json
        && let Err(error) = std::fs::write(path, report.json())
    {
        eprintln!("slat-peers: cannot write {path}: {error}");
        return ExitCode::FAILURE;
    }
    ExitCode::SUCCESS
}
