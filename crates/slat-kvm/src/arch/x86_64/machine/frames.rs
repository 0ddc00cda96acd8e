//! Walks the guest's stack: starts with RIP, and follows frame pointers to find return addresses.
//!
//! RBP is not trusted, because code without frame pointers uses it for other values. A frame is valid if it is aligned,
//! above the previous frame and not far from it, and if its return address is in the same half of the address space as
//! RIP. There are at most [`MOST`] frames. The walk ends at a frame that is not valid, or that [`super::peek`] cannot
//! read.

use super::VcpuMachine;
use super::peek::Peek;
use slat_x86::state::control;
use slat_x86::{Cpu, State};

/// The greatest number of addresses in a stack.
pub(crate) const MOST: usize = 64;
/// The greatest distance, in bytes, of a frame from the stack pointer or from the previous frame.
const FARTHEST: u64 = 64 << 10;
const RSP: usize = 4;
const RBP: usize = 5;

impl VcpuMachine {
    /// Writes the linear addresses of the guest's stack to `stack`, the innermost first. Returns the number of
    /// addresses, which is at least 1. `cpu` is this vCPU's CPU, which must not run meanwhile. Call inside the engine's
    /// reader section.
    pub(crate) fn stack(&self, cpu: &Cpu, stack: &mut [u64; MOST]) -> usize {
        let state = &cpu.state;
        match (Frames::of(state), self.peek(cpu)) {
            (Some(frames), Some(mut memory)) => frames.walk(state, &mut memory, stack),
            _ => {
                stack[0] = state.cs.base.wrapping_add(state.rip);
                1
            }
        }
    }
}

/// The layout of stack frames in one mode of the CPU.
struct Frames {
    /// The size in bytes of an address in a stack frame.
    size: usize,
    /// The bits of an address that exist in this mode.
    mask: u64,
    code_base: u64,
    stack_base: u64,
}

impl Frames {
    /// Returns the layout of the current mode. `None`: the CPU is in a 16-bit mode, in which frames are not walked.
    fn of(state: &State) -> Option<Self> {
        let is_long = state.efer & control::EFER_LMA != 0 && state.cs.long();
        match (is_long, state.cs.big()) {
            (true, _) => Some(Frames {
                size: 8,
                mask: u64::MAX,
                code_base: 0,
                stack_base: 0,
            }),
            (false, true) => Some(Frames {
                size: 4,
                mask: u32::MAX.into(),
                code_base: state.cs.base,
                stack_base: state.ss.base,
            }),
            (false, false) => None,
        }
    }

    /// Writes the addresses of the guest's stack to `stack`, and returns their number, for [`VcpuMachine::stack`].
    fn walk(&self, state: &State, memory: &mut Peek<'_>, stack: &mut [u64; MOST]) -> usize {
        let code = |address: u64| self.code_base.wrapping_add(address) & self.mask;
        stack[0] = code(state.rip);
        let bytes = self.size as u64;
        let mut below = state.gpr[RSP] & self.mask;
        let mut frame = state.gpr[RBP] & self.mask;
        for (count, address) in stack.iter_mut().enumerate().skip(1) {
            let is_near = frame >= below && frame - below <= FARTHEST;
            if !is_near || !frame.is_multiple_of(bytes) {
                return count;
            }
            let mut word = |at: u64| {
                let linear = self.stack_base.wrapping_add(at) & self.mask;
                memory.word(linear, self.size)
            };
            let (Some(next), Some(caller)) = (word(frame), word(frame.wrapping_add(bytes))) else {
                return count;
            };
            if caller == 0 || half(caller) != half(state.rip) {
                return count;
            }
            // If the call is the last instruction of a function, the return address is already in the next function. So
            // the address of the call's last byte is stored instead.
            *address = code(caller - 1);
            (below, frame) = (frame.saturating_add(bytes), next);
        }
        MOST
    }
}

/// Returns a number that identifies the half of the address space that contains `address`. For a word that is not an
/// address, the number belongs to neither half. All return addresses of one stack are in one half: the kernel's, or a
/// user program's.
fn half(address: u64) -> i64 {
    // Bits 63 to 56 are equal in every canonical address of 57 bits.
    address as i64 >> 56
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::entered::Entered;
    use crate::vcpu::Inner;
    use crate::vm::VmObject;
    use kvm_bindings::kvm_userspace_memory_region;
    use slat::{Access, Gpa};
    use slat_x86::Segment;

    const PAGE: usize = 4096;
    const PAGES: usize = 16;
    const PRESENT_WRITABLE: u64 = 3;
    /// A high linear address at which the guest's memory is also mapped.
    const HIGH: u64 = 0xffff_8000_0000_0000;
    const STACK: u64 = 0x8000;

    /// Guest memory with page tables in pages 1 to 4, as words.
    struct Memory(Vec<u64>, usize);

    impl Memory {
        fn new() -> Self {
            let words = vec![0u64; (PAGES + 1) * PAGE / 8];
            let first = words.as_ptr().align_offset(PAGE);
            let mut memory = Memory(words, first);
            memory.put(0x1000, 0x2000 | PRESENT_WRITABLE);
            memory.put(0x1800, 0x2000 | PRESENT_WRITABLE);
            memory.put(0x2000, 0x3000 | PRESENT_WRITABLE);
            memory.put(0x3000, 0x4000 | PRESENT_WRITABLE);
            for page in 0..PAGES as u64 {
                memory.put(0x4000 + 8 * page, page << 12 | PRESENT_WRITABLE);
            }
            memory
        }

        fn put(&mut self, gpa: u64, word: u64) {
            self.0[self.1 + gpa as usize / 8] = word;
        }

        /// Stores a frame at `gpa`: the caller's frame pointer `next`, and the return address `caller`.
        fn frame(&mut self, gpa: u64, next: u64, caller: u64) {
            self.put(gpa, next);
            self.put(gpa + 8, caller);
        }

        /// Returns the stack of a CPU with this memory. `set` changes the state of a 64-bit CPU.
        fn stack(&self, set: impl FnOnce(&mut State)) -> Vec<u64> {
            let before = self.0.clone();
            let vm = VmObject::new(Default::default(), None, Default::default()).unwrap();
            vm.set_user_memory_region(&kvm_userspace_memory_region {
                slot: 0,
                flags: 0,
                guest_phys_addr: 0,
                memory_size: (PAGES * PAGE) as u64,
                userspace_addr: &raw const self.0[self.1] as u64,
            })
            .unwrap();
            let (vcpu, _fd) = vm.create_vcpu(0).unwrap();
            let mut inner = vcpu.lock().unwrap();
            let Inner { cpu, machine, .. } = &mut *inner;
            let mut machine = Entered::enter(machine);
            for page in 0..PAGES as u64 {
                while machine
                    .memory
                    .engine
                    .translate(Gpa(page << 12), Access::Write)
                    .is_err()
                {
                    machine.memory.engine.quiesce();
                }
            }
            let state = &mut cpu.state;
            state.cr0 |= control::CR0_PG | 1;
            state.cr3 = 0x1000;
            state.cr4 |= control::CR4_PAE;
            state.efer |= control::EFER_LMA | control::EFER_LME;
            // L: the code segment has 64-bit code.
            state.cs = Segment {
                base: 0,
                rights: 0xa09b,
                ..state.cs
            };
            state.rip = 0x1234;
            state.gpr[RSP] = STACK;
            state.gpr[RBP] = STACK;
            set(state);
            let mut stack = [0; MOST];
            let (faults, count) = (
                machine.memory.engine.stats().pf_taken,
                machine.stack(cpu, &mut stack),
            );
            assert_eq!(machine.memory.engine.stats().pf_taken, faults);
            assert_eq!(self.0, before, "guest memory was changed");
            stack[..count].to_vec()
        }
    }

    #[test]
    fn frame_pointers_lead_to_the_callers() {
        let mut memory = Memory::new();
        memory.frame(STACK, STACK + 0x100, 0x5001);
        memory.frame(STACK + 0x100, STACK + 0x2000, 0x6001);
        memory.frame(STACK + 0x2000, 0, 0x7001);
        assert_eq!(memory.stack(|_| {}), [0x1234, 0x5000, 0x6000, 0x7000]);
        memory.frame(STACK, HIGH + STACK + 0x100, 0x5001);
        let high = memory.stack(|state| {
            state.gpr[RSP] = HIGH + STACK;
            state.gpr[RBP] = HIGH + STACK;
        });
        assert_eq!(high, [0x1234, 0x5000, 0x6000]);
    }

    #[test]
    fn code_of_32_bits_has_short_frames_and_segments() {
        let mut memory = Memory::new();
        memory.put(STACK, (0x5001 << 32) | (STACK - 0x1000 + 8));
        memory.put(STACK + 8, 0x6001 << 32);
        let stack = memory.stack(|state| {
            state.efer = 0;
            state.cr0 &= !control::CR0_PG;
            (state.cs.rights, state.cs.base, state.ss.base) = (0xc09b, 0x10_0000, 0x1000);
            // A 32-bit CPU does not see the upper bits.
            state.gpr[RSP] = 7 << 32 | (STACK - 0x1000);
            state.gpr[RBP] = 9 << 32 | (STACK - 0x1000);
        });
        assert_eq!(stack, [0x10_1234, 0x10_5000, 0x10_6000]);
    }

    #[test]
    fn garbage_ends_the_stack() {
        let mut memory = Memory::new();
        let not_mapped = (PAGES * PAGE) as u64;
        // Each of these values of the next frame pointer ends the stack: the frame's own address; an address below the
        // frame; an odd address; a distant address; an address in no memslot; an address in a page that the guest does
        // not map; the last address.
        for next in [
            STACK,
            8,
            STACK + 0x101,
            STACK + (64 << 10) + 16,
            1 << 40,
            not_mapped,
            u64::MAX - 7,
        ] {
            memory.frame(STACK, next, 0x5001);
            assert_eq!(memory.stack(|_| {}), [0x1234, 0x5000], "{next:#x}");
            assert_eq!(
                memory.stack(|state| state.gpr[RBP] = next),
                match next {
                    STACK => vec![0x1234, 0x5000],
                    _ => vec![0x1234],
                }
            );
        }
        for cr3 in [0x5000, 0x3000, u64::MAX, 1 << 45] {
            assert_eq!(memory.stack(|state| state.cr3 = cr3), [0x1234], "{cr3:#x}");
        }
        let at_the_end = memory.stack(|state| {
            state.gpr[RSP] = u64::MAX - 7;
            state.gpr[RBP] = u64::MAX - 7;
        });
        assert_eq!(at_the_end, [0x1234]);
    }

    #[test]
    fn a_caller_is_in_the_same_half_of_the_address_space() {
        let mut memory = Memory::new();
        for caller in [HIGH + 1, 0x1f75_d66f_e18b_25ff, 0] {
            memory.frame(STACK, 0, caller);
            assert_eq!(memory.stack(|_| {}), [0x1234], "{caller:#x}");
        }
        memory.frame(STACK, 0, HIGH + 0x10);
        let kernel = memory.stack(|state| state.rip = HIGH);
        assert_eq!(kernel, [HIGH, HIGH + 0xf]);
    }

    #[test]
    fn code_of_16_bits_is_not_walked() {
        let mut memory = Memory::new();
        memory.frame(STACK, 0, 0x5001);
        let real = memory.stack(|state| {
            (state.efer, state.cr0) = (0, 0);
            (state.cs.rights, state.cs.base) = (0x9b, 0xf_0000);
        });
        assert_eq!(real, [0xf_1234]);
    }

    #[test]
    fn a_stack_is_bounded() {
        let mut memory = Memory::new();
        for frame in 0..2 * MOST as u64 {
            memory.frame(STACK + 16 * frame, STACK + 16 * (frame + 1), 0x5001);
        }
        assert_eq!(memory.stack(|_| {}).len(), MOST);
    }
}
