//! Executes one x87 instruction of the host on operands that are the guest's registers.
//!
//! Sticky flags stay set in the host's status word, because clearing them takes longer than most instructions.
//! (`simd::host` does the same with MXCSR.) So if the host has a flag set afterwards that is clear in the guest, this
//! instruction or an earlier one may have set it. To find out, the code clears the host's flags, and executes the
//! instruction once more. The code does not load the control word if the guest's equals the host's.

use crate::state::{F80, State};
use crate::x87::Stub;
use core::arch::asm;

/// The sticky flags of the status word: the exception flags and the stack fault flag.
pub(super) const STICKY: u16 = 0x7f;

/// The operands of a stub.
pub(super) struct Call<'s> {
    stub: usize,
    /// The address of ST(0). The next fields are the addresses of ST(i), and of the register for the result.
    a: *const F80,
    b: *const F80,
    pub(super) to: *mut F80,
    /// The memory operand.
    memory: &'s mut u64,
    fcw: &'s u16,
    /// The sticky flags that are clear in the guest.
    clear: u32,
}

/// Defines functions that run a stub on the host. Such a function pushes the operands in `load`, calls the stub, runs
/// the code `then`, and pops the values to the operands in `store`, after which the host's stack is empty. If the host
/// has a flag set after the stub that is clear in the guest, the function clears the host's flags and does this once
/// more, because an earlier instruction may have set the flag. Returns the status word and the value that `then` has
/// left in RDX.
macro_rules! calls {
    ($($name:ident: [$($load:literal),*] [$($then:literal),*] [$($store:literal),*];)*) => {$(
        #[inline(always)]
        pub(super) fn $name(call: Call<'_>) -> (u16, u64) {
            let host = 0u16;
            let status: u32;
            let flags: u64;
            // SAFETY: the stub is one x87 instruction and a `ret`. If it has a memory operand, the operand has at most
            // 8 bytes and is at RDI. The pointers point to the guest's registers. All exceptions are masked. Afterwards
            // the x87 unit is empty and has the host's control word, as Rust code expects, and the stack is balanced.
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
    /// Returns the operands for a call of `stub`, from the indices of the guest's registers.
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
