//! Tests that a run ends soon after a kick, whatever loop the guest is in. The tests are loops of each shape that the
//! compiler makes, and the interpreter's.
//!
//! Another thread sets `attention`, and reads how much processor time the running thread has used so far. The run has
//! to end before it has used a millisecond more. Time in which the host runs other threads does not count, and the best
//! of several tries is taken.
#![cfg(feature = "jit")]

mod common;
use common::*;
use slat_x86::*;
use std::sync::Mutex;
use std::sync::atomic::{AtomicI32, Ordering};
use std::time::{Duration, Instant};

/// The largest allowed processor time between a kick and the end of the run. Without optimisation, the interpreter
/// takes longer.
const BOUND: Duration = Duration::from_millis(if cfg!(debug_assertions) { 10 } else { 1 });
const TRIES: usize = 5;
/// The address of another page of code.
const OTHER: u64 = CODE + 0x1000;
const FAR: u64 = 0x20_0000;

fn processor_time(clock: libc::clockid_t) -> Duration {
    let mut time = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: the call writes to a local variable.
    let failed = unsafe { libc::clock_gettime(clock, &mut time) };
    assert_eq!(failed, 0);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// Runs `guest`, and kicks it after a while. Returns the processor time that the run has used after the kick.
fn after_kick(guest: &mut Guest, after: Duration) -> Duration {
    let attention = guest.attention.clone();
    attention.store(0, Ordering::SeqCst);
    let clock = AtomicI32::new(0);
    std::thread::scope(|scope| {
        let running = scope.spawn(|| {
            let mut mine = 0;
            // SAFETY: the call writes to a local variable.
            unsafe { libc::pthread_getcpuclockid(libc::pthread_self(), &mut mine) };
            clock.store(mine, Ordering::SeqCst);
            let exit = guest.run();
            assert_eq!(exit, Exit::Attention);
            processor_time(libc::CLOCK_THREAD_CPUTIME_ID)
        });
        while clock.load(Ordering::SeqCst) == 0 {
            std::thread::yield_now();
        }
        let clock = clock.load(Ordering::SeqCst);
        // When the run has used some processor time, it has begun.
        let began = Instant::now();
        while processor_time(clock) < after && began.elapsed() < Duration::from_secs(10) {
            std::thread::sleep(Duration::from_micros(100));
        }
        let before = processor_time(clock);
        attention.store(1, Ordering::SeqCst);
        running.join().unwrap() - before
    })
}

/// Runs `code`, which does not end, by the interpreter and then compiled, and kicks each run. `prepare` sets
/// registers and adds more code.
fn ends_when_kicked(name: &str, code: &[u8], prepare: impl Fn(&mut Guest)) {
    for is_compiled in [false, true] {
        let mut guest = Guest::new(code);
        if is_compiled {
            compiled::always(&mut guest.cpu);
        }
        prepare(&mut guest);
        let (state, before) = (guest.cpu.state.clone(), *guest.cpu.counters());
        let times = (0..TRIES).map(|n| {
            guest.cpu.state.clone_from(&state);
            after_kick(&mut guest, Duration::from_millis(2 + n as u64))
        });
        let best = times.min().unwrap();
        println!("{name}, compiled: {is_compiled}: {best:?}");
        assert!(best <= BOUND, "{name}, compiled: {is_compiled}: {best:?}");
        let regions = guest.cpu.counters().regions - before.regions;
        assert!(regions > 0 || !is_compiled, "{name}");
    }
}

#[test]
fn loops_of_branches() {
    ends_when_kicked("jmp to itself", b"\xeb\xfe", |_| {});
    // inc eax; jmp; jnz over the loop's beginning. So one block is also entered in its middle.
    ends_when_kicked(
        "two blocks",
        b"\xff\xc0\x75\x02\xeb\xfa\xff\xc3\xeb\xf6",
        |_| {},
    );
    // again: mov ecx,100; dec ecx; jnz; jmp again
    ends_when_kicked("nested", b"\xb9\x64\0\0\0\xff\xc9\x75\xfc\xeb\xf5", |_| {});
    // lp: loop lp, from 0: 2^64 rounds
    ends_when_kicked("loop", b"\xe2\xfe\xeb\xfc", |guest| {
        guest.cpu.state.gpr[RCX] = 0;
    });
    // The code jumps forward through many blocks, and then back.
    let mut chain = b"\x74\x00".repeat(40);
    chain.extend(b"\xeb\xae");
    ends_when_kicked("forty blocks", &chain, |_| {});
}

/// In a loop of one block, compiled code does not store the guest's registers to memory between two turns.
#[test]
fn a_kick_loses_nothing_of_a_loop() {
    // inc rax; lea rbx,[rax+rax]; paddq xmm0,xmm1; jmp back
    let mut guest = Guest::new(b"\x48\xff\xc0\x48\x8d\x1c\x00\x66\x0f\xd4\xc1\xeb\xf3");
    compiled::always(&mut guest.cpu);
    let state = &mut guest.cpu.state;
    (state.gpr[RAX], state.xmm[0], state.xmm[1]) = (0, 0, 1);
    // The first kick may come while the loop is compiled.
    while guest.cpu.state.gpr[RAX] == 0 {
        after_kick(&mut guest, Duration::from_millis(2));
    }
    for n in 0..TRIES {
        let (rounds, before) = (guest.cpu.state.gpr[RAX], *guest.cpu.counters());
        after_kick(&mut guest, Duration::from_millis(2 + n as u64));
        let (state, after) = (&guest.cpu.state, guest.cpu.counters());
        assert_eq!(state.rip, CODE);
        assert_eq!(state.gpr[RBX], 2 * state.gpr[RAX]);
        assert_eq!(state.xmm[0], u128::from(state.gpr[RAX]));
        let rounds = state.gpr[RAX] - rounds;
        assert_eq!(after.instructions - before.instructions, 4 * rounds);
        let compiled = after.instructions_compiled - before.instructions_compiled;
        assert!(
            rounds > 100 && compiled > 3 * rounds,
            "{compiled} of {rounds} rounds"
        );
    }
}

#[test]
fn loops_over_pages() {
    // jmp OTHER, jmp CODE
    ends_when_kicked("jumps", b"\xe9\xfb\x0f\0\0", |guest| {
        guest.memory().write(OTHER, b"\xe9\xfb\xef\xff\xff");
    });
    // jmp rax / jmp rbx
    ends_when_kicked("indirect jumps", b"\xff\xe0", |guest| {
        guest.memory().write(OTHER, b"\xff\xe3");
        (guest.cpu.state.gpr[RAX], guest.cpu.state.gpr[RBX]) = (OTHER, CODE);
    });
    // call OTHER; jmp back / ret
    ends_when_kicked("calls and returns", b"\xe8\xfb\x0f\0\0\xeb\xf9", |guest| {
        guest.memory().write(OTHER, b"\xc3");
    });
    // call rax; jmp back / ret
    ends_when_kicked("indirect calls", b"\xff\xd0\xeb\xfc", |guest| {
        guest.memory().write(OTHER, b"\xc3");
        guest.cpu.state.gpr[RAX] = OTHER;
    });
    // push rax; ret, where RAX is the address of the push
    ends_when_kicked("returns", b"\x50\xc3", |guest| {
        guest.cpu.state.gpr[RAX] = CODE;
    });
}

#[test]
fn loops_of_handlers_and_misses() {
    // again: mov [rdi],eax; add rdi,4096; and rdi,FFFFFF; or rdi,200000; jmp again
    let misses =
        b"\x89\x07\x48\x81\xc7\0\x10\0\0\x48\x81\xe7\xff\xff\xff\0\x48\x81\xcf\0\0\x20\0\xeb\xe7";
    ends_when_kicked("misses", misses, |guest| {
        guest.cpu.state.gpr[RDI] = FAR;
    });
    // lock inc dword [rdi]; xchg [rdi+8],eax; jmp back
    ends_when_kicked(
        "atomic operations",
        b"\xf0\xff\x07\x87\x47\x08\xeb\xf8",
        |guest| {
            guest.cpu.state.gpr[RDI] = DATA;
        },
    );
    // fld1; fldpi; faddp; fsqrt; fstp st(0); jmp back
    ends_when_kicked(
        "x87",
        b"\xd9\xe8\xd9\xeb\xde\xc1\xd9\xfa\xdd\xd8\xeb\xf4",
        |guest| {
            let state = &mut guest.cpu.state;
            (state.fcw, state.fsw, state.ftw) = (0x37f, 0, 0);
        },
    );
    // addps xmm0,xmm1; sqrtps xmm2,xmm0; jmp back
    ends_when_kicked("SSE", b"\x0f\x58\xc1\x0f\x51\xd0\xeb\xf8", |guest| {
        guest.cpu.state.mxcsr = 0x1f80;
    });
    // ud2, whose handler returns to the ud2
    ends_when_kicked("exceptions", b"\x90\x90\x0f\x0b", |guest| {
        guest.memory().write(
            HANDLERS + 16 * u64::from(vector::UD),
            b"\x90\x90\x90\x90\x48\xcf",
        );
    });
    // rdtsc; cpuid; jmp back
    ends_when_kicked("system instructions", b"\x0f\x31\x0f\xa2\xeb\xfa", |_| {});
}

#[test]
fn repeated_string_instructions() {
    // Source and destination of 128 MiB are backed by one page each: an instruction takes longer than a millisecond.
    const LENGTH: u64 = 128 << 20;
    for (name, string, is_down, width) in [
        ("rep movsb", &b"\xf3\xa4"[..], false, 1),
        ("rep movsb down", b"\xf3\xa4", true, 1),
        ("rep stosq", b"\xf3\x48\xab", false, 8),
        ("rep lodsb", b"\xf3\xac", false, 1),
        ("repe scasb", b"\xf3\xae", false, 1),
        ("repe cmpsb", b"\xf3\xa6", false, 1),
    ] {
        // again: mov rdi,r9; mov rsi,r8; mov rcx,r10; rep …; jmp again
        let mut code = b"\x4c\x89\xcf\x4c\x89\xc6\x4c\x89\xd1".to_vec();
        code.extend(string);
        code.extend([0xeb, (-(code.len() as i8) - 2) as u8]);
        ends_when_kicked(name, &code, |guest| {
            for page in 0..(2 * LENGTH) >> 12 {
                let moved = &mut guest.machine.moved;
                moved.insert((MMIO >> 12) + page, FAR >> 12);
            }
            let state = &mut guest.cpu.state;
            let first = if is_down { LENGTH - 1 } else { 0 };
            state.rflags |= if is_down { 1 << 10 } else { 0 };
            (state.gpr[8], state.gpr[9]) = (MMIO + first, MMIO + LENGTH + first);
            state.gpr[10] = LENGTH / width;
            state.gpr[RAX] = 0;
        });
    }
}

/// The loop that a kick interrupts is compiled again, by Cranelift, with all its blocks. That holds although only the
/// interrupted block was entered directly since the baseline tier compiled them.
#[test]
fn a_loop_that_is_kicked_becomes_one_region() {
    const TURNS: u64 = 100_000;
    let memory = Guest::new(b"").machine.memory;
    // again: call f; dec ecx; jnz again; hlt; f: test cl,1; jz on; inc ebx; on: ret
    let code = b"\xe8\x05\0\0\0\xff\xc9\x75\xf7\xf4\xf6\xc1\x01\x74\x02\xff\xc3\xc3";
    let mut guest = Guest::interpreted(memory, code);
    let compiler = Compiler::try_new().unwrap();
    (guest.cpu.set_compiler(compiler.clone(), Compile::Hot)).unwrap();
    for tier in [Tier::Baseline, Tier::Full] {
        let compiler = compiler.clone();
        std::thread::spawn(move || compiler.work(tier));
    }
    for _ in 0..60 {
        guest.cpu.state.rip = CODE;
        guest.cpu.state.gpr[RCX] = 0xffff_ffff;
        after_kick(&mut guest, Duration::from_millis(1));
        // The next run begins where this one was kicked. The block there is compiled.
        after_kick(&mut guest, Duration::from_millis(1));
    }
    let before = *guest.cpu.counters();
    guest.attention.store(0, Ordering::SeqCst);
    guest.cpu.state.rip = CODE;
    guest.cpu.state.gpr[RCX] = TURNS;
    guest.halt();
    let did = guest.cpu.counters();
    let chained = did.regions_chained - before.regions_chained;
    // Only the return leaves the region. Then the CPU enters the region again.
    assert!(
        did.regions >= 2 && chained < TURNS * 3 / 2,
        "{} regions; {chained} entered by others in {TURNS} turns",
        did.regions
    );
}

/// If code has no loops, a kick is noticed after a region, when another region is about to run. The region that ran is
/// the one that is compiled again.
#[test]
fn code_without_loops_that_takes_the_time_is_compiled_again() {
    /// The addresses of the compiled code.
    static MADE: Mutex<Vec<u64>> = Mutex::new(Vec::new());
    let memory = Guest::new(b"").machine.memory;
    // again: call f, in another page; jmp again
    let call = (OTHER - CODE - 5) as u32;
    let code = [&b"\xe8"[..], &call.to_le_bytes(), b"\xeb\xf9"].concat();
    let mut guest = Guest::interpreted(memory, &code);
    // f: imul eax,ebx, many times; ret
    let function = [&b"\x0f\xaf\xc3".repeat(300)[..], b"\xc3"].concat();
    guest.memory().write(OTHER, &function);
    let compiler = Compiler::try_new().unwrap();
    compiler.observe(|made| MADE.lock().unwrap().push(made.rip));
    (guest.cpu.set_compiler(compiler.clone(), Compile::Hot)).unwrap();
    for tier in [Tier::Baseline, Tier::Full] {
        let compiler = compiler.clone();
        std::thread::spawn(move || compiler.work(tier));
    }
    guest.cpu.state.rip = CODE;
    let made = || MADE.lock().unwrap().clone();
    let times = |made: &[u64]| {
        let page = made.iter().filter(|rip| **rip >> 12 == OTHER >> 12);
        page.fold(std::collections::HashMap::new(), |mut times, rip| {
            *times.entry(*rip).or_insert(0) += 1;
            times
        })
    };
    let is_better = || times(&made()).values().any(|times| *times > 1);
    for _ in 0..200 {
        if is_better() {
            return;
        }
        after_kick(&mut guest, Duration::from_millis(1));
    }
    panic!("compiled once: {:x?}", made());
}
