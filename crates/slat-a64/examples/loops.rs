//! Measures loops on the interpreter, on compiled code, and in qemu-aarch64 (TCG), if it is there: nanoseconds of CPU
//! time per guest instruction, the median of several turns.
//!
//! `cargo run --release -p slat-a64 --example loops`

#[allow(dead_code)]
#[path = "../tests/common/host.rs"]
mod host;

use host::Memory;
use slat_a64::{Compile, Compiler, Cpu, Leave, State, SystemName};
use std::process::Command;
use std::sync::Arc;

const CODE: u64 = 0x10_0000;
const DATA: u64 = 0x20_0000;
const TABLES: u64 = 0x30_0000;
const ROUNDS: usize = 5;

/// A loop: its instructions, of which X1 counts the turns. X4 and X5 are addresses of data.
struct Loop {
    name: &'static str,
    words: &'static [u32],
    /// The instructions of one turn.
    instructions: u64,
}

const LOOPS: [Loop; 6] = [
    // ADD X2, X2, X1; EOR X3, X3, X2, LSL #3; SUBS X1, X1, #1; B.NE.
    Loop {
        name: "integers",
        words: &[0x8b01_0042, 0xca02_0c63, 0xf100_0421, 0x54ff_ffa1],
        instructions: 4,
    },
    // LDR X3, [X4]; ADD X3, X3, X1; STR X3, [X4]; EOR X2, X2, X3, LSL #3; SUBS X1, X1, #1; B.NE.
    Loop {
        name: "memory",
        words: &[
            0xf940_0083,
            0x8b01_0063,
            0xf900_0083,
            0xca03_0c42,
            0xf100_0421,
            0x54ff_ff61,
        ],
        instructions: 6,
    },
    // AND X6, X1, #0x1f8; LDP X2, X3, [X4]; STP X2, X3, [X5]; LDR Q0, [X4]; STR Q0, [X5, #16]; SUBS X1, X1, #1; B.NE.
    Loop {
        name: "copies",
        words: &[
            0x927d_1426,
            0xa940_0c82,
            0xa900_0ca2,
            0x3dc0_0080,
            0x3d80_04a0,
            0xf100_0421,
            0x54ff_ff41,
        ],
        instructions: 7,
    },
    // BL function; SUBS X1, X1, #1; B.NE; B on; function: ADD X2, X2, #1; RET; on:
    Loop {
        name: "calls",
        words: &[
            0x9400_0004,
            0xf100_0421,
            0x54ff_ffc1,
            0x1400_0003,
            0x9100_0442,
            0xd65f_03c0,
        ],
        instructions: 5,
    },
    // TST X1, #1; B.EQ even; ADD W2, W2, W1; B next; even: SUB W3, W3, W1; next: SUBS X1, X1, #1; B.NE. Of a turn.
    Loop {
        name: "branches",
        words: &[
            0xf240_003f,
            0x5400_0060,
            0x0b01_0042,
            0x1400_0002,
            0x4b01_0063,
            0xf100_0421,
            0x54ff_ff41,
        ],
        instructions: 5,
    },
    // FADD D0, D0, D1; FMUL D2, D0, D1; SUBS X1, X1, #1; B.NE.
    Loop {
        name: "doubles",
        words: &[0x1e61_2800, 0x1e61_0802, 0xf100_0421, 0x54ff_ffa1],
        instructions: 4,
    },
];

/// Returns the nanoseconds for which this process, and its children that have ended, have had a CPU.
fn cpu_time() -> f64 {
    [libc::RUSAGE_SELF, libc::RUSAGE_CHILDREN]
        .into_iter()
        .map(|who| {
            // SAFETY: zeros are a value of the struct, and the kernel writes it.
            let usage = unsafe {
                let mut usage: libc::rusage = std::mem::zeroed();
                libc::getrusage(who, &mut usage);
                usage
            };
            [usage.ru_utime, usage.ru_stime]
                .map(|time| time.tv_sec as f64 * 1e9 + time.tv_usec as f64 * 1e3)
                .iter()
                .sum::<f64>()
        })
        .sum()
}

fn timed(work: impl FnOnce()) -> f64 {
    let start = cpu_time();
    work();
    cpu_time() - start
}

/// Executes a loop here.
fn ours(code: &Loop, turns: u64, compiler: Option<&Arc<Compiler>>) {
    let mut memory = Memory::new();
    memory.add(CODE, 1, [true; 2]);
    memory.add(DATA, 2, [true; 2]);
    memory.add(TABLES, 1, [true; 2]);
    memory.put(TABLES, 1 | 1 << 10 | 3 << 8);
    // HVC ends.
    let words: Vec<u32> = (code.words.iter().copied())
        .chain([0xd400_0002, 0])
        .collect();
    for (n, pair) in words.chunks_exact(2).enumerate() {
        memory.put(
            CODE + 8 * n as u64,
            u64::from(pair[0]) | u64::from(pair[1]) << 32,
        );
    }
    let mut cpu = Cpu::new(State::reset());
    let settings = [
        (SystemName::new(3, 0, 10, 2, 0), 0xff),
        (SystemName::new(3, 0, 2, 0, 0), TABLES),
        (SystemName::new(3, 0, 2, 0, 2), 25 | 1 << 23),
        (SystemName::new(3, 0, 1, 0, 2), 3 << 20),
        (SystemName::new(3, 0, 1, 0, 0), 1),
    ];
    for (name, value) in settings {
        assert!(cpu.set_system(name, value));
    }
    if let Some(compiler) = compiler {
        cpu.set_compiler(compiler.clone(), Compile::AtOnce);
        // SAFETY: the pages are mappings of `Memory`, whose words are accessed guarded and by pointers alone.
        // `Memory::new` has installed the handlers.
        unsafe { cpu.access_directly() };
    }
    cpu.state.pc = CODE;
    cpu.state.x[1] = turns;
    cpu.state.x[4] = DATA;
    cpu.state.x[5] = DATA + 4096;
    cpu.state.v[1] = 1.0f64.to_bits().into();
    assert_eq!(cpu.run(&mut memory, u64::MAX), Leave::Hvc(0));
}

/// Makes a static program of a loop.
fn program(code: &Loop, turns: u64, path: &std::path::Path) {
    let mov = |register: u32, value: u64| {
        (0..4u32).map(move |n| {
            let part = (value >> (16 * n)) as u32 & 0xffff;
            let kind = if n == 0 { 0xd280_0000 } else { 0xf280_0000 };
            kind | n << 21 | part << 5 | register
        })
    };
    let mut words: Vec<u32> = mov(1, turns)
        .chain(mov(4, DATA))
        .chain(mov(5, DATA + 4096))
        // FMOV D1, #1.0.
        .chain([0x1e6e_1001])
        .chain(code.words.iter().copied())
        // MOV X8, #93; MOV X0, #0; SVC.
        .chain([0xd280_0ba8, 0xd280_0000, 0xd400_0001])
        .collect();
    words.resize(words.len().next_multiple_of(4), 0);
    let length = 64 + 2 * 56;
    let mut elf = Vec::new();
    elf.extend(b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0\x02\0\xb7\0\x01\0\0\0");
    elf.extend((CODE + length).to_le_bytes());
    elf.extend(64u64.to_le_bytes());
    elf.extend(0u64.to_le_bytes());
    elf.extend(b"\0\0\0\0\x40\0\x38\0\x02\0\0\0\0\0\0\0");
    let bytes = length + 4 * words.len() as u64;
    for (flags, address, in_file, size) in [(5u32, CODE, bytes, bytes), (6, DATA, 0, 0x4000)] {
        elf.extend(1u32.to_le_bytes());
        elf.extend(flags.to_le_bytes());
        for word in [0, address, address, in_file, size, 0x1000u64] {
            elf.extend(word.to_le_bytes());
        }
    }
    for word in words {
        elf.extend(word.to_le_bytes());
    }
    std::fs::write(path, elf).unwrap();
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    std::fs::set_permissions(path, mode).unwrap();
}

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

fn main() {
    let compiler = Compiler::try_new().expect("address space for code");
    let has_qemu = Command::new("qemu-aarch64")
        .arg("--version")
        .output()
        .is_ok();
    let path = std::env::temp_dir().join(format!("slat-a64-loop-{}", std::process::id()));
    println!("ns per instruction   interpreter   compiled   qemu-aarch64");
    for code in &LOOPS {
        let is_slow = code.name == "doubles";
        let (few, many) = if is_slow {
            (300_000, 3_000_000)
        } else {
            (1_000_000, 50_000_000)
        };
        program(code, many, &path);
        let mut times = [Vec::new(), Vec::new(), Vec::new()];
        for _ in 0..ROUNDS {
            let per = |time: f64, turns: u64| time / (turns * code.instructions) as f64;
            times[0].push(per(timed(|| ours(code, few, None)), few));
            times[1].push(per(timed(|| ours(code, many, Some(&compiler))), many));
            if has_qemu {
                let run = || {
                    assert!(
                        Command::new("qemu-aarch64")
                            .arg(&path)
                            .status()
                            .unwrap()
                            .success()
                    )
                };
                times[2].push(per(timed(run), many));
            }
        }
        let [interpreted, compiled, qemu] = times.map(|times| match times.is_empty() {
            true => f64::NAN,
            false => median(times),
        });
        println!(
            "{:<20} {interpreted:>11.2} {compiled:>10.3} {qemu:>14.3}",
            code.name
        );
    }
    let _ = std::fs::remove_file(&path);
}
