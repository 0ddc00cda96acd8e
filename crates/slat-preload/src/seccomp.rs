//! Installs the program's seccomp filters, by seccomp(2) or prctl(2), in programs that have loaded slat's C library.
//! (`dispatch::filters` serves the programs that slat loads.)

use crate::guarded::guarded;
use libc::sock_filter;
use slat_kvm::thread::Section;
use slat_kvm::{filters, user};
use slat_process::gate;
use std::ops::Range;

/// Implements seccomp(2) with `SECCOMP_SET_MODE_FILTER`. `flags`, and `program`, the address of a `sock_fprog`, are the
/// application's arguments. Calls `install` with the flags and the filter's address for the kernel. These may differ
/// from the application's: `filter_flags` may change the flags, and `exempting` may replace the filter.
pub fn install(flags: usize, program: usize, install: impl FnOnce(usize, usize) -> isize) -> isize {
    let flags = filter_flags(flags);
    filtering(program, || {
        exempting(flags, program, |program| install(flags, program))
    })
}

/// Installs a seccomp filter, a `sock_fprog` at `program`, by calling `install`. If the program already uses KVM,
/// starts slat's threads first, so that the filter does not apply to them.
pub fn filtering(program: usize, install: impl FnOnce() -> isize) -> isize {
    if !crate::is_prepared() {
        let answer = install();
        if answer >= 0 {
            guarded(|| {
                // SAFETY: the kernel has just read the `sock_fprog` and its instructions. Both structs have the
                // kernel's layout. This code makes no system call, because the filter may forbid it.
                let program = unsafe {
                    let program = (program as *const libc::sock_fprog).read_unaligned();
                    std::slice::from_raw_parts(program.filter, program.len.into())
                };
                filters::announce(program);
                Ok(0)
            });
        }
        return answer;
    }
    // slat serves no KVM calls in a child of `vfork`, and must not leave threads in the parent's memory.
    if crate::is_borrowed() {
        return install();
    }
    guarded(|| {
        filters::prepare();
        if let Ok(program) = read_filter(program as u64) {
            filters::announce(&program);
        }
        Ok(0)
    });
    install()
}

/// Returns the flags with which a filter is installed: `flags` without `SECCOMP_FILTER_FLAG_TSYNC` if the program has
/// only one thread.
fn filter_flags(flags: usize) -> usize {
    const FOR_ALL: usize = libc::SECCOMP_FILTER_FLAG_TSYNC as usize;
    let is_one = || {
        let _section = Section::enter();
        filters::is_one_thread()
    };
    match flags & FOR_ALL != 0 && crate::is_prepared() && is_one() {
        true => flags & !FOR_ALL,
        false => flags,
    }
}

/// Installs a filter, a `sock_fprog` at `program`, by calling `install` with the filter's address. If the filter is for
/// all threads and slat has threads, `install` gets another filter, which allows all calls of slat's threads. Otherwise
/// the application's filter could kill one of slat's threads, and requests to that thread would never complete.
fn exempting(flags: usize, program: usize, install: impl FnOnce(usize) -> isize) -> isize {
    let mut given = None;
    if flags & libc::SECCOMP_FILTER_FLAG_TSYNC as usize != 0
        && crate::is_prepared()
        && !crate::is_borrowed()
        && filters::has_threads()
    {
        guarded(|| {
            if let Ok(own) = read_filter(program as u64) {
                given = prefixed(&gate::exempt(), &own);
            }
            Ok(0)
        });
    }
    match given {
        Some((len, mut instructions)) => {
            let filter = instructions.as_mut_ptr();
            let given = libc::sock_fprog { len, filter };
            let answer = install(&raw const given as usize);
            guarded(|| {
                drop(instructions);
                Ok(0)
            });
            answer
        }
        None => install(program),
    }
}

/// Reads the instructions of the `sock_fprog` at `program`. Each has 8 bytes.
pub fn read_filter(program: u64) -> slat_kvm::Result<Vec<sock_filter>> {
    let [len, start] = user::read::<[u64; 2]>(program)?;
    let instructions = user::read_vec::<u64>(start, usize::from(len as u16))?;
    let decoded = instructions.iter().map(|bits| sock_filter {
        code: *bits as u16,
        jt: (bits >> 16) as u8,
        jf: (bits >> 24) as u8,
        k: (bits >> 32) as u32,
    });
    Ok(decoded.collect())
}

/// Returns instructions that allow calls from `range`, followed by the filter `own` for all other calls. `None`: there
/// are too many instructions.
pub fn prefixed(range: &Range<usize>, own: &[sock_filter]) -> Option<(u16, Vec<sock_filter>)> {
    let mut prefixed = allow(range);
    prefixed.extend_from_slice(own);
    Some((u16::try_from(prefixed.len()).ok()?, prefixed))
}

/// Returns instructions that allow calls from `range`. For all other calls, execution continues after these
/// instructions.
fn allow(range: &Range<usize>) -> Vec<sock_filter> {
    const ADDRESS: u32 = 8;
    let instruction = |code: u32, jt, jf, k| sock_filter {
        code: code as u16,
        jt,
        jf,
        k,
    };
    let load = libc::BPF_LD | libc::BPF_W | libc::BPF_ABS;
    let compare = |condition| libc::BPF_JMP | condition | libc::BPF_K;
    let (first, last) = (range.start, range.end - 1);
    let high = |address: usize| (address >> 32) as u32;
    let mut code = Vec::new();
    // BPF has words of 32 bits. So the code has one part for each value of the upper half of the addresses.
    for half in high(first)..=high(last) {
        let low = if half == high(first) { first as u32 } else { 0 };
        let end = if half == high(last) {
            last as u32
        } else {
            u32::MAX
        };
        code.extend([
            instruction(load, 0, 0, ADDRESS + 4),
            instruction(compare(libc::BPF_JEQ), 0, 4, half),
            instruction(load, 0, 0, ADDRESS),
            instruction(compare(libc::BPF_JGE), 0, 2, low),
            instruction(compare(libc::BPF_JGT), 1, 0, end),
            instruction(libc::BPF_RET | libc::BPF_K, 0, 0, libc::SECCOMP_RET_ALLOW),
        ]);
    }
    // The accumulator is 0 when a filter begins.
    code.push(instruction(libc::BPF_LD | libc::BPF_IMM, 0, 0, 0));
    code
}

#[cfg(test)]
mod tests {
    use super::*;
    use slat_process::filter::{self, Made};

    #[test]
    fn what_comes_from_the_range_passes_and_the_rest_is_the_filters() {
        let forbid = sock_filter {
            code: (libc::BPF_RET | libc::BPF_K) as u16,
            jt: 0,
            jf: 0,
            k: libc::SECCOMP_RET_KILL_PROCESS,
        };
        // A range within four gigabytes, a range that crosses a boundary of four gigabytes, and a range that ends at
        // such a boundary.
        for range in [
            0x7f12_3456_7000..0x7f12_3466_0000,
            0x7f12_fff0_0000..0x7f13_0010_0000,
            0x7f12_fff0_0000..0x7f13_0000_0000,
        ] {
            let mut program = allow(&range);
            program.push(forbid);
            let passes = |address| {
                let made = Made {
                    number: libc::SYS_read,
                    arguments: [0; 6],
                    address,
                };
                filter::lets_pass(&program, &made)
            };
            for address in [range.start, range.start + 0x8_0000, range.end - 1] {
                assert!(passes(address), "{address:#x} of {range:#x?}");
            }
            for address in [
                0,
                range.start - 1,
                range.end,
                range.start & 0xffff_ffff,
                range.start + (1 << 32),
            ] {
                assert!(!passes(address), "{address:#x}, not of {range:#x?}");
            }
        }
    }
}
