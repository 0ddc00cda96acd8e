//! Waiting for GDB and for the VM, whichever has something to say first.

use std::io;
use std::os::fd::RawFd;

use gdbstub::common::Signal;
use gdbstub::conn::{Connection as _, ConnectionExt};
use gdbstub::stub::MultiThreadStopReason;
use gdbstub::stub::run_blocking::{BlockingEventLoop, Event, WaitForStopReasonError};
use gdbstub::target::ext::breakpoints::WatchKind;

use super::connection::Connection;
use super::process::Stopped;
use super::target::{Vm, thread};

/// Waits until one of the descriptors can be read, for at most `milliseconds`, or, if that is negative, without limit.
/// Returns which can; what is `None` can.
pub fn wait<const N: usize>(
    descriptors: [Option<RawFd>; N],
    milliseconds: i32,
) -> io::Result<[bool; N]> {
    if descriptors.contains(&None) {
        return Ok(descriptors.map(|descriptor| descriptor.is_none()));
    }
    let mut polled = descriptors.map(|descriptor| libc::pollfd {
        fd: descriptor.unwrap_or(-1),
        events: libc::POLLIN,
        revents: 0,
    });
    // SAFETY: an array of that length.
    let found = unsafe { libc::poll(polled.as_mut_ptr(), N as libc::nfds_t, milliseconds) };
    match found {
        -1 => match io::Error::last_os_error() {
            error if error.kind() == io::ErrorKind::Interrupted => Ok([false; N]),
            error => Err(error),
        },
        _ => Ok(polled.map(|it| it.revents != 0)),
    }
}

/// How this command waits.
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
        // The acknowledgement of what has let the VM go on.
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
        // The VM says when it has stopped.
        vm.process.stop().map(|()| None)
    }
}

/// Returns what GDB is told.
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
