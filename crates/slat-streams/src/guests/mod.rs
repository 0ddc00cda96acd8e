//! Guests of random code, to test the software CPU with anything that a guest may contain.
//!
//! The fuzzer's bytes choose a mode, page tables, descriptors, registers and code, for one or two vCPUs on one memory.
//! The bytes also choose the actions of the main thread while the vCPUs run: it reads dirty logs, injects interrupts,
//! invalidates memory, deletes and creates slots. Each KVM_RUN is kicked when its slice of time is over, and must then
//! end ([`crate::watch`]).
//!
//! There are three kinds of guests. The usual guest runs like the guest of any program. A compiled guest runs as
//! compiled code from its first instruction on. A compared guest runs twice, interpreted and compiled, with one vCPU
//! and without actions of the main thread. Its two runs must have the same results (`compare`).
//!
//! At the end, this module checks that nothing was written outside the slots or to the read-only slot; that every
//! changed page of a logged slot is in the log; and that the audit of the VM finds no error.

mod code;
mod compare;
mod layout;
mod state;
mod tables;

use crate::leaks::Before;
use crate::memory::{Guarded, PAGE};
use crate::watch::{self, Kick, Lane, Slice, Step, Stream};
use code::End;
pub use compare::{COMPARED, Compared};
use kvm_bindings::*;
use layout::*;
use slat_host::mappings::{self, HugePages};
use slat_kvm::{Jit, Tier};
use slat_kvm::{Kvm, VcpuExit, VcpuFd, VmFd};
use slat_model::Rng;
use std::collections::BTreeSet;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;
use tables::Mode;

/// The maximum number of exits of a vCPU.
const EXITS: usize = 48;
/// The maximum number of kicks of a vCPU.
const KICKS: usize = 2;
/// The value of the choice of [`disturb`] that makes memory inaccessible.
const HIDE: u64 = 2;
/// The size of a huge page in bytes.
const HUGE_PAGE: usize = 2 << 20;

/// Returns the factor by which a slice of time is longer if it includes compilation.
fn compiling(tier: Tier) -> u32 {
    match tier {
        Tier::Baseline => 2,
        Tier::Full => 16,
    }
}

/// The CPU time that the compilation of a code region may take. A kick does not interrupt a compilation.
const COMPILES: Duration = Duration::from_secs(2);

/// The way in which a guest's code is executed. Real-mode code is never compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    /// As in every program: only hot code is compiled, which is rare in these short runs.
    Usual,
    /// All code is compiled before it runs.
    Compiled,
    /// The guest runs twice, interpreted and compiled, and the results are compared.
    Compared,
}

impl Way {
    /// Returns the way that the first byte of a stream chooses. The lower three bits of this byte choose the mode, and
    /// the next two bits choose the way.
    fn of(first: u64, mode: Mode) -> Self {
        match first >> 3 & 3 {
            _ if mode == Mode::Real => Way::Usual,
            1 => Way::Compiled,
            2 => Way::Compared,
            _ => Way::Usual,
        }
    }
}

/// Returns a first byte of a stream that chooses a compared guest.
pub fn compared(random: u8) -> u8 {
    // The mode is 64-bit mode in most cases, otherwise a 32-bit mode.
    let mode = [0, 6, 0, 6, 2 + random % 4][usize::from(random >> 5) % 5];
    random & 0xc0 | 2 << 3 | mode
}

/// Runs the guest that `bytes` describe (see the module's documentation).
pub fn guests(bytes: &[u8]) {
    watch::stream("guests", bytes, 3, |stream| {
        let before = Before::a_stream();
        let mut rng = Rng::from_bytes(bytes);
        let first = rng.below(256);
        let mode = Mode::ALL[first as usize % Mode::ALL.len()];
        match Way::of(first, mode) {
            Way::Usual => Guest::new(&mut rng, mode, Jit::On, End::Repeats).run(stream),
            Way::Compiled => {
                let tier = rng.pick(&[Tier::Baseline, Tier::Full]);
                Guest::new(&mut rng, mode, Jit::AtOnce(tier), End::Repeats).run(stream);
            }
            Way::Compared => compare::compare(stream.lane(0), &rng, mode),
        }
        before.check();
    });
}

/// A slot and its memory.
struct Slot {
    place: Place,
    flags: u32,
    memory: Guarded,
    /// The offset of the slot's memory in `memory`.
    offset: usize,
    /// The slot's contents before the guest runs. Empty if the contents are not checked.
    initial: Vec<u8>,
    /// The pages that the slot's dirty log has reported so far.
    dirty: BTreeSet<usize>,
}

impl Slot {
    fn new(place: Place, flags: u32) -> Self {
        let memory = Guarded::new(place.len());
        Slot {
            place,
            flags,
            memory,
            offset: 0,
            initial: Vec::new(),
            dirty: BTreeSet::new(),
        }
    }

    /// Makes a slot of one huge page, if the host provides one.
    fn huge() -> Self {
        let memory = Guarded::reserve(2 * HUGE_PAGE);
        let offset = memory.start().next_multiple_of(HUGE_PAGE) - memory.start();
        memory.open(offset, HUGE_PAGE);
        let start = memory.start() + offset;
        mappings::changed(start..start + HUGE_PAGE);
        // SAFETY: the call only gives advice about this slot's own memory.
        unsafe { libc::madvise(start as *mut _, HUGE_PAGE, libc::MADV_HUGEPAGE) };
        mappings::advised(start..start + HUGE_PAGE, HugePages::Wanted);
        Slot {
            place: HUGE,
            flags: 0,
            memory,
            offset,
            initial: Vec::new(),
            dirty: BTreeSet::new(),
        }
    }

    fn region(&self) -> kvm_userspace_memory_region {
        kvm_userspace_memory_region {
            slot: self.place.slot,
            flags: self.flags,
            guest_phys_addr: self.place.gpa,
            memory_size: self.place.len() as u64,
            userspace_addr: (self.memory.start() + self.offset) as u64,
        }
    }

    fn is_logged(&self) -> bool {
        self.flags & KVM_MEM_LOG_DIRTY_PAGES != 0
    }

    fn now(&self) -> Vec<u8> {
        self.memory.read(self.offset, self.place.len())
    }

    /// Reads the slot's dirty log. Returns the log's bitmap.
    fn harvest(&mut self, vm: &VmFd) -> Vec<u64> {
        if !self.is_logged() {
            return Vec::new();
        }
        let log = vm
            .get_dirty_log(self.place.slot, self.place.len())
            .expect("the slot is logged");
        let pages = (0..self.place.pages).filter(|page| log[page / 64] >> (page % 64) & 1 != 0);
        self.dirty.extend(pages);
        log
    }

    /// Reads the slot's dirty log, and clears the reported pages in it.
    fn clear(&mut self, vm: &VmFd) {
        let named = self.harvest(vm);
        if !named.is_empty() {
            let pages = self.place.pages as u32;
            vm.clear_dirty_log(self.place.slot, 0, pages, &named)
                .expect("the whole of a slot");
        }
    }

    /// Panics if the guest has written to memory to which it must not write, or if the log lacks a page that was
    /// written.
    fn check(&self) {
        self.memory.check();
        if self.initial.is_empty() {
            return;
        }
        let now = self.now();
        for page in 0..self.place.pages {
            let bytes = page * PAGE..(page + 1) * PAGE;
            if now[bytes.clone()] == self.initial[bytes] {
                continue;
            }
            assert_eq!(
                self.flags & KVM_MEM_READONLY,
                0,
                "page {page} of the read-only slot was written"
            );
            let known = !self.is_logged() || self.dirty.contains(&page);
            assert!(
                known,
                "page {page} of {:?} was written, but is not in its log",
                self.place
            );
        }
    }
}

/// The decisions about one vCPU: how it continues after its exits, and how its KVM_RUNs are ended.
struct Conduct {
    rng: Rng,
    slice: Duration,
    kick: Kick,
    /// The additional CPU time that each KVM_RUN may take after its kick (see [`Slice::extra`]).
    extra: Duration,
    /// Whether the slots' memory is sometimes inaccessible (see [`hide`]).
    may_fault: bool,
}

struct Guest {
    vm: VmFd,
    mode: Mode,
    slots: Vec<Slot>,
    /// The slot of system management mode. The main thread neither deletes this slot nor changes its memory, because an
    /// SMI without this slot would end the VM.
    smram: Slot,
    vcpus: Vec<(VcpuFd, Conduct)>,
    /// The numbers that choose the actions of the main thread while the vCPUs run (see [`disturb`]).
    beside: Vec<u64>,
    irqchip: bool,
}

fn set_slot(vm: &VmFd, region: kvm_userspace_memory_region) {
    // SAFETY: the slots' memory belongs to the guest. This process does not rely on its contents.
    unsafe { vm.set_user_memory_region(region) }.expect("a slot of the layout");
}

impl Guest {
    /// Makes a guest. If its code [counts](End::Counts), the guest has one vCPU, and does the same in each run.
    fn new(rng: &mut Rng, mode: Mode, jit: Jit, end: End) -> Self {
        let mut choices = rng.below(256);
        if end == End::Counts {
            choices &= !(1 | 1 << 3);
        }
        let chosen = |bit: u64| choices >> bit & 1 != 0;
        let kvm = Kvm::new().expect("no policy is set").with_jit(jit);
        let vm = kvm.create_vm().expect("a VM");
        let irqchip = chosen(0);
        if irqchip {
            vm.create_irq_chip().expect("before the vCPUs");
        }
        if chosen(1) {
            let mut manual = kvm_enable_cap {
                cap: KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2,
                ..Default::default()
            };
            manual.args[0] = 1;
            vm.enable_cap(&manual).expect("a capability");
        }
        let logged = |logs: bool| if logs { KVM_MEM_LOG_DIRTY_PAGES } else { 0 };
        let mut slots = vec![
            Slot::new(MAIN, logged(chosen(2))),
            Slot::new(ROM, KVM_MEM_READONLY),
            Slot::new(LOGGED, logged(true)),
            Slot::new(FAR, logged(true)),
        ];
        let main = &slots[0].memory;
        for slot in &slots[1..] {
            let word = |n: u64| (slot.place.gpa + n).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            let words = (0..slot.place.len() as u64 / 8).flat_map(|n| word(n).to_le_bytes());
            slot.memory.write(0, &words.collect::<Vec<u8>>());
        }
        tables::page_tables(rng, mode, main);
        tables::descriptors(rng, main);
        tables::gates(rng, mode, main, end);
        let count = 1 + u64::from(chosen(3));
        for index in 0..count {
            main.write((CODE + index * 0x1000) as usize, &code::code(rng, end));
        }
        // Writes two more pieces of code: one in read-only memory, which the guest cannot change, and one across a page
        // boundary.
        slots[1].memory.write(0, &code::code(rng, end));
        let last = code::code(rng, end);
        let last = &last[..last.len().min(8)];
        slots[2].memory.write(PAGE - last.len(), last);
        for slot in &mut slots {
            slot.initial = slot.now();
        }
        if chosen(4) {
            slots.push(Slot::huge());
        }
        let mut smram = Slot::new(SMRAM, logged(true));
        // inc word cs:[0]; rsm
        let handler = [0x2e, 0xff, 0x06, 0, 0, 0x0f, 0xaa];
        smram.memory.write(SMI_HANDLER, &handler);
        smram.initial = smram.now();
        for slot in slots.iter().chain([&smram]) {
            set_slot(&vm, slot.region());
        }
        let vcpus = (0..count)
            .map(|index| Self::vcpu(rng, &kvm, &vm, mode, index, jit, end))
            .collect();
        let beside = (0..rng.below(8)).map(|_| rng.below(256)).collect();
        Guest {
            vm,
            mode,
            slots,
            smram,
            vcpus,
            beside,
            irqchip,
        }
    }

    fn vcpu(
        rng: &mut Rng,
        kvm: &Kvm,
        vm: &VmFd,
        mode: Mode,
        index: u64,
        jit: Jit,
        end: End,
    ) -> (VcpuFd, Conduct) {
        let vcpu = vm.create_vcpu(index).expect("a vCPU");
        let cpuid = kvm
            .get_supported_cpuid(KVM_MAX_CPUID_ENTRIES)
            .expect("the table");
        vcpu.set_cpuid2(&cpuid).expect("before it runs");
        // If there is an interrupt controller, the second vCPU would otherwise wait until the first vCPU starts it.
        vcpu.set_mp_state(kvm_mp_state {
            mp_state: KVM_MP_STATE_RUNNABLE,
        })
        .expect("runnable");
        state::set(rng, mode, index, &vcpu, end == End::Repeats);
        let slice = Duration::from_micros(rng.pick(&[500, 100, 1000, 2000]));
        let (slice, extra) = match jit {
            Jit::AtOnce(tier) => (slice * compiling(tier), COMPILES),
            _ => (slice, Duration::ZERO),
        };
        let kick = rng.pick(&[Kick::Signal, Kick::Exit, Kick::ExitAndSignal]);
        let seed = rng.word();
        (
            vcpu,
            Conduct {
                rng: Rng::new(seed),
                slice,
                kick,
                extra,
                may_fault: false,
            },
        )
    }

    fn run(mut self, stream: &Stream) {
        let (vm, mode) = (&self.vm, self.mode);
        let may_fault = self.beside.iter().any(|choice| choice & 7 == HIDE);
        let running = AtomicUsize::new(self.vcpus.len());
        std::thread::scope(|scope| {
            for (index, (vcpu, conduct)) in self.vcpus.iter_mut().enumerate() {
                let (lane, running) = (stream.lane(index), &running);
                conduct.may_fault = may_fault;
                scope.spawn(move || {
                    lane.enter();
                    run(lane, mode, index as u64, vcpu, conduct);
                    lane.leave();
                    running.fetch_sub(1, Ordering::Release);
                });
            }
            let lane = stream.lane(2);
            lane.enter();
            for choice in &self.beside {
                if running.load(Ordering::Acquire) == 0 {
                    break;
                }
                std::thread::sleep(Duration::from_micros(100));
                let step = Step {
                    what: "beside",
                    detail: [*choice, 0],
                };
                lane.call(step, || disturb(vm, &mut self.slots, self.irqchip, *choice));
            }
            lane.leave();
        });
        self.check();
    }

    /// Checks the VM and its memory after the vCPUs have run.
    fn check(&mut self) {
        for slot in self.slots.iter_mut().chain([&mut self.smram]) {
            slot.harvest(&self.vm);
        }
        self.vm.engine().audit().expect("a quiet VM");
        for slot in self.slots.iter().chain([&self.smram]) {
            slot.check();
        }
    }
}

/// Makes a slot's memory inaccessible for a moment. If `told`, tells slat when the memory is accessible again.
fn hide(slot: &Slot, told: bool) {
    let start = slot.memory.start() + slot.offset;
    let range = start..start + slot.place.len();
    // SAFETY: the memory belongs to the guest, and this process does not access it during the call.
    let protect = |rights| unsafe { libc::mprotect(start as *mut _, range.len(), rights) };
    assert_eq!(protect(libc::PROT_NONE), 0);
    std::thread::sleep(Duration::from_micros(200));
    let show = || assert_eq!(protect(libc::PROT_READ | libc::PROT_WRITE), 0);
    match told {
        true => slat_kvm::notify::around(range.clone(), || {
            show();
            mappings::protected(range.clone());
        }),
        false => show(),
    }
}

/// Deletes a slot for a moment. During that time, the vCPUs cannot write to the slot's memory.
fn vanish(vm: &VmFd, slot: &mut Slot) {
    let region = slot.region();
    let gone = kvm_userspace_memory_region {
        memory_size: 0,
        ..region
    };
    set_slot(vm, gone);
    // The log was deleted together with the slot, so all pages count as reported.
    slot.dirty.extend(0..slot.place.pages);
    let looked_at = slot.place.len().min(16 * PAGE);
    let before = slot.memory.read(slot.offset, looked_at);
    std::thread::sleep(Duration::from_micros(300));
    let after = slot.memory.read(slot.offset, looked_at);
    assert!(
        before == after,
        "{:?} was written when it was no slot",
        slot.place
    );
    set_slot(vm, region);
}

/// Does an action while the vCPUs run. The action does not change the contents of their memory.
fn disturb(vm: &VmFd, slots: &mut [Slot], irqchip: bool, choice: u64) {
    let index = (choice >> 3) as usize % slots.len();
    let slot = &mut slots[index];
    match choice & 7 {
        0 | 1 => drop(slot.harvest(vm)),
        HIDE => hide(slot, choice >> 6 & 1 != 0),
        3 if irqchip => {
            let data = (choice >> 3) as u32 + 0x20;
            let msi = kvm_msi {
                address_lo: 0xfee0_0000,
                data,
                ..Default::default()
            };
            vm.signal_msi(msi).expect("a message to a local APIC");
        }
        4 => {
            let start = slot.memory.start() + slot.offset;
            let range = start..start + slot.place.len();
            slat_kvm::notify::around(range.clone(), || mappings::changed(range.clone()));
        }
        5 => slot.clear(vm),
        6 | 7 if ![MAIN.slot, LOGGED.slot].contains(&slot.place.slot) => vanish(vm, slot),
        _ => {}
    }
}

/// Runs one vCPU until it has reached its limits of exits and kicks.
fn run(lane: &Lane, mode: Mode, index: u64, vcpu: &mut VcpuFd, conduct: &mut Conduct) {
    let mut kicks = 0;
    for _ in 0..EXITS {
        let page = std::ptr::from_mut(vcpu.get_kvm_run()) as usize;
        let slice = Slice {
            page,
            length: conduct.slice,
            kick: conduct.kick,
            extra: conduct.extra,
        };
        let rng = &mut conduct.rng;
        let step = Step {
            what: "KVM_RUN",
            detail: [index, 0],
        };
        let after = lane.run(step, slice, || answer(rng, vcpu.run(), conduct.may_fault));
        match after {
            After::Go => {}
            After::Kicked if kicks + 1 < KICKS => kicks += 1,
            After::Kicked => return,
            After::Broken => {
                let step = Step {
                    what: "registers",
                    detail: [index, 0],
                };
                lane.call(step, || state::set(rng, mode, index, vcpu, true));
            }
        }
        if rng.one_in(8) {
            let step = Step {
                what: "event",
                detail: [index, 0],
            };
            lane.call(step, || event(rng, vcpu));
        }
    }
}

#[derive(Debug)]
enum After {
    Go,
    Kicked,
    /// The guest has shut down, or cannot continue for another reason.
    Broken,
}

/// Handles a vCPU's exit, like a device. Returns how the vCPU continues.
fn answer(rng: &mut Rng, exit: slat_kvm::Result<VcpuExit<'_>>, may_fault: bool) -> After {
    match exit {
        Ok(VcpuExit::IoIn(_, data) | VcpuExit::MmioRead(_, data)) => {
            data.fill_with(|| rng.below(256) as u8);
            After::Go
        }
        Ok(VcpuExit::Shutdown | VcpuExit::InternalError) => After::Broken,
        Ok(VcpuExit::Unsupported(reason)) => panic!("exit reason {reason}"),
        Ok(_) => After::Go,
        Err(error) if error.errno() == libc::EINTR => After::Kicked,
        Err(error) if error.errno() == libc::EFAULT && may_fault => After::Go,
        Err(error) => panic!("KVM_RUN = {error}"),
    }
}

/// Injects a random event between two KVM_RUNs.
fn event(rng: &mut Rng, vcpu: &VcpuFd) {
    match rng.below(4) {
        0 => vcpu.nmi().expect("an NMI"),
        3 => vcpu.smi().expect("an SMI"),
        // KVM refuses this request if there is an interrupt controller.
        1 => drop(vcpu.interrupt(rng.below(256) as u32)),
        _ => drop(vcpu.translate_gva(linear(rng))),
    }
}
