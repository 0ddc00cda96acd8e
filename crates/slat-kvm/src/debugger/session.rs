//! A debugger's session with the vCPUs of a VM. The session stops all of these vCPUs, and continues the vCPUs that the
//! debugger names.

use super::list::{Debugged, list};
use super::port::NEWS;
use super::{Debuggee, Request};
use crate::arch::{Probe, ProbeHit};
use crate::errno::Result;
use slat_process::wait;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// The time for which a request is repeated while another call holds the vCPU's lock.
const PATIENCE: Duration = Duration::from_secs(2);
/// The time between two attempts of a request.
const TRIES_AGAIN: Duration = Duration::from_millis(1);

/// The next action of a held vCPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Go {
    /// The vCPU continues.
    On,
    /// The vCPU executes one instruction.
    Step,
    /// The vCPU stays held.
    Nowhere,
}

/// The reason why all vCPUs are held.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stopped {
    /// The debugger has requested that the vCPUs are held.
    Asked,
    /// A vCPU has hit a probe.
    Hit(u32, ProbeHit),
    /// The VM has no vCPUs any more.
    Gone,
}

/// A debugger's use of a VM. Dropping this value lets all vCPUs continue, without probes.
pub(crate) struct Session {
    pub(crate) vm: u64,
    /// Whether all vCPUs are being held, because the debugger has asked to hold them or a vCPU has hit a probe.
    stops: bool,
    /// The vCPU that a code probe has stopped. When this vCPU continues, it ignores that probe once.
    passes: Option<u32>,
}

impl Session {
    /// Begins to debug a VM, and holds its vCPUs. If no VM is named, debugs the process's first VM.
    ///
    /// # Errors
    /// A message for the user.
    pub(crate) fn attach(vm: Option<u64>) -> std::result::Result<Self, &'static str> {
        let mut list = list();
        if list.debugged.is_some() {
            return Err("has a debugger already: end that one first");
        }
        let vm = vm.or(list.first_vm());
        let Some(vm) = vm.filter(|vm| list.of(*vm).next().is_some()) else {
            return Err("has no such VM with vCPUs: `slat stat` lists them");
        };
        let probes = Vec::new();
        list.debugged = Some(Debugged {
            vm,
            runs: true,
            probes,
        });
        drop(list);
        let mut session = Session {
            vm,
            stops: false,
            passes: None,
        };
        session.stop();
        Ok(session)
    }

    /// Calls `visit` with each vCPU.
    pub(crate) fn each(&self, visit: impl FnMut(&dyn Debuggee)) {
        list().of(self.vm).for_each(visit);
    }

    /// Begins to hold all vCPUs.
    pub(crate) fn stop(&mut self) {
        self.stops = true;
        self.each(|vcpu| vcpu.port().hold());
    }

    /// Whether the debugger has let the VM run, and was not told since then that the VM has stopped.
    pub(crate) fn runs(&self) -> bool {
        list().debugged.as_ref().is_some_and(|it| it.runs)
    }

    /// Waits for news of the vCPUs, for at most `longest`. Returns at once if there were news since
    /// [`news`](Self::news) returned `seen`.
    pub(crate) fn wait(&self, seen: u32, longest: Duration) {
        wait::sleep(&NEWS, seen, Some(longest));
    }

    /// Returns a number that changes whenever a vCPU has reported something to the debugger. Call before looking at the
    /// vCPUs.
    pub(crate) fn news(&self) -> u32 {
        NEWS.load(Ordering::Acquire)
    }

    /// Returns why all vCPUs are held; `None` if a vCPU runs. If several vCPUs have hit probes, returns one of the
    /// hits. Other hits of code probes are dropped, because the guest will hit these probes again. Other hits of data
    /// probes stay for the next call.
    pub(crate) fn stopped(&mut self) -> Option<Stopped> {
        let mut hit = false;
        self.each(|vcpu| hit |= vcpu.port().hit().is_some());
        if hit && !self.stops {
            self.stop();
        }
        if !self.stops {
            let gone = list().of(self.vm).next().is_none();
            return gone.then_some(Stopped::Gone);
        }
        let mut runs = false;
        self.each(|vcpu| runs |= vcpu.request(&mut Request::Nothing).is_none());
        if runs {
            return None;
        }
        let mut stopped = Stopped::Asked;
        self.each(|vcpu| match (stopped, vcpu.port().hit()) {
            (_, None) => {}
            (Stopped::Asked, Some(hit)) => {
                stopped = Stopped::Hit(vcpu.id(), hit);
                vcpu.port().forget_hit();
            }
            (_, Some(ProbeHit::Data(..))) => {}
            (_, Some(_)) => vcpu.port().forget_hit(),
        });
        self.stops = false;
        self.passes = match stopped {
            Stopped::Hit(vcpu, ProbeHit::Code) => Some(vcpu),
            _ => None,
        };
        if let Some(debugged) = &mut list().debugged {
            debugged.runs = false;
        }
        Some(stopped)
    }

    /// Lets vCPUs continue: `go` chooses the next action of each vCPU by its id. But if one of the vCPUs has hit a
    /// probe and the debugger does not know of the hit yet, no vCPU continues, and the next call of
    /// [`stopped`](Self::stopped) returns the hit.
    ///
    /// # Errors
    /// `ENOMEM`: all vCPUs stay held.
    pub(crate) fn resume(&mut self, go: impl Fn(u32) -> Go) -> Result<()> {
        let list = &mut *list();
        let moves = |vcpu: &&dyn Debuggee| go(vcpu.id()) != Go::Nowhere;
        let keeps = (list.of(self.vm).filter(moves)).any(|vcpu| vcpu.port().hit().is_some());
        if let Some(debugged) = list.debugged.as_ref().filter(|_| !keeps) {
            for vcpu in list.of(self.vm).filter(moves) {
                let steps = go(vcpu.id()) == Go::Step;
                let passes = self.passes == Some(vcpu.id());
                vcpu.port().release(debugged.orders(steps, passes)?);
            }
        }
        if let Some(debugged) = &mut list.debugged {
            debugged.runs = true;
        }
        Ok(())
    }

    /// Replaces the probes. vCPUs use the new probes when they continue.
    pub(crate) fn set_probes(&self, probes: Vec<Probe>) {
        if let Some(debugged) = &mut list().debugged {
            debugged.probes = probes;
        }
    }

    /// Carries out a request to a vCPU that is held. Returns whether the request succeeded.
    pub(crate) fn request(&self, vcpu: u32, request: &mut Request<'_>) -> bool {
        let begin = Instant::now();
        loop {
            let done = {
                let list = list();
                let found = list.of(self.vm).find(|it| it.id() == vcpu);
                match found {
                    Some(found) => found.request(request),
                    None => return false,
                }
            };
            match done {
                Some(done) => return done,
                None if begin.elapsed() > PATIENCE => return false,
                None => wait::pause(TRIES_AGAIN),
            }
        }
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        let list = &mut *list();
        list.debugged = None;
        list.came = true;
        (list.of(self.vm)).for_each(|vcpu| vcpu.port().detach());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arch::ProbeKind;
    use crate::debugger::{Held, Port, begin, end};
    use slat::Attention;

    /// The number of the tests' VM, which no real VM has.
    const VM: u64 = u64::MAX;

    struct Vcpu {
        id: u32,
        port: Port<()>,
    }

    impl Debuggee for Vcpu {
        fn id(&self) -> u32 {
            self.id
        }

        fn port(&self) -> &dyn Held {
            &self.port
        }

        fn request(&self, _: &mut Request<'_>) -> Option<bool> {
            Some(true)
        }
    }

    /// Two vCPUs hit data probes at the same time. Neither continues until the debugger knows of both hits.
    #[test]
    fn a_hit_that_was_not_told_holds_all() {
        let vcpus = [0, 1].map(|id| Vcpu {
            id,
            port: Port::new(Attention::new().unwrap()),
        });
        for vcpu in &vcpus {
            begin(VM, vcpu).unwrap();
        }
        let mut session = Session::attach(Some(VM)).unwrap();
        assert_eq!(session.stopped(), Some(Stopped::Asked));
        session.resume(|_| Go::On).unwrap();
        let hits = [0x1000, 0x2000].map(|at| ProbeHit::Data(ProbeKind::Write, at));
        for (vcpu, hit) in vcpus.iter().zip(hits) {
            assert!(vcpu.port.orders().is_some(), "it goes on");
            vcpu.port.stopped(hit);
        }
        assert_eq!(session.stopped(), Some(Stopped::Hit(0, hits[0])));
        session.resume(|_| Go::On).unwrap();
        assert!(vcpus.iter().all(|vcpu| vcpu.port.orders().is_none()));
        assert_eq!(session.stopped(), Some(Stopped::Hit(1, hits[1])));
        session.resume(|_| Go::On).unwrap();
        assert!(vcpus.iter().all(|vcpu| vcpu.port.orders().is_some()));
        drop(session);
        vcpus.iter().for_each(|vcpu| end(vcpu));
    }
}
