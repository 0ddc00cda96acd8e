//! Plans how a call site is rewritten, and makes the site's stub.
//!
//! slat replaces `svc #0`, an aligned instruction of four bytes, by the aligned instruction `b`, which reaches 128
//! megabytes in both directions. The `b` leads to a stub in memory nearby. So no instruction moves: a thread that
//! returns from the kernel, or is about to make the call, finds the code that it expects. All sites in a range of code
//! can be found, because each instruction begins at an aligned address.
//!
//! # Other threads
//! Other threads may execute the pages that are replaced ([`dispatch::sites`](crate::dispatch)). Arm ARM, section
//! B2.2.5, "Concurrent modification and execution of instructions", names the instructions of which one may replace
//! another while a processor executes them without synchronisation: B, B.cond, BL, BRK, CBNZ, CBZ, HVC, ISB, NOP, SMC,
//! SVC, TBNZ, TBZ. The processor then executes the old instruction or the new one. `svc` becomes `b`, and all other
//! words of a page keep their values. The stub is written and mapped before; the kernel cleans the data cache and
//! invalidates the instruction cache for the pages that it maps as executable.

use super::code::{SVC, calls};
use super::site_entry::{LEAVE, PASS, Site};
use std::mem::offset_of;
use std::ops::Range;

/// The distance in bytes that `b` reaches.
const BRANCH: usize = 128 << 20;
/// The maximum distance of a stub from the text.
pub const REACH: usize = BRANCH;
/// The size of an instruction in bytes.
const INSTRUCTION: usize = size_of::<u32>();

/// Returns `b`, at the address `from`, to the address `to`. `None`: `to` is too far away, or not aligned.
fn branch(from: usize, to: usize) -> Option<u32> {
    const OPCODE: u32 = 0x1400_0000;
    const DISTANCE: u32 = 0x03ff_ffff;
    let distance = to.wrapping_sub(from) as isize;
    let reached = -(BRANCH as isize)..BRANCH as isize;
    if !reached.contains(&distance) || distance % INSTRUCTION as isize != 0 {
        return None;
    }
    Some(OPCODE | (distance / INSTRUCTION as isize) as u32 & DISTANCE)
}

/// A plan to rewrite one call site (a call instruction of the program).
#[derive(Debug)]
pub struct Plan {
    /// The address of the `svc #0`.
    site: usize,
}

impl Plan {
    /// The size of a call site's stub in bytes.
    pub const STUB: usize = size_of::<Stub>();

    /// Plans to rewrite the `svc #0` that ends at the address `back`. `code` is the text that begins at the address
    /// `start`. `None`: no `svc #0` ends at `back`.
    pub fn of_site(code: &[u8], start: usize, back: usize) -> Option<Self> {
        let site = back.checked_sub(INSTRUCTION)?;
        let word = code.get(site.checked_sub(start)?..back.checked_sub(start)?)?;
        (site.is_multiple_of(INSTRUCTION) && word == SVC.to_le_bytes()).then_some(Plan { site })
    }

    /// Plans to rewrite all call sites of the code that begins at `start`, in the order of their addresses. `None`:
    /// `start` is not aligned, so sites would be missed.
    pub fn of_all(code: &[u8], start: usize) -> Option<Vec<Self>> {
        let is_aligned = start.is_multiple_of(INSTRUCTION);
        let plans = calls(code).map(|offset| Plan {
            site: start + offset,
        });
        is_aligned.then(|| plans.collect())
    }

    /// Returns the range of addresses whose bytes change.
    pub fn changes(&self) -> Range<usize> {
        self.site..self.site + INSTRUCTION
    }

    /// Returns the stub, which will be at the address `stub`, and leads to the function `entry`. `None`: the address is
    /// too far away from the call site.
    pub fn stub(&self, entry: usize, stub: usize) -> Option<[u8; Self::STUB]> {
        Some(Stub::new(self.site + INSTRUCTION, entry, stub)?.bytes())
    }

    /// Makes the plan's changes in `memory`, a copy of the memory that begins at the address `start`. The call site's
    /// stub is at `stub`. `None`: the stub is too far away.
    pub fn change(&self, memory: &mut [u8], start: usize, stub: usize) -> Option<()> {
        let word = branch(self.site, stub)?;
        memory[self.site - start..][..INSTRUCTION].copy_from_slice(&word.to_le_bytes());
        Some(())
    }
}

/// The code to which a rewritten call site jumps. A jump to an address in memory needs a register, so the code first
/// stores X16 and X17 below the program's stack pointer. That memory is free, because AAPCS64 has no red zone. Then the
/// code loads the address of `site`, and jumps to the entry.
#[repr(C)]
struct Stub {
    enter: [u32; 4],
    leave: [u32; 2],
    pass: [u32; 4],
    site: Site,
}

const _: () = assert!(offset_of!(Stub, site) - offset_of!(Stub, leave) == LEAVE);
const _: () = assert!(offset_of!(Stub, site) - offset_of!(Stub, pass) == PASS);

impl Stub {
    /// Makes the stub, at the address `at`, of the call site that ends at `back`.
    fn new(back: usize, entry: usize, at: usize) -> Option<Self> {
        /// stp x16, x17, [sp, #-16]!
        const PUSH: u32 = 0xa9bf_47f0;
        /// ldp x16, x17, [sp], #16
        const POP: u32 = 0xa8c1_47f0;
        /// ldr x17, [x16, #8]
        const LOAD: u32 = 0xf940_0611;
        /// br x17
        const JUMP: u32 = 0xd61f_0220;
        /// adr x16, #0
        const ADDRESS: u32 = 0x1000_0010;
        /// An instruction that is never executed: udf #0.
        const UNDEFINED: u32 = 0;
        const _: () = assert!(offset_of!(Site, entry) == 8);
        let site = (offset_of!(Stub, site) - INSTRUCTION) as u32;
        let from = |part: usize, index: usize| branch(at + part + index * INSTRUCTION, back);
        Some(Stub {
            enter: [PUSH, ADDRESS | (site / 4) << 5, LOAD, JUMP],
            leave: [POP, from(offset_of!(Stub, leave), 1)?],
            pass: [POP, SVC, from(offset_of!(Stub, pass), 2)?, UNDEFINED],
            site: Site { back, entry },
        })
    }

    /// Returns the stub as bytes.
    fn bytes(&self) -> [u8; size_of::<Self>()] {
        // SAFETY: the stub consists of integers and arrays of integers, without padding between them.
        unsafe { std::mem::transmute_copy(self) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_branch_reaches_128_megabytes() {
        const MIDDLE: usize = 0x4000_0000;
        assert_eq!(branch(MIDDLE, MIDDLE), Some(0x1400_0000));
        assert_eq!(branch(MIDDLE, MIDDLE + 4), Some(0x1400_0001));
        assert_eq!(branch(MIDDLE, MIDDLE - 4), Some(0x17ff_ffff));
        assert_eq!(branch(MIDDLE, MIDDLE + BRANCH - 4), Some(0x15ff_ffff));
        assert_eq!(branch(MIDDLE, MIDDLE - BRANCH), Some(0x1600_0000));
        assert_eq!(branch(MIDDLE, MIDDLE + BRANCH), None);
        assert_eq!(branch(MIDDLE, MIDDLE - BRANCH - 4), None);
        assert_eq!(branch(MIDDLE, MIDDLE + 2), None);
    }

    #[test]
    fn a_site_is_rewritten_where_the_instruction_is() {
        const START: usize = 0x40_0000;
        let words = [0xd503_201f, SVC, 0xd65f_03c0, SVC];
        let mut code: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        assert!(Plan::of_site(&code, START, START + 4).is_none());
        assert!(Plan::of_site(&code, START, START + 6).is_none());
        assert!(Plan::of_site(&code, START, START).is_none());
        assert!(Plan::of_site(&code, START, START + 20).is_none());
        let plan = Plan::of_site(&code, START, START + 8).unwrap();
        assert_eq!(plan.changes(), START + 4..START + 8);
        assert!(plan.change(&mut code, START, START + (1 << 30)).is_none());
        plan.change(&mut code, START, START - 0x1000).unwrap();
        let word = |index: usize| u32::from_le_bytes(code[4 * index..][..4].try_into().unwrap());
        assert_eq!(Some(word(1)), branch(START + 4, START - 0x1000));
        assert_eq!([word(0), word(2), word(3)], [words[0], words[2], SVC]);
        let all = Plan::of_all(&code, START).unwrap();
        assert_eq!(all.len(), 1);
        assert_eq!(all[0].changes(), START + 12..START + 16);
        assert!(Plan::of_all(&code, START + 2).is_none());
        assert!(plan.stub(0, START + (1 << 30)).is_none());
    }

    /// Executes a rewritten call site, whose stub leads to a function of this test.
    #[test]
    fn a_rewritten_site_leads_to_its_entry_and_back_with_all_registers() {
        use std::arch::{asm, naked_asm};

        /// Returns to the program as the real entry does, with another value in X0.
        #[unsafe(naked)]
        unsafe extern "C" fn entry() {
            naked_asm!("mov x0, 7", "sub x16, x16, {leave}", "br x16", leave = const LEAVE)
        }
        /// Makes the stub execute the system call.
        #[unsafe(naked)]
        unsafe extern "C" fn pass() {
            naked_asm!("sub x16, x16, {pass}", "br x16", pass = const PASS)
        }
        // The code is at the beginning of a page; its stub is in the next page.
        const PAGE: usize = 1 << 16;
        let code: Vec<u8> = [SVC, 0xd65f_03c0]
            .iter()
            .flat_map(|word| word.to_le_bytes())
            .collect();
        for (entry, expected) in [
            (entry as *const () as usize, 7),
            (pass as *const () as usize, std::process::id() as usize),
        ] {
            // SAFETY: new memory, which is written before it becomes executable.
            let at = unsafe {
                let access = libc::PROT_READ | libc::PROT_WRITE;
                let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
                let at = libc::mmap(std::ptr::null_mut(), 2 * PAGE, access, flags, -1, 0) as usize;
                let memory = std::slice::from_raw_parts_mut(at as *mut u8, 2 * PAGE);
                memory[..code.len()].copy_from_slice(&code);
                let plan = Plan::of_site(&code, at, at + 4).unwrap();
                memory[PAGE..][..Plan::STUB].copy_from_slice(&plan.stub(entry, at + PAGE).unwrap());
                plan.change(memory, at, at + PAGE).unwrap();
                let access = libc::PROT_READ | libc::PROT_EXEC;
                libc::mprotect(at as *mut _, 2 * PAGE, access);
                at
            };
            let (result, x16, x17, moved): (usize, usize, usize, usize);
            // SAFETY: the code returns; the call has no arguments.
            unsafe {
                asm!(
                    "mov x20, sp",
                    "mov x16, 16",
                    "mov x17, 17",
                    "blr {code}",
                    "mov x21, sp",
                    "sub x20, x21, x20",
                    code = in(reg) at,
                    in("x8") libc::SYS_getpid,
                    lateout("x0") result,
                    lateout("x16") x16,
                    lateout("x17") x17,
                    out("x20") moved,
                    out("x21") _,
                    clobber_abi("C"),
                );
                libc::munmap(at as *mut _, 2 * PAGE);
            }
            assert_eq!([result, x16, x17, moved], [expected, 16, 17, 0]);
        }
    }
}
