//! The compiler of hot code.
//!
//! A block that has run often becomes part of a *region*: blocks of the same page that follow one another, with their loops, which
//! become one function of the host's. It can be entered at each of its blocks. The compiling happens on a thread of its own
//! ([`Compiler::work`]); meanwhile and afterwards the interpreter runs what is not compiled. A region is attached to its blocks and
//! is as good as they are: both are compared with memory together (`Cpu::verify`), and all of a region lies in one page, so the
//! page's version covers it (`code_pages`). A region stores to no page with decoded code, it leaves that to the interpreter; so it
//! cannot change itself.
//!
//! | file | idea |
//! |---|---|
//! | `translate` | from guest code to Cranelift's intermediate language: a region as a whole |
//! | `instructions` | instructions with a translation of their own |
//! | `access` | accesses to guest memory |
//! | `condition` | the flags: computed when used |
//! | `helpers` | what compiled code calls |
//! | `memory` | pages for code, never writable and executable at once |
//!
//! While a region runs, R15 holds the address of the [`Cpu`]; the registers are its variables. It is left between two instructions
//! always, with all state written back, so faults are as precise as the interpreter's. Loops look at `attention` and at the version
//! of the code in each turn.

mod access;
mod condition;
mod helpers;
mod instructions;
mod memory;
mod translate;

use crate::block::{Block, Key};
use crate::heap::{self, OutOfMemory};
use crate::machine::Exit;
use crate::op::{Break, Op};
use crate::tlb::Entry;
use crate::{Cpu, cpu};
use cranelift_codegen::settings::{self, Configurable};
use cranelift_codegen::{Context, control::ControlPlane, isa};
use cranelift_frontend::{FunctionBuilder, FunctionBuilderContext};
use helpers::Status;
use iced_x86::{Decoder, DecoderOptions, FlowControl};
use memory::{Arena, Chunk};
use std::arch::asm;
use std::collections::VecDeque;
use std::mem::offset_of;
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

/// Entries of a block after which it is compiled.
pub(crate) const HOT: u32 = 8192;
/// Entries of a block between two looks for compiled code.
const LOOK: u32 = 64;
/// Blocks and bytes of a region.
const BLOCKS: usize = 24;
const BYTES: usize = 1024;
/// The most compiled code of a process, in bytes.
const MEMORY: usize = 64 << 20;
/// Jobs that wait: more are refused.
const JOBS: usize = 64;

/// The code of a region-to-be.
struct Source {
    mode: u8,
    /// Addresses and bytes. The region can be entered at each of them, by its index.
    blocks: Vec<(u64, Vec<u8>)>,
}

/// A job for the compiling thread.
struct Job {
    source: Source,
    /// The CPU that asked.
    client: u64,
}

/// Finished work that waits until its CPU takes it.
#[derive(Default)]
struct Done {
    regions: Vec<Arc<Region>>,
    /// There was no memory for a region.
    is_refused: bool,
}

/// The registration of a CPU with its compiler.
struct Client {
    compiler: Arc<Compiler>,
    number: u64,
}

impl Drop for Client {
    fn drop(&mut self) {
        let mut clients = lock(&self.compiler.clients);
        clients.retain(|(number, _)| *number != self.number);
    }
}

/// Compiled code.
pub(crate) struct Region {
    chunk: Chunk,
    source: Source,
    /// The operations with their addresses; the code has pointers to them.
    ops: Box<[(u64, Op)]>,
}

impl Region {
    /// Returns the code that was compiled: addresses and bytes.
    pub(crate) fn parts(&self) -> impl Iterator<Item = (u64, &[u8])> {
        self.source
            .blocks
            .iter()
            .map(|(rip, bytes)| (*rip, &**bytes))
    }

    /// Returns the bytes of the instruction at `rip`.
    fn bytes(&self, rip: u64, len: u8) -> &[u8] {
        let of = |(start, bytes): &'_ (u64, Vec<u8>)| {
            let at = usize::try_from(rip.checked_sub(*start)?).ok()?;
            (at < bytes.len()).then_some(at)
        };
        (self.source.blocks.iter())
            .find_map(|part| of(part).and_then(|at| part.1.get(at..at + usize::from(len))))
            .unwrap_or(&[])
    }
}

/// Where a block's compiled code is.
#[derive(Clone)]
pub(crate) struct Entrance {
    pub(crate) region: Arc<Region>,
    entry: u32,
}

/// What compiled code knows of its CPU besides the architectural state.
pub(crate) struct Compiled {
    /// Set by the signal handler: the last guarded access was skipped.
    gone: u32,
    /// Index of the operation at which the region was left.
    op: u64,
    /// Why an instruction ended.
    why: Break,
    /// RIP as the instruction that ended with [`Break::Jump`] has set it.
    rip: u64,
    /// The table of the TLB that data accesses use.
    pub(crate) table: *const Entry,
    attention: *const AtomicU32,
    version: *const AtomicU64,
    client: Option<Client>,
}

impl Compiled {
    pub(crate) fn new() -> Self {
        Self {
            gone: 0,
            op: 0,
            why: Break::Jump,
            rip: 0,
            table: ptr::null(),
            attention: ptr::null(),
            version: ptr::null(),
            client: None,
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The compiler of all CPUs of a process.
pub struct Compiler {
    arena: Arc<Arena>,
    isa: isa::OwnedTargetIsa,
    jobs: Mutex<VecDeque<Job>>,
    /// The CPUs by number, and what was compiled for them.
    clients: Mutex<Vec<(u64, Done)>>,
    /// Numbers of CPUs given so far.
    numbers: AtomicU64,
    changed: Condvar,
    /// Compile at once, on the thread that asks: for tests.
    at_once: bool,
}

impl std::fmt::Debug for Compiler {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Compiler").finish_non_exhaustive()
    }
}

impl Compiler {
    /// Makes a compiler. Some thread has to call [`work`](Self::work).
    ///
    /// # Errors
    /// [`OutOfMemory`] if the host gives no address space for code.
    pub fn try_new() -> Result<Arc<Self>, OutOfMemory> {
        Self::with(false, MEMORY)
    }

    /// Makes a compiler that compiles each block before it runs for the first time, on the CPU's own thread: for tests.
    ///
    /// # Errors
    /// As [`try_new`](Self::try_new).
    pub fn at_once() -> Result<Arc<Self>, OutOfMemory> {
        Self::with(true, MEMORY)
    }

    fn with(at_once: bool, memory: usize) -> Result<Arc<Self>, OutOfMemory> {
        let mut flags = settings::builder();
        for (name, value) in [
            // Optimising takes a quarter more time to compile, and gains nothing. (With it, `enable_alias_analysis` would have to
            // be off: other CPUs change guest memory at any time.)
            ("opt_level", "none"),
            ("enable_pinned_reg", "true"),
            ("enable_probestack", "false"),
            ("unwind_info", "false"),
            (
                "enable_verifier",
                if cfg!(debug_assertions) {
                    "true"
                } else {
                    "false"
                },
            ),
        ] {
            flags.set(name, value).expect("a setting of Cranelift's");
        }
        let isa = isa::lookup_by_name("x86_64-unknown-linux-gnu")
            .expect("Cranelift was built for this machine")
            .finish(settings::Flags::new(flags))
            .expect("settings that fit together");
        let arena = Arena::try_new(memory)?;
        if at_once {
            Self::announce(&arena);
        }
        Ok(Arc::new(Self {
            arena,
            isa,
            jobs: Mutex::default(),
            clients: Mutex::default(),
            numbers: AtomicU64::new(0),
            changed: Condvar::new(),
            at_once,
        }))
    }

    /// Tells the signal handlers of the code.
    fn announce(arena: &Arena) {
        let (code, table) = arena.places();
        // SAFETY: the table is readable as long as the arena exists, which the compiler and all regions keep; regions run with the
        // address of a CPU in R15 only (`Cpu::run_compiled`). Another compiler's regions belong to CPUs of a parent process.
        unsafe { slat_guard::set_generated(code, table, offset_of!(Cpu, compiled.gone)) };
    }

    /// Compiles, for ever. There is one such compiler in a process. Call on a thread of its own, which no filter forbids `mprotect`.
    pub fn work(&self) -> ! {
        Self::announce(&self.arena);
        let mut workshop = Workshop::default();
        loop {
            let mut jobs = lock(&self.jobs);
            let job = loop {
                match jobs.pop_front() {
                    Some(job) => break job,
                    None => {
                        jobs = (self.changed.wait(jobs)).unwrap_or_else(PoisonError::into_inner);
                    }
                }
            };
            drop(jobs);
            self.finish(job, &mut workshop);
        }
    }

    fn finish(&self, job: Job, workshop: &mut Workshop) {
        let region = self.compile(job.source, workshop);
        let mut clients = lock(&self.clients);
        let client = clients.iter_mut().find(|(number, _)| *number == job.client);
        let Some((_, done)) = client else {
            return;
        };
        match region {
            Some(region) if done.regions.try_reserve(1).is_ok() => {
                done.regions.push(Arc::new(region));
            }
            Some(_) => {}
            None => done.is_refused = true,
        }
    }

    fn compile(&self, source: Source, workshop: &mut Workshop) -> Option<Region> {
        let Workshop { context, builder } = workshop;
        context.clear();
        context.func.signature = translate::signature(1, 1);
        let ops = translate::translate(FunctionBuilder::new(&mut context.func, builder), &source);
        let compiled = context
            .compile(&*self.isa, &mut ControlPlane::default())
            .ok()?;
        let code = compiled.code_buffer();
        let guarded: Vec<(u32, u8)> = (compiled.buffer.traps().iter())
            .map(|trap| {
                let bytes = &code[trap.offset as usize..];
                let mut decoder = Decoder::new(64, bytes, DecoderOptions::NONE);
                (trap.offset, decoder.decode().len() as u8)
            })
            .collect();
        assert!(
            compiled.buffer.relocs().is_empty(),
            "code without relocations"
        );
        let chunk = self.arena.put(code, &guarded).ok()?;
        Some(Region { chunk, source, ops })
    }

    /// Takes what was compiled for a CPU.
    fn take(&self, client: u64) -> Done {
        let mut clients = lock(&self.clients);
        let done = clients.iter_mut().find(|(number, _)| *number == client);
        done.map(|(_, done)| std::mem::take(done))
            .unwrap_or_default()
    }

    /// Whether there are not too many jobs.
    fn has_room(&self) -> bool {
        lock(&self.jobs).len() < JOBS
    }

    /// Takes a job.
    fn submit(&self, job: Job) {
        if self.at_once {
            return self.finish(job, &mut Workshop::default());
        }
        let mut jobs = lock(&self.jobs);
        if jobs.try_reserve(1).is_ok() {
            jobs.push_back(job);
        }
        drop(jobs);
        self.changed.notify_one();
    }
}

/// What a compilation leaves for the next one to use again.
struct Workshop {
    context: Context,
    builder: FunctionBuilderContext,
}

impl Default for Workshop {
    fn default() -> Self {
        Self {
            context: Context::new(),
            builder: FunctionBuilderContext::new(),
        }
    }
}

impl Cpu {
    /// Has hot code compiled from now on.
    ///
    /// # Errors
    /// [`OutOfMemory`].
    pub fn set_compiler(&mut self, compiler: Arc<Compiler>) -> Result<(), OutOfMemory> {
        let number = compiler.numbers.fetch_add(1, Ordering::Relaxed);
        let mut clients = lock(&compiler.clients);
        clients.try_reserve(1).map_err(|_| OutOfMemory)?;
        clients.push((number, Done::default()));
        drop(clients);
        self.compiled.client = Some(Client { compiler, number });
        Ok(())
    }

    /// Whether blocks are compiled before they run for the first time.
    pub(crate) fn compiles_at_once(&self) -> bool {
        (self.compiled.client.as_ref()).is_some_and(|client| client.compiler.at_once)
    }

    /// Call before the CPU executes.
    pub(crate) fn prepare_compiled(&mut self, attention: &AtomicU32) {
        self.compiled.attention = attention;
        self.compiled.version = self.code.pages().version();
        self.compiled.gone = 0;
    }

    /// Call when a block has been entered often: has it compiled, or looks whether it was.
    #[cold]
    #[inline(never)]
    pub(crate) fn heated(&mut self, found: NonNull<Block>) {
        // SAFETY: a block lives until all are freed, which is the last thing that this does, if at all.
        let block = unsafe { found.as_ref() };
        let Some(client) = &self.compiled.client else {
            block.heat.set(u32::MAX);
            return;
        };
        let (compiler, client) = (client.compiler.clone(), client.number);
        let is_in_one_page = block.parts().1.is_empty();
        let fits =
            block.key.mode & cpu::mode::BITS == 2 && block.stamp == self.stamp && is_in_one_page;
        if fits
            && !block.is_submitted.get()
            && compiler.has_room()
            && let Ok(source) = self.collect(block)
        {
            compiler.submit(Job { source, client });
        }
        block.heat.set(LOOK);
        let done = compiler.take(client);
        if done.is_refused {
            // Hot code is compiled anew, what is hot no more is forgotten. This frees `block`.
            return self.blocks.clear(&mut self.fixed.front);
        }
        for region in done.regions {
            self.install(&region);
        }
    }

    /// Attaches compiled code to its blocks.
    fn install(&mut self, region: &Arc<Region>) {
        self.counters.regions += 1;
        for (entry, (rip, _)) in region.source.blocks.iter().enumerate() {
            let key = Key {
                lin: *rip,
                rip: *rip,
                mode: region.source.mode,
            };
            let entrance = Entrance {
                region: region.clone(),
                entry: entry as u32,
            };
            self.blocks.attach(&key, entrance);
        }
    }

    /// Collects a region: `block`, and the kept blocks of its page that follow.
    fn collect(&self, block: &Block) -> Result<Source, OutOfMemory> {
        let page = block.key.lin >> 12;
        let mut source = Source {
            mode: block.key.mode,
            blocks: heap::vec(BLOCKS)?,
        };
        let mut bytes = 0;
        // Each block has at most two successors.
        let mut wanted = heap::vec(1 + 2 * BLOCKS)?;
        wanted.push(block.key.rip);
        let mut next = 0;
        while let Some(&rip) = wanted.get(next) {
            next += 1;
            let known = source.blocks.iter().any(|(start, _)| *start == rip);
            if known || source.blocks.len() >= BLOCKS || bytes >= BYTES || rip >> 12 != page {
                continue;
            }
            let key = Key {
                rip,
                lin: rip,
                ..block.key
            };
            let Some(found) = self.blocks.kept(&key) else {
                continue;
            };
            let (code, second) = found.parts();
            // A block that has hardly run is left out: it would make the region larger, and save nothing.
            let is_warm = found.heat.get() <= HOT - HOT / 8
                || found.is_submitted.get()
                || self.compiles_at_once();
            if !second.is_empty() || found.stamp != self.stamp || !is_warm {
                continue;
            }
            let mut copy = heap::vec(code.len())?;
            copy.extend_from_slice(code);
            source.blocks.push((rip, copy));
            bytes += code.len();
            found.is_submitted.set(true);
            let mut decoder = Decoder::with_ip(64, code, rip, DecoderOptions::NONE);
            let mut last = decoder.decode();
            while decoder.can_decode() {
                last = decoder.decode();
            }
            let (target, after) = (last.near_branch_target(), last.next_ip());
            match last.flow_control() {
                FlowControl::ConditionalBranch => wanted.extend([target, after]),
                FlowControl::Call => wanted.extend([after, target]),
                FlowControl::Next | FlowControl::IndirectCall => wanted.push(after),
                FlowControl::UnconditionalBranch => wanted.push(target),
                _ => {}
            }
        }
        Ok(source)
    }

    /// Runs a region.
    pub(crate) fn run_compiled(&mut self, entrance: &Entrance, page: usize) -> Option<Exit> {
        let region = &*entrance.region;
        self.code_page = page;
        let function = region.chunk.start();
        let cpu = ptr::from_mut(self);
        let status: u64;
        // SAFETY: a function that the compiler made, which follows the C calling convention but for R15, in which it wants the CPU.
        // It accesses the CPU, its own stack frame, and guest memory by guarded accesses.
        unsafe {
            asm!(
                "call {function}",
                function = in(reg) function,
                in("rdi") u64::from(entrance.entry),
                inout("r15") cpu => _,
                lateout("rax") status,
                clobber_abi("C"),
            );
        }
        match Status::of(status) {
            Status::Broke => {
                let (rip, op) = &region.ops[self.compiled.op as usize];
                let why = self.compiled.why;
                if matches!(why, Break::Jump) {
                    self.state.rip = self.compiled.rip;
                }
                if matches!(
                    why,
                    Break::Jump | Break::End | Break::ExitAfter | Break::TaskFault
                ) {
                    self.counters.instructions += 1;
                }
                self.block_rip = *rip;
                self.after_break(op, region.bytes(*rip, op.len), why)
            }
            Status::Interpret => match self.find_block() {
                // SAFETY: a block lives until all are freed, which happens in `find_block` only; nothing changes it while it runs.
                Ok(block) => self.execute(unsafe { block.as_ref() }),
                Err(why) => self.fetch_failed(why),
            },
            Status::Continue | Status::After => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::CodePages;

    fn source(rip: u64) -> Source {
        // inc eax; jmp to the next
        Source {
            mode: 2,
            blocks: vec![(rip, b"\xff\xc0\xeb\x00".to_vec())],
        }
    }

    #[test]
    fn a_cpu_whose_region_was_refused_forgets_its_blocks_and_their_memory_is_used_again() {
        let compiler = Compiler::with(true, 2 * 4096).unwrap();
        let mut cpu = Cpu::try_new(CodePages::try_new().unwrap()).unwrap();
        cpu.set_compiler(compiler.clone()).unwrap();
        let client = cpu.compiled.client.as_ref().unwrap().number;
        let submit = |n: u64| {
            let source = source(0x1000 * n);
            compiler.submit(Job { source, client });
        };
        (0..3).for_each(submit);
        let done = compiler.take(client);
        assert!(done.is_refused);
        assert_eq!(done.regions.len(), 2);
        drop(done);
        (0..3).for_each(submit);
        let block = NonNull::from(Box::leak(Box::new(Block::with_room(1).unwrap())));
        cpu.heated(block);
        let done = compiler.take(client);
        assert!(!done.is_refused && done.regions.is_empty());
        submit(0);
        assert_eq!(compiler.take(client).regions.len(), 1);
        // SAFETY: made above; the CPU does not know it.
        drop(unsafe { Box::from_raw(block.as_ptr()) });
        drop(cpu);
        submit(0);
        assert!(compiler.take(client).regions.is_empty(), "the CPU is gone");
    }
}
