//! Plans how a call site is rewritten, and makes the site's stub.
//!
//! A `syscall` has two bytes. slat replaces it by a short jump, which also has two bytes and reaches 128 bytes. The
//! short jump leads to padding between two functions, if there are five bytes of padding; from there a longer jump
//! leads to a stub in memory nearby. So no instruction moves: a thread that returns from the kernel, or is about to
//! make the call, finds the code that it expects.
//!
//! A site is not rewritten if no such padding is near. On some processors, which the next section names, a site is
//! also not rewritten if its two bytes lie in two aligned quadwords.
//!
//! # Other threads
//! Other threads may execute the pages that are replaced ([`dispatch::sites`](crate::dispatch)). A processor may
//! execute the old instruction or the new one; it never reaches the longer jump before that jump exists. But it must
//! not execute the first byte of one with the second byte of the other:
//!
//! * Intel SDM, volume 3A, "Handling Self- and Cross-Modifying Code" (section 10.1.3; in older editions 9.1.3 or 8.1.3)
//!   has one algorithm for changing code that another processor may execute: the other processor executes a serializing
//!   instruction before the new code. The SDM does not promise that a plain store of two bytes is seen as a whole. slat
//!   follows the algorithm, because each other processor is interrupted for the invalidation ("Propagation of
//!   Paging-Structure Changes to Multiple Processors", section 5.10.5, formerly 4.10.5), and INVLPG, MOV to CR3 and
//!   IRET are serializing ("Serializing Instructions", section 10.3, formerly 9.3 or 8.3).
//! * Processors of AMD with INVLPGB invalidate without an interrupt (Linux 6.15). AMD APM, volume 2, section 7.6.1,
//!   "Cross-Modifying Code", allows asynchronous modification by a change within a naturally aligned quadword. So on
//!   these processors slat does not rewrite sites that lie in two quadwords.

use super::code::{SYSCALL, padding};
use super::site_entry::Site;
use slat_kvm::cpuid::host_leaf;
use std::mem::offset_of;
use std::ops::Range;

/// The maximum distance of a stub from the text.
pub const REACH: usize = 512 << 20;

/// `jmp`, with its distance.
const LONG: [u8; 5] = [0xe9, 0, 0, 0, 0];

/// Whether the two bytes at `site` lie within one aligned quadword. If so, slat may change the bytes while another
/// processor executes them, without an interrupt of that processor: see the module's documentation.
fn is_within_quadword(site: usize) -> bool {
    const QUADWORD: usize = 8;
    site % QUADWORD != QUADWORD - 1
}

/// Whether the processor has INVLPGB, by which Linux invalidates translations of other processors without an interrupt
/// (AMD APM, volume 3, appendix E.4.7).
fn has_invlpgb() -> bool {
    const LEAF: u32 = 0x8000_0008;
    const INVLPGB: u32 = 1 << 3;
    host_leaf(LEAF, 0).ebx & INVLPGB != 0
}

/// A plan to rewrite one call site (a call instruction of the program).
#[derive(Debug)]
pub struct Plan {
    /// The address after the call site.
    back: usize,
    /// The address of the padding.
    padding: usize,
}

impl Plan {
    /// The size of a call site's stub in bytes.
    pub const STUB: usize = size_of::<Stub>();

    /// Plans to rewrite the `syscall` that ends at the address `back`. `code` is the text that begins at `start`, a
    /// page's address. `None`: the call site cannot be rewritten.
    pub fn of_site(code: &[u8], start: usize, back: usize) -> Option<Self> {
        let site = back - SYSCALL.len();
        // The text begins at a page's boundary, so offsets in the text have the same alignment as addresses.
        let padding = start + padding(code, back - start, LONG.len())?;
        let is_call = code[..back - start].ends_with(&SYSCALL);
        let is_changed_at_once = !has_invlpgb() || is_within_quadword(site);
        i8::try_from(padding as isize - back as isize).ok()?;
        (is_call && is_changed_at_once).then_some(Plan { back, padding })
    }

    /// Plans to rewrite all call sites of the code that begins at `start`. Always `None` on x86-64: instructions have
    /// various lengths, so it is not known where they begin, and many sites cannot be rewritten.
    pub fn of_all(_code: &[u8], _start: usize) -> Option<Vec<Self>> {
        None
    }

    /// Returns the range of addresses whose bytes change.
    pub fn changes(&self) -> Range<usize> {
        let site = self.back - SYSCALL.len();
        site.min(self.padding)..site.max(self.padding) + LONG.len()
    }

    /// Returns the stub, which leads to the function `entry`. The stub works at any address, so the result is never
    /// `None`.
    pub fn stub(&self, entry: usize, _stub: usize) -> Option<[u8; Self::STUB]> {
        Some(Stub::new(self.back, entry).bytes())
    }

    /// Makes the plan's changes in `memory`, a copy of the memory that begins at the address `start`. The call site's
    /// stub is at `stub`. `None`: the stub is too far away.
    pub fn change(&self, memory: &mut [u8], start: usize, stub: usize) -> Option<()> {
        let distance = i32::try_from(stub as isize - (self.padding + LONG.len()) as isize).ok()?;
        let short = (self.padding as isize - self.back as isize) as u8;
        let mut put = |address: usize, bytes: &[u8]| {
            memory[address - start..][..bytes.len()].copy_from_slice(bytes);
        };
        let mut long = LONG;
        long[1..].copy_from_slice(&distance.to_le_bytes());
        put(self.padding, &long);
        put(self.back - SYSCALL.len(), &[0xeb, short]);
        Some(())
    }
}

/// The code to which a rewritten call site jumps. The stub loads the address of `site`, and jumps to `entry`. The stub
/// works at any address.
#[repr(C)]
struct Stub {
    enter: [u8; 16],
    site: Site,
    entry: usize,
}

impl Stub {
    /// Makes the stub of the call site that ends at `back`.
    fn new(back: usize, entry: usize) -> Self {
        let distance = |from: usize, to: usize| (to as i32 - from as i32).to_le_bytes();
        let site = offset_of!(Stub, site);
        let mut enter = [0xcc; 16];
        // lea rcx, [rip + site]; jmp [rip + entry]
        enter[..3].copy_from_slice(&[0x48, 0x8d, 0x0d]);
        enter[3..7].copy_from_slice(&distance(7, site + offset_of!(Site, back)));
        enter[7..9].copy_from_slice(&[0xff, 0x25]);
        enter[9..13].copy_from_slice(&distance(13, offset_of!(Stub, entry)));
        // syscall; jmp [rip + back]
        let mut call = [0x0f, 0x05, 0xff, 0x25, 0, 0, 0, 0];
        call[4..].copy_from_slice(&distance(
            offset_of!(Site, call) + 8,
            offset_of!(Site, back),
        ));
        Stub {
            enter,
            site: Site { back, call },
            entry,
        }
    }

    /// Returns the stub as bytes.
    fn bytes(&self) -> [u8; size_of::<Self>()] {
        // SAFETY: the stub consists of integers and arrays of bytes, without padding between them.
        unsafe { std::mem::transmute_copy(self) }
    }
}
