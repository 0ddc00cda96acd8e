//! The compiled code of one processor: looks for it, runs it, and asks the compiler for more.

use super::compiler::{Compile, Compiler};
use super::context::{CONTEXT_BITS, Context};
use super::frame::{Frame, TARGETS, Target, target_index};
use super::helpers::Helpers;
use super::region::Region;
use super::source::Source;
use super::translate::{CONTINUE, INTERPRET, INTERPRET_WITH_FLAGS};
use crate::abort::Right;
use crate::caches::Caches;
use crate::hypervisor::Hypervisor;
use crate::insn::Order;
use crate::mmu::Mmu;
use crate::ran::Ran;
use crate::state::State;
use slat_jit::FAILED;
use std::boxed::Box;
use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::Arc;
use std::vec::Vec;

/// `WARM`: the number of times that the interpreter comes to an address before the processor asks the compiler for
/// code. `ASKED_AGAIN`: the number of times that the interpreter comes to the address before the processor asks again
/// whether the code is ready. With `WARM` at 256 instead of 1024, a boot of Debian's kernel took a quarter more CPU
/// time, all of it Cranelift's.
const WARM: u32 = 1024;
const ASKED_AGAIN: u32 = 128;

/// The number of counters: a power of two.
const COUNTERS: usize = 4096;

/// The most regions that a processor keeps.
const REGIONS: usize = 1 << 16;

const PAGE: u64 = 4096;

/// Counts how often the interpreter came to an address.
#[derive(Clone, Copy)]
struct Counter {
    pc: u64,
    times: u32,
}

/// The key of compiled code: its address in the machine's memory, its virtual address, and the bits of its [`Context`].
type Place = (u64, u64, u64);

/// Returns the address of the page that contains a place, in the machine's memory.
fn page_of((at, pc, _): Place) -> u64 {
    at.wrapping_sub(pc % PAGE)
}

/// A compiled region that this processor uses.
struct Installed {
    region: Arc<Region>,
    /// The value of [`Caches::code_edition`] when the region's words were last compared with memory. Dropping decoded
    /// code raises `code_edition`.
    verified: u64,
}

/// A hasher of a few integers. It need not be strong: the guest chooses only addresses that it executes.
#[derive(Default)]
struct Mixer(u64);

impl Hasher for Mixer {
    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.write_u64((*byte).into());
        }
    }
    fn write_u64(&mut self, n: u64) {
        self.0 = (self.0 ^ n)
            .wrapping_mul(0x9e37_79b9_7f4a_7c15)
            .rotate_left(29);
    }
    fn finish(&self) -> u64 {
        self.0
    }
}

struct Client {
    compiler: Arc<Compiler>,
    compile: Compile,
}

/// The compiled code that one processor uses.
pub(crate) struct Compiled {
    client: Option<Client>,
    /// Compiled code accesses the host's memory itself.
    pub(crate) is_direct: bool,
    /// [`Compiler::generation`] at the last look-up.
    generation: u64,
    frame: Box<Frame>,
    targets: Vec<Target>,
    counters: Vec<Counter>,
    regions: HashMap<Place, Installed, BuildHasherDefault<Mixer>>,
    /// The number of instructions that compiled code has executed.
    pub(crate) instructions: u64,
}

// SAFETY: the frame's pointers are set before each use, and not used afterwards. The targets' code belongs to the
// regions, which any thread may use.
unsafe impl Send for Compiled {}

impl Compiled {
    pub(crate) fn new() -> Self {
        Self {
            client: None,
            is_direct: false,
            generation: 0,
            frame: Box::new(Frame::new()),
            targets: Vec::new(),
            counters: Vec::new(),
            regions: HashMap::default(),
            instructions: 0,
        }
    }

    /// Sets the compiler that compiles this processor's code from now on.
    pub(crate) fn attach(&mut self, compiler: Arc<Compiler>, compile: Compile) {
        compiler.announce();
        self.client = Some(Client { compiler, compile });
        self.targets = std::vec![Target::NONE; TARGETS];
        self.counters = std::vec![Counter { pc: 0, times: 0 }; COUNTERS];
        self.regions = HashMap::default();
    }

    /// Whether the processor has a compiler.
    #[inline(always)]
    pub(crate) fn is_attached(&self) -> bool {
        self.client.is_some()
    }

    /// Runs compiled code, if there is any at the program counter, for at most `budget` instructions. The caller has
    /// checked that the next event is the execution of an instruction, not an exception.
    pub(crate) fn run<H: Hypervisor>(
        &mut self,
        state: &mut State,
        caches: &mut Caches,
        below: &mut H,
        budget: u64,
    ) -> Ran {
        let Some(code) = self.find(state, caches, below) else {
            return Ran::default();
        };
        let context = Context::of(state, self.is_direct);
        let helpers = &const { Helpers::of::<H>() };
        let budget = budget.min(i64::MAX as u64);
        let edition = edition(caches, context);
        let tlb = caches.tlb.first();
        let mut machine = Mmu { caches, below };
        let frame = &mut *self.frame;
        frame.state = state;
        frame.tlb = tlb;
        frame.targets = self.targets.as_ptr();
        frame.edition = edition;
        frame.budget = budget as i64;
        frame.helpers = std::ptr::from_ref(helpers).cast();
        frame.machine = (&raw mut machine).cast();
        // SAFETY: `find` returns the code of a region that this processor uses, and regions return such code. Every
        // event that invalidates targets has changed the edition. The frame refers to the state, the machine and the
        // tables of this processor, to which nothing else refers until this returns. The pages in the TLB are memory to
        // which guarded accesses may be made, as `access_directly` demands.
        let why = unsafe { slat_jit::enter((&raw mut *frame).cast(), code) };
        self.frame.end_floats();
        let mut has_flags = why == INTERPRET_WITH_FLAGS;
        if why == FAILED {
            let failed = self.frame.entry.failed;
            let mut regions = self.regions.values();
            let point = regions.find_map(|installed| installed.region.point_at(failed));
            let point = point.expect("only this processor's regions run");
            state.pc = point.pc;
            self.frame.budget += point.uncounted;
            has_flags = point.has_flags;
        }
        if has_flags {
            state.flags = self.frame.flags.nzcv();
        }
        debug_assert!([CONTINUE, INTERPRET, INTERPRET_WITH_FLAGS, FAILED].contains(&why));
        let instructions = budget - self.frame.budget as u64;
        self.instructions += instructions;
        Ran {
            instructions,
            needs_interpreter: why != CONTINUE,
        }
    }

    /// Returns the compiled code at the program counter.
    #[inline(always)]
    fn find<H: Hypervisor>(
        &mut self,
        state: &State,
        caches: &mut Caches,
        below: &mut H,
    ) -> Option<*const u8> {
        let context = Context::of(state, self.is_direct);
        let pc = state.pc;
        let target = self.targets[target_index(pc)];
        if target.pc == pc && target.edition == edition(caches, context) {
            return Some(target.code);
        }
        self.look_up(state, context, caches, below)
    }

    /// Looks for a compiled region at the program counter. If there is none, counts that the interpreter has come to
    /// this address, and asks the compiler for a region if the count is high enough.
    fn look_up<H: Hypervisor>(
        &mut self,
        state: &State,
        context: Context,
        caches: &mut Caches,
        below: &mut H,
    ) -> Option<*const u8> {
        let pc = state.pc;
        let generation = self.client.as_ref()?.compiler.generation();
        if generation != self.generation || self.regions.len() > REGIONS {
            // Drop all regions: the compiler's memory was full, or this processor has so many regions that most of them
            // must be of code that no longer runs.
            self.generation = generation;
            self.regions.clear();
            self.targets.fill(Target::NONE);
        }
        let find = |caches: &Caches| caches.tlb.find(context.accessor, Right::Execute, pc, 4);
        let at = match find(caches) {
            Some(at) => at,
            None => {
                // If the fetch fails, the interpreter will repeat it and take the abort.
                Mmu { caches, below }.instruction(state, pc).ok()?;
                find(caches)?
            }
        };
        let place = (at, pc, context.bits());
        let code = match self.installed(place, caches, below) {
            Some(code) => code,
            None => self.count(place, context, caches, below)?,
        };
        self.targets[target_index(pc)] = Target {
            pc,
            code,
            edition: edition(caches, context),
        };
        Some(code)
    }

    /// Returns the code of an installed region. If decoded code was dropped since the last comparison, first compares
    /// the region's words with memory; if they differ, removes the region and returns `None`.
    fn installed<H: Hypervisor>(
        &mut self,
        place: Place,
        caches: &Caches,
        below: &mut H,
    ) -> Option<*const u8> {
        let installed = self.regions.get_mut(&place)?;
        if installed.verified != caches.code_edition {
            let source = &installed.region.source;
            let page = page_of(place);
            let is_there = |(offset, word): &(u16, u32)| {
                let at = page + u64::from(*offset);
                below.load(at, 2, Order::default()).ok() == Some(u64::from(*word))
            };
            if !source.words.iter().all(is_there) {
                // A target may still refer to the region, but only with an older edition, so compiled code does not
                // enter it.
                self.regions.remove(&place);
                return None;
            }
            installed.verified = caches.code_edition;
        }
        Some(installed.region.chunk.start())
    }

    /// Counts that the interpreter has come to an address. If the interpreter has come often enough, asks the compiler
    /// for the region. Returns the region's code if the compiler has it already.
    fn count<H: Hypervisor>(
        &mut self,
        place: Place,
        context: Context,
        caches: &Caches,
        below: &mut H,
    ) -> Option<*const u8> {
        let (_, pc, _) = place;
        let client = self.client.as_ref()?;
        let counter = &mut self.counters[(pc >> 2 ^ pc >> 14) as usize & (COUNTERS - 1)];
        if counter.pc != pc {
            *counter = Counter { pc, times: 0 };
        }
        counter.times += 1;
        if client.compile == Compile::Hot {
            if counter.times < WARM {
                return None;
            }
            counter.times = WARM - ASKED_AGAIN;
        }
        let page = page_of(place);
        let source = Source::collect(pc, context, |offset| {
            let word = below.load(page + offset, 2, Order::default());
            word.ok().map(|word| word as u32)
        })?;
        let region = client.compiler.get(source, client.compile)?;
        let code = region.chunk.start();
        let installed = Installed {
            region,
            verified: caches.code_edition,
        };
        self.regions.insert(place, installed);
        Some(code)
    }
}

/// Returns the edition of the targets that are valid now: see [`Frame::edition`].
#[inline(always)]
fn edition(caches: &Caches, context: Context) -> u64 {
    caches.edition << CONTEXT_BITS | context.bits()
}
