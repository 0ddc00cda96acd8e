//! System calls by which a loaded program sets its thread pointer. AArch64 has none: a program sets the thread pointer
//! by an instruction.

/// Serves a call that sets the thread pointer. `None`: the call does not concern the thread pointer.
pub fn serve(
    _number: i64,
    _arguments: [usize; 6],
    _store: impl FnOnce(usize, u64) -> isize,
    _refuse: impl FnOnce(&str) -> isize,
) -> Option<isize> {
    None
}
