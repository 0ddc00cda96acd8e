//! Finds code in memory: the program's own code, and the C library's text. The kernel dispatches no system calls made
//! within the C library's text. So slat makes its own calls by instructions in this text.

use crate::arch::code;
use std::ffi::{c_int, c_void};
use std::ops::Range;

/// The C library's text.
#[derive(Debug)]
pub struct Text {
    /// The text's addresses.
    pub range: Range<usize>,
    /// The address of an instruction in the text that enters the kernel and is followed by a return.
    pub gate: usize,
    /// The address of the code in the text that returns from a signal handler (rt_sigreturn). `None`: the text has no
    /// such code.
    pub restorer: Option<usize>,
}

impl Text {
    /// Finds the C library's text, and in it the instructions that slat needs. `None`: the text of this C library does
    /// not have these instructions.
    pub fn find() -> Option<Self> {
        let address = libc::getppid as *const () as usize;
        let mut range = 0..0;
        each_segment(|_, segment| {
            if segment.contains(&address) {
                range = segment;
            }
        });
        if range.is_empty() {
            return None;
        }
        // SAFETY: the segment is mapped and readable, and never changes.
        let text = unsafe { std::slice::from_raw_parts(range.start as *const u8, range.len()) };
        let (gate, restorer) = code::find_entries(text)?;
        Some(Text {
            gate: range.start + gate,
            restorer: restorer.map(|restorer| range.start + restorer),
            range,
        })
    }
}

/// Returns the addresses of the program's own code, except code that can be executed but not read.
pub fn programs() -> Vec<Range<usize>> {
    let mut texts = Vec::new();
    each_segment(|object, segment| {
        // The first object is the program itself.
        if object == 0 {
            texts.push(segment);
        }
    });
    texts
}

/// Whether the program's own code makes system calls.
pub fn program_makes_calls() -> bool {
    programs().into_iter().any(|text| {
        // SAFETY: the segment is mapped and readable. A program that changes its code while it starts is not
        // supported.
        let code = unsafe { std::slice::from_raw_parts(text.start as *const u8, text.len()) };
        code::makes_calls(code)
    })
}

/// Calls `look` for each segment that is executable and readable, with the number of the segment's object (program or
/// library). The objects come in the order of loading.
fn each_segment(mut look: impl FnMut(usize, Range<usize>)) {
    type Look<'a> = (usize, &'a mut dyn FnMut(usize, Range<usize>));
    unsafe extern "C" fn each(
        info: *mut libc::dl_phdr_info,
        _size: usize,
        to: *mut c_void,
    ) -> c_int {
        // SAFETY: `info` is the linker's description of an object. Until this call returns, no other code uses the data
        // of `to`.
        let (info, (object, look), headers) = unsafe {
            let info = &*info;
            let headers = match info.dlpi_phnum {
                0 => &[],
                count => std::slice::from_raw_parts(info.dlpi_phdr, count.into()),
            };
            (info, &mut *to.cast::<Look<'_>>(), headers)
        };
        let executable = libc::PF_X | libc::PF_R;
        for header in headers {
            if header.p_type == libc::PT_LOAD && header.p_flags & executable == executable {
                let start = (info.dlpi_addr + header.p_vaddr) as usize;
                look(*object, start..start + header.p_memsz as usize);
            }
        }
        *object += 1;
        0
    }
    let mut to: Look<'_> = (0, &mut look);
    // SAFETY: `each` has this signature, and `to` lives as long as the call.
    unsafe { libc::dl_iterate_phdr(Some(each), (&raw mut to).cast()) };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_gate_makes_system_calls_and_lies_in_the_text() {
        let text = Text::find().unwrap();
        assert!(text.range.contains(&text.gate));
        assert!(
            text.restorer
                .is_none_or(|restorer| text.range.contains(&restorer))
        );
        let before = slat_process::gate::address();
        // SAFETY: `Text::find` has found the instructions at this address.
        unsafe { slat_process::gate::move_to(text.gate) };
        let (pid, _) = slat_process::myself();
        // SAFETY: `before` was the gate before this test.
        unsafe { slat_process::gate::move_to(before) };
        assert_eq!(pid as u32, std::process::id());
    }
}
