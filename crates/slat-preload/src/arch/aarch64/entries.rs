//! The first instructions of functions that replace the C library's functions, where these instructions must be
//! assembly.

/// The body of a function like `execl`, whose arguments are a path and a list of words that ends with a null. Calls
/// `$inner` with the path and an array of the words.
///
/// The first seven words are in registers, all others on the stack (AAPCS64, "Parameter passing"). The function stores
/// the registers right below the words on the stack, so that all words form one array.
macro_rules! with_list {
    ($inner:path) => {
        ::std::arch::naked_asm!(
            "stp x29, x30, [sp, #-80]!",
            "mov x29, sp",
            "stp x1, x2, [sp, #24]",
            "stp x3, x4, [sp, #40]",
            "stp x5, x6, [sp, #56]",
            "str x7, [sp, #72]",
            "add x1, sp, #24",
            "bl {inner}",
            "ldp x29, x30, [sp], #80",
            "ret",
            inner = sym $inner,
        )
    };
}
pub(crate) use with_list;

/// The body of `dlsym`: jumps to `$look_up`, or for `RTLD_NEXT` and `RTLD_DEFAULT` to the C library's function. The
/// variable `$known` has the address of the C library's function; if it is 0, the function `$find` returns the address.
macro_rules! look_up {
    ($look_up:path, $known:path, $find:path) => {
        ::std::arch::naked_asm!(
            "add x16, x0, #1",
            "cmp x16, #1", // RTLD_NEXT is -1, RTLD_DEFAULT 0.
            "b.ls 2f",
            "b {look_up}",
            "2:",
            "adrp x16, {known}",
            "ldr x16, [x16, :lo12:{known}]",
            "cbnz x16, 3f",
            "stp x29, x30, [sp, #-32]!",
            "stp x0, x1, [sp, #16]",
            "bl {find}",
            "mov x16, x0",
            "ldp x0, x1, [sp, #16]",
            "ldp x29, x30, [sp], #32",
            "3:",
            "br x16",
            look_up = sym $look_up,
            known = sym $known,
            find = sym $find,
        )
    };
}
pub(crate) use look_up;
