//! The workspace's default command, `cargo run --release -- run`. It runs only the demonstration, for which a third of
//! the crates that the command `slat` needs suffice.

use std::io::Write;
use std::process::ExitCode;

const OTHERWISE: &str = "\
slat-demo: this is the demonstration alone, and its one command is `run`. The command slat:
  cargo install --path crates/slat-cli                  installs it
  cargo run --release -p slat-cli -- COMMAND            builds and runs it in this directory
";

fn main() -> ExitCode {
    let mut arguments = std::env::args_os().skip(1);
    if !(arguments.next().is_some_and(|command| command == "run") && arguments.next().is_none()) {
        eprint!("{OTHERWISE}");
        return ExitCode::from(2);
    }
    let text = match slat_demo::run() {
        Ok(text) => text,
        Err(error) => {
            eprintln!("slat-demo: the built-in KVM program: {error}");
            return ExitCode::FAILURE;
        }
    };
    let mut output = std::io::stdout().lock();
    match output
        .write_all(text.as_bytes())
        .and_then(|()| output.flush())
    {
        Err(error) if error.kind() != std::io::ErrorKind::BrokenPipe => {
            eprintln!("slat-demo: cannot write to standard output: {error}");
            ExitCode::FAILURE
        }
        _ => ExitCode::SUCCESS,
    }
}
