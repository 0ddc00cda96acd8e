//! What an example does on a machine whose guests are not those of the example.

use std::process::ExitCode;

pub fn main() -> ExitCode {
    eprintln!("this example has a guest of x86-64, and needs such a machine");
    ExitCode::FAILURE
}
