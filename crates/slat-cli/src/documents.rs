//! `slat completions` and `slat man`, which are generated from the description of the command line.

use std::io;
use std::process::ExitCode;

use clap::{Command, CommandFactory};
use clap_mangen::Man;
use clap_mangen::roff::{Roff, roman};

use crate::args::{self, Args};
use crate::output;

/// Prints a shell's completions.
pub fn completions(options: &args::Completions) -> ExitCode {
    let mut text = Vec::new();
    clap_complete::generate(options.shell, &mut Args::command(), "slat", &mut text);
    print(text)
}

/// Prints a manual page.
pub fn man(options: &args::Man) -> ExitCode {
    let mut command = Args::command();
    // `build` gives the subcommands their full names, like slat-run.
    command.build();
    let page = match &options.command {
        None => Some(&command),
        Some(name) => command.find_subcommand(name),
    };
    let Some(page) = page else {
        let names: Vec<_> = command.get_subcommands().map(|c| c.get_name()).collect();
        output::complain(&format!("man: COMMAND is one of: {}", names.join(", ")));
        return ExitCode::from(2);
    };
    let mut text = Vec::new();
    match render(page, &mut text) {
        Ok(()) => print(text),
        Err(error) => {
            output::complain(&format!("man: {error}"));
            ExitCode::FAILURE
        }
    }
}

/// Writes the manual page of a command like [`Man::render`], but makes each heading in the text after the options a
/// section of the page.
fn render(page: &Command, text: &mut Vec<u8>) -> io::Result<()> {
    let man = Man::new(page.clone()).source(concat!("slat ", env!("CARGO_PKG_VERSION")));
    man.render_title(text)?;
    man.render_name_section(text)?;
    man.render_synopsis_section(text)?;
    man.render_description_section(text)?;
    man.render_options_section(text)?;
    if page.has_subcommands() {
        man.render_subcommands_section(text)?;
    }
    let Some(end) = page.get_after_help() else {
        return Ok(());
    };
    let mut sections = Roff::new();
    for line in end.to_string().lines() {
        match line.strip_suffix(':').filter(|line| !line.starts_with(' ')) {
            // Each line of the section stays a line of its own.
            Some(heading) => sections
                .control("SH", [heading.to_uppercase().as_str()])
                .control("nf", []),
            None => sections.text([roman(line.trim_start())]),
        };
    }
    sections.to_writer(text)
}

fn print(text: Vec<u8>) -> ExitCode {
    output::print(&String::from_utf8_lossy(&text))
}
