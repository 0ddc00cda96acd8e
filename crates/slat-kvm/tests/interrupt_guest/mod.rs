//! Guests that count interrupts in memory, for tests of interrupt delivery. They run in real mode and x2APIC mode, so
//! an EOI is an MSR write. Handlers do not exit to the client, unless a test requests that.
//!
//! The requests are raw, as `slat run` makes them, because `KVM_IRQ_LINE_STATUS` has no method.
#![allow(dead_code)]

use crate::common::{Memory, create};
use kvm_bindings::*;
use slat_kvm::abi::*;
use slat_kvm::ioctl::{Answer, Object};
use slat_model::Rng;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::thread::JoinHandleExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use vmm_sys_util::eventfd::EventFd;

/// The time for which a test waits for an expected event: much longer than the event takes on a busy machine.
pub const PATIENCE: Duration = Duration::from_secs(120);

/// The address of the counts: for each vector, how often its handler has run.
const COUNTS: u64 = 0x400;
/// The address of the sent numbers: for each vector, a number that the test writes before it injects the interrupt.
const SENT: u64 = 0x800;
/// The address of the seen numbers: for each vector, the number that its handler has read last.
const SEEN: u64 = 0xc00;
/// The address of the rounds: for each vCPU, the number of rounds of its main loop.
const ROUNDS: u64 = 0x1000;
/// The address of the programs of vCPUs, 0x100 bytes each.
const PROGRAMS: u64 = 0x2000;
/// The address of the handlers of interrupts, [`HANDLER`] bytes each.
const HANDLERS: u64 = 0x4000;
const HANDLER: u64 = 64;
/// The address of the stacks of vCPUs, [`STACK`] bytes each, which grow downwards.
const STACKS: u64 = 0x8000;
const STACK: u64 = 0x400;
const MEMORY: u64 = 0x1_0000;
/// The port by which a handler tells the test that it runs, before it ends its interrupt.
pub const PORT: u16 = 0x10;

/// mov ecx, msr; mov eax, low; mov edx, high; wrmsr
pub fn wrmsr(msr: u32, low: u32, high: u32) -> Vec<u8> {
    let mut code = vec![0x66, 0xb9];
    code.extend(msr.to_le_bytes());
    code.extend([0x66, 0xb8]);
    code.extend(low.to_le_bytes());
    code.extend([0x66, 0xba]);
    code.extend(high.to_le_bytes());
    code.extend([0x0f, 0x30]);
    code
}

/// Returns code that enables the APIC by software, and interrupts.
pub fn open() -> Vec<u8> {
    [wrmsr(0x80f, 0x1ff, 0), vec![0xfb]].concat()
}

/// Returns code that repeats `body`, and counts the rounds in [`ROUNDS`].
pub fn forever(body: &[u8]) -> Vec<u8> {
    // inc dword [si]
    let mut code = vec![0x66, 0xff, 0x04];
    code.extend(body);
    // jmp near, to the beginning
    let back = -(code.len() as i16 + 3);
    code.push(0xe9);
    code.extend(back.to_le_bytes());
    code
}

/// Returns code that waits for interrupts in halts.
pub fn halting() -> Vec<u8> {
    [open(), forever(&[0xf4])].concat()
}

/// Returns code that waits for interrupts in a busy loop.
pub fn busy() -> Vec<u8> {
    [open(), forever(&[0xf3, 0x90])].concat()
}

/// Returns code that repeatedly sends an IPI: `low` and `high` are the words of the ICR.
pub fn sending(low: u32, high: u32) -> Vec<u8> {
    [open(), forever(&wrmsr(0x830, low, high))].concat()
}

/// Returns code that ends an interrupt.
pub fn end() -> Vec<u8> {
    wrmsr(0x80b, 0, 0)
}

/// Returns code that writes the vector to [`PORT`].
pub fn tell(vector: u8) -> Vec<u8> {
    // mov al, vector; out PORT, al
    vec![0xb0, vector, 0xe6, PORT as u8]
}

/// Returns the code of a handler that counts its runs, and then executes `body`.
fn handler(vector: u8, body: &[u8]) -> Vec<u8> {
    let of = |array: u64| ((array + 4 * u64::from(vector)) as u16).to_le_bytes();
    // push eax, ecx, edx
    let mut code = vec![0x66, 0x50, 0x66, 0x51, 0x66, 0x52];
    // mov eax, [SENT]; mov [SEEN], eax; lock inc dword [COUNTS]
    code.extend([0x66, 0xa1]);
    code.extend(of(SENT));
    code.extend([0x66, 0xa3]);
    code.extend(of(SEEN));
    code.extend([0xf0, 0x66, 0xff, 0x06]);
    code.extend(of(COUNTS));
    code.extend(body);
    // pop edx, ecx, eax; iret
    code.extend([0x66, 0x5a, 0x66, 0x59, 0x66, 0x58, 0xcf]);
    assert!(code.len() as u64 <= HANDLER);
    code
}

/// The interrupt controllers that slat emulates for a machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Chips {
    /// slat emulates no interrupt controller: the client emulates all. Handlers write no EOI.
    None,
    Pc,
    /// A split irqchip: slat emulates the local APICs, and the client emulates the I/O APIC and the 8259 pair.
    Split,
}

fn handler_at(vector: u8) -> u64 {
    HANDLERS + HANDLER * u64::from(vector)
}

fn errno(error: slat_kvm::Error) -> i32 {
    error.errno()
}

/// Makes an ioctl whose argument is the address of a struct.
pub fn call<T>(object: &Object, request: u32, argument: &mut T) -> Result<i32, i32> {
    match object.ioctl(request, std::ptr::from_mut(argument) as u64) {
        Ok(Answer::Value(value)) => Ok(value),
        Ok(other) => panic!("{other:?}"),
        Err(error) => Err(errno(error)),
    }
}

/// The `kvm_run` of a vCPU.
pub struct RunPage(*mut kvm_run);

// SAFETY: the memory is shared, and is accessed only by volatile and atomic accesses.
unsafe impl Send for RunPage {}
// SAFETY: the memory is shared, and is accessed only by volatile and atomic accesses.
unsafe impl Sync for RunPage {}

impl RunPage {
    fn map(fd: &OwnedFd) -> Self {
        // SAFETY: the call makes a new mapping at an address of the kernel's choice.
        let start = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                slat_kvm::run_page::mmap_size(),
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED,
                fd.as_raw_fd(),
                0,
            )
        };
        assert_ne!(start, libc::MAP_FAILED);
        RunPage(start.cast())
    }

    /// Returns the reason of the last exit.
    pub fn exit_reason(&self) -> u32 {
        // SAFETY: the address is within the mapping.
        unsafe { (&raw const (*self.0).exit_reason).read_volatile() }
    }

    /// Returns the vector of a `KVM_EXIT_IOAPIC_EOI`.
    pub fn ended(&self) -> u8 {
        // SAFETY: the address is within the mapping, and all values of the byte are vectors.
        unsafe { (&raw const (*self.0).__bindgen_anon_1.eoi.vector).read_volatile() }
    }

    /// Sets whether the client asks for `KVM_EXIT_IRQ_WINDOW_OPEN`.
    pub fn request_window(&self, on: bool) {
        // SAFETY: the address is within the mapping.
        unsafe {
            (&raw mut (*self.0).request_interrupt_window).write_volatile(on.into());
        }
    }

    /// Whether the vCPU accepts a `KVM_INTERRUPT` now.
    pub fn ready(&self) -> bool {
        // SAFETY: the address is within the mapping.
        unsafe { (&raw const (*self.0).ready_for_interrupt_injection).read_volatile() != 0 }
    }

    /// Returns the port and the first byte of an exit for a port.
    pub fn port(&self) -> (u16, u8) {
        // SAFETY: the fields are within the mapping, and so are the data, at the offset that the exit names.
        unsafe {
            let io = (&raw const (*self.0).__bindgen_anon_1.io).read_volatile();
            let data = self.0.cast::<u8>().add(io.data_offset as usize);
            (io.port, data.read_volatile())
        }
    }
}

impl Drop for RunPage {
    fn drop(&mut self) {
        // SAFETY: the mapping belongs to this test.
        unsafe { libc::munmap(self.0.cast(), slat_kvm::run_page::mmap_size()) };
    }
}

/// One vCPU that does not run yet.
pub struct Vcpu {
    pub object: Object,
    pub page: RunPage,
    _fd: OwnedFd,
}

impl Vcpu {
    /// Runs until an exit. Returns its reason, or the errno.
    pub fn run(&self) -> Result<u32, i32> {
        (self.object.ioctl(KVM_RUN, 0))
            .map(|_| self.page.exit_reason())
            .map_err(errno)
    }
}

/// A machine whose vCPUs do not run yet. Each vCPU will run its own program.
pub struct Machine {
    pub vm: Object,
    _fd: OwnedFd,
    pub memory: Arc<Memory>,
    vcpus: Vec<Vcpu>,
}

impl Machine {
    /// Creates a machine with one vCPU for each program. The APIC id of a vCPU is its index. `tells`: vectors whose
    /// handlers write to [`PORT`].
    pub fn new(chips: Chips, programs: &[Vec<u8>], tells: &[u8]) -> Self {
        // No vCPU polls: a test hangs if slat forgets to notify a vCPU.
        slat_kvm::watch_signals();
        let (vm, fd) = create(&Object::system(), KVM_CREATE_VM, 0);
        match chips {
            Chips::None => {}
            Chips::Pc => assert!(vm.ioctl(KVM_CREATE_IRQCHIP, 0).is_ok()),
            Chips::Split => {
                let mut split = kvm_enable_cap {
                    cap: KVM_CAP_SPLIT_IRQCHIP,
                    ..Default::default()
                };
                split.args[0] = 24;
                assert_eq!(call(&vm, KVM_ENABLE_CAP, &mut split), Ok(0));
            }
        }
        let memory = Arc::new(Memory::new(MEMORY as usize));
        let mut region = kvm_userspace_memory_region {
            memory_size: MEMORY,
            userspace_addr: memory.start as u64,
            ..Default::default()
        };
        assert_eq!(call(&vm, KVM_SET_USER_MEMORY_REGION, &mut region), Ok(0));
        for vector in 0..=255u8 {
            // The segment contains the whole address, so the offset is always 0.
            let pointer = (handler_at(vector) as u32 >> 4) << 16;
            memory.write(4 * u64::from(vector), &pointer.to_le_bytes());
        }
        let vcpus = (programs.iter().enumerate())
            .map(|(id, program)| Self::vcpu(&vm, chips, &memory, id as u64, program))
            .collect();
        let machine = Machine {
            vm,
            _fd: fd,
            memory,
            vcpus,
        };
        for vector in 0..=255 {
            let mut body = Vec::new();
            // The handler of #GP exits, which ends the test. Without the exit, the handler would return to the
            // faulting instruction for ever.
            if tells.contains(&vector) || vector == 13 {
                body.extend(tell(vector));
            }
            if chips != Chips::None {
                body.extend(end());
            }
            machine.set_handler(vector, &body);
        }
        machine
    }

    /// Replaces the code that the handler of `vector` executes after it has counted.
    pub fn set_handler(&self, vector: u8, body: &[u8]) {
        (self.memory).write(handler_at(vector), &handler(vector, body));
    }

    fn vcpu(vm: &Object, chips: Chips, memory: &Memory, id: u64, program: &[u8]) -> Vcpu {
        assert!(program.len() <= 0x100);
        memory.write(PROGRAMS + 0x100 * id, program);
        let (object, fd) = create(vm, KVM_CREATE_VCPU, id);
        // Without x2APIC in its CPUID, a guest may not switch to that mode.
        let mut cpuid = CpuId::new(KVM_MAX_CPUID_ENTRIES).expect("memory");
        // SAFETY: the calls store at most as many entries as the list has space for.
        let list = unsafe { cpuid.as_mut_fam_struct() };
        assert_eq!(
            call(&Object::system(), KVM_GET_SUPPORTED_CPUID, list),
            Ok(0)
        );
        assert_eq!(call(&object, KVM_SET_CPUID2, list), Ok(0));
        let mut sregs = kvm_sregs::default();
        assert_eq!(call(&object, KVM_GET_SREGS, &mut sregs), Ok(0));
        for segment in [&mut sregs.cs, &mut sregs.ds, &mut sregs.es, &mut sregs.ss] {
            (segment.base, segment.selector) = (0, 0);
        }
        if chips != Chips::None {
            // Puts the APIC into x2APIC mode.
            sregs.apic_base |= 0xc00;
        }
        assert_eq!(call(&object, KVM_SET_SREGS, &mut sregs), Ok(0));
        let mut regs = kvm_regs {
            rip: PROGRAMS + 0x100 * id,
            rsp: STACKS + STACK * (id + 1),
            rsi: ROUNDS + 4 * id,
            rflags: 2,
            ..Default::default()
        };
        assert_eq!(call(&object, KVM_SET_REGS, &mut regs), Ok(0));
        let mut state = kvm_mp_state {
            mp_state: KVM_MP_STATE_RUNNABLE,
        };
        assert_eq!(call(&object, KVM_SET_MP_STATE, &mut state), Ok(0));
        Vcpu {
            object,
            page: RunPage::map(&fd),
            _fd: fd,
        }
    }

    /// Removes and returns a vCPU that the test runs itself. The indices of later vCPUs decrease by one.
    pub fn take(&mut self, place: usize) -> Vcpu {
        self.vcpus.remove(place)
    }

    /// Starts all vCPUs. `exit` handles their exits; its first argument is the vCPU's index.
    pub fn start(self, exit: impl Fn(usize, &Vcpu, u32) + Send + Sync + 'static) -> RunningMachine {
        let stop = Arc::new(AtomicBool::new(false));
        let exit = Arc::new(exit);
        let threads = (self.vcpus.into_iter().enumerate())
            .map(|(place, vcpu)| {
                let (stop, exit) = (stop.clone(), exit.clone());
                std::thread::spawn(move || {
                    while !stop.load(Ordering::SeqCst) {
                        match vcpu.run() {
                            Ok(reason) => exit(place, &vcpu, reason),
                            Err(libc::EINTR | libc::EAGAIN) => {}
                            Err(error) => panic!("vCPU {place}: {error}"),
                        }
                    }
                })
            })
            .collect();
        RunningMachine {
            vm: self.vm,
            memory: self.memory,
            _fd: self._fd,
            stop,
            threads,
        }
    }
}

/// Handler for vCPUs that must not exit: panics.
pub fn no_exit(place: usize, _: &Vcpu, reason: u32) {
    panic!("vCPU {place} exits for {reason}");
}

/// A machine whose vCPUs run. Dropping this stops them.
pub struct RunningMachine {
    pub vm: Object,
    pub memory: Arc<Memory>,
    _fd: OwnedFd,
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

impl RunningMachine {
    fn word(&self, at: u64) -> &AtomicU32 {
        assert!(at + 4 <= MEMORY && at.is_multiple_of(4));
        // SAFETY: the address is within the mapping, and the guest's accesses are atomic, too.
        unsafe { AtomicU32::from_ptr(self.memory.start.add(at as usize).cast()) }
    }

    /// Returns how often the handler of `vector` has run.
    pub fn count(&self, vector: u8) -> u32 {
        self.word(COUNTS + 4 * u64::from(vector))
            .load(Ordering::SeqCst)
    }

    /// Returns the number of rounds of a vCPU's main loop.
    pub fn rounds(&self, vcpu: u64) -> u32 {
        self.word(ROUNDS + 4 * vcpu).load(Ordering::SeqCst)
    }

    /// Stores a number for the handler of `vector`. Call before injecting the interrupt.
    pub fn send(&self, vector: u8, number: u32) {
        self.word(SENT + 4 * u64::from(vector))
            .store(number, Ordering::SeqCst);
    }

    /// Returns the number that the handler of `vector` saw last.
    pub fn seen(&self, vector: u8) -> u32 {
        self.word(SEEN + 4 * u64::from(vector))
            .load(Ordering::SeqCst)
    }

    /// Sets a line. Returns the status of `KVM_IRQ_LINE_STATUS`.
    pub fn line(&self, gsi: u32, level: bool) -> i32 {
        let mut line = kvm_irq_level {
            level: level.into(),
            ..Default::default()
        };
        line.__bindgen_anon_1.irq = gsi;
        assert_eq!(call(&self.vm, KVM_IRQ_LINE_STATUS, &mut line), Ok(0));
        // SAFETY: the call has written this part of the union.
        unsafe { line.__bindgen_anon_1.status }
    }

    /// Sends a message in fixed mode by `KVM_SIGNAL_MSI`.
    pub fn message(&self, apic: u32, vector: u8) -> i32 {
        let mut message = kvm_msi {
            address_lo: 0xfee0_0000 | apic << 12,
            data: vector.into(),
            ..Default::default()
        };
        call(&self.vm, KVM_SIGNAL_MSI, &mut message).expect("a message")
    }

    /// Replaces all routes.
    pub fn route(&self, entries: &[kvm_irq_routing_entry]) {
        route(&self.vm, entries);
    }

    /// Calls `KVM_IRQFD`.
    pub fn irqfd(&self, event: &EventFd, gsi: u32, flags: u32, resample: Option<&EventFd>) {
        let mut irqfd = kvm_irqfd {
            fd: event.as_raw_fd() as u32,
            gsi,
            flags,
            resamplefd: resample.map_or(0, |fd| fd.as_raw_fd() as u32),
            ..Default::default()
        };
        assert_eq!(call(&self.vm, KVM_IRQFD, &mut irqfd), Ok(0));
    }

    /// Writes redirection entries of the I/O APIC: pairs of pin and entry.
    pub fn set_pins(&self, pins: &[(usize, u64)]) {
        set_pins(&self.vm, pins);
    }

    /// Returns whether the line at a pin of the I/O APIC is high.
    pub fn is_high(&self, pin: usize) -> bool {
        // SAFETY: `io_apic` has read the state of the I/O APIC, so this part of the union is filled in.
        let lines = unsafe { io_apic(&self.vm).chip.ioapic.irr };
        lines >> pin & 1 != 0
    }

    /// Waits until `condition` holds.
    pub fn wait(&self, what: &str, condition: impl Fn() -> bool) {
        wait(what, condition);
    }

    /// Waits until no handler has run for a while.
    pub fn settle(&self) {
        let all = || {
            (0..=255)
                .map(|vector| self.count(vector))
                .collect::<Vec<_>>()
        };
        let mut before = all();
        loop {
            std::thread::sleep(Duration::from_millis(300));
            let now = all();
            if now == before {
                return;
            }
            before = now;
        }
    }
}

impl Drop for RunningMachine {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::SeqCst);
        for thread in self.threads.drain(..) {
            while !thread.is_finished() {
                slat_kvm::interrupt_thread(thread.as_pthread_t() as usize);
                std::thread::sleep(Duration::from_micros(100));
            }
            let result = thread.join();
            if !std::thread::panicking() {
                result.expect("a vCPU's thread");
            }
        }
    }
}

/// Waits until `condition` holds.
pub fn wait(what: &str, condition: impl Fn() -> bool) {
    let begin = Instant::now();
    while !condition() {
        assert!(begin.elapsed() < PATIENCE, "{what}");
        std::thread::sleep(Duration::from_micros(100));
    }
}

fn io_apic(vm: &Object) -> kvm_irqchip {
    let mut chip = kvm_irqchip {
        chip_id: KVM_IRQCHIP_IOAPIC,
        ..Default::default()
    };
    assert_eq!(call(vm, KVM_GET_IRQCHIP, &mut chip), Ok(0));
    chip
}

/// Writes redirection entries of the I/O APIC of a VM: pairs of pin and entry.
pub fn set_pins(vm: &Object, pins: &[(usize, u64)]) {
    let mut chip = io_apic(vm);
    for &(pin, entry) in pins {
        // SAFETY: `io_apic` has read the state of the I/O APIC, so this part of the union is filled in.
        unsafe { chip.chip.ioapic.redirtbl[pin].bits = entry };
    }
    assert_eq!(call(vm, KVM_SET_IRQCHIP, &mut chip), Ok(0));
}

/// Replaces all routes of a VM.
pub fn route(vm: &Object, entries: &[kvm_irq_routing_entry]) {
    let mut table = KvmIrqRouting::from_entries(entries).expect("memory");
    // SAFETY: the table is only read.
    let at = unsafe { std::ptr::from_mut(table.as_mut_fam_struct()) } as u64;
    let answer = vm.ioctl(KVM_SET_GSI_ROUTING, at);
    assert!(matches!(answer, Ok(Answer::Value(0))), "{answer:?}");
}

/// Returns a route from `gsi` to a pin of the I/O APIC.
pub fn to_pin(gsi: u32, pin: u32) -> kvm_irq_routing_entry {
    let mut entry = kvm_irq_routing_entry {
        gsi,
        type_: KVM_IRQ_ROUTING_IRQCHIP,
        ..Default::default()
    };
    entry.u.irqchip = kvm_irq_routing_irqchip {
        irqchip: KVM_IRQCHIP_IOAPIC,
        pin,
    };
    entry
}

/// Returns a route from `gsi` to a message.
pub fn to_message(gsi: u32, apic: u32, data: u32) -> kvm_irq_routing_entry {
    let mut entry = kvm_irq_routing_entry {
        gsi,
        type_: KVM_IRQ_ROUTING_MSI,
        ..Default::default()
    };
    entry.u.msi.address_lo = 0xfee0_0000 | apic << 12;
    entry.u.msi.data = data;
    entry
}

/// Waits for a random time: often not at all, sometimes longer than an interrupt takes.
pub fn pause(rng: &mut Rng) {
    match rng.below(8) {
        0..4 => {}
        4..7 => (0..rng.below(2000)).for_each(|_| std::hint::spin_loop()),
        _ => std::thread::sleep(Duration::from_micros(rng.below(300))),
    }
}

/// Counts the open descriptors of this process.
pub fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

/// Counts the threads of this process.
pub fn threads() -> usize {
    std::fs::read_dir("/proc/self/task").unwrap().count()
}
