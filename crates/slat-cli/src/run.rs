//! `slat run`: executes, in this process, PROGRAM with slat's library preloaded, or slat's library, which then loads
//! PROGRAM.

use std::env;
use std::ffi::OsString;
use std::fs;
use std::io;
use std::os::unix::process::CommandExt;
use std::path::{self, Path, PathBuf};
use std::process::{Command, ExitCode};

use slat_kvm::policy::{Assignment, check_pair};
use slat_kvm::symbols::Symbols;

use crate::arch::program::LINKER;
use crate::args::Run;
use crate::output::{complain, print};
use crate::preload::{Order, sanitizer_settings};
use crate::program::{Reach, Refusal};
use crate::{launchers, preload, program};

/// Returns the environment variables that slat's library or the built-in program reads.
fn settings(options: &Run) -> [(&'static str, Option<OsString>); 10] {
    let text = |value: Option<String>| value.map(OsString::from);
    [
        ("SLAT_MMU", Some(options.mmu.name().into())),
        ("SLAT_FORMAT", Some(options.table_format().name().into())),
        // A variable without a value is removed, so that a `slat run` inside another one does not inherit the outer
        // one's option.
        ("SLAT_STATS", options.stats.then(|| "1".into())),
        (
            "SLAT_GUEST_SYMBOLS",
            options.guest_symbols.as_deref().map(from_anywhere),
        ),
        policies(&options.set),
        ("SLAT_GDB_WAIT", options.gdb_wait.then(|| "1".into())),
        (
            "SLAT_PROFILE",
            options.profile.clone().map(PathBuf::into_os_string),
        ),
        (
            "SLAT_TRACE",
            options.trace.clone().map(PathBuf::into_os_string),
        ),
        (
            "SLAT_TRACE_EVENTS",
            text(options.trace_events.map(|list| list.to_string())),
        ),
        (
            "SLAT_TRACE_BUFFER",
            text(options.trace_buffer.map(|size| size.to_string())),
        ),
    ]
}

/// Returns the path as an absolute path, which does not depend on the working directory.
fn from_anywhere(path: &Path) -> OsString {
    std::path::absolute(path).map_or_else(|_| path.into(), PathBuf::into_os_string)
}

/// Returns the environment variable that sets policies, and its value. The value is `None` if `set` is empty.
pub fn policies(set: &[Assignment]) -> (&'static str, Option<OsString>) {
    let words: Vec<_> = set.iter().map(Assignment::to_string).collect();
    let value = (!words.is_empty()).then(|| words.join(",").into());
    ("SLAT_SET", value)
}

/// Prepares the output file of `option`. Makes its path absolute, because PROGRAM may change its directory. Removes an
/// old file at the path, because a process writes only a file that it has created, so that no two processes write to
/// the same file. Checks that a file can be created at the path.
///
/// # Errors
/// A sentence for the user.
fn prepare(option: &str, file: &mut Option<PathBuf>) -> Result<(), String> {
    let Some(file) = file else {
        return Ok(());
    };
    let prepared = path::absolute(&*file).and_then(|absolute| {
        *file = absolute;
        match fs::symlink_metadata(&*file) {
            Ok(known) if !known.is_file() => Err(io::Error::other("is there, and is no file")),
            Ok(_) => fs::remove_file(&*file),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            Err(error) => Err(error),
        }?;
        fs::File::create_new(&*file)?;
        fs::remove_file(&*file)
    });
    prepared.map_err(|error| format!("{option} {}: {error}", file.display()))
}

/// Replaces this process by PROGRAM. So PROGRAM has this process's id, and the caller gets PROGRAM's exit status and
/// signals. Returns only on failure.
pub fn run(options: &mut Run) -> ExitCode {
    let symbols = options.guest_symbols.as_deref().map(Symbols::read);
    let checked = check_pair(options.mmu, options.table_format())
        .and(symbols.transpose().map(drop))
        .and_then(|()| prepare("--trace", &mut options.trace))
        .and_then(|()| prepare("--profile", &mut options.profile));
    if let Err(message) = checked {
        complain(&message);
        return ExitCode::from(2);
    }
    let options = &*options;
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
        return match slat_demo::run() {
            Ok(text) => print(&text),
            Err(e) => {
                complain(&format!("the built-in KVM program: {e}"));
                ExitCode::FAILURE
            }
        };
    };
    let found = program::find(name, env::var_os("PATH").as_deref());
    let checked = found.and_then(|file| program::check(&file).map(|program| (file, program)));
    let (file, program) = match checked {
        Ok(checked) => checked,
        Err(Refusal { message, status }) => {
            complain(&message);
            return ExitCode::from(status);
        }
    };
    if let Some(message) = launchers::losing_preload(name, arguments) {
        complain(&message);
    }
    let library = match preload::write_out() {
        Ok(path) => path,
        Err(message) => {
            complain(&message);
            return ExitCode::from(126);
        }
    };

    let (mut command, preload) = match program.reach {
        Reach::Preloaded(linked) => {
            let order = Order::new(&library, env::var_os("LD_PRELOAD").as_deref(), &linked);
            let children = (order.children != order.program).then_some(order.children);
            let preload = [
                ("LD_PRELOAD", Some(order.program)),
                ("SLAT_CHILDRENS_LD_PRELOAD", children),
                ("SLAT_PROGRAM", None),
            ];
            (Command::new(&file), preload)
        }
        Reach::Loads => {
            let mut command = Command::new(&library);
            command.args(program.before);
            let preload = [
                ("LD_PRELOAD", None),
                ("SLAT_CHILDRENS_LD_PRELOAD", None),
                ("SLAT_PROGRAM", Some(program.runs.into_os_string())),
            ];
            (command, preload)
        }
    };
    command.arg0(name).args(arguments);
    let processors = preload::write_out_processors(&library).map(PathBuf::into_os_string);
    let processors = [("SLAT_CPUINFO", processors)];
    for (name, value) in settings(options)
        .into_iter()
        .chain(preload)
        .chain(processors)
    {
        match value {
            Some(value) => command.env(name, value),
            None => command.env_remove(name),
        };
    }
    command.envs(sanitizer_settings(|name| env::var_os(name)));
    let error = command.exec();
    let started = Path::new(command.get_program());
    let remedy = if started != library {
        String::new()
    } else if Path::new(LINKER).exists() {
        ", which loads it: is its directory mounted with noexec? (XDG_CACHE_HOME names another)"
            .to_owned()
    } else {
        format!(
            ", which loads it, needs glibc, and {} is not there: run slat in a container that has it",
            LINKER
        )
    };
    complain(&format!(
        "{}: {}{remedy}: {error}",
        file.display(),
        started.display()
    ));
    ExitCode::from(126)
}
