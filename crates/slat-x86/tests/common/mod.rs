//! A small machine for the tests: flat memory at guest address 0 with a few pages' rights changed, a
//! hole for devices, and a 64-bit guest with GDT, IDT and TSS.
#![allow(dead_code)]

pub mod compiled;
use compiled::compile;
use slat_x86::*;
use std::collections::{HashMap, HashSet};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::AtomicU32;

pub const CODE: u64 = 0x1_0000;
pub const DATA: u64 = 0x2_0000;
pub const STACK: u64 = 0x4_0000;
pub const GDT: u64 = 0x5_0000;
pub const IDT: u64 = 0x5_1000;
pub const TSS: u64 = 0x5_2000;
/// The address of the handler of vector 0. Each handler is 16 bytes after the handler of the previous vector.
pub const HANDLERS: u64 = 0x6_0000;
pub const IST_STACK: u64 = 0x7_0000;
pub const KERNEL_STACK: u64 = 0x8_0000;
/// The end of memory. Addresses from here on belong to devices.
pub const MMIO: u64 = 0x100_0000;

/// A generator of random numbers: xorshift64*.
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }
    pub fn below(&mut self, n: u64) -> u64 {
        (self.next() >> 16) % n
    }
    pub fn pick<T: Copy>(&mut self, of: &[T]) -> T {
        of[self.below(of.len() as u64) as usize]
    }
}

/// Guest memory, shared by CPUs on several threads.
pub struct Memory {
    base: *mut u8,
    len: usize,
    /// The table by which a CPU learns that another CPU has stored to its code.
    pub code: Arc<CodePages>,
}

// SAFETY: the memory is a mapping that is accessed by raw pointers only.
unsafe impl Send for Memory {}
// SAFETY: the memory is a mapping that is accessed by raw pointers only.
unsafe impl Sync for Memory {}

impl Memory {
    pub fn new(len: usize) -> Arc<Self> {
        slat_guard::install().unwrap();
        let prot = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        // SAFETY: the call makes a new anonymous mapping at an address of the kernel's choice.
        let base = unsafe { libc::mmap(std::ptr::null_mut(), len, prot, flags, -1, 0) };
        assert_ne!(base, libc::MAP_FAILED);
        Arc::new(Self {
            base: base.cast(),
            len,
            code: CodePages::try_new().unwrap(),
        })
    }
    pub fn at(&self, gpa: u64) -> *mut u8 {
        assert!((gpa as usize) < self.len);
        self.base.wrapping_add(gpa as usize)
    }
    pub fn write(&self, gpa: u64, bytes: &[u8]) {
        // SAFETY: the address is within the mapping.
        unsafe {
            self.at(gpa)
                .copy_from_nonoverlapping(bytes.as_ptr(), bytes.len())
        }
    }
    /// Changes the rights of the host page that backs the page of `gpa`.
    pub fn protect(&self, gpa: u64, protection: libc::c_int) {
        // SAFETY: the page belongs to this mapping, and the CPU makes only guarded accesses to it.
        let failed = unsafe { libc::mprotect(self.at(gpa & !0xfff).cast(), 0x1000, protection) };
        assert_eq!(failed, 0);
    }
    pub fn write64(&self, gpa: u64, v: u64) {
        self.write(gpa, &v.to_le_bytes());
    }
    pub fn read<const N: usize>(&self, gpa: u64) -> [u8; N] {
        let mut out = [0; N];
        // SAFETY: the address is within the mapping.
        unsafe { self.at(gpa).copy_to_nonoverlapping(out.as_mut_ptr(), N) };
        out
    }
    pub fn read64(&self, gpa: u64) -> u64 {
        u64::from_le_bytes(self.read(gpa))
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: `base` is a mapping of this length, which nothing uses any more.
        unsafe { libc::munmap(self.base.cast(), self.len) };
    }
}

/// The accesses that a page allows: reads, writes, execution, user accesses.
#[derive(Clone, Copy)]
pub struct Rights {
    pub present: bool,
    pub write: bool,
    pub execute: bool,
    pub user: bool,
}

pub struct TestMachine {
    pub memory: Arc<Memory>,
    pub rights: HashMap<u64, Rights>,
    /// The translations that the CPU has requested.
    pub translations: Vec<(u64, Access)>,
    /// The number of further translations that fail with `Retry`.
    pub retries: usize,
    /// The translation, counted from the first, that fails with `Retry`.
    pub retry_at: Option<usize>,
    /// For a page, the number of fetches that fail before one succeeds, and their fault.
    pub failing_fetches: HashMap<u64, (usize, Fault)>,
    pub rechecks: usize,
    pub bad_address: bool,
    /// The result of [`Mmu::recheck`], after it has made the host page accessible.
    pub mends: Option<Result<(), Fault>>,
    pub msrs: HashMap<u32, u64>,
    pub hypercalls: Vec<(u64, u8, bool)>,
    pub cpuid_faults: bool,
    /// The MSRs to which an access is refused, each with whether the access is a write.
    pub forbidden_msrs: Vec<(u32, bool)>,
    /// The refused accesses to MSRs that end the run, so that the caller handles them.
    pub outside_msrs: Vec<MsrFault>,
    pub tsc: u64,
    /// The difference of linear and guest-physical addresses, which the tests of flushes change.
    pub shift: u64,
    /// Pages that are mapped elsewhere: from page number to guest-physical page number.
    pub moved: HashMap<u64, u64>,
    /// Pages that are mapped elsewhere for a value of CR3 while paging is on: from CR3 and page number to
    /// guest-physical page number.
    pub spaces: HashMap<(u64, u64), u64>,
    /// The size of the guest's pages: 2^`page_bits` bytes.
    pub page_bits: u32,
    /// The linear page numbers of the global pages, if CR4.PGE is set.
    pub globals: HashSet<u64>,
    /// The guest-physical page numbers of tracked pages.
    pub tracked: HashSet<u64>,
    /// The stores to tracked pages.
    pub stores: Vec<Stored>,
    /// The translations that the guest invalidated.
    pub flushes: Vec<GuestFlush>,
}

/// A call of [`Mmu::stored`].
pub struct Stored {
    pub gpa: u64,
    /// The contents of the stored range at the time of the call.
    pub bytes: Vec<u8>,
    /// At the time of the call, the last 8 bytes of the page at [`DATA`] and the first 8 bytes of the next page.
    pub around: [u8; 16],
    /// The number of translations before the call.
    pub translations: usize,
}

impl TestMachine {
    pub fn new(memory: Arc<Memory>) -> Self {
        Self {
            memory,
            rights: HashMap::new(),
            translations: vec![],
            retries: 0,
            retry_at: None,
            failing_fetches: HashMap::new(),
            rechecks: 0,
            bad_address: false,
            mends: None,
            msrs: HashMap::new(),
            hypercalls: vec![],
            cpuid_faults: false,
            forbidden_msrs: vec![],
            outside_msrs: vec![],
            tsc: 0,
            shift: 0,
            moved: HashMap::new(),
            spaces: HashMap::new(),
            page_bits: 12,
            globals: HashSet::new(),
            tracked: HashSet::new(),
            stores: vec![],
            flushes: vec![],
        }
    }
    pub fn absent(&mut self, gva: u64) {
        let rights = Rights {
            present: false,
            write: false,
            execute: false,
            user: false,
        };
        self.rights.insert(gva >> 12, rights);
    }
    /// Tracks the page of `gpa`.
    pub fn track(&mut self, gpa: u64) {
        self.tracked.insert(gpa >> 12);
    }
    pub fn read_only(&mut self, gva: u64) {
        let rights = Rights {
            present: true,
            write: false,
            execute: true,
            user: true,
        };
        self.rights.insert(gva >> 12, rights);
    }
}

impl Mmu for TestMachine {
    fn translate(&mut self, gva: u64, access: Access, paging: &Paging) -> Result<HostPage, Fault> {
        self.translations.push((gva, access));
        if self.retries > 0 {
            self.retries -= 1;
            return Err(Fault::Retry);
        }
        if self.retry_at == Some(self.translations.len() - 1) {
            return Err(Fault::Retry);
        }
        if access == Access::Execute
            && let Some((left, fault)) = self.failing_fetches.get_mut(&(gva >> 12))
            && *left > 0
        {
            *left -= 1;
            return Err(*fault);
        }
        let all = Rights {
            present: true,
            write: true,
            execute: true,
            user: true,
        };
        let rights = *self.rights.get(&(gva >> 12)).unwrap_or(&all);
        let allowed = rights.present
            && (access != Access::Write || rights.write)
            && (access != Access::Execute || rights.execute)
            && (!paging.user || rights.user);
        if !allowed {
            let write = u32::from(access == Access::Write) << 1;
            let fetch = u32::from(access == Access::Execute) << 4;
            let user = u32::from(paging.user) << 2;
            let error_code = u32::from(rights.present) | write | user | fetch;
            return Err(Fault::Page { error_code });
        }
        let space = (paging.cr0 >> 31 != 0).then_some((paging.cr3, gva >> 12));
        let space = space.and_then(|page| self.spaces.get(&page));
        let gpa = match space.or(self.moved.get(&(gva >> 12))) {
            Some(page) => page << 12 | gva & 0xfff,
            None => gva.wrapping_add(self.shift),
        };
        if gpa >= self.memory.len as u64 {
            return Err(Fault::Mmio { gpa });
        }
        let tracked = self.tracked.contains(&(gpa >> 12));
        Ok(HostPage {
            base: NonNull::new(self.memory.at(gpa & !0xfff)).unwrap(),
            read: true,
            write: rights.write && !tracked,
            execute: rights.execute,
            tracked: tracked.then_some(gpa & !0xfff),
            bits: self.page_bits,
            global: self.globals.contains(&(gva >> 12)) && paging.cr4 & 1 << 7 != 0,
        })
    }
    /// Nested tables map the pages in `spaces`.
    fn translate_nested_physical(
        &mut self,
        gpa: u64,
        access: Access,
        nested: &NestedPaging,
    ) -> Result<HostPage, Fault> {
        match self.spaces.get(&(nested.cr3, gpa >> 12)) {
            Some(page) => self.translate(page << 12, access, &Paging::OFF),
            None => Err(Fault::NestedPage {
                error_code: 1 << 32,
                gpa,
            }),
        }
    }
    fn recheck(&mut self, host: *mut u8, _: Access) -> Result<(), Fault> {
        self.rechecks += 1;
        if let Some(result) = self.mends {
            let gpa = host as u64 - self.memory.at(0) as u64;
            self.memory.protect(gpa, libc::PROT_READ | libc::PROT_WRITE);
            result
        } else if self.bad_address {
            Err(Fault::BadAddress)
        } else {
            Ok(())
        }
    }
    fn stored(&mut self, gpa: u64, bytes: usize) -> bool {
        let byte = |n| self.memory.read::<1>(gpa + n)[0];
        self.stores.push(Stored {
            gpa,
            bytes: (0..bytes as u64).map(byte).collect(),
            around: self.memory.read(DATA + 0xff8),
            translations: self.translations.len(),
        });
        false
    }
    fn flush_guest(&mut self, what: GuestFlush, _: &Paging) -> bool {
        self.flushes.push(what);
        false
    }
}

impl Machine for TestMachine {
    fn cpuid(&mut self, leaf: u32, subleaf: u32) -> [u32; 4] {
        [leaf, subleaf, 0x1234, 0x5678]
    }
    fn cpuid_faults(&mut self) -> bool {
        self.cpuid_faults
    }
    fn rdmsr(&mut self, msr: u32) -> Result<u64, MsrFault> {
        self.msrs.get(&msr).copied().ok_or(MsrFault::Unknown)
    }
    fn wrmsr(&mut self, msr: u32, value: u64) -> Result<(), MsrFault> {
        *self.msrs.get_mut(&msr).ok_or(MsrFault::Unknown)? = value;
        Ok(())
    }
    fn allows_msr(&mut self, msr: u32, write: bool) -> bool {
        !self.forbidden_msrs.contains(&(msr, write))
    }
    fn answers_msr_outside(&mut self, why: MsrFault) -> bool {
        self.outside_msrs.contains(&why)
    }
    fn tsc(&mut self) -> u64 {
        self.tsc += 1;
        self.tsc
    }
    fn hypercall(&mut self, state: &mut State, cpl: u8, long_mode: bool) -> HypercallOutcome {
        let nr = state.gpr[0];
        self.hypercalls.push((nr, cpl, long_mode));
        match nr {
            100.. => HypercallOutcome::Outside,
            99 => HypercallOutcome::Undefined,
            _ => {
                (state.gpr[0], state.gpr[2]) = (7, state.gpr[1]);
                HypercallOutcome::Done
            }
        }
    }
}

/// A CPU with its machine.
pub struct Guest {
    pub cpu: Executor,
    pub machine: TestMachine,
    pub attention: Arc<AtomicU32>,
}

/// Puts a CPU into 64-bit mode at CPL 0, with the tables that [`Guest::with_memory`] makes.
pub fn long_mode(state: &mut State) {
    let code = Segment {
        selector: 8,
        base: 0,
        limit: u32::MAX,
        rights: 0xa09b,
    };
    let data = Segment {
        selector: 16,
        base: 0,
        limit: u32::MAX,
        rights: 0xc093,
    };
    state.cs = code;
    (state.ds, state.es, state.ss, state.fs, state.gs) = (data, data, data, data, data);
    state.tr = Segment {
        selector: 40,
        base: TSS,
        limit: 0x67,
        rights: 0x8b,
    };
    state.gdtr = Table {
        base: GDT,
        limit: 0xff,
    };
    state.idtr = Table {
        base: IDT,
        limit: 0xfff,
    };
    state.cr0 = 0x8005_0033;
    state.cr4 = 0x0000_0620;
    state.efer = 0xd01;
    state.gpr[4] = STACK;
    state.rip = CODE;
}

impl Guest {
    /// Makes a 64-bit guest at CPL 0 whose code is at [`CODE`]. Every vector's handler is a HLT.
    pub fn new(code: &[u8]) -> Self {
        Self::with_memory(Memory::new(MMIO as usize), code)
    }

    pub fn with_memory(memory: Arc<Memory>, code: &[u8]) -> Self {
        let mut guest = Self::interpreted(memory, code);
        compile(&mut guest.cpu);
        guest
    }

    /// Like [`Self::with_memory`], but for a test that compares compiled code with the interpreter: only code that the
    /// test asks to compile is compiled.
    pub fn interpreted(memory: Arc<Memory>, code: &[u8]) -> Self {
        memory.write(CODE, code);
        // The descriptors are: null, kernel code and data, user data and code (in SYSRET's order), TSS.
        let gdt = [
            0,
            0x00af_9b00_0000_ffff,
            0x00cf_9300_0000_ffff,
            0x00cf_f300_0000_ffff,
            0x00af_fb00_0000_ffff,
        ];
        for (i, descriptor) in gdt.into_iter().enumerate() {
            memory.write64(GDT + 8 * i as u64, descriptor);
        }
        memory.write64(GDT + 40, 0x0000_8b00_0000_0067 | (TSS & 0xff_ffff) << 16);
        memory.write64(TSS + 4, KERNEL_STACK);
        memory.write64(TSS + 36, IST_STACK);
        for vector in 0..256u64 {
            let at = HANDLERS + 16 * vector;
            Self::gate(&memory, vector as u8, at, 0, 0);
            memory.write(at, &[0xf4]);
        }
        let mut cpu = Executor::try_new(memory.code.clone()).unwrap();
        long_mode(&mut cpu.state);
        Self {
            cpu,
            machine: TestMachine::new(memory),
            attention: Arc::default(),
        }
    }

    /// Writes an interrupt gate to the IDT.
    pub fn gate(memory: &Memory, vector: u8, target: u64, dpl: u64, ist: u64) {
        let low = target & 0xffff
            | 8 << 16
            | ist << 32
            | (0x8e | dpl << 5) << 40
            | (target >> 16 & 0xffff) << 48;
        memory.write64(IDT + 16 * u64::from(vector), low);
        memory.write64(IDT + 16 * u64::from(vector) + 8, target >> 32);
    }

    pub fn run(&mut self) -> Exit {
        self.cpu.run(&mut self.machine, &self.attention)
    }

    /// Runs the guest until a HLT.
    pub fn halt(&mut self) {
        let exit = self.run();
        assert_eq!(exit, Exit::Hlt, "at {:#x}", self.cpu.state.rip);
    }

    /// Runs the code in real mode, and checks that its first instruction raises #UD.
    pub fn is_undefined_in_real_mode(&mut self) {
        let state = &mut self.cpu.state;
        (state.cr0, state.efer) = (0x10, 0);
        state.cs = Segment::real((CODE >> 4) as u16, 0x9b);
        state.ss = Segment::real(0, 0x93);
        state.rip = 0;
        state.gpr[RSP] = 0x8000;
        state.idtr = Table {
            base: 0,
            limit: 0x3ff,
        };
        self.memory().write(0x9000, &[0xf4]);
        self.memory().write(6 * 4, &0x9000u32.to_le_bytes());
        self.halt();
        assert_eq!(self.cpu.state.rip, 0x9001);
    }

    /// Runs the guest until the HLT in the handler of `vector`.
    pub fn halt_in_handler(&mut self, vector: u8) {
        self.halt();
        assert_eq!(
            self.cpu.state.rip,
            HANDLERS + 16 * u64::from(vector) + 1,
            "another vector came"
        );
    }

    /// Returns the word at `RSP + 8 * n`.
    pub fn stack(&self, n: u64) -> u64 {
        self.machine.memory.read64(self.cpu.state.gpr[4] + 8 * n)
    }

    pub fn memory(&self) -> &Memory {
        &self.machine.memory
    }
}

pub const RAX: usize = 0;
pub const RCX: usize = 1;
pub const RDX: usize = 2;
pub const RBX: usize = 3;
pub const RSP: usize = 4;
pub const RBP: usize = 5;
pub const RSI: usize = 6;
pub const RDI: usize = 7;
