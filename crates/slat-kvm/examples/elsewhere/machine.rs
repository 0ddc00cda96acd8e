//! An example's program for machines that cannot run the example's guest.

use std::process::ExitCode;

pub fn main() -> ExitCode {
    eprintln!("this example has a guest of x86-64, and needs such a machine");
    ExitCode::FAILURE
}
