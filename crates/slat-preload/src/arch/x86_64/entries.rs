//! The first instructions of functions that replace the C library's functions, where these instructions must be
//! assembly.

/// The body of a function like `execl`, whose arguments are a path and a list of words that ends with a null. Calls
/// `$inner` with the path and an array of the words.
///
/// The first five words are in registers, all others on the stack (System V ABI, AMD64 supplement, "Parameter
/// Passing"). The function moves the return address down, and pushes the registers above it, so that all words form
/// one array.
macro_rules! with_list {
    ($inner:path) => {
        ::std::arch::naked_asm!(
            "pop rax",
            "push r9",
            "push r8",
            "push rcx",
            "push rdx",
            "push rsi",
            "mov rsi, rsp",
            "push rax",
            "call {inner}",
            "pop rcx",
            "add rsp, 40",
            "push rcx",
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
            "lea rax, [rdi + 1]",
            "cmp rax, 1", // RTLD_NEXT is -1, RTLD_DEFAULT 0.
            "jbe 2f",
            "jmp {look_up}",
            "2:",
            "mov rax, [rip + {known}]",
            "test rax, rax",
            "jnz 3f",
            "push rdi",
            "push rsi",
            "sub rsp, 8",
            "call {find}",
            "add rsp, 8",
            "pop rsi",
            "pop rdi",
            "3:",
            "jmp rax",
            look_up = sym $look_up,
            known = sym $known,
            find = sym $find,
        )
    };
}
pub(crate) use look_up;
