//! `slat gdb`: serves GDB's remote protocol for a VM in another process.
//!
//! | file | idea |
//! |---|---|
//! | `process` | the conversation with the process that runs the VM |
//! | `connection` | the connection to GDB |
//! | `arch` | the description of the registers for GDB |
//! | `target` | GDB's requests, carried out on vCPUs |
//! | `monitor` | GDB's command `monitor` |
//! | `events` | waiting for GDB and for the VM |
//!
//! The process of `slat gdb` keeps no state of the VM. Whenever and however it ends, the VM continues without
//! breakpoints.

mod arch;
mod connection;
mod events;
mod monitor;
mod process;
mod target;

use std::io::{self, Write as _};
use std::process::ExitCode;

use gdbstub::stub::{DisconnectReason, GdbStub};

use crate::output::complain;
pub use connection::Address;
use connection::Listener;
use process::Process;
use target::Vm;

/// The message when GDB ends the session.
const GONE: &str = "gdb has gone; the VM goes on";

/// Runs the command `slat gdb`.
pub fn run(pid: i32, vm: Option<u64>, listen: &Address) -> ExitCode {
    match serve(pid, vm, listen) {
        Ok(end) => {
            let _ = writeln!(io::stderr(), "slat: {end}");
            ExitCode::SUCCESS
        }
        Err(message) => {
            complain(&format!("gdb: {message}"));
            ExitCode::FAILURE
        }
    }
}

/// Serves one GDB session. Returns a message that says how the session ended.
fn serve(pid: i32, vm: Option<u64>, listen: &Address) -> Result<&'static str, String> {
    // This connection is only a check, before GDB connects, so that a wrong process id is reported at once.
    drop(Process::connect(pid)?);
    let listener = Listener::open(listen)?;
    // If this text for the user cannot be printed, GDB can still connect.
    let _ = writeln!(
        io::stderr(),
        "slat: in gdb, type: target remote {}",
        listener.address()
    );
    let mut connection = listener.accept()?;
    let mut vm = Vm::attach(pid, vm)?;
    if connection.keep_last_packet().is_err() {
        return Ok(GONE);
    }
    let ended = GdbStub::new(connection).run_blocking::<events::Events>(&mut vm);
    match ended {
        Ok(DisconnectReason::Disconnect | DisconnectReason::Kill) => Ok(GONE),
        Ok(_) => Ok("the VM has ended"),
        Err(error) if error.is_target_error() => Err(error.into_target_error().unwrap_or_default()),
        Err(error) if error.is_connection_error() => Ok(GONE),
        Err(error) => Err(error.to_string()),
    }
}
