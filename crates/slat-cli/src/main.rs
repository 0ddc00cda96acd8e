//! The `slat` command: runs KVM programs without `/dev/kvm`.

#[cfg(target_arch = "x86_64")]
mod args;
#[cfg(target_arch = "x86_64")]
mod bench;
#[cfg(target_arch = "x86_64")]
mod documents;
#[cfg(target_arch = "x86_64")]
mod gdb;
#[cfg(target_arch = "x86_64")]
mod info;
#[cfg(target_arch = "x86_64")]
mod launchers;
#[cfg(target_arch = "x86_64")]
mod live;
#[cfg(target_arch = "x86_64")]
mod map;
#[cfg(target_arch = "x86_64")]
mod output;
#[cfg(target_arch = "x86_64")]
mod preload;
#[cfg(target_arch = "x86_64")]
mod processes;
#[cfg(target_arch = "x86_64")]
mod program;
#[cfg(target_arch = "x86_64")]
mod run;
#[cfg(target_arch = "x86_64")]
mod stat;
#[cfg(target_arch = "x86_64")]
mod trace;

#[cfg(target_arch = "x86_64")]
fn main() -> std::process::ExitCode {
    use clap::Parser;

    let args = match args::Args::try_parse() {
        Ok(args) => args,
        // `exit` would print, too, but would not report a failure to print.
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

#[cfg(not(target_arch = "x86_64"))]
fn main() -> std::process::ExitCode {
    eprintln!(
        "slat: needs an x86-64 host, this one is {} (the engine itself is portable: see the slat crate)",
        std::env::consts::ARCH
    );
    std::process::ExitCode::from(1)
}
