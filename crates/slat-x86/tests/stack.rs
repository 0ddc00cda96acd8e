//! Tests how many bytes of its caller's stack a run uses. (`slat-kvm` has a similar test for `KVM_RUN` of an
//! interpreted guest.)
#![cfg(feature = "jit")]

mod common;
use common::*;
use slat_x86::*;

/// The largest number of bytes of the stack that a run may use. Without optimisation, frames are larger.
const BOUND: usize = if cfg!(debug_assertions) {
    48 << 10
} else {
    14 << 10
};
const THREAD: usize = 256 << 10;
const PAINT: u64 = 0x5a5a_a5a5_5a5a_a5a5;

/// Returns the lowest address of this thread's stack that may be written.
fn lowest() -> usize {
    // SAFETY: the calls store the attributes of this thread in local variables.
    unsafe {
        let mut attributes = std::mem::zeroed();
        assert_eq!(
            libc::pthread_getattr_np(libc::pthread_self(), &mut attributes),
            0
        );
        let (mut start, mut len, mut guard) = (std::ptr::null_mut(), 0, 0);
        libc::pthread_attr_getstack(&attributes, &mut start, &mut len);
        libc::pthread_attr_getguardsize(&attributes, &mut guard);
        libc::pthread_attr_destroy(&mut attributes);
        start as usize + guard
    }
}

/// Calls `work`. Returns how many bytes of the stack it used.
#[inline(never)]
fn depth(work: impl FnOnce()) -> usize {
    let here = 0u64;
    let top = (&raw const here as usize & !7) - 1024;
    let painted = (lowest()..top).step_by(8);
    for at in painted.clone() {
        // SAFETY: the address is below this function's frame and above the guard page. Nothing uses this memory while
        // this function calls no other function.
        unsafe { (at as *mut u64).write_volatile(PAINT) };
    }
    work();
    // SAFETY: the addresses are below this function's frame and above the guard page, and nothing uses this memory now.
    let used = painted
        .clone()
        .find(|at| unsafe { (*at as *const u64).read_volatile() } != PAINT);
    top - used.unwrap_or(top) + 1024
}

/// Makes a guest with many kinds of code: loops whose blocks call and return, misses, exceptions whose handlers return,
/// atomic operations, SSE and x87 with loads and stores, FXSAVE, string instructions, system instructions, MMIO.
fn guest() -> Guest {
    let mut code = vec![];
    // again: mov [rdi],eax; add rdi,4096; and edi,7fffff; or edi,200000
    code.extend(b"\x89\x07\x48\x81\xc7\0\x10\0\0\x81\xe7\xff\xff\x7f\0\x81\xcf\0\0\x20\0");
    // lock inc dword [rdi]; push rdi; pop rbx; xchg [rdi+8],eax
    code.extend(b"\xf0\xff\x07\x57\x5b\x87\x47\x08");
    // addps xmm0,[rsi]; sqrtsd xmm1,xmm0; movups [rsi+16],xmm1
    code.extend(b"\x0f\x58\x06\xf2\x0f\x51\xc8\x0f\x11\x4e\x10");
    // fld qword [rsi]; fsin; fstp tbyte [rsi+32]; fnsave [rsi+256]; frstor [rsi+256]; fxsave [rsi+1024]; movq
    // mm0,[rsi]; paddd mm0,mm0; emms
    code.extend(b"\xdd\x06\xd9\xfe\xdb\x7e\x20\xdd\xb6\0\x01\0\0\xdd\xa6\0\x01\0\0\x0f\xae\x86\0\x04\0\0\x0f\x6f\x06\x0f\xfe\xc0\x0f\x77");
    // push rdi; push rsi; push rcx; mov rdi,300800; mov ecx,3000; rep movsb; mov ecx,3000; rep stosb; std; mov ecx,30;
    // rep movsb; mov ecx,30; repe cmpsb; mov ecx,30; repne scasb; cld; pop rcx; pop rsi; pop rdi
    code.extend(b"\x57\x56\x51\x48\xc7\xc7\0\x08\x30\0\xb9\xb8\x0b\0\0\xf3\xa4\xb9\xb8\x0b\0\0\xf3\xaa\xfd\xb9\x1e\0\0\0\xf3\xa4");
    code.extend(b"\xb9\x1e\0\0\0\xf3\xa6\xb9\x1e\0\0\0\xf2\xae\xfc\x59\x5e\x5f");
    // ud2; then a division by zero: xor ebx,ebx; div bx. The handlers skip the faulting instructions.
    code.extend(b"\x0f\x0b\x31\xdb\x90\xf7\xf3");
    // rdtsc; xor eax,eax; cpuid, which changes RCX
    code.extend(b"\x51\x0f\x31\x31\xc0\x0f\xa2\x59");
    // mov eax,[r8]; mov [r8],eax: a device's
    code.extend(b"\x41\x8b\0\x41\x89\0");
    // dec ecx; jnz again; hlt
    code.extend(b"\xff\xc9\x0f\x85");
    let back = -(code.len() as i32 + 4);
    code.extend(back.to_le_bytes());
    code.extend(b"\xf4");
    let mut guest = Guest::new(&code);
    for vector in [vector::UD, vector::DE] {
        // add qword [rsp],2; iretq
        let at = HANDLERS + 16 * u64::from(vector);
        guest.memory().write(at, b"\x48\x83\x04\x24\x02\x48\xcf");
    }
    let state = &mut guest.cpu.state;
    (state.fcw, state.fsw, state.ftw, state.mxcsr) = (0x37f, 0, 0, 0x1f80);
    (state.gpr[RSI], state.gpr[RDI]) = (DATA, 0x20_0000);
    (state.gpr[8], state.gpr[RCX]) = (MMIO, 40_000);
    guest
}

fn run(guest: &mut Guest) {
    loop {
        match guest.run() {
            Exit::Mmio { write: false, .. } => guest.cpu.complete_mmio_read(&[1; 4]),
            Exit::Mmio { .. } => {}
            exit => {
                assert_eq!(exit, Exit::Hlt, "at {:#x}", guest.cpu.state.rip);
                assert_eq!(guest.cpu.state.gpr[RCX], 0);
                return;
            }
        }
    }
}

/// Runs the guest. Returns the number of stack bytes used, and the CPU's counters.
fn measure(compiler: Option<std::sync::Arc<Compiler>>) -> (usize, Counters) {
    let measured = move || {
        let mut guest = guest();
        if let Some(compiler) = compiler {
            guest.cpu.set_compiler(compiler, Compile::Hot).unwrap();
        }
        let used = depth(|| run(&mut guest));
        (used, *guest.cpu.counters())
    };
    let thread = std::thread::Builder::new().stack_size(THREAD);
    thread.spawn(measured).unwrap().join().unwrap()
}

#[test]
fn a_run_takes_little_of_the_stack() {
    // With this variable, the guests use a compiler that compiles on the stack of the run.
    if std::env::var_os("SLAT_TEST_COMPILED").is_some() {
        return;
    }
    let (interpreted, _) = measure(None);
    println!("{interpreted} bytes for the interpreter");
    let compiler = Compiler::try_new().unwrap();
    let worker = compiler.clone();
    std::thread::spawn(move || worker.work(Tier::Baseline));
    let (with_code, counters) = measure(Some(compiler));
    println!("{with_code} bytes with compiled code");
    assert!(
        counters.instructions_compiled > counters.instructions / 10,
        "{counters:?}"
    );
    assert!(interpreted.max(with_code) <= BOUND);
}
