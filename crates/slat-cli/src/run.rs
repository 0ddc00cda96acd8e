//! `slat run`: becomes PROGRAM with slat's library preloaded.

use std::env;
use std::os::unix::process::CommandExt;
use std::process::{Command, ExitCode};

use crate::args::Run;
use crate::program::Refusal;
use crate::{demo, preload, program};

/// Starts PROGRAM in place of this process, so that its exit status, its signals and its process id
/// are its own. Comes back only when that did not work.
pub fn run(options: &Run) -> ExitCode {
    let Some((name, arguments)) = options.program.split_first() else {
        return demo::run();
    };
    let file = match program::find(name, env::var_os("PATH").as_deref())
        .and_then(|file| program::check(&file).map(|()| file))
    {
        Ok(file) => file,
        Err(Refusal { message, status }) => {
            eprintln!("slat: {message}");
            return ExitCode::from(status);
        }
    };
    let library = match preload::write_out() {
        Ok(path) => path,
        Err(message) => {
            eprintln!("slat: {message}");
            return ExitCode::from(126);
        }
    };

    let mut command = Command::new(&file);
    command
        .arg0(name)
        .args(arguments)
        .env(
            "LD_PRELOAD",
            preload::ld_preload(&library, env::var_os("LD_PRELOAD")),
        )
        .env("SLAT_MMU", &options.mmu)
        .env("SLAT_FORMAT", &options.format);
    // A `slat run` inside another one does not inherit what it was not asked for.
    if options.stats {
        command.env("SLAT_STATS", "1");
    } else {
        command.env_remove("SLAT_STATS");
    }
    if options.set.is_empty() {
        command.env_remove("SLAT_SET");
    } else {
        command.env("SLAT_SET", options.set.join(","));
    }
    let error = command.exec();
    eprintln!("slat: {}: {error}", file.display());
    ExitCode::from(126)
}
