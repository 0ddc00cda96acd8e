//! Serves GDB's requests. GDB sees a VM as a process, and each vCPU as a thread of that process.

use gdbstub::common::{Signal, Tid};
use gdbstub::target::ext::base::BaseOps;
use gdbstub::target::ext::base::multithread::{
    MultiThreadBase, MultiThreadResume, MultiThreadResumeOps, MultiThreadSchedulerLocking,
    MultiThreadSchedulerLockingOps, MultiThreadSingleStep, MultiThreadSingleStepOps,
};
use gdbstub::target::ext::base::single_register_access::{
    SingleRegisterAccess, SingleRegisterAccessOps,
};
use gdbstub::target::ext::breakpoints::{
    Breakpoints, BreakpointsOps, HwBreakpoint, HwBreakpointOps, HwWatchpoint, HwWatchpointOps,
    SwBreakpoint, SwBreakpointOps, WatchKind,
};
use gdbstub::target::ext::monitor_cmd::MonitorCmdOps;
use gdbstub::target::ext::thread_extra_info::{ThreadExtraInfo, ThreadExtraInfoOps};
use gdbstub::target::{Target, TargetError, TargetResult};
use slat_kvm::debugger::MOST_PROBES;

use super::arch::{Guest, Number, Registers};
use super::process::{Process, Space, Stopped};

/// The errno for memory or a vCPU that does not exist.
const EFAULT: u8 = 14;
/// The errno for a value that cannot be set.
const EINVAL: u8 = 22;

/// Returns the thread that GDB sees for a vCPU. GDB has no thread 0, so the thread's id is the vCPU's id plus one.
pub fn thread(vcpu: u32) -> Tid {
    Tid::new(vcpu as usize + 1).expect("more than 0")
}

pub fn vcpu(thread: Tid) -> u32 {
    (thread.get() - 1) as u32
}

/// A VM that is being debugged. Whenever GDB has stopped its threads, the process holds the VM's vCPUs.
pub struct Vm {
    pub pid: i32,
    pub number: u64,
    pub process: Process,
    /// The id of the VM's first vCPU.
    pub first: u32,
    /// Whether GDB's addresses are guest-physical; otherwise they are guest-virtual.
    pub physical: bool,
    /// The kind, address and number of bytes of each probe (breakpoint or watchpoint). A probe that GDB has set twice
    /// is listed twice.
    probes: Vec<(&'static str, u64, u64)>,
    probes_changed: bool,
    /// The way in which those vCPUs continue that GDB's command to resume does not name. The vCPUs that it names are in
    /// the map `own`.
    others: &'static str,
    own: Vec<(u32, &'static str)>,
}

impl Vm {
    /// Begins to debug a VM of process `pid`, and waits until the process holds the VM's vCPUs.
    ///
    /// # Errors
    /// A sentence for the user.
    pub fn attach(pid: i32, vm: Option<u64>) -> Result<Self, String> {
        let mut process = Process::connect(pid)?;
        let number = process.attach(vm)?;
        if process.stopped()? == Stopped::Gone {
            return Err(format!("VM {number} of process {pid} has ended"));
        }
        let ids = process.vcpus()?;
        let gone = || format!("VM {number} of process {pid} has no vCPU any more");
        let first = ids.into_iter().min().ok_or_else(gone)?;
        Ok(Vm {
            pid,
            number,
            process,
            first,
            physical: false,
            probes: Vec::new(),
            probes_changed: false,
            others: "on",
            own: Vec::new(),
        })
    }

    fn space(&self) -> Space {
        match self.physical {
            true => Space::Physical,
            false => Space::Linear,
        }
    }

    /// Returns all registers of a vCPU.
    pub fn registers(&mut self, vcpu: u32) -> Result<Option<Registers>, String> {
        Ok(self.process.registers(vcpu)?.map(Registers))
    }

    fn add_probe(&mut self, probe: (&'static str, u64, u64)) -> bool {
        let fits = self.probes.len() < MOST_PROBES;
        if fits {
            self.probes.push(probe);
            self.probes_changed = true;
        }
        fits
    }

    fn remove_probe(&mut self, probe: (&'static str, u64, u64)) -> bool {
        let found = self.probes.iter().position(|it| *it == probe);
        if let Some(at) = found {
            self.probes.remove(at);
            self.probes_changed = true;
        }
        found.is_some()
    }
}

/// Returns the value in `found`. For `None`, returns an error with the number `errno`, which GDB shows.
fn present<T>(found: Option<T>, errno: u8) -> TargetResult<T, Vm> {
    found.ok_or(TargetError::Errno(errno))
}

fn fatal(message: String) -> TargetError<String> {
    TargetError::Fatal(message)
}

impl Target for Vm {
    type Arch = Guest;
    type Error = String;

    fn base_ops(&mut self) -> BaseOps<'_, Guest, String> {
        BaseOps::MultiThread(self)
    }

    fn support_breakpoints(&mut self) -> Option<BreakpointsOps<'_, Self>> {
        Some(self)
    }

    fn support_monitor_cmd(&mut self) -> Option<MonitorCmdOps<'_, Self>> {
        Some(self)
    }
}

impl MultiThreadBase for Vm {
    fn read_registers(&mut self, registers: &mut Registers, tid: Tid) -> TargetResult<(), Self> {
        let found = self.registers(vcpu(tid)).map_err(fatal)?;
        *registers = present(found, EFAULT)?;
        Ok(())
    }

    fn write_registers(&mut self, registers: &Registers, tid: Tid) -> TargetResult<(), Self> {
        let vcpu = vcpu(tid);
        let found = self.registers(vcpu).map_err(fatal)?;
        let before = present(found, EFAULT)?;
        for ((number, old), (_, new)) in before.iter().zip(registers.iter()) {
            if old != new
                && !self
                    .process
                    .set_register(vcpu, number, new)
                    .map_err(fatal)?
            {
                return Err(TargetError::Errno(EINVAL));
            }
        }
        Ok(())
    }

    fn support_single_register_access(&mut self) -> Option<SingleRegisterAccessOps<'_, Tid, Self>> {
        Some(self)
    }

    fn read_addrs(&mut self, at: u64, to: &mut [u8], tid: Tid) -> TargetResult<usize, Self> {
        let space = self.space();
        let read = self.process.read(vcpu(tid), space, at, to).map_err(fatal)?;
        present(
            Some(read).filter(|read| *read != 0 || to.is_empty()),
            EFAULT,
        )
    }

    fn write_addrs(&mut self, at: u64, bytes: &[u8], tid: Tid) -> TargetResult<(), Self> {
        let space = self.space();
        let written = self.process.write(vcpu(tid), space, at, bytes);
        present(written.map_err(fatal)?.then_some(()), EFAULT)
    }

    fn list_active_threads(&mut self, register: &mut dyn FnMut(Tid)) -> Result<(), String> {
        self.process
            .vcpus()?
            .into_iter()
            .map(thread)
            .for_each(register);
        Ok(())
    }

    fn support_resume(&mut self) -> Option<MultiThreadResumeOps<'_, Self>> {
        Some(self)
    }

    fn support_thread_extra_info(&mut self) -> Option<ThreadExtraInfoOps<'_, Self>> {
        Some(self)
    }
}

impl SingleRegisterAccess<Tid> for Vm {
    fn read_register(&mut self, tid: Tid, at: Number, to: &mut [u8]) -> TargetResult<usize, Self> {
        let found = self.registers(vcpu(tid)).map_err(fatal)?;
        let all = present(found, EFAULT)?;
        let value = all.iter().find(|(number, _)| *number == at.0);
        let (_, value) = present(value, EINVAL)?;
        let room = present(to.get_mut(..value.len()), EINVAL)?;
        room.copy_from_slice(value);
        Ok(value.len())
    }

    fn write_register(&mut self, tid: Tid, at: Number, value: &[u8]) -> TargetResult<(), Self> {
        let set = self.process.set_register(vcpu(tid), at.0, value);
        present(set.map_err(fatal)?.then_some(()), EINVAL)
    }
}

impl ThreadExtraInfo for Vm {
    fn thread_extra_info(&self, tid: Tid, to: &mut [u8]) -> Result<usize, String> {
        let name = format!("vCPU {}", vcpu(tid));
        let len = name.len().min(to.len());
        to[..len].copy_from_slice(&name.as_bytes()[..len]);
        Ok(len)
    }
}

impl MultiThreadResume for Vm {
    fn resume(&mut self) -> Result<(), String> {
        if std::mem::take(&mut self.probes_changed) {
            // A probe that GDB has set twice is passed to the process once.
            let mut probes = self.probes.clone();
            probes.sort_unstable();
            probes.dedup();
            self.process.set_probes(probes.iter())?;
        }
        self.process.resume(self.others, &self.own)
    }

    fn clear_resume_actions(&mut self) -> Result<(), String> {
        self.others = "on";
        self.own.clear();
        Ok(())
    }

    /// Lets a thread continue. The signal is ignored, because a guest has no signals.
    fn set_resume_action_continue(&mut self, tid: Tid, _: Option<Signal>) -> Result<(), String> {
        self.own.push((vcpu(tid), "on"));
        Ok(())
    }

    fn support_single_step(&mut self) -> Option<MultiThreadSingleStepOps<'_, Self>> {
        Some(self)
    }

    fn support_scheduler_locking(&mut self) -> Option<MultiThreadSchedulerLockingOps<'_, Self>> {
        Some(self)
    }
}

impl MultiThreadSingleStep for Vm {
    fn set_resume_action_step(&mut self, tid: Tid, _: Option<Signal>) -> Result<(), String> {
        self.own.push((vcpu(tid), "step"));
        Ok(())
    }
}

impl MultiThreadSchedulerLocking for Vm {
    fn set_resume_action_scheduler_lock(&mut self) -> Result<(), String> {
        self.others = "stay";
        Ok(())
    }
}

impl Breakpoints for Vm {
    fn support_sw_breakpoint(&mut self) -> Option<SwBreakpointOps<'_, Self>> {
        Some(self)
    }

    fn support_hw_breakpoint(&mut self) -> Option<HwBreakpointOps<'_, Self>> {
        Some(self)
    }

    fn support_hw_watchpoint(&mut self) -> Option<HwWatchpointOps<'_, Self>> {
        Some(self)
    }
}

impl SwBreakpoint for Vm {
    fn add_sw_breakpoint(&mut self, at: u64, _: usize) -> TargetResult<bool, Self> {
        Ok(self.add_probe(("code", at, 1)))
    }

    fn remove_sw_breakpoint(&mut self, at: u64, _: usize) -> TargetResult<bool, Self> {
        Ok(self.remove_probe(("code", at, 1)))
    }
}

/// Hardware breakpoints. They are the same as software breakpoints, because no breakpoint changes guest memory.
impl HwBreakpoint for Vm {
    fn add_hw_breakpoint(&mut self, at: u64, kind: usize) -> TargetResult<bool, Self> {
        self.add_sw_breakpoint(at, kind)
    }

    fn remove_hw_breakpoint(&mut self, at: u64, kind: usize) -> TargetResult<bool, Self> {
        self.remove_sw_breakpoint(at, kind)
    }
}

fn name(kind: WatchKind) -> &'static str {
    match kind {
        WatchKind::Write => "write",
        WatchKind::Read => "read",
        WatchKind::ReadWrite => "access",
    }
}

impl HwWatchpoint for Vm {
    fn add_hw_watchpoint(
        &mut self,
        at: u64,
        len: u64,
        kind: WatchKind,
    ) -> TargetResult<bool, Self> {
        Ok(self.add_probe((name(kind), at, len)))
    }

    fn remove_hw_watchpoint(
        &mut self,
        at: u64,
        len: u64,
        kind: WatchKind,
    ) -> TargetResult<bool, Self> {
        Ok(self.remove_probe((name(kind), at, len)))
    }
}
