//! Executes one x87 instruction of the host with the guest's registers as operands.
//!
//! The sticky flags stay set in the host's status word, as in MXCSR (`simd::host`), because clearing them takes longer
//! than most instructions. If the host has a flag set that is clear in the guest, the flags are cleared and the
//! instruction is executed once more, to find out whether this instruction has set the flag. FLDCW is skipped if the
//! guest's control word equals the host's.

use crate::state::{F80, State};
use crate::x87::Stub;
use core::arch::asm;

/// The sticky flags in the status word: the exceptions and the stack fault.
pub(super) const STICKY: u16 = 0x7f;

/// The operands of a call to the host.
pub(super) struct Call<'s> {
    stub: usize,
    /// Addresses of ST(0), of ST(i), and of the result's register.
    a: *const F80,
    b: *const F80,
    pub(super) to: *mut F80,
    /// The operand in memory.
    memory: &'s mut u64,
    fcw: &'s u16,
    /// The guest's sticky flags that are clear.
    clear: u32,
}

/// Defines functions that run a stub on the host: they push `load`, call the stub, run `then`, and end with `store`,
/// which empties the stack. If the host then has a flag set that is clear in the guest, they do all this once more,
/// because the flag may have been set before the instruction. Each returns the status word and the value that `then`
/// left in RDX.
macro_rules! calls {
    ($($name:ident: [$($load:literal),*] [$($then:literal),*] [$($store:literal),*];)*) => {$(
        #[inline(always)]
        pub(super) fn $name(call: Call<'_>) -> (u16, u64) {
            let host = 0u16;
            let status: u32;
            let flags: u64;
            // SAFETY: the stub is one x87 instruction and a `ret`; its memory operand, if any, has at most 8 bytes and
            // is at RDI. The pointers are those of the guest's registers. All exceptions are masked. The x87 unit is
            // left empty and with the host's control word, as Rust code expects it; the stack is balanced.
            unsafe {
                asm!(
                    "/* {a} {b} {to} */",
                    "fnstcw [{host}]",
                    "movzx ecx, word ptr [{host}]",
                    "cmp cx, [{fcw}]",
                    "je 3f",
                    "2:",
                    "fldcw [{fcw}]",
                    "3:",
                    $(concat!("fld tbyte ptr [", $load, "]"),)*
                    "call {stub}",
                    $($then,)*
                    "fnstsw ax",
                    "test eax, r8d",
                    "jnz 5f",
                    $(concat!("fstp ", $store),)*
                    "cmp cx, [{fcw}]",
                    "je 4f",
                    "fldcw [{host}]",
                    "4:",
                    ".pushsection .text.unlikely, \"ax\", @progbits",
                    "5:",
                    "fninit",
                    "xor r8d, r8d",
                    "jmp 2b",
                    ".popsection",
                    stub = in(reg) call.stub,
                    a = in(reg) call.a,
                    b = in(reg) call.b,
                    to = in(reg) call.to,
                    fcw = in(reg) call.fcw,
                    host = in(reg) &raw const host,
                    in("rdi") call.memory,
                    out("eax") status,
                    out("ecx") _,
                    inout("r8d") call.clear => _,
                    inout("rdx") 0u64 => flags,
                    out("st(0)") _, out("st(1)") _, out("st(2)") _, out("st(3)") _,
                    out("st(4)") _, out("st(5)") _, out("st(6)") _, out("st(7)") _,
                );
            }
            (status as u16, flags)
        }
    )*};
}

calls! {
    none_to_one: [] [] ["tbyte ptr [{to}]"];
    one_to_none: ["{a}"] [] [];
    one_to_one: ["{a}"] [] ["tbyte ptr [{to}]"];
    one_kept: ["{a}"] [] ["st(0)"];
    two_to_none: ["{b}", "{a}"] [] [];
    two_to_one: ["{b}", "{a}"] [] ["tbyte ptr [{to}]"];
    two_to_one_and_other: ["{b}", "{a}"] [] ["tbyte ptr [{to}]", "st(0)"];
    two_to_flags: ["{b}", "{a}"] ["pushfq", "pop rdx"] ["st(0)"];
}

impl State {
    /// Returns a call of `stub` with physical registers as operands.
    #[inline(always)]
    pub(super) fn call<'s>(
        &'s mut self,
        stub: Stub,
        (a, b, to): (usize, usize, usize),
        memory: &'s mut u64,
    ) -> Call<'s> {
        let st = self.st.as_mut_ptr();
        Call {
            stub: stub.address(),
            a: st.wrapping_add(a & 7),
            b: st.wrapping_add(b & 7),
            to: st.wrapping_add(to & 7),
            memory,
            fcw: &self.fcw,
            clear: (!self.fsw & STICKY).into(),
        }
    }
}
