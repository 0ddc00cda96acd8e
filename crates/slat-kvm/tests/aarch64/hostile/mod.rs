//! Guests of random instructions, tables and registers, and clients that write random values to registers and device
//! attributes. Nothing panics, a signal ends each run, nothing is written beside the memslots or to a read-only one,
//! each written page is in the log, and the engine's tables pass their audit.
//!
//! `SLAT_TEST_ROUNDS=… SLAT_SEED=…` execute more rounds, and others. `SLAT_SET=jit=at-once` compiles the guests' code.

mod code;
#[path = "../../hostile_hypervisors/watch.rs"]
mod watch;

use super::gic::{V2, V3, create, place};
use super::guests::{CODE, DEVICE, PC, X0, system};
use super::memory::Memory;
use kvm_bindings::*;
use slat_kvm::{DeviceFd, Kvm, VcpuExit, VcpuFd, VmFd};
use slat_model::Rng;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// The slots' memory and what is around it: a gap, the slot with everything, a gap, the read-only slot, a gap.
const GAP: usize = 0x1_0000;
const MAIN: usize = 0x4_0000;
const ROM: usize = 0x1_0000;
const ROM_AT: u64 = CODE + MAIN as u64 + 0x10_0000;
const ALL: usize = GAP + MAIN + GAP + ROM + GAP;
/// The byte that all memory has beside the first slot.
const FILL: u8 = 0xa5;

/// Rounds of a test, and of a VM.
const ROUNDS: u64 = 200;
const OF_A_VM: u64 = 20;
/// The greatest number of exits of a vCPU in a round, and the CPU time after which a signal ends its runs.
const EXITS: usize = 100;
const SLICE: Duration = Duration::from_millis(5);

/// Returns the time for which this thread has had a CPU.
fn cpu_time() -> Duration {
    let mut time = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: the kernel writes the struct.
    unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut time) };
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

fn number(name: &str, default: u64) -> u64 {
    std::env::var(name).map_or(default, |text| text.parse().expect("a number"))
}

/// How a run has ended.
enum After {
    Go,
    /// The guest has switched itself off.
    Off,
    /// A signal has ended it.
    Kicked,
    Ended,
}

/// What the guests and clients of a test have done: exits, runs that a signal has ended, pages that were written, and
/// accepted values of registers and attributes.
#[derive(Debug, Default)]
struct Seen {
    exits: u64,
    kicks: u64,
    pages: u64,
    accepted: u64,
}

struct Machine {
    vm: VmFd,
    vcpus: Vec<VcpuFd>,
    /// The interrupt controller, and an ITS.
    devices: Vec<DeviceFd>,
    registers: Vec<u64>,
    memory: Memory,
    rng: Rng,
    seen: Seen,
}

impl Machine {
    fn new(mut rng: Rng) -> Self {
        let vm = Kvm::new().unwrap().create_vm_with_ipa_size(0).unwrap();
        let memory = Memory::new(ALL);
        memory.write(0, &[FILL; ALL]);
        let slot = |slot, flags, guest_phys_addr, at: usize, len: usize| {
            let region = kvm_userspace_memory_region {
                slot,
                flags,
                guest_phys_addr,
                memory_size: len as u64,
                userspace_addr: memory.address() + at as u64,
            };
            // SAFETY: the memory is mapped until the test ends, and nothing relies on its contents.
            unsafe { vm.set_user_memory_region(region) }.unwrap();
        };
        slot(0, KVM_MEM_LOG_DIRTY_PAGES, CODE, GAP, MAIN);
        slot(1, KVM_MEM_READONLY, ROM_AT, GAP + MAIN + GAP, ROM);
        let model = rng.pick(&[None, Some(V2), Some(V3)]);
        let mut devices: Vec<_> = model
            .map(|model| create(&vm, model).unwrap())
            .into_iter()
            .collect();
        let vcpus: Vec<_> = (0..2).map(|id| vm.create_vcpu(id).unwrap()).collect();
        let mut machine = Self {
            vm,
            vcpus,
            devices: vec![],
            registers: vec![],
            memory,
            rng,
            seen: Seen::default(),
        };
        (0..2).for_each(|index| machine.initialise(index));
        if let Some(model) = model {
            place(model, &devices[0]);
            if model == V3 {
                devices
                    .push(create(&machine.vm, kvm_device_type_KVM_DEV_TYPE_ARM_VGIC_ITS).unwrap());
            }
        }
        machine.devices = devices;
        let mut list = RegList::new(500).unwrap();
        machine.vcpus[0].get_reg_list(&mut list).unwrap();
        machine.registers = list.as_slice().to_vec();
        machine
    }

    fn initialise(&mut self, index: usize) {
        let mut init = kvm_vcpu_init::default();
        self.vm.get_preferred_target(&mut init).unwrap();
        init.features[0] = 1 << KVM_ARM_VCPU_PSCI_0_2;
        self.vcpus[index].vcpu_init(&init).unwrap();
    }

    /// Returns an address that is likely to mean something, or to be at the end of something.
    fn address(&mut self) -> u64 {
        let aligned = self.rng.pick(&[!0, !7, !15]);
        let near = self.rng.below(MAIN as u64) & aligned;
        match self.rng.below(12) {
            0 => ROM_AT + near % (ROM as u64 + 8),
            1 => DEVICE + near,
            2 => 0x0800_0000 + near,
            3 => 0x080a_0000 + near,
            4 => CODE + MAIN as u64 - near % 32,
            5 => self.rng.word(),
            6 => near | !0 << 39,
            _ => CODE + near,
        }
    }

    /// Returns a descriptor, which often leads to the guest's own memory.
    fn descriptor(&mut self) -> u64 {
        let kind = self.rng.pick(&[3, 3, 3, 3, 1, 1, 0, 2]);
        let flags = self.rng.word() & 0x0060_0000_0000_0bfc;
        let above = if self.rng.one_in(8) {
            self.rng.word() & 0x1f << 59
        } else {
            0
        };
        self.address() & 0xffff_ffff_f000
            | flags
            | above
            | u64::from(!self.rng.one_in(8)) << 10
            | kind
    }

    /// Fills the first slot with tables and code. Returns its content.
    fn fill(&mut self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(MAIN);
        while bytes.len() < MAIN {
            match bytes.len() / 0x1000 % 4 {
                // The first entries of a table: identity for the guest's own gigabyte, and for devices.
                0 if !self.rng.one_in(4) => {
                    let block = CODE | self.rng.word() & 0xbdc | 1 << 10 | 1;
                    let words = [DEVICE & !0x3fff_ffff | 1 << 10 | 1 << 2 | 1, block];
                    bytes.extend(words.iter().flat_map(|word| word.to_le_bytes()));
                    (2..512).for_each(|_| bytes.extend(self.descriptor().to_le_bytes()));
                }
                0 => (0..512).for_each(|_| bytes.extend(self.descriptor().to_le_bytes())),
                kind => {
                    let words = if kind == 1 { 512 } else { 1024 };
                    code::code(&mut self.rng, &mut bytes, words);
                    if kind == 1 {
                        code::vectors(&mut self.rng, &mut bytes);
                    }
                }
            }
        }
        self.memory.write(GAP, &bytes);
        bytes
    }

    fn set(&mut self, index: usize, register: u64, value: u64) {
        // A client's values need not be accepted.
        let set = self.vcpus[index].set_one_reg(register, &value.to_le_bytes());
        is_accepted("KVM_SET_ONE_REG", set.map(drop));
    }

    /// Gives a vCPU registers with which its code runs for a while, and a few others with any values.
    fn prepare(&mut self, index: usize) {
        for n in 0..31 {
            let value = self.address();
            self.set(index, X0 + 2 * n, value);
        }
        let tables = CODE + self.rng.below(16) * 0x4000;
        let size = self.rng.pick(&[25, 25, 25, 25, 16, 28, 39]);
        let tcr = size | size << 16 | 5 << 32 | 2 << 30 | self.rng.word() & 0x7f0_0000_0000;
        // SCTLR_EL1: translation, and any of A, SA, SA0, UMA, DZE, UCT, nTWI, nTWE, WXN, SPAN, UCI.
        let sctlr =
            (self.rng.word() & self.rng.word() & 0x0498_c21a) | u64::from(self.rng.one_in(2));
        let any = self.rng.word();
        let mair = self
            .rng
            .pick(&[0x44ff_ffff_ffff_04ff, 0x44ff_ffff_ffff_04ff, any]);
        // Mostly those of `code::vectors`.
        let vectors =
            CODE + self.rng.below(16) * 0x4000 + self.rng.pick(&[0x1800, 0x1800, 0x1800, 0x2000]);
        let values = [
            (system(3, 0, 2, 0, 0), tables),
            (system(3, 0, 2, 0, 1), tables),
            (system(3, 0, 2, 0, 2), tcr),
            (system(3, 0, 10, 2, 0), mair),
            (system(3, 0, 1, 0, 0), sctlr),
            (system(3, 0, 1, 0, 2), 3 << 20),
            (system(3, 0, 12, 0, 0), vectors),
        ];
        values
            .iter()
            .for_each(|(register, value)| self.set(index, *register, *value));
        for _ in 0..self.rng.below(12) {
            let register = self.rng.pick(&self.registers);
            self.write_any(index, register);
        }
        let pc = CODE + self.rng.below(16) * 0x4000 + 0x1000 + self.rng.below(0x3000) / 4 * 4;
        self.set(index, PC, pc);
    }

    /// Writes any value to a register, and reads it.
    fn write_any(&mut self, index: usize, register: u64) {
        let mut bytes = [0; 256];
        let len = 1usize << (register >> 52 & 15).min(8);
        for word in bytes[..len.next_multiple_of(8)].chunks_mut(8) {
            let value = if self.rng.one_in(2) {
                self.address()
            } else {
                self.rng.word()
            };
            word.copy_from_slice(&value.to_le_bytes());
        }
        let set = self.vcpus[index].set_one_reg(register, &bytes[..len]);
        self.seen.accepted += u64::from(is_accepted("KVM_SET_ONE_REG", set.map(drop)));
        let get = self.vcpus[index].get_one_reg(register, &mut bytes);
        is_accepted("KVM_GET_ONE_REG", get.map(drop));
    }

    /// Does what a client may do between two runs.
    fn act(&mut self, index: usize) {
        match self.rng.below(8) {
            0..3 => {
                let register = self.rng.pick(&self.registers);
                // Often a register that does not exist, or another size.
                let flipped = if self.rng.one_in(2) {
                    1 << self.rng.below(56)
                } else {
                    0
                };
                self.write_any(index, register ^ flipped);
            }
            3 => {
                let events = self.vcpus[index].get_vcpu_events().unwrap();
                self.vcpus[index].set_vcpu_events(&events).unwrap();
                let mut events = kvm_vcpu_events::default();
                events.exception.serror_pending = 1;
                events.exception.serror_has_esr = self.rng.below(2) as u8;
                events.exception.serror_esr = self.rng.word() & 0x3ff_ffff;
                is_accepted(
                    "KVM_SET_VCPU_EVENTS",
                    self.vcpus[index].set_vcpu_events(&events),
                );
            }
            4 => {
                let line = self.rng.word() as u32 & 0x0301_03ff | self.rng.below(4) as u32;
                let set = self.vm.set_irq_line(line, self.rng.one_in(2));
                is_accepted("KVM_IRQ_LINE", set);
            }
            _ => self.use_device(),
        }
    }

    /// Sets or gets an attribute of a device. Only its value is written.
    fn use_device(&mut self) {
        if self.devices.is_empty() {
            return;
        }
        let device = &self.devices[self.rng.below(self.devices.len() as u64) as usize];
        let attr = match self.rng.below(4) {
            0 => self.rng.below(8),
            1 => self.rng.word(),
            // A vCPU and the offset of a register, or a system register.
            _ => {
                self.rng.below(3) << 32
                    | self.rng.pick(&[0, 0x1_0000])
                    | (self.rng.below(0x400) * 4)
            }
        };
        let mut value = [
            0xeeee_eeee_eeee_eeee,
            self.rng.word(),
            0xeeee_eeee_eeee_eeee,
        ];
        let mut attribute = kvm_device_attr {
            group: self.rng.below(10) as u32,
            attr,
            addr: &raw mut value[1] as u64,
            ..Default::default()
        };
        let done = match self.rng.below(3) {
            0 => device.has_device_attr(&attribute),
            1 => device.set_device_attr(&attribute),
            // SAFETY: the address is that of a value that has room for every attribute.
            _ => unsafe { device.get_device_attr(&mut attribute) },
        };
        self.seen.accepted += u64::from(is_accepted("an attribute", done));
        assert_eq!([value[0], value[2]], [0xeeee_eeee_eeee_eeee; 2]);
    }

    /// Runs a vCPU until its time is over, or it has exited often.
    fn run(&mut self, index: usize) {
        let end = cpu_time() + SLICE;
        for _ in 0..EXITS {
            let any = self.rng.word();
            let after = match self.vcpus[index].run() {
                Ok(VcpuExit::MmioRead(_, data)) => {
                    let len = data.len();
                    data.copy_from_slice(&any.to_le_bytes()[..len]);
                    After::Go
                }
                Ok(VcpuExit::SystemEvent(..)) => After::Off,
                Ok(_) => After::Go,
                Err(error) if error.errno() == libc::EINTR => After::Kicked,
                // An access that no memslot has, and that a client cannot carry out.
                Err(error) if [libc::EFAULT, libc::ENOSYS].contains(&error.errno()) => After::Ended,
                Err(error) => panic!("KVM_RUN = {error}"),
            };
            match after {
                After::Go => self.seen.exits += 1,
                After::Off => return self.initialise(index),
                After::Kicked => {
                    self.seen.kicks += 1;
                    if cpu_time() > end {
                        return;
                    }
                }
                After::Ended => return,
            }
            if self.rng.one_in(3) {
                self.act(index);
            }
        }
    }

    /// Checks what was written since the first slot had this content.
    fn check(&mut self, before: &[u8]) {
        let all = self.memory.read(0, ALL);
        let [main, rom] = [GAP..GAP + MAIN, GAP + MAIN..ALL];
        let beside = all[..GAP].iter().chain(&all[rom]);
        assert!(
            beside.into_iter().all(|byte| *byte == FILL),
            "a write beside the slot"
        );
        let log = self.vm.get_dirty_log(0, MAIN).unwrap();
        let page = slat_host::page_size();
        let pages = all[main].chunks(page).zip(before.chunks(page));
        for (n, (now, before)) in pages.enumerate() {
            let is_logged = log[n / 64] >> (n % 64) & 1 != 0;
            assert!(
                is_logged || now == before,
                "page {n} was written, and is not in the log"
            );
            self.seen.pages += u64::from(now != before);
        }
        self.vm.engine().audit().expect("a quiet VM");
    }
}

/// The errnos of the requests that clients make here.
const ERRNOS: [i32; 10] = [
    libc::EINVAL,
    libc::ENOENT,
    libc::EPERM,
    libc::EBUSY,
    libc::ENXIO,
    libc::EEXIST,
    libc::ENODEV,
    libc::E2BIG,
    libc::EFAULT,
    libc::ENOTTY,
];

/// Whether a request was accepted. Panics if it has failed with another errno than requests have here.
fn is_accepted(what: &str, result: Result<(), slat_kvm::Error>) -> bool {
    let errno = result.err().map(|error| error.errno());
    assert!(
        errno.is_none_or(|errno| ERRNOS.contains(&errno)),
        "{what} = {errno:?}"
    );
    errno.is_none()
}

#[test]
fn hostile_guests_and_clients_break_nothing() {
    let progress = Arc::new(AtomicU64::new(0));
    let watchman = watch::watch(&progress);
    let seed = number("SLAT_SEED", 1);
    let rounds = number("SLAT_TEST_ROUNDS", ROUNDS);
    let mut seen = Seen::default();
    for of_vm in 0..rounds.div_ceil(OF_A_VM) {
        let mut machine = Machine::new(Rng::new(seed + of_vm));
        for _ in 0..OF_A_VM {
            progress.fetch_add(1, Ordering::Relaxed);
            // The log is empty from here on.
            machine.vm.get_dirty_log(0, MAIN).unwrap();
            let before = machine.fill();
            for index in 0..2 {
                machine.prepare(index);
                machine.run(index);
            }
            machine.check(&before);
        }
        seen.exits += machine.seen.exits;
        seen.kicks += machine.seen.kicks;
        seen.pages += machine.seen.pages;
        seen.accepted += machine.seen.accepted;
    }
    println!("{rounds} rounds: {seen:?}");
    // How many, is the machine's speed.
    assert!(seen.pages > 0 && seen.kicks > 0 && seen.accepted > 0);
    drop(progress);
    watchman.join().unwrap();
}
