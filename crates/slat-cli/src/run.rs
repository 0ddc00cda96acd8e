//! `slat run`: becomes PROGRAM with slat's library preloaded.

use std::env;
use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::process::{Command, ExitCode};

use slat::MmuKind;
use slat_kvm::engine::TableFormat;
use slat_kvm::policy::{check_pair, mmu_by_name};

use crate::args::Run;
use crate::output::complain;
use crate::program::Refusal;
use crate::{demo, preload, program};

/// Returns the environment of the library, or of the built-in program.
fn settings(options: &Run) -> [(&'static str, Option<OsString>); 4] {
    [
        ("SLAT_MMU", Some(options.mmu.clone().into())),
        ("SLAT_FORMAT", Some(table_format(options).name().into())),
        // Removed if not asked for: a `slat run` inside another one inherits nothing.
        ("SLAT_STATS", options.stats.then(|| "1".into())),
        (
            "SLAT_SET",
            (!options.set.is_empty()).then(|| options.set.join(",").into()),
        ),
    ]
}

fn mmu(options: &Run) -> MmuKind {
    mmu_by_name(&options.mmu).unwrap_or_default()
}

/// Returns the format that was asked for, or the one that the MMU usually has.
fn table_format(options: &Run) -> TableFormat {
    let asked = options.format.as_deref();
    let usual = TableFormat::of(mmu(options));
    asked.and_then(TableFormat::by_name).unwrap_or(usual)
}

/// Replaces this process by PROGRAM, so that its exit status, its signals and its process id are
/// its own. Returns only if that failed.
pub fn run(options: &Run) -> ExitCode {
    if let Err(message) = check_pair(mmu(options), table_format(options)) {
        complain(&message);
        return ExitCode::from(2);
    }
    let Some((name, arguments)) = options.program.split_first() else {
        for (name, value) in settings(options) {
            // SAFETY: this process has no other thread yet.
            unsafe {
                match value {
                    Some(value) => env::set_var(name, value),
                    None => env::remove_var(name),
                }
            }
        }
        return demo::run(table_format(options).name());
    };
    let file = match program::find(name, env::var_os("PATH").as_deref())
        .and_then(|file| program::check(&file).map(|()| file))
    {
        Ok(file) => file,
        Err(Refusal { message, status }) => {
            complain(&message);
            return ExitCode::from(status);
        }
    };
    let library = match preload::write_out() {
        Ok(path) => path,
        Err(message) => {
            complain(&message);
            return ExitCode::from(126);
        }
    };

    let mut command = Command::new(&file);
    command.arg0(name).args(arguments).env(
        "LD_PRELOAD",
        preload::ld_preload(&library, env::var_os("LD_PRELOAD")),
    );
    for (name, value) in settings(options) {
        match value {
            Some(value) => command.env(name, value),
            None => command.env_remove(name),
        };
    }
    let error = command.exec();
    complain(&format!("{}: {error}", file.display()));
    ExitCode::from(126)
}
