//! `slat trace`: reads the records of `slat run --trace`.
//!
//! | file | idea |
//! |---|---|
//! | `summary` | exits by reason with their times, the most frequent addresses, faults by memslot |
//! | `written` | the pages that the guest writes repeatedly while its dirty pages are logged |
//! | `text`, `json` | the summary, for people and for scripts |
//! | `perfetto` | the records in Perfetto's format |

mod json;
mod perfetto;
mod summary;
mod text;
mod written;

use std::path::Path;
use std::process::ExitCode;

use slat_kvm::symbols::Symbols;
use slat_trace::read::{Event, Trace};

use crate::args;
use crate::output::{Pending, complain, print};
use summary::Summary;

/// Runs the command `slat trace`.
pub fn run(options: &args::Trace) -> ExitCode {
    let done = match options {
        args::Trace::Report(options) => report(options),
        args::Trace::Convert(options) => convert(&options.file, &options.output),
    };
    done.unwrap_or_else(|message| {
        complain(&format!("trace: {message}"));
        ExitCode::FAILURE
    })
}

fn report(options: &args::Report) -> Result<ExitCode, String> {
    let trace = Trace::read(&options.file)?;
    let symbols = options.guest_symbols.as_deref().map(Symbols::read);
    let names = Names(symbols.transpose()?);
    let summary = Summary::of(&trace);
    Ok(print(&match options.json {
        true => json::of(&trace, &summary, options.top, &names),
        false => text::of(&trace, &summary, options.top, &names),
    }))
}

fn convert(file: &Path, output: &Path) -> Result<ExitCode, String> {
    let trace = Trace::read(file)?;
    Pending::open(output)?.write(perfetto::of(&trace))?;
    Ok(ExitCode::SUCCESS)
}

/// The names of the guest's code, if the user has given a file with them.
struct Names(Option<Symbols>);

impl Names {
    /// Returns the name of the function that contains an address, and the address's offset from the function's start.
    fn of(&self, address: u64) -> Option<String> {
        let (name, offset) = self.0.as_ref()?.find(address)?;
        Some(format!("{name}+{offset:#x}"))
    }
}

/// Returns the records of all threads, ordered by time.
fn in_order(trace: &Trace) -> Vec<&Event> {
    let threads = trace.threads.iter();
    let mut events: Vec<_> = threads.flat_map(|thread| &thread.events).collect();
    events.sort_by_key(|event| event.ns);
    events
}
