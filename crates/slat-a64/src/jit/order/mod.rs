//! Tests that compiled code keeps the order of accesses that Arm promises to guests. They use models: a test that runs
//! on x86 observes only x86's order, and a test that runs on arm64 observes one processor, whose order may be stronger
//! than that of others.
//!
//! 1. The tests find out what a guest instruction compiles to, from Cranelift's intermediate language and the host's
//!    code.
//! 2. With that, they translate a program of guest instructions to one of the host's instructions. [`model`] computes
//!    the possible results of both programs. Each result of the host's program must be a possible result of the
//!    guest's.
//!
//! The interpreter and the helpers of compiled code fence each ordered access on both sides, and their plain accesses
//! are at least as strong as compiled ones (`slat_guard`). So they always order more than compiled code does, and a
//! mixture of interpreted and compiled code has no result that compiled code alone would not have.
//!
//! The tests leave out dependencies. A dependency in the guest's code is one in the host's code, too, unless Cranelift
//! computes the value without it (`eor x1, x0, x0`). On arm64 such an artificial dependency orders nothing in compiled
//! code. No known guest relies on one.

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

/// What compiled code does to memory if the TLB has the page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Emitted {
    Load,
    Store,
    LoadAcquire,
    StoreRelease,
    Fence,
    /// Calls a helper, which runs the interpreter's function.
    Helper,
}
use Emitted::*;

/// Compiles an instruction. Returns the emitted accesses and barriers, and the host's assembly code.
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
    // Accesses that miss the TLB are in cold blocks, which are left out.
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

/// Guest instructions with the address in X0, and what is emitted for each.
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
                // On x86, plain stores are releases and plain loads are acquires, so only MFENCE is to be found.
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

/// Returns the host's instructions for a guest instruction, on a host with this memory model.
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
        // As `INSTRUCTIONS` says, arm64's own ordered access is emitted for an ordered access.
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
        // A helper executes updates: by a loop of exclusive accesses on arm64, by a locked instruction on x86.
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

/// Returns the results that are possible for the host's program and impossible for the guest's.
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

/// All accesses to place `at`: a read, a write and an update, each without order and with all its orders.
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

/// Returns all threads of this form: an access to one place, perhaps a barrier, and an access to the other place.
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

/// Two threads each write one place, and two threads read both places in opposite orders.
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

/// Breaks the code on purpose, and expects that the checks notice: a store-release without its MFENCE on x86, and a
/// plain load in place of a load-acquire on arm64.
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
