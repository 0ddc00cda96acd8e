//! The compiler of a process: its queue of code to compile, its thread, and the regions that it has compiled.

use super::plan::Plan;
use super::region::Region;
use super::source::Source;
use super::translate::{signature, translate};
use cranelift_codegen::control::ControlPlane;
use cranelift_codegen::{Context, isa};
use cranelift_frontend::{FunctionBuilder, FunctionBuilderContext};
use slat_jit::{Arena, Guarded, Jobs, Refused, lock};
use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

/// The greatest size of all compiled code of a process, in bytes.
const MEMORY: usize = 64 << 20;

/// The greatest number of pieces of guest code that the compiler remembers, compiled or not.
const KNOWN: usize = 1 << 16;

/// The time at which code is compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Compile {
    /// The compiler's thread compiles code that has run often.
    Hot,
    /// The processor's own thread compiles code before the code runs for the first time. This is slow, and only for
    /// tests.
    AtOnce,
}

/// What the compiler knows of a piece of guest code.
enum Known {
    Waiting,
    Compiled(Arc<Region>),
    /// The code cannot be compiled.
    Refused,
}

/// The compiler of all processors of a process. A process has one.
pub struct Compiler {
    arena: Arc<Arena>,
    isa: isa::OwnedTargetIsa,
    jobs: Jobs<Source>,
    known: Mutex<HashMap<Source, Known>>,
    is_forbidden: AtomicBool,
    generation: AtomicU64,
}

impl fmt::Debug for Compiler {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Compiler").finish_non_exhaustive()
    }
}

impl Compiler {
    /// Makes a compiler. A thread must call [`work`](Self::work), unless all processors compile [at
    /// once](Compile::AtOnce). Returns `None` if the host cannot reserve address space for code.
    pub fn try_new() -> Option<Arc<Self>> {
        Self::with(MEMORY)
    }

    fn with(memory: usize) -> Option<Arc<Self>> {
        let isa = slat_jit::isa(&[
            ("opt_level", "speed"),
            // Cranelift may not reuse loaded values: other processors change guest memory at any time.
            ("enable_alias_analysis", "false"),
        ]);
        Some(Arc::new(Self {
            arena: Arena::try_new(memory)?,
            isa,
            jobs: Jobs::default(),
            known: Mutex::default(),
            is_forbidden: AtomicBool::new(false),
            generation: AtomicU64::new(0),
        }))
    }

    /// Registers the memory for code with the signal handlers. Call before a processor runs compiled code.
    pub(super) fn announce(&self) {
        // SAFETY: a guarded access may leave compiled code by `slat_jit::enter` at any time: a checkpoint was made
        // before it. If another compiler was registered, its code belongs to processors of a parent process.
        unsafe { self.arena.announce(slat_jit::failed_access()) };
    }

    /// Compiles the code that processors request, and never returns. Call on a separate thread, where no filter of
    /// system calls forbids `mprotect`.
    pub fn work(&self) -> ! {
        let mut workshop = Workshop::default();
        loop {
            let source = self.jobs.take();
            self.finish(source, &mut workshop);
        }
    }

    /// Whether the host has refused executable memory. If so, all code is interpreted.
    pub fn is_forbidden(&self) -> bool {
        self.is_forbidden.load(Ordering::Relaxed)
    }

    /// Returns a number that changes when the memory for code is full. Processors must then drop their regions.
    pub(super) fn generation(&self) -> u64 {
        self.generation.load(Ordering::Relaxed)
    }

    /// Returns the compiled code of `source`, if there is any. If there is none, compiles `source` at once and returns
    /// the code, or queues `source` for the compiler's thread and returns `None`.
    pub(super) fn get(&self, source: Source, compile: Compile) -> Option<Arc<Region>> {
        let mut known = lock(&self.known);
        match known.get(&source) {
            Some(Known::Compiled(region)) => return Some(region.clone()),
            Some(Known::Waiting | Known::Refused) => return None,
            None => {}
        }
        if self.is_forbidden() || (compile == Compile::Hot && !self.jobs.has_room()) {
            return None;
        }
        if known.len() >= KNOWN {
            known.clear();
        }
        known.insert(source.clone(), Known::Waiting);
        drop(known);
        match compile {
            Compile::AtOnce => self.finish(source, &mut Workshop::default()),
            Compile::Hot => {
                if !self.jobs.add(source.clone()) {
                    lock(&self.known).remove(&source);
                }
                None
            }
        }
    }

    /// Compiles `source`, and records the result.
    fn finish(&self, source: Source, workshop: &mut Workshop) -> Option<Arc<Region>> {
        let made = self.compile(source.clone(), workshop);
        let mut known = lock(&self.known);
        match made {
            Ok(region) => {
                let region = Arc::new(region);
                known.insert(source, Known::Compiled(region.clone()));
                Some(region)
            }
            Err(Refused::Full) => {
                // The memory for code is full. The regions are freed once all processors have dropped them. Then
                // the processors request again the code that is still hot.
                known.clear();
                self.generation.fetch_add(1, Ordering::Relaxed);
                None
            }
            Err(refused) => {
                if refused == Refused::Forbidden {
                    self.is_forbidden.store(true, Ordering::Relaxed);
                }
                known.insert(source, Known::Refused);
                None
            }
        }
    }

    fn compile(&self, source: Source, workshop: &mut Workshop) -> Result<Region, Refused> {
        let Workshop { context, builder } = workshop;
        context.clear();
        context.func.signature = signature();
        let plan = Plan::new(&source);
        let builder = FunctionBuilder::new(&mut context.func, builder);
        let translated = translate(builder, &plan, source.pc, source.context);
        let compiled = context
            .compile(&*self.isa, &mut ControlPlane::default())
            .map_err(|_| Refused::Unable)?;
        assert!(
            compiled.buffer.relocs().is_empty(),
            "code without relocations"
        );
        let guarded = Guarded::of(compiled);
        let chunk = self.arena.put(compiled.code_buffer(), guarded.offsets())?;
        Ok(Region {
            chunk,
            source,
            guarded,
            points: translated.points,
            _functions: translated.functions,
        })
    }
}

/// Allocations of a compilation, which the next one reuses.
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
