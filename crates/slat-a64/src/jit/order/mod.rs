//! Checks that compiled code keeps the order of accesses that Arm promises to guests. Models check it: a test on x86
//! observes x86's order alone, and a test on arm64 observes one processor, whose order may be stronger than another's.
//!
//! 1. The tests read the code of an instruction from Cranelift's intermediate language, and from the host's code.
//! 2. So a program of guest instructions becomes a program of the host's, and [`model`] tells what both can compute. The
//!    host's results have to be the guest's.
//!
//! The interpreter and the helpers of compiled code fence each ordered access on both sides, and their plain accesses are
//! at least as strong as compiled ones (`slat_guard`). So they order more than compiled code does, at each place, and a
//! mixture of tiers computes nothing that compiled code alone would not.
//!
//! Left out: dependencies. A dependency of the guest's is one of the host's code, unless Cranelift computes the value
//! without it (`eor x1, x0, x0`). On arm64 such an artificial dependency orders nothing in compiled code. No known guest
//! relies on one.

mod model;

use super::context::Context;
use super::plan::Plan;
use super::source::Source;
use super::translate::{signature, translate};
use crate::stage1::Accessor;
use cranelift_codegen::control::ControlPlane;
use cranelift_codegen::ir::Opcode;
use cranelift_frontend::{FunctionBuilder, FunctionBuilderContext};
use model::{Model, Op, outcomes};
use slat_jit::GUARDED;
use std::string::{String, ToString};
use std::vec;
use std::vec::Vec;

/// What compiled code does to memory where the TLB has the page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Emitted {
    Load,
    Store,
    LoadAcquire,
    StoreRelease,
    Fence,
    /// Calls a function of the interpreter's.
    Helper,
}
use Emitted::*;

/// Compiles an instruction. Returns what is emitted for it, and the host's code.
fn emitted(word: u32) -> (Vec<Emitted>, String) {
    let context = Context {
        accessor: Accessor::El1,
        checks_stack: false,
        traps_vectors: false,
        has_usual_floats: true,
        is_direct: true,
    };
    let source = Source::collect(0x1000, context, |at| (at == 0).then_some(word));
    let source = source.expect("a word at the program counter");
    let plan = Plan::new(&source);
    let mut compiling = cranelift_codegen::Context::new();
    compiling.func.signature = signature();
    let mut allocations = FunctionBuilderContext::new();
    let builder = FunctionBuilder::new(&mut compiling.func, &mut allocations);
    let _kept = translate(builder, &plan, source.pc, source.context);
    let func = &compiling.func;
    // Misses are in cold blocks.
    let blocks = func
        .layout
        .blocks()
        .filter(|block| !func.layout.is_cold(*block));
    let insts = blocks.flat_map(|block| func.layout.block_insts(block));
    let parts = insts.filter_map(|inst| {
        let data = func.dfg.insts[inst];
        let is_guarded = data
            .memflags()
            .is_some_and(|flags| flags.trap_code() == Some(GUARDED));
        match data.opcode() {
            Opcode::Fence => Some(Fence),
            Opcode::CallIndirect => Some(Helper),
            Opcode::AtomicLoad if is_guarded => Some(LoadAcquire),
            Opcode::AtomicStore if is_guarded => Some(StoreRelease),
            opcode if is_guarded && opcode.can_load() => Some(Load),
            opcode if is_guarded && opcode.can_store() => Some(Store),
            _ => None,
        }
    });
    let parts = parts.collect();
    compiling.set_disasm(true);
    let isa = slat_jit::isa(&[("opt_level", "speed")]);
    let compiled = compiling.compile(&*isa, &mut ControlPlane::default());
    let text = compiled
        .expect("a function that Cranelift compiles")
        .vcode
        .clone();
    (parts, text.expect("a disassembly").to_string())
}

/// Guest instructions with X0 as the address, and what is emitted for them.
const INSTRUCTIONS: [(&str, u32, &[Emitted]); 24] = [
    ("ldrb w1, [x0]", 0x3940_0001, &[Load]),
    ("ldrh w1, [x0]", 0x7940_0001, &[Load]),
    ("ldr w1, [x0]", 0xb940_0001, &[Load]),
    ("ldr x1, [x0]", 0xf940_0001, &[Load]),
    ("strb w1, [x0]", 0x3900_0001, &[Store]),
    ("str x1, [x0]", 0xf900_0001, &[Store]),
    ("ldarb w1, [x0]", 0x08df_fc01, &[LoadAcquire]),
    ("ldarh w1, [x0]", 0x48df_fc01, &[LoadAcquire]),
    ("ldar w1, [x0]", 0x88df_fc01, &[LoadAcquire]),
    ("ldar x1, [x0]", 0xc8df_fc01, &[LoadAcquire]),
    ("ldapr x1, [x0]", 0xf8bf_c001, &[LoadAcquire]),
    ("ldaxr x1, [x0]", 0xc85f_fc01, &[LoadAcquire, Helper]),
    ("stlrb w1, [x0]", 0x089f_fc01, &[StoreRelease]),
    ("stlrh w1, [x0]", 0x489f_fc01, &[StoreRelease]),
    ("stlr w1, [x0]", 0x889f_fc01, &[StoreRelease]),
    ("stlr x1, [x0]", 0xc89f_fc01, &[StoreRelease]),
    ("stlxr w2, x1, [x0]", 0xc802_fc01, &[Helper]),
    ("dmb ish", 0xd503_3bbf, &[Fence]),
    ("dmb ishld", 0xd503_39bf, &[Fence]),
    ("dmb ishst", 0xd503_3abf, &[Fence]),
    ("dsb sy", 0xd503_3f9f, &[Fence]),
    ("ldadd x1, x2, [x0]", 0xf821_0002, &[Helper]),
    ("ldaddal x1, x2, [x0]", 0xf8e1_0002, &[Helper]),
    ("swpal x1, x2, [x0]", 0xf8e1_8002, &[Helper]),
];

#[test]
fn each_instruction_is_emitted_with_its_order() {
    for (name, word, expected) in INSTRUCTIONS {
        let (parts, text) = emitted(word);
        assert_eq!(parts, expected, "{name}");
        for part in parts {
            let needed = match (part, cfg!(target_arch = "x86_64")) {
                // Plain stores and loads are x86's release and acquire.
                (StoreRelease | Fence, true) => "mfence",
                (StoreRelease, false) => "stlr",
                (LoadAcquire, false) => "ldar",
                (Fence, false) => "dmb ish",
                _ => continue,
            };
            assert!(text.contains(needed), "{name} without {needed}:\n{text}");
        }
    }
}

/// Returns what a guest instruction is on a host with this order.
fn on_host(host: Model, op: Op) -> Vec<Op> {
    let (plain_read, plain_write) = (
        |at| Op::Read {
            at,
            acquires: false,
        },
        |at| Op::Write {
            at,
            releases: false,
        },
    );
    match (host, op) {
        // `INSTRUCTIONS`: an ordered access is the ordered one of arm64.
        (Model::Arm, Op::Read { .. } | Op::Write { .. }) | (_, Op::Fence) => vec![op],
        (Model::X86, Op::Read { at, .. }) => vec![plain_read(at)],
        (
            Model::X86,
            Op::Write {
                at,
                releases: false,
            },
        ) => vec![plain_write(at)],
        (Model::X86, Op::Write { at, releases: true }) => vec![plain_write(at), Op::Fence],
        // A helper's. A loop of exclusive accesses, or a locked instruction.
        (
            _,
            Op::Update {
                at,
                acquires,
                releases,
            },
        ) => {
            let update = match host {
                Model::Arm => Op::Update {
                    at,
                    acquires: true,
                    releases: true,
                },
                Model::X86 => Op::Update {
                    at,
                    acquires: false,
                    releases: false,
                },
            };
            match acquires || releases {
                true => vec![Op::Fence, update, Op::Fence],
                false => vec![update],
            }
        }
    }
}

/// Returns the results that the host's program computes and the guest's does not.
fn wrong(
    host: Model,
    guest: &[Vec<Op>],
    on_host: impl Fn(Model, Op) -> Vec<Op>,
) -> Vec<model::Outcome> {
    let translated: Vec<Vec<Op>> = guest
        .iter()
        .map(|ops| ops.iter().flat_map(|op| on_host(host, *op)).collect())
        .collect();
    if host == Model::Arm && translated == guest {
        return Vec::new();
    }
    let allowed = outcomes(Model::Arm, guest);
    outcomes(host, &translated)
        .difference(&allowed)
        .cloned()
        .collect()
}

/// Accesses to a place: each kind without an order, and with its orders.
fn accesses(at: u8) -> Vec<Op> {
    let with = |is_ordered| {
        let (acquires, releases) = (is_ordered, is_ordered);
        [
            Op::Read { at, acquires },
            Op::Write { at, releases },
            Op::Update {
                at,
                acquires,
                releases,
            },
        ]
    };
    [with(false), with(true)].concat()
}

/// All threads with an access to one place, perhaps a barrier, and an access to the other place.
fn threads() -> Vec<Vec<Op>> {
    let mut all = Vec::new();
    for places in [[0, 1], [1, 0]] {
        for first in accesses(places[0]) {
            for second in accesses(places[1]) {
                all.push(vec![first, second]);
                all.push(vec![first, Op::Fence, second]);
            }
        }
    }
    all
}

#[test]
fn no_program_of_two_threads_computes_on_a_host_what_arm_forbids() {
    let threads = threads();
    for (n, first) in threads.iter().enumerate() {
        for second in &threads[n..] {
            let guest = [first.clone(), second.clone()];
            for host in [Model::X86, Model::Arm] {
                let wrong = wrong(host, &guest, on_host);
                assert!(wrong.is_empty(), "{guest:?} on {host:?}: {wrong:?}");
            }
        }
    }
}

/// Writes to two places by two threads, and two threads that read both in different orders.
#[test]
fn all_threads_see_one_order_of_writes_where_arm_promises_it() {
    let write = |at, releases| vec![Op::Write { at, releases }];
    for bits in 0..1 << 8 {
        let is = |n: u32| bits >> n & 1 != 0;
        let reads = |places: [u8; 2], n: u32| {
            let mut ops = vec![Op::Read {
                at: places[0],
                acquires: is(n),
            }];
            if is(n + 1) {
                ops.push(Op::Fence);
            }
            ops.push(Op::Read {
                at: places[1],
                acquires: is(n + 2),
            });
            ops
        };
        let guest = [
            write(0, is(0)),
            write(1, is(1)),
            reads([0, 1], 2),
            reads([1, 0], 5),
        ];
        for host in [Model::X86, Model::Arm] {
            let wrong = wrong(host, &guest, on_host);
            assert!(wrong.is_empty(), "{guest:?} on {host:?}: {wrong:?}");
        }
    }
}

/// The check would notice: a store-release without its MFENCE on x86, and a load-acquire that is a plain load on arm64.
#[test]
fn a_barrier_that_is_missing_is_found() {
    let stores = |at, other| {
        vec![
            Op::Write { at, releases: true },
            Op::Read {
                at: other,
                acquires: true,
            },
        ]
    };
    let guest = [stores(0, 1), stores(1, 0)];
    let unfenced = |host, op: Op| {
        let ops = on_host(host, op).into_iter();
        ops.filter(|op| *op != Op::Fence).collect::<Vec<_>>()
    };
    assert_eq!(wrong(Model::X86, &guest, unfenced), [[0, 0, 1, 2]]);
    let plain = |_, op| match op {
        Op::Read { at, .. } => vec![Op::Read {
            at,
            acquires: false,
        }],
        op => on_host(Model::Arm, op),
    };
    let sends = vec![
        Op::Write {
            at: 0,
            releases: false,
        },
        Op::Write {
            at: 1,
            releases: true,
        },
    ];
    let receives = vec![
        Op::Read {
            at: 1,
            acquires: true,
        },
        Op::Read {
            at: 0,
            acquires: false,
        },
    ];
    assert_eq!(wrong(Model::Arm, &[sends, receives], plain), [[2, 0, 1, 2]]);
}
