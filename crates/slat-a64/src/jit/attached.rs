//! A processor's side of compiled code: finds it, runs it, and asks for more.

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

/// How often the interpreter comes to an address before the code there is compiled, and how often it comes there
/// between two questions for the result. With 256 instead of 1024, a boot of Debian's kernel took a quarter more CPU
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

/// Where code is: the machine's address, the virtual address, and the context.
type Place = (u64, u64, u64);

/// Returns the machine's address of the page that contains a place.
fn page_of((at, pc, _): Place) -> u64 {
    at.wrapping_sub(pc % PAGE)
}

/// A region that this processor uses.
struct Installed {
    region: Arc<Region>,
    /// The value of [`Caches::code_edition`], which is raised when decoded code is dropped, when the region's code was
    /// compared with memory.
    verified: u64,
}

/// A hasher of a few integers, of which the guest chooses only addresses that it executes.
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

/// A processor's compiled code.
pub(crate) struct Compiled {
    client: Option<Client>,
    /// Accesses are made to the host's memory.
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
// regions, which may be on any thread.
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

    /// Whether there is a compiler.
    #[inline(always)]
    pub(crate) fn is_attached(&self) -> bool {
        self.client.is_some()
    }

    /// Runs compiled code, if there is any at the program counter, for at most `budget` instructions. The caller has
    /// made sure that the interpreter would execute an instruction now, and take no exception first.
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
        // SAFETY: `find` returns the code of a region that this processor uses, and regions return such code. Whatever
        // invalidates targets has changed the edition. The frame has the state, the machine and the tables of this
        // processor, to which nothing else refers until this returns. The pages in the TLB are memory to which guarded
        // accesses may be made, as `access_directly` demands.
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

    /// Looks for a region that was compiled, and has code compiled to which the interpreter has come often.
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
            // The memory for code was full, or most of the regions are of code that no longer runs.
            self.generation = generation;
            self.regions.clear();
            self.targets.fill(Target::NONE);
        }
        let find = |caches: &Caches| caches.tlb.find(context.accessor, Right::Execute, pc, 4);
        let at = match find(caches) {
            Some(at) => at,
            None => {
                // If there is a fault, the interpreter finds it again.
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

    /// Returns the code of an installed region, if memory still has the guest code from which it was compiled.
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
                // A target may still refer to the region: it is one of an older edition.
                self.regions.remove(&place);
                return None;
            }
            installed.verified = caches.code_edition;
        }
        Some(installed.region.chunk.start())
    }

    /// Counts that the interpreter has come to an address. Returns the code of a region that is new.
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

/// Returns the edition of targets that are valid now.
#[inline(always)]
fn edition(caches: &Caches, context: Context) -> u64 {
    caches.edition << CONTEXT_BITS | context.bits()
}
