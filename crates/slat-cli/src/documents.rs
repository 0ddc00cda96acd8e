//! `slat completions` and `slat man`: what the command line's own description is good for, beside parsing.

use std::process::ExitCode;

use clap::CommandFactory;
use clap_mangen::Man;

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
    // Gives the commands their names: slat-run.
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
    match Man::new(page.clone()).render(&mut text) {
        Ok(()) => print(text),
        Err(error) => {
            output::complain(&format!("man: {error}"));
            ExitCode::FAILURE
        }
    }
}

fn print(text: Vec<u8>) -> ExitCode {
    output::print(&String::from_utf8_lossy(&text))
}
