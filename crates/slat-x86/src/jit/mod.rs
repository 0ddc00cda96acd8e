//! The compiler.
//!
//! A block that has run often becomes part of a *region*: blocks of one page that follow one another, with their loops,
//! compiled to one function of the host. A region can be entered at the beginnings of its `paths`. Separate threads
//! compile ([`Compiler::work`]). Until a region is installed, the interpreter runs its code.
//!
//! There are two [tiers](Tier). Both begin with the same translation, to Cranelift's intermediate language. Most
//! compiled code is only warm, so it must be compiled quickly. For this code, the `baseline` tier makes machine code in
//! one pass. The caller interrupts each run every few milliseconds. The region that runs at that moment is a *sample*
//! (`Executor::sampled`). At its second sample a region is compiled again by Cranelift, which makes faster code. So
//! compiled code needs no counters, and Cranelift's total time is limited by the number of samples. (In a boot, most
//! regions that are sampled once are never sampled again: waiting for the second sample saves two thirds of Cranelift's
//! time.) Each tier has its own thread, because while code waits for the baseline tier, the interpreter runs it. With
//! one thread for both tiers, a third of the code that was interpreted in a boot was such waiting code.
//!
//! A region belongs to no CPU. Each CPU whose memory holds the region's guest code may use it (`known`). Each CPU
//! attaches the region to its own blocks. The region is valid as long as its block is valid. Both are compared with
//! memory together (`Executor::verify`), and the guest code of a region is in one page, whose version covers all of it
//! (`code_pages`). A region cannot change its own guest code, because it leaves stores to pages with decoded code to
//! the interpreter.
//!
//! Code with segments is 16-bit code, and 32-bit code whose segments are not flat. The regions of such code, like its
//! blocks, are identified by linear address and RIP. A region with segments is compiled for one base of CS
//! (`Kind::base`), because code addresses are constants in it, and because all of its guest code must be in one page.
//! It reads the other segments when it runs (`address`). A region with segments continues only in regions with the same
//! base. To ensure this, every instruction that loads CS leaves compiled code. And when the CPU enters compiled code
//! with another base than the last time, it drops all targets (`Executor::tell_targets_apart`).
//!
//! | file | idea |
//! |---|---|
//! | `translate` | from guest code to Cranelift's intermediate language: a region as a whole |
//! | `guest` | the decoded guest instructions |
//! | `paths` | which blocks follow one another while registers and flags stay in SSA values |
//! | `values` | registers and operands as values |
//! | `compute` | the formulas of `sem` as code |
//! | `instructions` | instructions with a translation of their own |
//! | `bits` | instructions on bits, and wide arithmetic |
//! | `vector` | vector instructions with a translation of their own |
//! | `elements` | vector instructions that reorder elements |
//! | `float` | floating-point instructions |
//! | `baseline` | from the intermediate language to machine code, in one pass |
//! | `stub` | all other vector instructions, by the interpreter's stubs |
//! | `address` | linear addresses: segments, the stack pointer |
//! | `segments` | moves of segment registers |
//! | `access` | accesses to guest memory |
//! | `near` | host addresses found from the last access |
//! | `condition` | the flags, which are computed when an instruction uses them |
//! | `kept` | the state that a path keeps in values |
//! | `helpers` | the functions that compiled code calls |
//! | `known` | all compiled code, found by its guest code |
//! | `window` | the fields of a CPU that R15 reaches |
//! | `entries` | where the code of a region is entered |
//! | `dispatch` | entering a region, and continuing in the next one |
//!
//! Module `region` has the regions themselves and the memory for them. Module `hot` has the CPU's side, which requests
//! compilations and runs regions. Module `compiled` has the fields of a CPU that compiled code uses.
//!
//! While a region runs, R15 points near the [`Cpu`] (`window`), the guest's registers are variables of the region, and
//! RIP is in the region's page. A region is always left between two instructions, with all state written back. So
//! faults are as precise as in the interpreter. After that the CPU continues directly in the region at the new RIP, if
//! `Targets` has that region and its code is current. Each iteration of a loop, and each change to another region,
//! checks `attention`.
//!
//! [`Cpu`]: crate::Cpu

mod access;
mod address;
mod baseline;
mod bits;
mod compute;
mod condition;
pub(crate) mod dispatch;
mod elements;
mod entries;
mod float;
mod guest;
pub(crate) mod helpers;
mod instructions;
mod kept;
mod known;
mod near;
mod paths;
mod segments;
mod stub;
mod translate;
mod values;
mod vector;
mod window;

use crate::heap::OutOfMemory;
pub use crate::region::CompiledCode;
pub use crate::region::Tier;

use crate::region::{Kind, Region, Source, Step};
use cranelift_codegen::{Context, control::ControlPlane, isa};
use cranelift_frontend::{FunctionBuilder, FunctionBuilderContext};
use known::Known;
use slat_jit::{Arena, Chunk, Guarded, Jobs, Refused, lock};
use slat_trace::{CompileRegion, point};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

/// The greatest number of bytes of compiled code in a process.
const MEMORY: usize = 64 << 20;

/// A job for a compiling thread.
struct Job {
    source: Source,
    tier: Tier,
    /// The CPU that has requested the job.
    client: u64,
    /// The page of the guest code.
    page: u64,
}

/// The results of jobs, until the CPU that requested them collects them.
#[derive(Default)]
pub(crate) struct Done {
    /// The regions, each with the page of its guest code.
    pub(crate) regions: Vec<(Arc<Region>, u64)>,
    /// Whether there was no memory for a region.
    pub(crate) is_refused: bool,
}

/// When code is compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Compile {
    /// The compiler's threads compile a block by the baseline tier after it has run often, and by Cranelift when its
    /// region is sampled for the second time.
    Hot,
    /// The CPU's own thread compiles a block before the block runs for the first time. This is slow, and is for tests
    /// of the compiler.
    AtOnce(Tier),
}

/// The registration of a CPU with its compiler.
pub(crate) struct Client {
    pub(crate) compiler: Arc<Compiler>,
    pub(crate) number: u64,
    pub(crate) compile: Compile,
}

impl Client {
    /// Registers a CPU.
    ///
    /// # Errors
    /// [`OutOfMemory`].
    pub(crate) fn try_new(compiler: Arc<Compiler>, compile: Compile) -> Result<Self, OutOfMemory> {
        compiler.announce();
        let number = compiler.numbers.fetch_add(1, Ordering::Relaxed);
        let mut clients = lock(&compiler.clients);
        clients.try_reserve(1).map_err(|_| OutOfMemory)?;
        clients.push((number, Done::default()));
        drop(clients);
        Ok(Client {
            compiler,
            number,
            compile,
        })
    }

    /// Returns a compiled region that probably has an entry for a block, given as the block's kind, its place (RIP, or
    /// the offset in its page if the kind is movable) and its bytes. The look-up compares hashes: the caller has to
    /// compare the region's code with memory.
    pub(crate) fn known(&self, kind: Kind, place: u64, bytes: &[u8]) -> Option<Arc<Region>> {
        self.compiler.known.at(kind, place, bytes)
    }

    /// Requests a compilation, or compiles at once if the CPU's [`Compile`] says so.
    pub(crate) fn submit(&self, source: Source, page: u64, tier: Tier) {
        let job = Job {
            source,
            tier,
            client: self.number,
            page,
        };
        match self.compile {
            Compile::Hot => {
                self.compiler.jobs[tier as usize].add(job);
            }
            Compile::AtOnce(_) => self.compiler.finish(job, &mut Workshop::default()),
        }
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        let mut clients = lock(&self.compiler.clients);
        clients.retain(|(number, _)| *number != self.number);
    }
}

/// A region continues here if one of its guarded accesses has failed. Returns from the region. The result is the
/// address of the access, which is in RAX.
#[unsafe(naked)]
unsafe extern "C" fn access_failed() {
    std::arch::naked_asm!("mov rsp, rbp", "pop rbp", "ret")
}

/// The compiler, which all CPUs of a process share.
pub struct Compiler {
    arena: Arc<Arena>,
    isa: isa::OwnedTargetIsa,
    /// The jobs of each tier.
    jobs: [Jobs<Job>; 2],
    /// The CPUs, by number, each with the results of its finished jobs.
    clients: Mutex<Vec<(u64, Done)>>,
    /// The number that the next registered CPU gets.
    numbers: AtomicU64,
    known: Known,
    is_forbidden: AtomicBool,
    /// The function that is called with each new region.
    observer: OnceLock<fn(&CompiledCode)>,
}

impl std::fmt::Debug for Compiler {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Compiler").finish_non_exhaustive()
    }
}

impl Compiler {
    /// Makes a compiler. A thread for each tier must call [`work`](Self::work), unless all CPUs compile [at
    /// once](Compile::AtOnce).
    ///
    /// # Errors
    /// [`OutOfMemory`] if the host gives no address space for code.
    pub fn try_new() -> Result<Arc<Self>, OutOfMemory> {
        Self::with(MEMORY)
    }

    pub(crate) fn with(memory: usize) -> Result<Arc<Self>, OutOfMemory> {
        let isa = slat_jit::isa(&[
            // Optimising makes compilation a quarter slower, and does not make the code faster. (With optimising,
            // `enable_alias_analysis` would have to be off, because other CPUs may change guest memory at any time.)
            ("opt_level", "none"),
            // `access_failed` needs the frame pointer to return from the region.
            ("preserve_frame_pointers", "true"),
        ]);
        let arena = Arena::try_new(memory).ok_or(OutOfMemory)?;
        Ok(Arc::new(Self {
            arena,
            isa,
            jobs: Default::default(),
            clients: Mutex::default(),
            numbers: AtomicU64::new(0),
            known: Known::new(),
            is_forbidden: AtomicBool::new(false),
            observer: OnceLock::new(),
        }))
    }

    /// Registers the code with the signal handlers. Call before a CPU runs compiled code.
    fn announce(&self) {
        let exit = access_failed as *const () as usize;
        // SAFETY: at a guarded access a region has written back all state, and RBP points to its frame. If another
        // compiler was registered, its regions belong to CPUs of a parent process.
        unsafe { self.arena.announce(exit) };
    }

    /// Calls `observer` for all code that is compiled from now on, before the code runs, on the threads that compile. A
    /// compiler has one observer. Further observers are ignored. The memory of code that is no longer used is later
    /// used for other code.
    pub fn observe(&self, observer: fn(&CompiledCode)) {
        self.observer.get_or_init(|| observer);
    }

    /// Compiles the jobs of a tier. Never returns. Call on a separate thread whose seccomp filter, if any, allows
    /// `mprotect`.
    pub fn work(&self, tier: Tier) -> ! {
        let mut workshop = Workshop::default();
        loop {
            let job = self.jobs[tier as usize].take();
            self.finish(job, &mut workshop);
        }
    }

    /// Does a job, and keeps the result until the job's CPU [takes](Self::take) it.
    fn finish(&self, job: Job, workshop: &mut Workshop) {
        // The same code may have been compiled for another CPU while this job waited.
        let known = (job.source.blocks.first())
            .and_then(|(place, bytes)| self.known.at(job.source.kind, *place, bytes))
            .filter(|known| known.source == job.source && known.tier >= job.tier);
        let region = match known {
            Some(known) => Ok(known),
            None => self
                .compile(job.source, job.page, job.tier, workshop)
                .map(|region| {
                    point(|| CompileRegion {
                        rip: region.rip(),
                        tier: region.tier as u32,
                    });
                    let region = Arc::new(region);
                    if let Some(observer) = self.observer.get() {
                        observer(&region.compiled());
                    }
                    self.known.add(&region);
                    region
                }),
        };
        if matches!(region, Err(Refused::Forbidden)) {
            self.is_forbidden.store(true, Ordering::Relaxed);
        }
        let mut clients = lock(&self.clients);
        let client = clients.iter_mut().find(|(number, _)| *number == job.client);
        let Some((_, done)) = client else {
            return;
        };
        match region {
            Ok(region) if done.regions.try_reserve(1).is_ok() => {
                done.regions.push((region, job.page));
            }
            Err(Refused::Full) => {
                self.known.clear();
                done.is_refused = true;
            }
            Ok(_) | Err(Refused::Forbidden | Refused::Unable) => {}
        }
    }

    /// Compiles a region by `tier`. If the baseline tier cannot compile it, compiles it by Cranelift.
    fn compile(
        &self,
        source: Source,
        page: u64,
        tier: Tier,
        workshop: &mut Workshop,
    ) -> Result<Region, Refused> {
        let steps = workshop.translate(&source, page, tier);
        let Workshop { context, room, .. } = workshop;
        let made = match tier {
            Tier::Baseline => baseline::generate(&context.func, room),
            Tier::Full => None,
        };
        if let Some(code) = made {
            let (chunk, guarded) = self.put(code.bytes, Guarded(code.guarded.into()))?;
            return Ok(Region {
                chunk,
                source,
                page,
                tier,
                is_sampled: AtomicBool::new(false),
                steps,
                guarded,
                entries: code.entries.into_iter().map(Some).collect(),
            });
        }
        let steps = match tier {
            Tier::Baseline => workshop.translate(&source, page, Tier::Full),
            Tier::Full => steps,
        };
        let compiled = (workshop.context)
            .compile(&*self.isa, &mut ControlPlane::default())
            .map_err(|_| Refused::Unable)?;
        let entries = entries::of(compiled, source.blocks.len())?;
        let (chunk, guarded) = self.put_full(compiled)?;
        Ok(Region {
            entries,
            chunk,
            source,
            page,
            tier: Tier::Full,
            is_sampled: AtomicBool::new(false),
            steps,
            guarded,
        })
    }

    /// Copies the code that Cranelift has made to executable memory.
    fn put_full(
        &self,
        compiled: &cranelift_codegen::CompiledCode,
    ) -> Result<(Chunk, Guarded), Refused> {
        assert!(
            compiled.buffer.relocs().is_empty(),
            "code without relocations"
        );
        self.put(compiled.code_buffer(), Guarded::of(compiled))
    }

    fn put(&self, code: &[u8], guarded: Guarded) -> Result<(Chunk, Guarded), Refused> {
        let chunk = self.arena.put(code, guarded.offsets())?;
        Ok((chunk, guarded))
    }

    /// Removes and returns the finished work for a CPU.
    pub(crate) fn take(&self, client: u64) -> Done {
        let mut clients = lock(&self.clients);
        let done = clients.iter_mut().find(|(number, _)| *number == client);
        done.map(|(_, done)| std::mem::take(done))
            .unwrap_or_default()
    }

    /// Whether the host has refused executable memory. If so, all code is interpreted.
    pub fn is_forbidden(&self) -> bool {
        self.is_forbidden.load(Ordering::Relaxed)
    }

    /// Whether a job of a tier would be accepted: executable memory is allowed, and not too many jobs are waiting.
    pub(crate) fn has_room(&self, tier: Tier) -> bool {
        !self.is_forbidden() && self.jobs[tier as usize].has_room()
    }
}

/// Allocations that are reused from one compilation to the next.
struct Workshop {
    context: Context,
    builder: FunctionBuilderContext,
    room: baseline::Room,
}

impl Workshop {
    /// Makes the function of a region in the intermediate language. Returns the region's steps.
    fn translate(&mut self, source: &Source, page: u64, tier: Tier) -> Box<[Step]> {
        let Workshop {
            context, builder, ..
        } = self;
        context.clear();
        context.func.signature = translate::region();
        let builder = FunctionBuilder::new(&mut context.func, builder);
        translate::translate(builder, source, page, tier)
    }
}

impl Default for Workshop {
    fn default() -> Self {
        Self {
            context: Context::new(),
            builder: FunctionBuilderContext::new(),
            room: baseline::Room::default(),
        }
    }
}
