//! A VM's calls for its clock and the frequency of its vCPUs' TSC.

use crate::arch::x86_64::clock::{self, FLAGS};
use crate::errno::{Result, fail};
use crate::thread::bits;
use crate::vm::VmObject;
use kvm_bindings::*;

impl VmObject {
    /// Carries out `KVM_SET_TSC_KHZ`: sets the frequency of the VM's vCPUs; 0 means the host's frequency.
    ///
    /// # Errors
    /// `EINVAL` for a frequency beyond KVM's own limits, and once there are vCPUs. The second rule is KVM's since Linux
    /// 6.17. In earlier versions the call succeeded, and affected only vCPUs that were created later.
    pub fn set_tsc_khz(&self, khz: u32) -> Result<()> {
        let _call = self.begin()?;
        let khz = clock::frequency(khz)?;
        self.before_vcpus(|| {
            self.arch.clock.set_tsc_khz(khz);
            Ok(())
        })
    }

    /// Carries out `KVM_GET_TSC_KHZ`.
    pub fn tsc_khz(&self) -> u32 {
        self.arch.clock.tsc_khz()
    }

    /// Carries out `KVM_GET_CLOCK`.
    ///
    /// # Errors
    /// `EIO` in a forked child.
    pub fn get_clock(&self) -> Result<kvm_clock_data> {
        let _call = self.begin()?;
        let now = self.arch.clock.read();
        let data = kvm_clock_data {
            clock: now.clock,
            ..Default::default()
        };
        // As in KVM, the wall clock and the host's TSC are returned only if all vCPUs agree on the clock.
        Ok(match now.is_stable {
            false => data,
            true => kvm_clock_data {
                flags: FLAGS,
                realtime: now.realtime,
                host_tsc: now.host_tsc,
                ..data
            },
        })
    }

    /// Carries out `KVM_SET_CLOCK`. With `KVM_CLOCK_REALTIME`, adds the time that has passed since `data.realtime`.
    /// Waits until no vCPU executes guest code with the old clock.
    ///
    /// # Errors
    /// `EINVAL` for unknown flags.
    pub fn set_clock(&self, data: &kvm_clock_data) -> Result<()> {
        let _call = self.begin()?;
        if data.flags & !FLAGS != 0 {
            return fail(libc::EINVAL);
        }
        let since = (data.flags & KVM_CLOCK_REALTIME != 0).then_some(data.realtime);
        let stop = || {
            // A vCPU that enters the engine from now on sees the update, and waits before it executes guest code.
            self.call_vcpus_out();
            self.engine.synchronize();
        };
        self.arch.clock.update(stop, || {
            self.arch.clock.set(data.clock, since);
            self.clock_pages_changed();
        });
        Ok(())
    }

    /// Makes all vCPUs write the pages of their clocks before they execute guest code again. Does not wait. Call after
    /// the VM's kvmclock pair has changed.
    pub(crate) fn clock_pages_changed(&self) {
        self.arch.hyperv.clock_changed();
        self.call_vcpus_out();
    }

    fn call_vcpus_out(&self) {
        (self.engine).visit_attention(&mut |attention| attention.raise(bits::RETRY));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arch::x86_64::clock::TscChange;
    use crate::arch::x86_64::clock::host::simulated::{self, Host};
    use crate::arch::x86_64::machine::msrs;
    use crate::arch::x86_64::msr::index;
    use crate::vcpu::VcpuObject;
    use slat::Shared;
    use slat_hyperv::msr::{REFERENCE_TSC, TIME_REF_COUNT};
    use slat_irqchip::lapic;
    use std::os::fd::OwnedFd;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
    use std::time::{Duration, Instant};

    const MEMORY: usize = 0x2_0000;
    const CODE: u64 = 0x1000;
    const HYPERV_PAGE: u64 = 0x2000;
    const WALL_CLOCK: u64 = 0x3000;
    /// The guest-physical address of vCPU 0's kvmclock page. The pages of the other vCPUs follow.
    const PAGES: u64 = 0x4000;
    const SECOND: u64 = 1_000_000_000;
    /// The greatest difference, in nanoseconds, between two clocks that are read at one moment.
    const TOLERANCE: u64 = 1_000;

    /// A VM whose vCPUs halt at once, and whose clocks the test reads as the guest would.
    struct Machine {
        vm: Arc<VmObject>,
        vcpus: Vec<(Shared<VcpuObject>, OwnedFd)>,
        memory: *mut u8,
        /// The latest time that was read from any clock.
        latest: u64,
    }

    impl Drop for Machine {
        fn drop(&mut self) {
            // SAFETY: `new` has made this mapping, and no guest code of the VM uses the mapping any more.
            unsafe { libc::munmap(self.memory.cast(), MEMORY) };
        }
    }

    impl Machine {
        fn new() -> Self {
            let vm = VmObject::new(Default::default(), None, Default::default()).unwrap();
            // SAFETY: the call makes a new mapping.
            let memory = unsafe {
                libc::mmap(
                    std::ptr::null_mut(),
                    MEMORY,
                    libc::PROT_READ | libc::PROT_WRITE,
                    libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
                    -1,
                    0,
                )
            };
            assert_ne!(memory, libc::MAP_FAILED);
            vm.set_user_memory_region(&kvm_userspace_memory_region {
                memory_size: MEMORY as u64,
                userspace_addr: memory as u64,
                ..Default::default()
            })
            .unwrap();
            let machine = Machine {
                vm,
                vcpus: Vec::new(),
                memory: memory.cast(),
                latest: 0,
            };
            // hlt
            machine.at(CODE).store(0xf4, Ordering::SeqCst);
            machine
        }

        /// Returns a word of guest memory.
        fn at(&self, address: u64) -> &AtomicU64 {
            assert!(address as usize + 8 <= MEMORY);
            // SAFETY: the word is aligned and within the mapping. Other threads access the word atomically or through
            // the VM.
            unsafe { &*self.memory.add(address as usize).cast() }
        }

        fn page(vcpu: usize) -> u64 {
            PAGES + 0x1000 * vcpu as u64
        }

        /// Adds a vCPU and runs it. Its guest enables the kvmclock page.
        fn add_vcpu(&mut self) -> usize {
            let number = self.vcpus.len();
            self.vcpus.push(self.vm.create_vcpu(number as u64).unwrap());
            let vcpu = &self.vcpus[number].0;
            let mut sregs = vcpu.get_sregs().unwrap();
            (sregs.cs.base, sregs.cs.selector) = (0, 0);
            vcpu.set_sregs(&sregs).unwrap();
            self.enable(number);
            number
        }

        fn enable(&self, vcpu: usize) {
            let page = Self::page(vcpu) | 1;
            self.write(vcpu, index::KVM_SYSTEM_TIME_NEW, page, true);
            self.run(vcpu);
        }

        fn run(&self, vcpu: usize) {
            let vcpu = &self.vcpus[vcpu].0;
            let mut regs = vcpu.get_regs().unwrap();
            (regs.rip, regs.rflags) = (CODE, 2);
            vcpu.set_regs(&regs).unwrap();
            vcpu.run().unwrap();
            assert_eq!(vcpu.get_regs().unwrap().rip, CODE + 1);
        }

        /// Writes an MSR.
        fn write(&self, vcpu: usize, msr: u32, value: u64, by_guest: bool) {
            let mut inner = self.vcpus[vcpu].0.lock().unwrap();
            msrs::write_machine(&mut inner.machine, msr, value, by_guest).unwrap();
        }

        fn read(&self, vcpu: usize, msr: u32) -> u64 {
            let mut entries = [kvm_msr_entry {
                index: msr,
                ..Default::default()
            }];
            assert_eq!(self.vcpus[vcpu].0.get_msrs(&mut entries).unwrap(), 1);
            entries[0].data
        }

        fn tsc(&self, vcpu: usize) -> u64 {
            self.read(vcpu, index::TSC)
        }

        fn word(&self, address: u64) -> u64 {
            self.at(address).load(Ordering::SeqCst)
        }

        /// Returns the time that the guest computes from its kvmclock page, by the formula in KVM's documentation.
        fn page_clock(&self, vcpu: usize) -> u64 {
            let page = Self::page(vcpu);
            loop {
                let version = self.word(page) as u32;
                let (then, time) = (self.word(page + 8), self.word(page + 16));
                let (mul, shift) = (
                    self.word(page + 24) as u32,
                    (self.word(page + 24) >> 32) as i8,
                );
                let since = self.tsc(vcpu).wrapping_sub(then);
                if version.is_multiple_of(2) && version == self.word(page) as u32 {
                    let since = match shift {
                        0.. => since << shift,
                        _ => since >> -shift,
                    };
                    let ns = (u128::from(since) * u128::from(mul)) >> 32;
                    return time.wrapping_add(ns as u64);
                }
            }
        }

        fn is_stable(&self, vcpu: usize) -> bool {
            self.word(Self::page(vcpu) + 24) >> 40 & 1 != 0
        }

        /// Returns the time, in nanoseconds, that the guest computes from Hyper-V's page. If the page tells the guest
        /// to read the counter MSR instead, returns the time of this MSR.
        fn hyperv_clock(&self, vcpu: usize) -> u64 {
            let words = [0, 8, 16].map(|offset| self.word(HYPERV_PAGE + offset));
            if words[0] as u32 == 0 {
                return self.read(vcpu, TIME_REF_COUNT) * 100;
            }
            let scaled = (u128::from(self.tsc(vcpu)) * u128::from(words[1])) >> 64;
            (scaled as u64).wrapping_add(words[2]).wrapping_mul(100)
        }

        /// Reads all clocks. Checks that the clocks agree, and that no clock shows a time before an earlier reading.
        /// Returns the time.
        fn check(&mut self, what: &str) -> u64 {
            let mut clocks = vec![(
                "KVM_GET_CLOCK".to_owned(),
                self.vm.get_clock().unwrap().clock,
            )];
            for vcpu in 0..self.vcpus.len() {
                let mut add = |name: &str, clock| clocks.push((format!("{name} of {vcpu}"), clock));
                add("the page", self.page_clock(vcpu));
                add("Hyper-V's counter", self.read(vcpu, TIME_REF_COUNT) * 100);
                add("Hyper-V's page", self.hyperv_clock(vcpu));
            }
            let (_, now) = clocks[0];
            for (name, clock) in &clocks {
                assert!(
                    clock.abs_diff(now) <= TOLERANCE,
                    "{what}: {name} differs by {}: {clocks:?}",
                    clock.wrapping_sub(now) as i64
                );
                // Hyper-V's clocks count in units of 100 ns, so they may show up to 100 ns less.
                let back = self.latest.saturating_sub(*clock);
                assert!(back < 200, "{what}: {name} goes back by {back} ns");
            }
            self.latest = self.latest.max(now);
            now
        }

        /// Checks the clocks while an hour passes. The vCPUs run once a minute.
        fn check_hour(&mut self, what: &str) {
            let begin = (host().tsc, self.check(what));
            for _ in 0..60 {
                pass(60 * SECOND);
                (0..self.vcpus.len()).for_each(|vcpu| self.run(vcpu));
                self.check(what);
            }
            let cycles = u128::from(host().tsc - begin.0);
            let passed = (cycles * 1_000_000 / u128::from(host().khz)) as u64;
            let counted = self.check(what) - begin.1;
            // A scale is rounded down, so the clock loses 1.7 µs in an hour.
            assert!(
                passed.abs_diff(counted) < 2_000,
                "{what}: {passed} {counted}"
            );
        }
    }

    fn host() -> Host {
        simulated::get().unwrap()
    }

    /// Advances the simulated host's clocks by `ns` nanoseconds.
    fn pass(ns: u64) {
        let mut host = host();
        host.tsc += (u128::from(ns) * u128::from(host.khz) / 1_000_000) as u64;
        simulated::set(Some(host));
    }

    /// Runs `work` on simulated hosts with different TSC frequencies.
    fn on_hosts(work: impl Fn()) {
        for khz in [999_999, 2_596_144, 3_400_001, 4_700_017] {
            simulated::set(Some(Host {
                tsc: 123_456_789_012_345,
                khz,
                realtime: 1_700_000_000 * SECOND,
                step: 40,
            }));
            work();
        }
        simulated::set(None);
    }

    /// Returns a machine with two vCPUs and Hyper-V's page. The second vCPU is started three seconds after the first.
    fn two_vcpus() -> Machine {
        let mut machine = Machine::new();
        machine.add_vcpu();
        machine.write(0, REFERENCE_TSC, HYPERV_PAGE | 1, false);
        machine.run(0);
        pass(3 * SECOND);
        machine.add_vcpu();
        machine
    }

    #[test]
    fn all_clocks_are_one() {
        on_hosts(|| {
            let mut machine = two_vcpus();
            machine.check_hour("two vCPUs");
            machine.enable(0);
            machine.check("a page that is written again");
            machine.vcpus[1].0.kvmclock_ctrl().unwrap();
            machine.run(1);
            machine.check("a guest that was paused");
            assert!(machine.is_stable(0) && machine.is_stable(1));
            machine.add_vcpu();
            machine.check_hour("a vCPU that was added later");
            // No vCPU runs for eight hours.
            pass(8 * 3600 * SECOND);
            machine.check("after a suspension");
            assert_eq!(machine.vm.get_clock().unwrap().flags, FLAGS);
        });
    }

    #[test]
    fn a_client_stops_and_continues_the_clock() {
        on_hosts(|| {
            let mut machine = two_vcpus();
            let mut before = machine.check("before");
            for round in 0..1000 {
                let clock = machine.vm.get_clock().unwrap().clock;
                assert!(clock.wrapping_sub(before) < 10_000, "{round}");
                pass(SECOND);
                let data = kvm_clock_data {
                    clock,
                    ..Default::default()
                };
                machine.vm.set_clock(&data).unwrap();
                // The guest may read the page of any vCPU, whichever runs first.
                machine.run(round % 2);
                before = machine.check("after it was set");
                assert!(
                    before - clock < 100_000,
                    "the time of the pause is not counted"
                );
            }
            machine.check_hour("later");
        });
    }

    #[test]
    fn a_pause_is_told_until_the_guest_has_read_it() {
        let mut machine = Machine::new();
        machine.add_vcpu();
        let flags = Machine::page(0) + 24;
        let paused = |machine: &Machine| machine.word(flags) >> 41 & 1 != 0;
        assert!(!paused(&machine));
        machine.vcpus[0].0.kvmclock_ctrl().unwrap();
        for _ in 0..2 {
            machine.run(0);
            assert!(paused(&machine));
            machine
                .vm
                .set_clock(&machine.vm.get_clock().unwrap())
                .unwrap();
        }
        machine.at(flags).fetch_and(!(1 << 41), Ordering::SeqCst);
        machine.run(0);
        assert!(!paused(&machine));
    }

    /// If a guest continues on a vCPU of another VM, the clock's page of this vCPU has a version that the guest has not
    /// seen before.
    #[test]
    fn the_version_of_a_page_counts_on() {
        for (before, after) in [(0, 2), (1000, 1002), (1001, 1004), (0xffff_fffe, 0)] {
            let mut machine = Machine::new();
            machine.at(Machine::page(0)).store(before, Ordering::SeqCst);
            machine.add_vcpu();
            assert_eq!(machine.word(Machine::page(0)), after);
        }
    }

    #[test]
    fn clocks_of_different_tscs_agree_and_are_not_stable() {
        on_hosts(|| {
            let mut machine = two_vcpus();
            let differ = |machine: &mut Machine, what: &str| {
                (0..2).for_each(|vcpu| machine.run(vcpu));
                machine.check_hour(what);
                let clock = machine.vm.get_clock().unwrap();
                assert_eq!(
                    (clock.flags, clock.host_tsc, clock.realtime),
                    (0, 0, 0),
                    "{what}"
                );
                assert!(!machine.is_stable(0) && !machine.is_stable(1), "{what}");
                // The client makes the vCPUs' TSCs equal again.
                let tsc = machine.tsc(0);
                (0..2).for_each(|vcpu| machine.write(vcpu, index::TSC, tsc, false));
                (0..2).for_each(|vcpu| machine.run(vcpu));
                machine.check_hour("they are equal");
                assert!(machine.is_stable(0) && machine.is_stable(1), "after {what}");
                assert_eq!(machine.vm.get_clock().unwrap().flags, FLAGS);
            };
            machine.write(1, index::TSC_ADJUST, 5_000_000, true);
            differ(&mut machine, "TSC_ADJUST");
            machine.write(0, index::TSC, 0, true);
            differ(&mut machine, "the TSC, by the guest");
            let far = machine.tsc(1) + (1 << 50);
            machine.write(1, index::TSC, far, false);
            differ(&mut machine, "the TSC, by the client");
            let offset =
                (machine.vcpus[0].0.lock().unwrap().machine.tsc.offset()).wrapping_sub(777);
            machine.vcpus[0]
                .0
                .lock()
                .unwrap()
                .machine
                .change_tsc(TscChange::Offset(offset));
            differ(&mut machine, "KVM_VCPU_TSC_OFFSET");
            let khz = host().khz;
            machine.vcpus[1].0.set_tsc_khz(khz / 3).unwrap();
            (0..2).for_each(|vcpu| machine.run(vcpu));
            machine.check_hour("another frequency");
            assert!(!machine.is_stable(0) && !machine.is_stable(1));
            machine.vcpus[0].0.set_tsc_khz(khz / 3).unwrap();
            differ_not(&mut machine);
        });
        fn differ_not(machine: &mut Machine) {
            let tsc = machine.tsc(0);
            (0..2).for_each(|vcpu| machine.write(vcpu, index::TSC, tsc, false));
            (0..2).for_each(|vcpu| machine.run(vcpu));
            machine.check_hour("one other frequency");
            assert!(machine.is_stable(0) && machine.is_stable(1));
        }
    }

    #[test]
    fn a_clock_goes_on_in_another_vm() {
        // The TSC frequencies of hosts to which the guest is migrated: the same frequency, as another process has
        // measured it; a frequency within the tolerance; and a different frequency.
        for (numerator, denominator) in [(1_000_001, 1_000_000), (1_000_200, 1_000_000), (4, 3)] {
            on_hosts(|| {
                let mut source = two_vcpus();
                source.check_hour("at the source");
                let khz = source.vcpus[0].0.tsc_khz().unwrap();
                let tscs = [0, 1].map(|vcpu| source.tsc(vcpu));
                let before = source.check("at the source");
                let data = source.vm.get_clock().unwrap();
                drop(source);
                pass(SECOND / 2);
                let Host { tsc, realtime, .. } = host();
                let wall = realtime + (u128::from(tsc) * 1_000_000 / u128::from(host().khz)) as u64;
                let khz_there = (u64::from(khz) * numerator / denominator) as u32;
                let there = 1_000_000_000_000_000;
                simulated::set(Some(Host {
                    tsc: there,
                    khz: khz_there,
                    realtime: wall - (u128::from(there) * 1_000_000 / u128::from(khz_there)) as u64,
                    step: 40,
                }));
                let mut target = Machine::new();
                target.vm.set_tsc_khz(khz).unwrap();
                target.add_vcpu();
                target.add_vcpu();
                for (vcpu, tsc) in tscs.into_iter().enumerate() {
                    target.write(vcpu, index::TSC, tsc, false);
                    assert_eq!(target.vcpus[vcpu].0.tsc_khz().unwrap(), khz);
                }
                target.vm.set_clock(&data).unwrap();
                target.write(0, REFERENCE_TSC, HYPERV_PAGE | 1, false);
                (0..2).for_each(|vcpu| target.run(vcpu));
                target.latest = before;
                let after = target.check("at the target");
                assert!(
                    (after - before).abs_diff(SECOND / 2) < 20_000,
                    "{}",
                    after - before
                );
                assert!(target.is_stable(0) && target.is_stable(1));
                target.check_hour("at the target");
            });
        }
    }

    #[test]
    fn the_wall_clock_and_timers_follow() {
        on_hosts(|| {
            let mut machine = two_vcpus();
            let timers = machine.vm.arch.clock.now();
            machine.check_hour("an hour");
            machine.write(0, index::KVM_WALL_CLOCK_NEW, WALL_CLOCK, true);
            machine.run(0);
            let boot = (machine.word(WALL_CLOCK) >> 32) * SECOND
                + machine.word(WALL_CLOCK + 8) as u32 as u64;
            let data = machine.vm.get_clock().unwrap();
            assert!(data.realtime.abs_diff(boot + data.clock) < TOLERANCE);
            // If a guest's TSC counts faster than the host's, the guest's timers still count with the guest's clock.
            let (begin, tsc) = (machine.vm.arch.clock.now(), machine.tsc(0));
            pass(3600 * SECOND);
            let (end, cycles) = (machine.vm.arch.clock.now(), machine.tsc(0) - tsc);
            let actual_khz = machine.vcpus[0].0.lock().unwrap().machine.tsc.actual_khz();
            let by_tsc = (u128::from(cycles) * 1_000_000 / u128::from(actual_khz)) as u64;
            assert!((end - begin).abs_diff(by_tsc) < 2_000);
            assert!(begin - timers > 3600 * SECOND - 2_000);
        });
    }

    /// The timer for a TSC deadline expires when the TSC reaches that value, even if the guest's TSC frequency is not
    /// the real one.
    #[test]
    fn a_deadline_by_the_tsc_is_one_by_the_clock() {
        on_hosts(|| {
            let vm = VmObject::new(Default::default(), None, Default::default()).unwrap();
            vm.create_irqchip().unwrap();
            let (vcpu, _fd) = vm.create_vcpu(0).unwrap();
            let khz = host().khz;
            for told in [khz, khz + khz / 5000, khz / 3] {
                vcpu.set_tsc_khz(told).unwrap();
                let mut inner = vcpu.lock().unwrap();
                let machine = &mut inner.machine;
                let (begin, tsc) = (vm.arch.clock.now(), machine.guest_tsc());
                let mut lapic = machine.common.lapic().unwrap();
                lapic.write(lapic::reg::LVT_TIMER, 2 << 17 | 0x40, begin);
                drop(lapic);
                pass(3600 * SECOND);
                let end = machine.guest_tsc();
                let mut earlier = host();
                earlier.tsc -= earlier.khz as u64 * 1000 * 3600;
                simulated::set(Some(earlier));
                msrs::write_machine(machine, index::TSC_DEADLINE, end, true).unwrap();
                let deadline = machine.common.lapic().unwrap().deadline().unwrap();
                // A ratio of frequencies is rounded to 2^-32.
                let error = (deadline - begin).abs_diff(3600 * SECOND);
                assert!(end > tsc && error < 5_000, "{told} kHz: {error}");
            }
        });
    }

    /// A [`Machine`] that threads share.
    struct Shareable(Machine);

    // SAFETY: the machine's pointer refers to guest memory, whose words the threads access atomically.
    unsafe impl Sync for Shareable {}

    impl Shareable {
        fn with_two_vcpus() -> Self {
            let mut machine = Machine::new();
            machine.add_vcpu();
            machine.add_vcpu();
            Shareable(machine)
        }
    }

    /// Two threads read vCPUs' pages, one thread reads KVM_GET_CLOCK, and one thread makes the vCPUs write their pages
    /// again and again. No thread reads a time before an earlier reading.
    #[test]
    fn readings_of_several_threads_never_go_back() {
        let readers = Shareable::with_two_vcpus();
        let (latest, ends) = (AtomicU64::new(0), AtomicBool::new(false));
        let check = |what: &str, read: &dyn Fn() -> u64| {
            let mut worst = 0;
            while !ends.load(Ordering::Relaxed) {
                let before = latest.load(Ordering::SeqCst);
                let now = read();
                worst = worst.max(before.saturating_sub(now));
                latest.fetch_max(now, Ordering::SeqCst);
            }
            assert_eq!(worst, 0, "{what} goes back by so many nanoseconds");
        };
        let (readers, check) = (&readers, &check);
        std::thread::scope(|scope| {
            let threads = [0, 1]
                .map(|vcpu| scope.spawn(move || check("a page", &|| readers.0.page_clock(vcpu))));
            let clock = scope.spawn(|| {
                check("KVM_GET_CLOCK", &|| readers.0.vm.get_clock().unwrap().clock);
            });
            for round in 0..100 {
                // Gives the other threads time.
                std::thread::sleep(Duration::from_millis(1));
                readers.0.enable(round % 2);
            }
            ends.store(true, Ordering::Relaxed);
            threads
                .into_iter()
                .for_each(|thread| thread.join().unwrap());
            clock.join().unwrap();
        });
    }

    /// If the guest on one vCPU has seen the new clock, no other vCPU's guest sees the old clock after that.
    #[test]
    fn guests_see_a_new_clock_at_the_same_time() {
        // The guest's code. Register SI has the address of the vCPU's page. The code compares the upper half of the
        // page's time. The word at 0x7000 is the greatest value that any vCPU has seen. The byte at 0x7008 is set if a
        // vCPU has seen a smaller value later. The byte at 0x7010 ends the loop.
        const WATCH: [u8; 40] = [
            0x80, 0x3e, 0x10, 0x70, 0x00, // again: cmp byte [0x7010], 0
            0x75, 0x1d, // jne end
            0x66, 0xa1, 0x00, 0x70, // mov eax, [0x7000]
            0x66, 0x8b, 0x5c, 0x14, // mov ebx, [si + 20]
            0x66, 0x39, 0xc3, // cmp ebx, eax
            0x72, 0x0b, // jb back
            0x74, 0xea, // je again
            0xf0, 0x66, 0x0f, 0xb1, 0x1e, 0x00, 0x70, // lock cmpxchg [0x7000], ebx
            0xeb, 0xe1, // jmp again
            0xc6, 0x06, 0x08, 0x70, 0x01, // back: mov byte [0x7008], 1
            0xf4, 0xf4, 0xf4, 0xf4, // end: hlt
        ];
        let machine = Shareable::with_two_vcpus();
        for (word, bytes) in WATCH.as_chunks::<8>().0.iter().enumerate() {
            let at = CODE + 0x100 + 8 * word as u64;
            machine
                .0
                .at(at)
                .store(u64::from_le_bytes(*bytes), Ordering::SeqCst);
        }
        let machine = &machine;
        std::thread::scope(|scope| {
            for vcpu in 0..2 {
                scope.spawn(move || {
                    let regs = kvm_regs {
                        rip: CODE + 0x100,
                        rsi: Machine::page(vcpu),
                        rflags: 2,
                        ..Default::default()
                    };
                    machine.0.vcpus[vcpu].0.set_regs(&regs).unwrap();
                    machine.0.vcpus[vcpu].0.run().unwrap();
                });
            }
            for round in 1..=200 {
                let data = kvm_clock_data {
                    clock: round << 32,
                    ..Default::default()
                };
                machine.0.vm.set_clock(&data).unwrap();
                // Waits until a guest has seen the new clock.
                let begin = Instant::now();
                while machine.0.word(0x7000) < round && machine.0.word(0x7008) == 0 {
                    if begin.elapsed() > Duration::from_secs(20) {
                        machine.0.at(0x7008).store(2, Ordering::SeqCst);
                    }
                    std::thread::yield_now();
                }
            }
            machine.0.at(0x7010).store(1, Ordering::SeqCst);
        });
        assert_eq!(
            machine.0.word(0x7008),
            0,
            "1: the old clock after the new one; 2: no new clock"
        );
    }
}
