//! Measures the speed of the interpreter: millions of guest instructions per second, for a few loops.
//!
//! `cargo run --release -p slat-x86 --example mips`

#[path = "../tests/common/mod.rs"]
mod common;

use common::*;

/// Returns the processor time of this thread, to which other load on the machine does not count.
fn seconds_of_cpu() -> f64 {
    let mut time = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: a local to write to.
    unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut time) };
    time.tv_sec as f64 + time.tv_nsec as f64 * 1e-9
}

/// Returns a loop of a string instruction on `count` bytes: mov rdi,0x200000; mov rsi,0x300000; mov rdx,rcx; mov
/// ecx,count; rep …; mov rcx,rdx; dec rcx; jnz
fn string(rep: &[u8; 2], count: u32) -> Vec<u8> {
    let mut code =
        b"\x48\xc7\xc7\x00\x00\x20\x00\x48\xc7\xc6\x00\x00\x30\x00\x48\x89\xca\xb9".to_vec();
    code.extend(count.to_le_bytes());
    code.extend(rep);
    code.extend(b"\x48\x89\xd1\x48\xff\xc9\x75\xe0\xf4");
    code
}

fn main() {
    // The name of each loop, and its code. RCX counts, RSI points to data, the end is HLT.
    let loops: &[(&str, &[u8], u64)] = &[
        // add rax,rcx; xor rdx,rax; lea rbx,[rbx+rdx*2]; shr rdx,3; sub rcx,1; jnz
        (
            "alu",
            b"\x48\x01\xc8\x48\x31\xc2\x48\x8d\x1c\x53\x48\xc1\xea\x03\x48\x83\xe9\x01\x75\xec\xf4",
            20_000_000,
        ),
        // mov rax,[rsi]; mov [rsi+8],rax; add qword [rsi+16],1; mov rdx,[rsi+rbx*8]; dec rcx; jnz
        (
            "ldst",
            b"\x48\x8b\x06\x48\x89\x46\x08\x48\x83\x46\x10\x01\x48\x8b\x14\xde\x48\xff\xc9\x75\xeb\xf4",
            20_000_000,
        ),
        // l: call f; dec rcx; jnz l; hlt; f: push rbp; mov rbp,rsp; mov eax,1; pop rbp; ret
        (
            "call",
            b"\xe8\x06\x00\x00\x00\x48\xff\xc9\x75\xf6\xf4\x55\x48\x89\xe5\xb8\x01\x00\x00\x00\x5d\xc3",
            10_000_000,
        ),
        // mov rdi,rsi; mov rbx,4096 ... walks 4096 pages: mov [rdi],rcx; add rdi,4096; dec rbx; jnz; dec rcx; jnz
        (
            "miss",
            b"\x48\x89\xf7\xbb\x00\x08\x00\x00\x48\x89\x0f\x48\x81\xc7\x00\x10\x00\x00\x48\xff\xcb\x75\xf1\x48\xff\xc9\x75\xe4\xf4",
            1000,
        ),
        // fld qword [rsi]; fmul qword [rsi+8]; fadd qword [rsi+16]; fstp qword [rsi+24]; dec rcx; jnz
        (
            "x87",
            b"\xdd\x06\xdc\x4e\x08\xdc\x46\x10\xdd\x5e\x18\x48\xff\xc9\x75\xf0\xf4",
            1_000_000,
        ),
        // fldpi; fldz; l: fadd st,st(1); fxch; fcomi st,st(1); fchs; dec rcx; jnz l
        (
            "x87regs",
            b"\xd9\xeb\xd9\xee\xd8\xc1\xd9\xc9\xdb\xf1\xd9\xe0\x48\xff\xc9\x75\xf3\xf4",
            1_000_000,
        ),
        ("movs8", &string(b"\xf3\xa4", 8), 1_000_000),
        ("movs64", &string(b"\xf3\xa4", 64), 1_000_000),
        ("movs4k", &string(b"\xf3\xa4", 4096), 100_000),
        ("stos8", &string(b"\xf3\xaa", 8), 1_000_000),
        ("stos64", &string(b"\xf3\xaa", 64), 1_000_000),
        ("stos4k", &string(b"\xf3\xaa", 4096), 100_000),
        ("repe cmps64", &string(b"\xf3\xa6", 64), 100_000),
        ("repe cmps4k", &string(b"\xf3\xa6", 4096), 10_000),
        // Memory is zero, and AL is 1.
        ("repne scas64", &string(b"\xf2\xae", 64), 100_000),
        ("repne scas4k", &string(b"\xf2\xae", 4096), 10_000),
        // fib(n) recursive: edi = n in rcx
        (
            "fib",
            &[
                0x48, 0x89, 0xcf, // mov rdi,rcx
                0xe8, 0x01, 0x00, 0x00, 0x00, // call fib
                0xf4, // hlt
                0x48, 0x83, 0xff, 0x02, // fib: cmp rdi,2
                0x73, 0x04, // jae rec
                0x48, 0x89, 0xf8, // mov rax,rdi
                0xc3, // ret
                0x53, // rec: push rbx
                0x57, // push rdi
                0x48, 0x8d, 0x7f, 0xff, // lea rdi,[rdi-1]
                0xe8, 0xeb, 0xff, 0xff, 0xff, // call fib
                0x48, 0x89, 0xc3, // mov rbx,rax
                0x5f, // pop rdi
                0x48, 0x8d, 0x7f, 0xfe, // lea rdi,[rdi-2]
                0xe8, 0xde, 0xff, 0xff, 0xff, // call fib
                0x48, 0x01, 0xd8, // add rax,rbx
                0x5b, // pop rbx
                0xc3, // ret
            ],
            32,
        ),
    ];
    let only = std::env::args().nth(1);
    for (name, code, count) in loops {
        if only.as_ref().is_some_and(|o| o != name) {
            continue;
        }
        let mut guest = Guest::new(code);
        guest.cpu.state.gpr[RCX] = *count;
        guest.cpu.state.gpr[RSI] = 0x20_0000;
        guest.cpu.state.gpr[RAX] = 1;
        (guest.cpu.state.fcw, guest.cpu.state.ftw) = (0x37f, 0);
        let start = seconds_of_cpu();
        guest.halt();
        let seconds = seconds_of_cpu() - start;
        let instructions = guest.cpu.counters().instructions;
        println!(
            "{name:10} {:8.1} MIPS  {:6.2} ns/instruction  ({instructions} instructions, {} translations)",
            instructions as f64 / seconds / 1e6,
            seconds * 1e9 / instructions as f64,
            guest.machine.translations.len(),
        );
    }
}
