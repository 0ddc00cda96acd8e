//! Evaluates a seccomp filter for one system call, as the kernel's BPF machine does. The machine is described by
//! `Documentation/userspace-api/seccomp_filter.rst` and `Documentation/networking/filter.rst`.

use crate::arch::calls::AUDIT_ARCH;
use crate::list::{Call, Entry, Instead, forbid};
use libc::sock_filter;

/// A filter's input: the kernel's `struct seccomp_data` as its 16 words.
type Data = [u32; 16];

/// The number of 32-bit words in the scratch memory of a BPF program.
const MEMORY: usize = libc::BPF_MEMWORDS as usize;

/// Records the calls that the filter `program` forbids. From then on, the helper thread makes these calls for all
/// threads. Call before or after a thread of this process installs the filter. If `program` allows `KVM_RUN`, returns
/// the forbidden calls without which `KVM_RUN` cannot work.
pub fn announce(program: &[sock_filter]) -> Vec<&'static Entry> {
    const KVM_RUN: usize = 0xae80;
    let mut needed = Vec::new();
    for call in Call::ALL {
        let entry = call.entry();
        if !allows(program, entry.number, entry.arguments) {
            forbid(*call);
            if entry.instead == Instead::Nobody {
                needed.push(entry);
            }
        }
    }
    if !allows(program, libc::SYS_ioctl, &[(1, KVM_RUN)]) {
        needed.clear();
    }
    needed
}

/// A system call that a program makes.
#[derive(Clone, Copy, Debug)]
pub struct Made {
    /// The call's number.
    pub number: i64,
    /// The call's arguments.
    pub arguments: [usize; 6],
    /// The address of the instruction after the call.
    pub address: usize,
}

/// Whether `program` allows a system call with these arguments (index and value). The filter sees 0 for all arguments
/// that are not given, and for the address. If a tracer or a supervisor would decide about the call, the call counts as
/// forbidden.
fn allows(program: &[sock_filter], number: i64, arguments: &[(usize, usize)]) -> bool {
    let mut made = Made {
        number,
        arguments: [0; 6],
        address: 0,
    };
    for (index, value) in arguments {
        made.arguments[*index] = *value;
    }
    lets_pass(program, &made)
}

/// Whether `program` allows a system call. If a tracer or a supervisor would decide about the call, the call counts as
/// forbidden.
pub fn lets_pass(program: &[sock_filter], made: &Made) -> bool {
    let mut data: Data = [0; 16];
    (data[0], data[1]) = (made.number as u32, AUDIT_ARCH);
    for (index, value) in [made.address].into_iter().chain(made.arguments).enumerate() {
        data[2 + 2 * index] = value as u32;
        data[3 + 2 * index] = (value >> 32) as u32;
    }
    // `None`: the kernel would refuse to install the program, so it forbids nothing.
    run(program, &data).is_none_or(|decision| {
        let action = decision & libc::SECCOMP_RET_ACTION_FULL;
        [libc::SECCOMP_RET_ALLOW, libc::SECCOMP_RET_LOG].contains(&action)
    })
}

/// Runs `program`. Returns its decision. `None`: the kernel would have refused to install `program`.
fn run(program: &[sock_filter], data: &Data) -> Option<u32> {
    let (mut a, mut x) = (0u32, 0u32);
    let mut memory = [0u32; MEMORY];
    let mut next = 0usize;
    loop {
        // Jumps go forward only, so the loop ends.
        let instruction = program.get(next)?;
        next += 1;
        let (code, k) = (u32::from(instruction.code), instruction.k);
        let source = match code & 0x08 {
            libc::BPF_X => x,
            _ => k,
        };
        match code & 0x07 {
            libc::BPF_LD => a = load(code, k, data, &memory)?,
            libc::BPF_LDX => x = load(code, k, data, &memory)?,
            libc::BPF_ST => *memory.get_mut(k as usize)? = a,
            libc::BPF_STX => *memory.get_mut(k as usize)? = x,
            libc::BPF_ALU => a = arithmetic(code & 0xf0, a, source)?,
            libc::BPF_JMP => {
                let skip = match code & 0xf0 {
                    libc::BPF_JA => k,
                    condition => u32::from(match holds(condition, a, source)? {
                        true => instruction.jt,
                        false => instruction.jf,
                    }),
                };
                next = next.checked_add(skip as usize)?;
            }
            libc::BPF_RET => {
                return match code & 0x18 {
                    libc::BPF_A => Some(a),
                    libc::BPF_K => Some(k),
                    _ => None,
                };
            }
            // The remaining class of instructions is BPF_MISC, with the two operations TAX and TXA.
            _ => match code & 0xf8 {
                0x00 => x = a,
                0x80 => a = x,
                _ => return None,
            },
        }
    }
}

fn load(code: u32, k: u32, data: &Data, memory: &[u32; MEMORY]) -> Option<u32> {
    match code & 0xe0 {
        libc::BPF_ABS if k.is_multiple_of(4) => data.get(k as usize / 4).copied(),
        libc::BPF_IMM => Some(k),
        libc::BPF_MEM => memory.get(k as usize).copied(),
        libc::BPF_LEN => Some(size_of::<Data>() as u32),
        _ => None,
    }
}

fn arithmetic(operation: u32, a: u32, b: u32) -> Option<u32> {
    Some(match operation {
        libc::BPF_ADD => a.wrapping_add(b),
        libc::BPF_SUB => a.wrapping_sub(b),
        libc::BPF_MUL => a.wrapping_mul(b),
        // On a division by 0, the kernel ends the filter with result 0, which kills the process. Here the quotient is 0
        // instead, and the filter continues.
        libc::BPF_DIV => a.checked_div(b).unwrap_or(0),
        libc::BPF_AND => a & b,
        libc::BPF_OR => a | b,
        libc::BPF_XOR => a ^ b,
        libc::BPF_LSH => a.wrapping_shl(b),
        libc::BPF_RSH => a.wrapping_shr(b),
        libc::BPF_NEG => a.wrapping_neg(),
        _ => return None,
    })
}

fn holds(condition: u32, a: u32, b: u32) -> Option<bool> {
    Some(match condition {
        libc::BPF_JEQ => a == b,
        libc::BPF_JGT => a > b,
        libc::BPF_JGE => a >= b,
        libc::BPF_JSET => a & b != 0,
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn instruction(code: u32, jt: u8, jf: u8, k: u32) -> sock_filter {
        sock_filter {
            code: code as u16,
            jt,
            jf,
            k,
        }
    }

    /// Makes a filter that allows `futex` with operation 128, and `ioctl` if bit 4 of its second argument is clear. The
    /// filter forbids all other calls.
    fn example() -> Vec<sock_filter> {
        use libc::*;
        let load = BPF_LD | BPF_W | BPF_ABS;
        vec![
            instruction(load, 0, 0, 4),
            instruction(BPF_JMP | BPF_JEQ, 1, 0, AUDIT_ARCH),
            instruction(BPF_RET, 0, 0, SECCOMP_RET_KILL_PROCESS),
            instruction(load, 0, 0, 0),
            instruction(BPF_JMP | BPF_JEQ, 0, 2, SYS_futex as u32),
            instruction(load, 0, 0, 24),
            instruction(BPF_JMP | BPF_JEQ, 4, 3, 128),
            instruction(BPF_JMP | BPF_JEQ, 0, 2, SYS_ioctl as u32),
            instruction(load, 0, 0, 24),
            instruction(BPF_JMP | BPF_JSET, 0, 1, 16),
            instruction(BPF_RET, 0, 0, SECCOMP_RET_TRAP),
            instruction(BPF_RET, 0, 0, SECCOMP_RET_ALLOW),
        ]
    }

    #[test]
    fn a_filter_is_asked_by_number_and_arguments() {
        let program = example();
        assert!(allows(&program, libc::SYS_futex, &[(1, 128)]));
        assert!(!allows(&program, libc::SYS_futex, &[(1, 129)]));
        assert!(allows(&program, libc::SYS_ioctl, &[(1, 15)]));
        assert!(!allows(&program, libc::SYS_ioctl, &[(1, 16)]));
        assert!(!allows(&program, libc::SYS_openat, &[]));
    }

    /// Runs a filter that computes with A = 7 and X = 5. Returns A.
    fn calculate(codes: &[(u32, u32)]) -> Option<u32> {
        use libc::*;
        let mut program = vec![
            instruction(BPF_LD | BPF_IMM, 0, 0, 5),
            instruction(BPF_MISC, 0, 0, 0),
            instruction(BPF_LD | BPF_IMM, 0, 0, 7),
        ];
        program.extend(codes.iter().map(|(code, k)| instruction(*code, 0, 0, *k)));
        program.push(instruction(BPF_RET | BPF_A, 0, 0, 0));
        run(&program, &[0; 16])
    }

    #[test]
    fn the_machine_calculates() {
        use libc::*;
        assert_eq!(calculate(&[(BPF_ALU | BPF_SUB | BPF_X, 0)]), Some(2));
        assert_eq!(calculate(&[(BPF_ALU | BPF_MUL | BPF_K, 3)]), Some(21));
        assert_eq!(calculate(&[(BPF_ALU | BPF_DIV | BPF_K, 0)]), Some(0));
        let swapped = [(BPF_ST, 3), (BPF_MISC | 0x80, 0), (BPF_STX, 4)];
        assert_eq!(calculate(&swapped), Some(5));
        let kept = [(BPF_ST, 3), (BPF_LD | BPF_IMM, 0), (BPF_LD | BPF_MEM, 3)];
        assert_eq!(calculate(&kept), Some(7));
    }

    #[test]
    fn what_the_kernel_refuses_is_no_filter() {
        use libc::*;
        assert_eq!(run(&[], &[0; 16]), None);
        assert_eq!(calculate(&[(BPF_ST, 16)]), None);
        assert_eq!(calculate(&[(BPF_LD | BPF_ABS, 64)]), None);
        let nowhere = [instruction(BPF_JMP | BPF_JA, 0, 0, u32::MAX)];
        assert_eq!(run(&nowhere, &[0; 16]), None);
    }
}
