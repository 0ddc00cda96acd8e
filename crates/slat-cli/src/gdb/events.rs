//! Waits for GDB and for the VM at the same time, and handles whichever reports first.

use std::io;

use gdbstub::common::Signal;
use gdbstub::conn::{Connection as _, ConnectionExt};
use gdbstub::stub::MultiThreadStopReason;
use gdbstub::stub::run_blocking::{BlockingEventLoop, Event, WaitForStopReasonError};
use gdbstub::target::ext::breakpoints::WatchKind;

use super::connection::{Connection, wait};
use super::process::Stopped;
use super::target::{Vm, thread};

/// The event loop that `gdbstub` calls.
pub enum Events {}

impl BlockingEventLoop for Events {
    type Target = Vm;
    type Connection = Connection;
    type StopReason = MultiThreadStopReason<u64>;

    fn wait_for_stop_reason(
        vm: &mut Vm,
        gdb: &mut Connection,
    ) -> Result<Event<Self::StopReason>, WaitForStopReasonError<String, io::Error>> {
        use WaitForStopReasonError::{Connection, Target};
        // GDB waits for the acknowledgement of its last packet, the command to resume.
        gdb.flush().map_err(Connection)?;
        loop {
            let descriptors = [gdb.descriptor(), vm.process.descriptor()];
            let [says, stops] = wait(descriptors, -1).map_err(Connection)?;
            if says {
                return gdb.read().map(Event::IncomingData).map_err(Connection);
            }
            if stops {
                let stopped = vm.process.stopped().map_err(Target)?;
                return Ok(Event::TargetStopped(reason(vm, &stopped)));
            }
        }
    }

    fn on_interrupt(vm: &mut Vm) -> Result<Option<Self::StopReason>, String> {
        // This call only asks for the stop. `wait_for_stop_reason` reports the stop later.
        vm.process.stop().map(|()| None)
    }
}

/// Converts the reason of a stop to GDB's terms.
fn reason(vm: &Vm, stopped: &Stopped) -> MultiThreadStopReason<u64> {
    let signal = |vcpu, signal| MultiThreadStopReason::SignalWithThread {
        tid: thread(vcpu),
        signal,
    };
    match stopped {
        Stopped::Asked => signal(vm.first, Signal::SIGINT),
        Stopped::Code(vcpu) => MultiThreadStopReason::SwBreak(thread(*vcpu)),
        Stopped::Step(vcpu) => signal(*vcpu, Signal::SIGTRAP),
        Stopped::Data(vcpu, kind, addr) => MultiThreadStopReason::Watch {
            tid: thread(*vcpu),
            kind: match kind.as_str() {
                "write" => WatchKind::Write,
                "read" => WatchKind::Read,
                _ => WatchKind::ReadWrite,
            },
            addr: *addr,
        },
        Stopped::Gone => MultiThreadStopReason::Exited(0),
    }
}
