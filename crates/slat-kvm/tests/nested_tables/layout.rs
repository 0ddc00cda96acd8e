//! The layout of guest memory, and the random entries that are stored to tables.

/// The size of a page in bytes.
pub const PAGE: u64 = 0x1000;

/// Flags of entries of page tables.
pub const P: u64 = 1 << 0;
pub const RW: u64 = 1 << 1;
pub const US: u64 = 1 << 2;
pub const A: u64 = 1 << 5;
pub const D: u64 = 1 << 6;
pub const PS: u64 = 1 << 7;
pub const G: u64 = 1 << 8;
pub const NX: u64 = 1 << 63;
/// The bits of an entry that contain an address.
pub const ADDRESS: u64 = 0x000f_ffff_ffff_f000;

/// The size of the hypervisor's system slot, in bytes. The first pages of the slot are only used through a nested
/// page of 1 GiB. Then come code, control blocks, and tables. These tables are fixed, except for the later entries of
/// the roots.
pub const SYSTEM_BYTES: u64 = 0x20_0000;
/// The address of the code: vmrun; hlt
pub const VMRUN: u64 = 0x8000;
/// The address of the code: invlpga; hlt
pub const INVLPGA: u64 = 0x8010;
/// The address of the code: mov [rdi], rsi; hlt
pub const STORE: u64 = 0x8020;
/// The control block of the first vCPU. The control block of the second vCPU is in the next page.
pub const VMCB: u64 = 0x9000;
pub const HOST_SAVE: u64 = 0xb000;
/// The hypervisor's own tables, which map each page of its memory to itself.
pub const OWN: u64 = 0xc000;
/// The address of the nested guest's code: mov rax, [rdi]; vmmcall. The nested guest, its physical memory and the
/// hypervisor have this code at the same address.
pub const LOAD: u64 = 0x1_0000;
/// The address of the code: mov [rdi], rsi; vmmcall
pub const NESTED_STORE: u64 = 0x1_0010;
/// The address of the code: jmp rdi
pub const JUMP: u64 = 0x1_0020;
/// The address of the code: invlpg [rdi]; vmmcall
pub const INVLPG: u64 = 0x1_0030;
/// The address of the code: mov rax, cr3; mov cr3, rax; vmmcall
pub const LOAD_CR3: u64 = 0x1_0040;
/// The nested guest's tables: the root, and the fixed tables below its first entry, which map the code.
pub const GUEST_ROOT: u64 = 0x1_1000;
/// The nested tables: the root, and the fixed tables below its first entry, which map the code and the guest's fixed
/// tables.
pub const NESTED_ROOT: u64 = 0x1_5000;

/// The pool: the pages whose contents are random. The first pages are nested tables. The others belong to the guest,
/// and are used as both tables and data.
pub const POOL: u64 = 0x20_0000;
pub const POOL_PAGES: u64 = 24;
/// The number of the first page of the pool that belongs to the guest.
const GUESTS: u64 = 10;
/// The number of pages of the pool ([`POOL`]) that one memslot has.
pub const SLOT_PAGES: u64 = 6;
/// The number of entries of each table that the addresses use.
pub const USED: u64 = 4;

/// The offset of code in each page, above the page's entries: mov eax, PAGE; vmmcall.
pub const CODE_AT: u64 = 0x800;
/// The offset of the page's number.
pub const NAME_AT: u64 = 0x810;
/// The offset to which accesses store data.
pub const DATA_AT: u64 = 0x818;

/// Returns the addresses of all pages that accesses can reach.
pub fn reached() -> impl Iterator<Item = u64> {
    (0..USED)
        .map(|page| page * PAGE)
        .chain((0..POOL_PAGES).map(|page| POOL + page * PAGE))
}

/// Returns the addresses of all entries that the test checks: the entries that change, and the first entries of the
/// roots.
pub fn entries() -> impl Iterator<Item = u64> {
    let roots = [GUEST_ROOT, NESTED_ROOT].into_iter();
    roots
        .chain(reached())
        .flat_map(|page| (0..USED).map(move |n| page + 8 * n))
}

/// Returns whether the entry at `at` may change. The first entries of the roots, and the tables below these entries,
/// are fixed.
pub fn changes(at: u64) -> bool {
    let is_root = [GUEST_ROOT, NESTED_ROOT].contains(&(at & !0xfff));
    match at {
        LOAD..SYSTEM_BYTES => is_root && !at.is_multiple_of(PAGE),
        _ => true,
    }
}

/// A generator of random numbers: xorshift64*.
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    pub fn below(&mut self, end: u64) -> u64 {
        ((self.next() >> 32) * end) >> 32
    }

    /// Returns `true` in one of `n` cases.
    pub fn one_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }

    /// Returns a random address for accesses. Its indices are below [`USED`], and its index in the root is not 0,
    /// because the first entry of a root is fixed.
    pub fn address(&mut self) -> u64 {
        let top = 1 + self.below(USED - 1);
        let rest = [30, 21, 12].map(|shift| self.below(USED) << shift);
        top << 39 | rest.iter().sum::<u64>()
    }

    /// Returns the address of a random entry: of a table in the pool, or of a root.
    pub fn entry_address(&mut self) -> u64 {
        match self.below(8) {
            0 => NESTED_ROOT + 8 * (1 + self.below(USED - 1)),
            1 => GUEST_ROOT + 8 * (1 + self.below(USED - 1)),
            _ => POOL + self.below(POOL_PAGES) * PAGE + 8 * self.below(USED),
        }
    }

    /// Returns a random value for the entry at `at`. Most values are valid there.
    pub fn entry(&mut self, at: u64) -> u64 {
        let page = at.wrapping_sub(POOL) / PAGE;
        let is_guests = at & !0xfff == GUEST_ROOT || (GUESTS..POOL_PAGES).contains(&page);
        let target = match is_guests != self.one_in(30) {
            // The entry has an address of the nested guest's memory. The guest's tables may be anywhere in this memory.
            true => self.address(),
            // Most entries refer to a suitable page: an entry of a nested table refers to a table of the next lower
            // level, and an entry of the lowest level refers to a page of the guest.
            false => {
                let (from, to) = match page {
                    _ if self.one_in(30) => (0, POOL_PAGES + 2),
                    0..2 => (2, 5),
                    2..5 => (5, GUESTS),
                    5..POOL_PAGES => (GUESTS, POOL_PAGES),
                    _ => (0, 2),
                };
                POOL + (from + self.below(to - from)) * PAGE
            }
        };
        let mut entry = target | P | RW | US | A | D;
        let flips = [
            (P, 50),
            (RW, 30),
            (US, 40),
            (A, 3),
            (D, 3),
            (PS, 16),
            (G, 60),
            (NX, 16),
        ];
        for (flag, n) in flips {
            if self.one_in(n) {
                entry ^= flag;
            }
        }
        match entry & PS {
            // Usually clears the bits that are reserved in a page of 2 MiB.
            PS if !self.one_in(8) => entry & !0x1f_e000,
            _ => entry,
        }
    }
}
