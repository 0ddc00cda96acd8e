//! Boots Linux on a board with one processor: slat-a64 and slat-gic alone, without KVM's API. Any machine can be the
//! host, so this is how to find out what the processor makes of a kernel, and where its time goes.
//!
//! `cargo run --release -p slat-a64 --example linux -- [--interpret] IMAGE INITRD [COMMAND LINE...]`
//!
//! IMAGE is a kernel for arm64 that is not compressed. The console is on standard input and output. The guest's clock
//! counts instructions, and so does not depend on the host's speed; it goes on when the guest waits. When the guest has
//! powered off, the number of instructions and the CPU time are printed to standard error. Hot code is compiled, on a
//! thread of its own, but not with `--interpret`.

mod board;
mod tree;
mod uart;

use board::{Board, RAM};
use slat_a64::{Compile, Compiler, Cpu, Hint, Leave, State, Stop, SystemName};
use std::process::ExitCode;

/// The addresses of the device tree and of the initrd. Both are above the kernel.
const TREE: u64 = RAM + (200 << 20);
const INITRD: u64 = RAM + (202 << 20);

/// The number of instructions of a run. The guest's clock stands still during a run.
const BATCH: u64 = 2000;
/// The number of instructions that are counted for a run that ends early: an estimate.
const EARLY: u64 = BATCH / 40;

/// ID_AA64PFR0_EL1, and its field for the system registers of a GICv3.
const PFR0: SystemName = SystemName::new(3, 0, 0, 4, 0);
const PFR0_GIC_V3: u64 = 1 << 24;

/// PSCI: the functions, and results.
const PSCI_VERSION: u64 = 0x8400_0000;
const PSCI_MIGRATE_INFO_TYPE: u64 = 0x8400_0006;
const SYSTEM_OFF: u64 = 0x8400_0008;
const SYSTEM_RESET: u64 = 0x8400_0009;
const VERSION_1_0: u64 = 0x1_0000;
const NO_MIGRATION: u64 = 2;
const NOT_SUPPORTED: u64 = u64::MAX;

/// Returns the nanoseconds for which this process has had a CPU.
fn cpu_time() -> f64 {
    let mut time = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: the kernel writes the struct.
    unsafe { libc::clock_gettime(libc::CLOCK_PROCESS_CPUTIME_ID, &mut time) };
    time.tv_sec as f64 * 1e9 + time.tv_nsec as f64
}

/// Copies a kernel to where its header wants it. Returns its start.
fn load(board: &mut Board, kernel: &[u8]) -> u64 {
    let field = |at: usize| u64::from_le_bytes(std::array::from_fn(|n| kernel[at + n]));
    assert_eq!(&kernel[56..60], b"ARM\x64", "a kernel for arm64");
    let start = RAM + field(8);
    assert!(start + field(16) <= TREE, "too large a kernel");
    board.fill(start, kernel);
    start
}

fn main() -> ExitCode {
    let mut arguments = std::env::args().skip(1).peekable();
    let interprets = arguments
        .next_if(|argument| argument == "--interpret")
        .is_some();
    let (Some(kernel), Some(initrd)) = (arguments.next(), arguments.next()) else {
        eprintln!("usage: linux [--interpret] IMAGE INITRD [COMMAND LINE...]");
        return ExitCode::FAILURE;
    };
    let line = arguments.collect::<Vec<_>>().join(" ");
    let [kernel, initrd] = [kernel, initrd].map(|path| std::fs::read(path).expect("a file"));
    let mut board = Board::new();
    let start = load(&mut board, &kernel);
    board.fill(INITRD, &initrd);
    board.fill(
        TREE,
        &tree::of_board(&line, INITRD..INITRD + initrd.len() as u64),
    );
    let mut cpu = Cpu::new(State::reset());
    let pfr0 = cpu.state.system(PFR0).unwrap_or(0);
    cpu.state.identify(PFR0, pfr0 | PFR0_GIC_V3);
    if !interprets {
        compile(&mut cpu);
    }
    cpu.state.pc = start;
    cpu.state.x[0] = TREE;
    let before = cpu_time();
    let instructions = run(&mut cpu, &mut board);
    let time = cpu_time() - before;
    eprintln!(
        "{} million instructions, {} million of them compiled; {:.1} s, {:.1} ns an instruction",
        instructions / 1_000_000,
        cpu.compiled_instructions() / 1_000_000,
        time / 1e9,
        time / instructions as f64
    );
    ExitCode::SUCCESS
}

/// Lets a thread compile the guest's hot code.
fn compile(cpu: &mut Cpu) {
    let compiler = Compiler::try_new().expect("address space for code");
    cpu.set_compiler(compiler.clone(), Compile::Hot);
    slat_guard::install().expect("signal handlers");
    // SAFETY: the board's pages are at the host's addresses of its memory, which is never freed, and of which it makes
    // references only where compiled code does not run. The handlers are installed.
    unsafe { cpu.access_directly() };
    std::thread::spawn(move || compiler.work());
}

/// Executes the guest until it powers off. Returns about how many instructions it has executed.
fn run(cpu: &mut Cpu, board: &mut Board) -> u64 {
    let mut instructions = 0;
    loop {
        cpu.pending = board.attend(instructions);
        let leave = cpu.run(board, BATCH);
        instructions += if leave == Leave::Limit { BATCH } else { EARLY };
        match leave {
            Leave::Hint(Hint::Wfi) => board.wait(),
            Leave::Limit | Leave::Attention | Leave::Invalidated(_) | Leave::Hint(_) => {}
            Leave::Hvc(_) | Leave::Smc(_) => {
                let x0 = &mut cpu.state.x[0];
                *x0 = match *x0 & 0xffff_ffff {
                    SYSTEM_OFF | SYSTEM_RESET => return instructions,
                    PSCI_VERSION => VERSION_1_0,
                    PSCI_MIGRATE_INFO_TYPE => NO_MIGRATION,
                    _ => NOT_SUPPORTED,
                };
            }
            Leave::Stage2 { fault, syndrome } => {
                let access = syndrome.filter(|_| !fault.is_fetch && !fault.is_walk);
                let done = access.and_then(|access| {
                    let stored = access.is_store.then(|| access.stored(&cpu.state));
                    let loaded = board.access(fault.ipa, 1 << access.size, stored)?;
                    Some((access, loaded))
                });
                match done {
                    Some((access, loaded)) => access.complete(&mut cpu.state, loaded),
                    None if fault.is_fetch => cpu.state.take_fetch_abort(fault.external()),
                    None => cpu.state.take_stop(Stop::Memory(fault.external())),
                }
            }
            Leave::Debug(_) => unreachable!("`State::traps_debug` is not set"),
        }
    }
}
