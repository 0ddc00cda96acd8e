//! `slat stat`: shows live the counters of VMs in the user's processes.
//!
//! | file | idea |
//! |---|---|
//! | `text` | parses the processes' replies |
//! | `subject` | the VMs and vCPUs that the tables list, and the rates of their counters |
//! | `json` | one refresh as JSON |
//! | `screen` | the live table |

mod json;
mod screen;
mod subject;
mod text;

use std::fmt::Write as _;
use std::io::{self, ErrorKind, IsTerminal, Write as _};
use std::process::ExitCode;
use std::thread::sleep;
use std::time::{Duration, Instant};

use crate::args::Stat;
use crate::live;
use crate::output::{complain, print};
use crate::processes::{self, NOBODY, why_not};
use subject::{Earlier, HEADS, Subject, cells, shown, subjects, times};

/// A process and its counters.
type Process = processes::Process<text::Answer>;

/// Asks all processes of the user, or only the process `wanted`.
fn ask(wanted: Option<i32>) -> Vec<Process> {
    processes::ask(&text::question(), wanted)
}

/// Runs the command `slat stat`.
pub fn run(options: &Stat) -> ExitCode {
    let processes = ask(options.pid);
    if let (Some(pid), true) = (options.pid, processes.is_empty()) {
        complain(&format!("stat: {}", why_not(pid)));
        return ExitCode::FAILURE;
    }
    if options.json {
        return print(&json::of(&processes));
    }
    if options.csv {
        return csv(options, processes);
    }
    if options.once || !io::stdout().is_terminal() {
        return print(&once(&processes, options));
    }
    if processes.is_empty() {
        return print(NOBODY);
    }
    let mut screen = screen::Screen::new(options, processes);
    live::show("stat", interval(options), &mut screen)
}

/// Returns one refresh as text: a table of VMs or vCPUs; for a single process, also all counters.
fn once(processes: &[Process], options: &Stat) -> String {
    if processes.is_empty() {
        return NOBODY.to_owned();
    }
    let earlier = Earlier::default();
    let found = subjects(processes, options.by_vcpu);
    let rows: Vec<_> = found
        .iter()
        .map(|subject| cells(subject, &earlier))
        .collect();
    let mut text = String::new();
    let widths: Vec<_> = (0..HEADS.len())
        .map(|column| {
            let cells = rows.iter().map(|row| row[column].chars().count());
            cells.chain([HEADS[column].len()]).max().unwrap_or(0)
        })
        .collect();
    for row in [HEADS.map(str::to_owned)].iter().chain(&rows) {
        let mut line = String::new();
        for (column, (cell, width)) in row.iter().zip(&widths).enumerate() {
            let _ = match column {
                // Columns 1 and 3 contain words, which are aligned left; numbers are aligned right.
                1 | 3 => write!(line, "{cell:<width$}  "),
                _ => write!(line, "{cell:>width$}  "),
            };
        }
        let _ = writeln!(text, "{}", line.trim_end());
    }
    for process in processes {
        if let Err(why) = &process.answer {
            let _ = writeln!(text, "{} {} {why}", process.pid, process.command);
        }
    }
    if options.pid.is_some() {
        found.iter().for_each(|subject| detail(&mut text, subject));
    }
    text
}

/// Adds to `text` the counters of a VM or vCPU that are not 0.
fn detail(text: &mut String, subject: &Subject) {
    let _ = writeln!(text, "\n{}", title(subject));
    for (name, value) in subject.counters().filter(|(_, value)| *value != 0) {
        let _ = writeln!(text, "  {name:<26}{value:>15}");
    }
    let _ = writeln!(text, "  {}", times(subject));
}

/// Returns a heading that names a VM or vCPU.
fn title(subject: &Subject) -> String {
    let (pid, vm, vcpu) = subject.key;
    let vcpu = vcpu.map(|id| format!(", vCPU {id}")).unwrap_or_default();
    format!("VM {vm} of process {pid} ({}){vcpu}", subject.command)
}

/// Prints one line for each counter of each VM or vCPU at each refresh. Ends when the process has ended, when the
/// reader closes the pipe, or after the requested number of refreshes.
fn csv(options: &Stat, mut processes: Vec<Process>) -> ExitCode {
    let begin = Instant::now();
    let mut earlier = Earlier::default();
    let mut text = "seconds,pid,vm,vcpu,counter,value,per_second\n".to_owned();
    let mut looks = 0;
    loop {
        let found = subjects(&processes, options.by_vcpu);
        for subject in &found {
            let (pid, vm, vcpu) = subject.key;
            let vcpu = vcpu.map(|id| id.to_string()).unwrap_or_default();
            let seconds = begin.elapsed().as_secs_f64();
            let all = subject.counters().zip(0..);
            for ((name, value), index) in all {
                let of = |it: &Subject| it.counters().nth(index).map_or(0, |(_, value)| value);
                let rate = earlier.rate(subject, of);
                let rate = rate.map_or(String::new(), |rate| shown(Some(rate)));
                let _ = writeln!(text, "{seconds:.3},{pid},{vm},{vcpu},{name},{value},{rate}");
            }
        }
        let mut output = io::stdout().lock();
        match output
            .write_all(text.as_bytes())
            .and_then(|()| output.flush())
        {
            Ok(()) => text.clear(),
            Err(error) if error.kind() == ErrorKind::BrokenPipe => return ExitCode::SUCCESS,
            Err(error) => {
                complain(&format!("stat: cannot write to standard output: {error}"));
                return ExitCode::FAILURE;
            }
        }
        earlier.remember(&found);
        looks += 1;
        if options.once || options.count == Some(looks) {
            return ExitCode::SUCCESS;
        }
        sleep(interval(options));
        processes = ask(options.pid);
        if options.pid.is_some() && processes.is_empty() {
            return ExitCode::SUCCESS;
        }
    }
}

/// Returns the time between two refreshes.
fn interval(options: &Stat) -> Duration {
    Duration::from_secs_f64(options.interval)
}
