//! System calls by which a loaded program sets its thread pointer. There are none: a program sets it by an instruction.

/// Serves such a call. `None`: the call does not concern the thread pointer.
pub fn serve(
    _number: i64,
    _arguments: [usize; 6],
    _store: impl FnOnce(usize, u64) -> isize,
    _refuse: impl FnOnce(&str) -> isize,
) -> Option<isize> {
    None
}
