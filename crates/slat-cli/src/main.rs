//! The `slat` command: runs KVM programs without `/dev/kvm`.

mod arch;
mod args;
mod bench;
mod documents;
mod gdb;
mod info;
mod launchers;
mod live;
mod map;
mod output;
mod preload;
mod processes;
mod program;
mod run;
mod stat;
mod trace;

use std::process::ExitCode;

use clap::Parser;

fn main() -> ExitCode {
    let args = match args::Args::try_parse() {
        Ok(args) => args,
        // The help is printed here, because the method `exit` would not report a failure to print it.
        Err(help) if !help.use_stderr() => return output::print(&help.render().to_string()),
        Err(error) => error.exit(),
    };
    match args.command {
        args::Command::Run(mut options) => run::run(&mut options),
        args::Command::Bench(options) => bench::run(&options),
        args::Command::Stat(options) => stat::run(&options),
        args::Command::Trace(options) => trace::run(&options),
        args::Command::Map(options) => map::run(&options),
        args::Command::Gdb(options) => gdb::run(options.pid, options.vm, &options.listen),
        args::Command::Info => info::print(),
        args::Command::Completions(options) => documents::completions(&options),
        args::Command::Man(options) => documents::man(&options),
    }
}
