//! A socket that answers with text. `slat stat` reads the counters of this process's VMs from the socket, `slat map`
//! reads how their memory is mapped, and `slat gdb` debugs a VM through it.
//!
//! | file | idea |
//! |---|---|
//! | `socket` | a directory that only the user can enter, and the socket in it |
//! | `writer` | writes an answer to a socket, in parts |
//! | `text` | questions, and the common form of all answers |
//! | `stat` | the answer with all counters |
//! | `map` | the answer with the memslots and what is mapped |
//! | `debug` | a conversation with a debugger, by a thread of its own |
//!
//! Publishing costs a vCPU nothing. The counters stay in the vCPUs' own memory, and one thread, which sleeps until a
//! reader connects, reads them. The thread is started with the process's first VM. Most clients install their seccomp
//! filters later; if a client installs one earlier, [`crate::filters`] starts the thread before that. The thread has a
//! descriptor table of its own. So the client does not see the socket's descriptor, and a forked child does not inherit
//! it. The kernel closes the socket when the process ends, even if the process is killed. If the thread or its socket
//! cannot be made, the process is not published, and everything else works.

mod debug;
mod map;
mod socket;
mod stat;
mod text;
mod writer;

use crate::background::{self, Background};
use crate::engine::EngineVm;
use crate::errno::Result;
use crate::heap;
use crate::process::PerProcess;
use crate::vcpu_common::VcpuCommon;
use slat::Shared;
use socket::Listener;
use std::ffi::{CStr, OsString};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};

// The process and the command `slat` both use these constants. They are public only for that command.
#[doc(hidden)]
pub use debug::{DEBUG, MOST_BYTES};
#[doc(hidden)]
pub use map::{MAP, MOST_CELLS};
#[doc(hidden)]
pub use socket::directories;
#[doc(hidden)]
pub use stat::STAT;
#[doc(hidden)]
pub use writer::VERSION;

/// A live VM and its vCPUs.
struct Listed {
    /// The VM's number: how many VMs the process had created before this VM.
    number: u64,
    engine: Weak<EngineVm>,
    vcpus: Vec<Shared<VcpuCommon>>,
}

/// The live VMs of a process, in the order of their numbers.
#[derive(Default)]
struct Registry {
    created: u64,
    vms: Vec<Listed>,
}

static VMS: PerProcess<Mutex<Registry>> = PerProcess::new();

/// Whether this program publishes its VMs.
static ENABLED: AtomicBool = AtomicBool::new(false);

fn registry() -> MutexGuard<'static, Registry> {
    VMS.get().lock().unwrap_or_else(PoisonError::into_inner)
}

impl Registry {
    fn index(&self, number: u64) -> Option<usize> {
        self.vms.binary_search_by_key(&number, |vm| vm.number).ok()
    }
}

/// Makes this program, and its forked children, answer `slat stat` from their first VM on.
pub fn enable() {
    ENABLED.store(true, Ordering::Relaxed);
}

/// Lists a new VM, and starts the thread if the VM is the process's first. Returns the VM's number.
///
/// # Errors
/// `ENOMEM`.
pub(crate) fn vm_begins(engine: &Arc<EngineVm>) -> Result<u64> {
    let number = {
        let mut registry = registry();
        heap::reserve(&mut registry.vms, 1)?;
        let number = registry.created;
        registry.created += 1;
        registry.vms.push(Listed {
            number,
            engine: Arc::downgrade(engine),
            vcpus: Vec::new(),
        });
        number
    };
    start();
    Ok(number)
}

/// Removes the VM `number` from the list.
pub(crate) fn vm_ends(number: u64) {
    let mut registry = registry();
    let gone = registry.index(number).map(|at| registry.vms.remove(at));
    drop(registry);
    // `gone` is dropped only after the list is unlocked. If it is the last reference to a vCPU, dropping it frees the
    // vCPU, which acquires other locks.
    drop(gone);
}

/// Lists a new vCPU of the VM `number`.
///
/// # Errors
/// `ENOMEM`.
pub(crate) fn vcpu_begins(number: u64, vcpu: Shared<VcpuCommon>) -> Result<()> {
    let mut registry = registry();
    if let Some(at) = registry.index(number) {
        heap::reserve(&mut registry.vms[at].vcpus, 1)?;
        registry.vms[at].vcpus.push(vcpu);
    }
    Ok(())
}

/// Removes a vCPU of the VM `number` from the list.
pub(crate) fn vcpu_ends(number: u64, vcpu: &VcpuCommon) {
    let mut registry = registry();
    let gone = registry.index(number).and_then(|at| {
        let vcpus = &mut registry.vms[at].vcpus;
        let place = vcpus.iter().position(|other| std::ptr::eq(&**other, vcpu));
        place.map(|place| vcpus.remove(place))
    });
    drop(registry);
    drop(gone);
}

/// Returns the first live VM whose number is at least `from`, and its number. The list is unlocked when this function
/// returns, so a slow reader delays no client.
fn vm_from(from: u64) -> Option<(u64, Arc<EngineVm>)> {
    let registry = registry();
    let first = registry.vms.partition_point(|vm| vm.number < from);
    let mut rest = registry.vms[first..].iter();
    rest.find_map(|vm| Some((vm.number, vm.engine.upgrade()?)))
}

/// Returns the vCPU at `index` in the list of the VM `number`.
fn vcpu_at(number: u64, index: usize) -> Option<Shared<VcpuCommon>> {
    let registry = registry();
    let vm = &registry.vms[registry.index(number)?];
    vm.vcpus.get(index).cloned()
}

#[derive(Default)]
struct Publisher {
    /// The value of `XDG_RUNTIME_DIR` when the process created its first VM. The client may change its environment
    /// later.
    runtime: OnceLock<Option<OsString>>,
    /// The socket's path, which is set when the socket is made.
    path: OnceLock<socket::Path>,
}

static PUBLISHER: PerProcess<Publisher> = PerProcess::new();

/// Starts the thread if the program publishes its VMs. Call before the client installs a seccomp filter.
pub(crate) fn start() {
    if ENABLED.load(Ordering::Relaxed) {
        PUBLISHER.get_or_start(|publisher| {
            let runtime = || std::env::var_os("XDG_RUNTIME_DIR");
            publisher.runtime.get_or_init(runtime);
            background::start(publisher);
        });
    }
}

/// Removes the process's socket from the directory. Call at the end of the process. The socket of a killed process is
/// removed by `slat stat`, or by the next process that makes a socket in the same directory.
#[doc(hidden)]
pub fn end() {
    if let Some(path) = PUBLISHER.peek().and_then(|publisher| publisher.path.get()) {
        path.remove();
    }
}

impl Background for Publisher {
    const NAME: &CStr = c"slat-stat";
    const WITHOUT: &str = "`slat stat`, `slat map` and `slat gdb` will not see this process";
    const STACK: usize = 128 << 10;

    fn run(&'static self) {
        let runtime = self.runtime.get().and_then(Option::as_deref);
        let Some(listener) = Listener::open(runtime) else {
            return;
        };
        // `set` does not fail: the thread is started only once, so the path was not set before.
        let _ = self.path.set(listener.path().clone());
        while let Some(asked) = listener.accept() {
            text::answer(asked);
        }
    }
}
