//! `slat map`: shows live how the guest-physical memory of VMs is mapped.
//!
//! | file | idea |
//! |---|---|
//! | `text` | parses a process's reply |
//! | `picture` | memory as lines of text |
//! | `screen` | the live picture |
//! | `json` | the cells as JSON |

mod json;
mod picture;
mod screen;
mod text;

use std::io::{self, IsTerminal};
use std::process::ExitCode;
use std::time::Duration;

use slat_bench::html::{Strip, memory_page};

use crate::args::Map;
use crate::live;
use crate::output::{Pending, complain, print};
use crate::processes::{self, why_not};
use text::Vm;

/// A process, and the mappings of its VMs' memory.
type Process = processes::Process<Vec<Vm>>;

/// Asks the process for the mappings of its VMs' memory. `None`: there is no such process, or it has no VM.
fn ask(options: &Map) -> Option<Process> {
    let question = text::question(options.cells, options.vm);
    processes::ask(&question, Some(options.pid)).pop()
}

/// Runs the command `slat map`.
pub fn run(options: &Map) -> ExitCode {
    match show(options) {
        Ok(status) => status,
        Err(message) => {
            complain(&format!("map: {message}"));
            ExitCode::FAILURE
        }
    }
}

fn show(options: &Map) -> Result<ExitCode, String> {
    let page = options.html.as_deref().map(Pending::open).transpose()?;
    let process = ask(options).ok_or_else(|| why_not(options.pid))?;
    let vms = (process.answer.as_ref()).map_err(|why| format!("process {} {why}", options.pid))?;
    if let Some(wanted) = options.vm.filter(|_| vms.is_empty()) {
        return Err(format!("process {} has no VM {wanted}", options.pid));
    }
    if let Some(page) = page {
        page.write(html(&process, vms))?;
        return Ok(ExitCode::SUCCESS);
    }
    if options.json {
        return Ok(print(&json::of(&process, vms)));
    }
    if options.once || !io::stdout().is_terminal() {
        return Ok(print(&picture::of(&process, vms)));
    }
    let interval = Duration::from_secs_f64(options.interval);
    let mut screen = screen::Screen::new(options, process);
    Ok(live::show("map", interval, &mut screen))
}

/// Makes the HTML page.
fn html(process: &Process, vms: &[Vm]) -> String {
    let groups: Vec<_> = vms
        .iter()
        .map(|vm| {
            let names: Vec<_> = vm.parts.iter().map(picture::name).collect();
            (vm, names)
        })
        .collect();
    let groups: Vec<_> = groups
        .iter()
        .map(|(vm, names)| {
            let strips = vm.parts.iter().zip(names).map(|(part, name)| Strip {
                name,
                cell_pages: part.cell_pages,
                cells: &part.cells,
            });
            (picture::title(vm), strips.collect())
        })
        .collect();
    memory_page(&picture::whose(process), &groups)
}
