//! The compiler of hot guest code.
//!
//! A block that has run often becomes part of a *region*: blocks of one page that follow one another, with their loops,
//! compiled to one function of the host. A region can be entered at the beginnings of its `paths`. Separate threads
//! compile ([`Compiler::work`]). Until a region is installed, the interpreter runs its code.
//!
//! There are two [tiers](Tier). Both begin with the same translation to Cranelift's intermediate language. Most
//! compiled code is only warm, so it must be compiled quickly: the `baseline` tier makes machine code in one pass. To
//! find hot code, the region that is running when the caller interrupts a run, which happens every few milliseconds, is
//! taken as a *sample* (`Executor::sampled`). When a region is sampled for the second time, Cranelift compiles it again
//! to faster code. So compiled code needs no counters, and the number of samples limits Cranelift's total time. (In a
//! boot, most regions that are sampled once are never sampled again: waiting for the second sample saves two thirds of
//! Cranelift's time.) Each tier has a thread of its own, because the interpreter runs the code that waits for the
//! baseline tier. With one thread for both tiers, a third of the code that was interpreted in a boot was such waiting
//! code.
//!
//! A region belongs to no CPU. Each CPU whose memory holds the region's guest code may use it (`known`), and attaches
//! it to its own blocks. The region is valid as long as the block is valid to which it is attached: both are compared
//! with memory together (`Executor::verify`), and the guest code of a region is in one page, whose version covers all
//! of it (`code_pages`). A region cannot change its own guest code, because it leaves stores to pages with decoded code
//! to the interpreter.
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
//! | `translate` | translates a region to a function in Cranelift's intermediate language |
//! | `guest` | the decoded guest instructions |
//! | `paths` | which blocks follow one another while registers and flags stay in SSA values |
//! | `values` | registers and operands as values |
//! | `compute` | emits the formulas of `sem` |
//! | `instructions` | general instructions |
//! | `bits` | instructions on bits, and wide arithmetic |
//! | `vector` | vector instructions that become instructions of Cranelift |
//! | `elements` | vector instructions that reorder elements |
//! | `float` | floating-point instructions |
//! | `baseline` | compiles the intermediate language to machine code in one pass |
//! | `stub` | other vector instructions, by calls of the interpreter's stubs |
//! | `address` | linear addresses: segments, the stack pointer |
//! | `segments` | moves of segment registers |
//! | `access` | accesses to guest memory |
//! | `near` | host addresses found from the last access |
//! | `condition` | the flags, which are computed when an instruction uses them |
//! | `kept` | the state that a path keeps in values |
//! | `helpers` | the functions that compiled code calls |
//! | `known` | all compiled code, found by its guest code |
//! | `window` | the position of R15 in the `Cpu` |
//! | `entries` | where the code of a region is entered |
//! | `dispatch` | entering a region, and continuing in the next one |
//!
//! Module `region` has the regions themselves. Module `hot` requests compilations for a CPU and runs regions. Module
//! `compiled` has the fields of a CPU that compiled code uses.
//!
//! While a region runs, R15 points near the [`Cpu`] (`window`), the guest's registers are variables of the region, and
//! RIP is in the region's page. A region is always left between two instructions, with all state written back. So
//! faults are as precise as in the interpreter. After that the CPU continues directly in the region at the new RIP, if
//! it is among the CPU's `Targets` and its code is current. Each iteration of a loop, and each change to another
//! region, checks `attention`.
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

/// The greatest size of all compiled code of a process, in bytes.
const MEMORY: usize = 64 << 20;

/// A job for a compiling thread.
struct Job {
    source: Source,
    tier: Tier,
    /// The CPU that has requested the job.
    client: u64,
    /// The address of the page that contains the guest code.
    page: u64,
}

/// The results of jobs for one CPU, until the CPU collects them.
#[derive(Default)]
pub(crate) struct Done {
    /// The regions, each with the page of its guest code.
    pub(crate) regions: Vec<(Arc<Region>, u64)>,
    /// Whether a region was dropped for lack of memory.
    pub(crate) is_refused: bool,
}

/// The time at which code is compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Compile {
    /// The compiler's threads compile a block with the baseline tier after it has run often, and with Cranelift when
    /// its region is sampled for the second time.
    Hot,
    /// The CPU's own thread compiles a block before the block runs for the first time. This is slow, and only for tests
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

    /// Returns a region that can probably be entered at a block, given as the block's kind, its place (RIP, or the
    /// offset in its page if the kind is movable) and its bytes. The look-up compares only hashes: the caller has to
    /// compare the region's code with memory.
    pub(crate) fn known(&self, kind: Kind, place: u64, bytes: &[u8]) -> Option<Arc<Region>> {
        self.compiler.known.at(kind, place, bytes)
    }

    /// Requests a compilation or, if the CPU's [`Compile`] says so, compiles at once.
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

/// Returns from the region. The signal handler continues here if a guarded access of the region has failed, with the
/// address of the access in RAX, which becomes the region's result.
#[unsafe(naked)]
unsafe extern "C" fn access_failed() {
    std::arch::naked_asm!("mov rsp, rbp", "pop rbp", "ret")
}

/// The compiler, which all CPUs of a process share.
pub struct Compiler {
    arena: Arc<Arena>,
    isa: isa::OwnedTargetIsa,
    /// The queues of jobs, one for each tier.
    jobs: [Jobs<Job>; 2],
    /// The numbers of the CPUs, each with the results of its finished jobs.
    clients: Mutex<Vec<(u64, Done)>>,
    /// The number for the next CPU that registers.
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
    /// Makes a compiler. For each tier, a thread must call [`work`](Self::work), unless all CPUs compile [at
    /// once](Compile::AtOnce).
    ///
    /// # Errors
    /// [`OutOfMemory`] if the host cannot reserve address space for code.
    pub fn try_new() -> Result<Arc<Self>, OutOfMemory> {
        Self::with(MEMORY)
    }

    pub(crate) fn with(memory: usize) -> Result<Arc<Self>, OutOfMemory> {
        let isa = slat_jit::isa(&[
            // Optimising makes compilation a quarter slower, and does not make the code faster. (It would also require
            // that `enable_alias_analysis` is off, because other CPUs may change guest memory at any time.)
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

    /// Registers the memory for code with the signal handlers. Call before a CPU runs compiled code.
    fn announce(&self) {
        let exit = access_failed as *const () as usize;
        // SAFETY: at a guarded access a region has written back the state of its checkpoint, and RBP points to its
        // frame. If another compiler was registered, its regions belong to CPUs of a parent process.
        unsafe { self.arena.announce(exit) };
    }

    /// Calls `observer` for each region that is compiled from now on, before it runs, on the thread that compiles. A
    /// compiler has at most one observer: further ones are ignored. The memory of code that is no longer used is later
    /// used for other code.
    pub fn observe(&self, observer: fn(&CompiledCode)) {
        self.observer.get_or_init(|| observer);
    }

    /// Compiles the jobs of a tier. Never returns. Call on a separate thread, whose seccomp filter, if any, must allow
    /// `mprotect`.
    pub fn work(&self, tier: Tier) -> ! {
        let mut workshop = Workshop::default();
        loop {
            let job = self.jobs[tier as usize].take();
            self.finish(job, &mut workshop);
        }
    }

    /// Does a job, and stores the result until the job's CPU [takes](Self::take) it.
    fn finish(&self, job: Job, workshop: &mut Workshop) {
        // While this job waited, the same code may have been compiled for another CPU.
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

    /// Compiles a region for `tier`. If the baseline tier cannot compile it, Cranelift does.
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

    /// Copies code that Cranelift has made to executable memory.
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

    /// Removes and returns the results of a CPU's finished jobs.
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

    /// Whether a job of a tier would be accepted: executable memory is allowed, and not too many jobs wait.
    pub(crate) fn has_room(&self, tier: Tier) -> bool {
        !self.is_forbidden() && self.jobs[tier as usize].has_room()
    }
}

/// Allocations of a compilation, which the next one reuses.
struct Workshop {
    context: Context,
    builder: FunctionBuilderContext,
    room: baseline::Room,
}

impl Workshop {
    /// Translates a region to a function in the intermediate language. Returns the region's steps.
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
