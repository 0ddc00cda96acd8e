//! Allocates VMIDs, ASIDs or VPIDs: the numbers by which a TLB distinguishes guests.
//!
//! A VMID has 8 to 16 bits, and a host may have more VMs. So the allocator gives out numbers in *generations*, as Linux
//! does for arm64 (`vmid.c`). A VM keeps its number during a generation. When no number is free, the next generation
//! begins, and all numbers are free again except those of guests that are running then. Each CPU flushes its TLB before
//! it enters its first guest of the new generation. A VM that ends does not give its number back, and needs no flush.
//!
//! # Concurrency
//! Each word may be written as follows:
//! * [`Vmid::tag`] (number and generation), [`VmidAllocator::generation`] and [`Cpu::flushed`] only by a thread that
//!   holds the lock;
//! * [`Cpu::active`]: by its own CPU, without the lock, which stores the tag of the guest that it enters, or [`IDLE`];
//!   and by the thread that begins a generation, with the lock, which stores [`ROLLED`].
//!
//! *Two running guests have different numbers.* A CPU enters with the tag that it has read, by exchanging `active` for
//! the tag. (A *tag* is a number and its generation.) The exchange succeeds only if no generation has begun since the
//! CPU read `active`. A thread that begins a generation exchanges the same word for `ROLLED`. If that thread's exchange
//! is first, the CPU's exchange fails, and the CPU takes the lock. If the CPU's exchange is first, the thread finds the
//! CPU's tag in `active`, and reserves the tag's number for the VM until the CPU has left the guest and a later
//! generation begins. A CPU that leaves replaces `ROLLED`, which synchronizes with the thread that stored it: the CPU's
//! next entry sees the new generation.
//!
//! *No TLB has entries of a number's earlier VM.* A number is given to another VM only in a new generation. `flushed`
//! is the generation in which the CPU last flushed. If this is not the current generation, the CPU's next call of
//! `enter` takes the lock, and tells the CPU to flush.
//!
//! *A flush by number misses nothing.* A thread that flushes has changed a table before, and then reads the VM's
//! number. [`Vmid::number`] and [`VmidAllocator::enter`] each have a fence. So either the thread sees the number under
//! which a CPU has entered, or that CPU's walker sees the changed table. If the VM had another number in an earlier
//! generation, only CPUs that will flush before they enter any guest have TLB entries under that number.

use alloc::boxed::Box;
use alloc::vec::Vec;
use core::fmt;
use core::iter::repeat_with;

use crate::heap::OutOfMemory;
use crate::sync::SpinLock;
use crate::sync::atomic::{AtomicU64, Ordering::*, const_fn, fence};

/// Number of bits of a tag that contain the number. The other 48 bits contain the generation: they suffice for a new
/// generation each microsecond for nine years.
const NUMBER_BITS: u32 = 16;
/// The value of [`Cpu::active`] while the CPU is in no guest. As a tag it has generation 0, which no VM has.
const IDLE: u64 = 1;
/// The value of [`Cpu::active`] after another thread has begun a generation, until the CPU's next entry or exit.
const ROLLED: u64 = 0;

const fn number(tag: u64) -> u16 {
    tag as u16
}

const fn generation(tag: u64) -> u64 {
    tag >> NUMBER_BITS
}

/// A VM's number (VMID, ASID or VPID), and the number's generation. A VM has no number before a CPU first enters it.
///
/// Use one `Vmid` for each VM if only second-level translations are tagged with its number, or if a CPU flushes its TLB
/// when it changes to another vCPU of the same VM. Use one `Vmid` for each vCPU if the guest's own translations are
/// tagged only with this number (SVM's ASID, VMX's VPID).
pub struct Vmid {
    tag: AtomicU64,
}

impl Vmid {
    const_fn! {
        /// Creates the VMID of a VM that no CPU has entered.
        pub fn new() -> Self {
            Vmid {
                tag: AtomicU64::new(0),
            }
        }
    }
}

impl Vmid {
    /// Returns the number with which the VM's TLB entries are tagged, for [`Platform::flush`](crate::Platform::flush)
    /// on a machine that flushes by number. `None`: no CPU has entered the VM yet, so no TLB has entries of the VM.
    ///
    /// If a CPU later enters the VM under another number, the CPU's walker sees everything that the caller stored
    /// before this call, in particular changes of tables.
    pub fn number(&self) -> Option<u16> {
        fence(SeqCst);
        let tag = self.tag.load(Relaxed);
        (tag != 0).then_some(number(tag))
    }
}

impl Default for Vmid {
    fn default() -> Self {
        Self::new()
    }
}

impl fmt::Debug for Vmid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Vmid({:?})", self.number())
    }
}

/// The reason why a [`VmidAllocator`] cannot be created.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum VmidError {
    /// The machine does not have more numbers than CPUs. Such a machine must flush whenever a CPU enters another VM
    /// than the last time.
    TooFew,
    /// There was no heap memory for the allocator.
    OutOfMemory,
}

impl fmt::Display for VmidError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            VmidError::TooFew => {
                "VMIDs: there are not more numbers than CPUs; flush at each change of VM instead"
            }
            VmidError::OutOfMemory => "VMIDs: no memory for the bitmap of numbers",
        })
    }
}

impl core::error::Error for VmidError {}

impl From<OutOfMemory> for VmidError {
    fn from(_: OutOfMemory) -> Self {
        VmidError::OutOfMemory
    }
}

/// Gives VMIDs (or ASIDs, VPIDs) to the VMs that run on a machine's CPUs. A hypervisor has one allocator.
///
/// ```
/// use slat::{Vmid, VmidAllocator};
/// # fn flush_all_guests_on_this_cpu() {}
/// # fn run_guest(vmid: u16) {}
/// // AArch64 with 8 bits: 1 to 255. 0 is the host's.
/// let vmids = VmidAllocator::new(8, 4)?;
/// // Beside each VM:
/// let vmid = Vmid::new();
///
/// // On CPU 2, with interrupts masked, before each entry:
/// let running = vmids.enter(2, &vmid);
/// if running.must_flush() {
///     flush_all_guests_on_this_cpu();
/// }
/// run_guest(running.number());
/// // The guest has exited, and the CPU does not walk its tables any more.
/// drop(running);
/// # Ok::<(), slat::VmidError>(())
/// ```
pub struct VmidAllocator {
    generation: AtomicU64,
    cpus: Box<[Cpu]>,
    numbers: SpinLock<Numbers>,
}

/// The words that a CPU reads or writes at each entry, in a cache line of their own.
#[derive(Debug)]
#[repr(align(64))]
struct Cpu {
    /// The tag of the guest that the CPU runs, or [`IDLE`], or [`ROLLED`].
    active: AtomicU64,
    /// The generation in which the CPU last flushed its TLB.
    flushed: AtomicU64,
}

/// The state of the current generation's numbers.
struct Numbers {
    /// A bit for each number, set if a VM has the number. The bit of number 0 is always set.
    taken: Box<[u64]>,
    /// For each CPU, the tag of the guest that the CPU ran when the generation began, or, if it ran none, a tag of
    /// generation 0.
    reserved: Box<[u64]>,
    /// All numbers below `next` are in use.
    next: usize,
    /// The end of the numbers that may be given: all numbers are below `end`.
    end: usize,
}

impl VmidAllocator {
    /// Makes an allocator of the numbers from 1 to 2^`bits` - 1 for `cpus` CPUs. Number 0 is never given to a VM: it
    /// belongs to the host (SVM, VMX, and KVM on Arm).
    ///
    /// No CPU may have TLB entries of these numbers.
    ///
    /// # Errors
    /// [`VmidError::TooFew`] unless there are more numbers than CPUs; [`VmidError::OutOfMemory`].
    ///
    /// # Panics
    /// If `bits` is more than 16.
    pub fn new(bits: u32, cpus: usize) -> Result<Self, VmidError> {
        assert!(bits <= NUMBER_BITS, "a VMID has at most 16 bits");
        let numbers = 1usize << bits;
        if numbers - 1 <= cpus {
            return Err(VmidError::TooFew);
        }
        let cpu = || Cpu {
            active: AtomicU64::new(IDLE),
            flushed: AtomicU64::new(1),
        };
        Ok(VmidAllocator {
            generation: AtomicU64::new(1),
            cpus: array(cpus, cpu)?,
            numbers: SpinLock::new(Numbers::new(numbers, cpus)?),
        })
    }

    /// Call on CPU `cpu`, counted from 0, before it enters a guest of the VM, and drop the returned guard after the
    /// exit. Until then, the CPU must not call `enter` again: mask interrupts, or do not enter a VM in interrupt
    /// handlers.
    ///
    /// Takes a lock if the VM has no number of the current generation, or the CPU has to flush. The lock is held for a
    /// few instructions. A CPU that begins a generation holds it longer, while it clears the bitmap and checks all
    /// CPUs.
    ///
    /// # Panics
    /// If `cpu` is not below the number of CPUs ([`Self::new`]).
    #[inline]
    pub fn enter<'a>(&'a self, cpu: usize, vmid: &Vmid) -> RunningVmid<'a> {
        let cpu = &self.cpus[cpu];
        let before = cpu.active.load(Relaxed);
        let tag = vmid.tag.load(Relaxed);
        let current = self.generation.load(Relaxed);
        let entered = before != ROLLED
            && generation(tag) == current
            && cpu.flushed.load(Relaxed) == current
            && (cpu.active)
                .compare_exchange(before, tag, Relaxed, Relaxed)
                .is_ok();
        let running = match entered {
            true => RunningVmid {
                cpu,
                number: number(tag),
                must_flush: false,
            },
            false => self.enter_locked(cpu, vmid),
        };
        fence(SeqCst);
        running
    }

    #[cold]
    #[inline(never)]
    fn enter_locked<'a>(&'a self, cpu: &'a Cpu, vmid: &Vmid) -> RunningVmid<'a> {
        let mut numbers = self.numbers.lock(pause);
        let mut tag = vmid.tag.load(Relaxed);
        if generation(tag) != self.generation.load(Relaxed) {
            tag = self.assign(&mut numbers, tag);
            vmid.tag.store(tag, Relaxed);
        }
        cpu.active.store(tag, Relaxed);
        let flushed = cpu.flushed.load(Relaxed);
        cpu.flushed.store(generation(tag), Relaxed);
        RunningVmid {
            cpu,
            number: number(tag),
            must_flush: flushed != generation(tag),
        }
    }

    /// Returns a tag for a VM that had the tag `old`. If no number is free, begins a new generation. The returned tag
    /// is of the current generation.
    fn assign(&self, numbers: &mut Numbers, old: u64) -> u64 {
        let current =
            |number: u16| self.generation.load(Relaxed) << NUMBER_BITS | u64::from(number);
        // At most two rounds: a new generation has a free number, because there are more numbers than CPUs.
        loop {
            // A VM that runs on another CPU keeps the number that it has there. Any other VM also keeps its old number,
            // if that number is free.
            if generation(old) != 0 {
                let new = current(number(old));
                if numbers.renew(old, new) || numbers.take(number(old)) {
                    return new;
                }
            }
            match numbers.take_any() {
                Some(number) => return current(number),
                None => self.begin_generation(numbers),
            }
        }
    }

    fn begin_generation(&self, numbers: &mut Numbers) {
        let next = self.generation.load(Relaxed) + 1;
        self.generation.store(next, Relaxed);
        numbers.free_all();
        for (index, cpu) in self.cpus.iter().enumerate() {
            // `ROLLED`: an earlier generation has already begun while this CPU ran its guest, so `reserved` has the
            // tag.
            match cpu.active.swap(ROLLED, AcqRel) {
                ROLLED => {}
                active => numbers.reserved[index] = active,
            }
            let reserved = numbers.reserved[index];
            if generation(reserved) != 0 {
                numbers.take(number(reserved));
            }
        }
    }
}

impl Numbers {
    fn new(end: usize, cpus: usize) -> Result<Self, OutOfMemory> {
        let mut numbers = Numbers {
            taken: array(end.div_ceil(64), || 0)?,
            reserved: array(cpus, || IDLE)?,
            next: 0,
            end,
        };
        numbers.free_all();
        Ok(numbers)
    }

    fn free_all(&mut self) {
        self.taken.fill(0);
        self.take(0);
        self.next = 1;
    }

    /// Marks `number` as taken. Returns `false` if it was already taken.
    fn take(&mut self, number: u16) -> bool {
        let (word, bit) = (usize::from(number) / 64, 1 << (number % 64));
        let free = self.taken[word] & bit == 0;
        self.taken[word] |= bit;
        free
    }

    /// Takes and returns the lowest free number. `None`: no number is free.
    fn take_any(&mut self) -> Option<u16> {
        let from = self.next / 64;
        let free = (self.taken[from..].iter()).position(|word| *word != u64::MAX);
        let found = free.map(|offset| {
            let word = from + offset;
            word * 64 + self.taken[word].trailing_ones() as usize
        });
        let Some(found) = found.filter(|number| *number < self.end) else {
            self.next = self.end;
            return None;
        };
        self.next = found + 1;
        let number = found as u16;
        self.take(number);
        Some(number)
    }

    /// Replaces all reservations of `old` by `new`. Returns whether a CPU had reserved `old`.
    fn renew(&mut self, old: u64, new: u64) -> bool {
        let mut found = false;
        for reserved in self.reserved.iter_mut().filter(|tag| **tag == old) {
            *reserved = new;
            found = true;
        }
        found
    }
}

impl fmt::Debug for VmidAllocator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("VmidAllocator")
    }
}

/// The number under which a CPU runs a guest. Drop it when the guest has exited.
#[derive(Debug)]
#[must_use = "when it is dropped the guest counts as exited"]
pub struct RunningVmid<'a> {
    cpu: &'a Cpu,
    number: u16,
    must_flush: bool,
}

impl RunningVmid<'_> {
    /// Returns the number for entering the guest.
    #[inline]
    pub fn number(&self) -> u16 {
        self.number
    }

    /// Whether the CPU must flush the translations of all guests from its TLB before it enters the guest. If CPUs share
    /// a TLB, the flush must cover the translations of all these CPUs.
    #[inline]
    pub fn must_flush(&self) -> bool {
        self.must_flush
    }
}

impl Drop for RunningVmid<'_> {
    #[inline]
    fn drop(&mut self) {
        // Acquire: if this replaces `ROLLED`, the CPU's next entry sees the new generation.
        self.cpu.active.swap(IDLE, AcqRel);
    }
}

/// Waits for a short time, so that another thread can proceed.
fn pause(_: u32) {
    #[cfg(loom)]
    loom::thread::yield_now();
}

/// Allocates a slice of `length` elements.
fn array<T>(length: usize, element: impl FnMut() -> T) -> Result<Box<[T]>, OutOfMemory> {
    let mut array = Vec::new();
    (array.try_reserve_exact(length)).map_err(|_| OutOfMemory)?;
    array.extend(repeat_with(element).take(length));
    Ok(array.into_boxed_slice())
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use std::collections::BTreeMap;
    use std::vec::Vec;

    /// A model of a CPU. Its TLB has at most one entry per number: the VM for which the entry was loaded, and the
    /// version of the VM's tables at that time.
    #[derive(Default)]
    struct Cpu<'a> {
        tlb: BTreeMap<u16, (usize, u64)>,
        guest: Option<(usize, RunningVmid<'a>)>,
    }

    struct Machine<'a> {
        vmids: &'a VmidAllocator,
        /// Each VM's number, and the version of its tables.
        vms: Vec<(Vmid, u64)>,
        cpus: Vec<Cpu<'a>>,
    }

    impl<'a> Machine<'a> {
        fn new(vmids: &'a VmidAllocator, cpus: usize, vms: usize) -> Self {
            Machine {
                vmids,
                vms: (0..vms).map(|_| (Vmid::new(), 0)).collect(),
                cpus: (0..cpus).map(|_| Default::default()).collect(),
            }
        }

        /// If `cpu` is in no guest, enters `vm`. If it is in the guest `vm`, that guest makes an access. If it is in
        /// another guest, that guest exits.
        fn run(&mut self, cpu: usize, vm: usize) {
            match &self.cpus[cpu].guest {
                None => {
                    let running = self.vmids.enter(cpu, &self.vms[vm].0);
                    if running.must_flush() {
                        self.cpus[cpu].tlb.clear();
                    }
                    for (other, beside) in self.cpus.iter().filter_map(|cpu| cpu.guest.as_ref()) {
                        assert_eq!(*other == vm, beside.number() == running.number());
                    }
                    self.cpus[cpu].guest = Some((vm, running));
                    self.access(cpu);
                }
                Some((inside, _)) if *inside == vm => self.access(cpu),
                Some(_) => self.cpus[cpu].guest = None,
            }
        }

        /// The guest of `cpu` uses the translation in its TLB; if there is none, the TLB loads one.
        fn access(&mut self, cpu: usize) {
            let Cpu { tlb, guest } = &mut self.cpus[cpu];
            let (vm, running) = guest.as_ref().unwrap();
            let current = (*vm, self.vms[*vm].1);
            let used = *tlb.entry(running.number()).or_insert(current);
            assert_eq!(used, current, "CPU {cpu} used a stale entry");
        }

        /// Changes the tables of `vm`. If `vm` has a VMID, flushes the entries of this VMID from the TLBs of all CPUs.
        fn change(&mut self, vm: usize) {
            self.vms[vm].1 += 1;
            if let Some(number) = self.vms[vm].0.number() {
                for cpu in &mut self.cpus {
                    cpu.tlb.remove(&number);
                }
            }
        }
    }

    #[test]
    fn no_tlb_serves_a_vm_with_entries_of_another() {
        let mut state = 1u64;
        let mut random = |below: usize| {
            state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
            (state >> 33) as usize % below
        };
        for (bits, cpus, vms) in [
            (1, 0, 1),
            (2, 1, 5),
            (2, 2, 3),
            (2, 2, 9),
            (3, 6, 40),
            (7, 9, 400),
        ] {
            let vmids = VmidAllocator::new(bits, cpus).unwrap();
            let mut machine = Machine::new(&vmids, cpus, vms);
            for _ in 0..200_000 {
                match random(8) {
                    0 => machine.change(random(vms)),
                    _ if cpus == 0 => {}
                    // VMs with low indexes run more often, so that some VMs run in many generations.
                    1..4 => machine.run(random(cpus), random(1 + vms / 8)),
                    _ => machine.run(random(cpus), random(vms)),
                }
            }
            let begun = vmids.generation.load(Relaxed);
            assert_eq!(begun > 100, vms > (1 << bits), "{begun} generations");
        }
    }

    #[test]
    fn vms_keep_their_numbers_while_there_are_enough() {
        let vmids = VmidAllocator::new(8, 2).unwrap();
        let vms: Vec<_> = (0..255).map(|_| Vmid::new()).collect();
        assert_eq!(vms[0].number(), None);
        for round in 0..3 {
            for (index, vm) in vms.iter().enumerate() {
                let running = vmids.enter(round % 2, vm);
                assert_eq!(usize::from(running.number()), index + 1);
                assert!(!running.must_flush());
            }
        }
        // One more VM than there are numbers: the next generation begins, and each CPU flushes once.
        let one_more = Vmid::new();
        assert!(vmids.enter(0, &one_more).must_flush());
        assert!(!vmids.enter(0, &vms[7]).must_flush());
        assert!(vmids.enter(1, &vms[7]).must_flush());
        assert!(!vmids.enter(1, &one_more).must_flush());
    }

    #[test]
    fn there_must_be_more_numbers_than_cpus() {
        assert_eq!(VmidAllocator::new(0, 1).unwrap_err(), VmidError::TooFew);
        assert_eq!(VmidAllocator::new(3, 7).unwrap_err(), VmidError::TooFew);
        assert!(VmidAllocator::new(3, 6).is_ok());
        assert!(VmidAllocator::new(16, 4096).is_ok());
    }
}
