//! Chooses the addresses of memory operands, and other inputs that a form needs.

use iced_x86::{Instruction, Mnemonic, OpKind, Register};

use crate::forms::{Case, DF, FREE_FLAGS, nth};
use crate::native::{BRANCH_TARGET, DATA, DATA_LEN, GS_BASE, HOLE, PAGE, Regs, STACK};
use crate::rng::Rng;

/// Gives operand `n` an address of a random shape, and sets the registers so that it points into the data pages: mostly
/// to the middle, sometimes across the page boundary, sometimes into the hole after them.
pub fn place(instruction: &mut Instruction, n: u32, base: usize, regs: &mut Regs, rng: &mut Rng) {
    instruction.set_op_kind(n, OpKind::Memory);
    if is_gather(instruction) {
        return place_gather(instruction, base, regs, rng);
    }
    let size = instruction.memory_size().size().max(1);
    let aligned = rng.one_in(2) || size >= 16;
    let offset = match rng.below(16) {
        0 => DATA + PAGE - rng.below(size) - 1 + rng.below(2),
        1 => HOLE - rng.below(size + 8),
        2 => DATA + PAGE - size,
        3 => HOLE - size,
        4 => DATA + 0x100 + rng.below(DATA_LEN - 0x300),
        _ if aligned => DATA + 0x100 + 16 * rng.below((DATA_LEN - 0x300) / 16),
        _ => DATA + 0x100 + size * rng.below((DATA_LEN - 0x300) / size),
    };
    let mut target = (base + offset) as u64;
    match rng.below(16) {
        0 => {
            instruction.set_segment_prefix(Register::GS);
            target = target.wrapping_sub(GS_BASE);
        }
        // These segments have no base in 64-bit mode.
        1 => instruction.set_segment_prefix(rng.pick(&[
            Register::ES,
            Register::CS,
            Register::SS,
            Register::DS,
        ])),
        _ => {}
    }
    if rng.one_in(8) {
        instruction.set_memory_base(Register::RIP);
        instruction.set_memory_displ_size(8);
        instruction.set_memory_displacement64(target);
        return;
    }
    let narrow = rng.one_in(12);
    let first = if narrow { Register::EAX } else { Register::RAX };
    let mut b = rng.below(16);
    // A register that is also an operand has one value for both roles. RSP stays a stack pointer.
    while b == 4 {
        b = rng.below(16);
    }
    let mut displacement = match rng.below(4) {
        0 => 0i64,
        1 => i64::from(rng.next() as i8),
        _ => i64::from(rng.next() as i32),
    };
    if narrow {
        displacement = i64::from(displacement as i8);
    }
    instruction.set_memory_base(nth(first, b));
    let mut scaled = 0;
    if rng.one_in(3) {
        let i = rng.below(16);
        if i != 4 && i != b {
            let scale = 1 << rng.below(4);
            instruction.set_memory_index(nth(first, i));
            instruction.set_memory_index_scale(scale);
            scaled = regs.gpr[i].wrapping_mul(u64::from(scale));
        }
    }
    instruction.set_memory_displacement64(displacement as u64);
    instruction.set_memory_displ_size(match displacement {
        0 => 0,
        -128..=127 => 1,
        _ => 8,
    });
    let mut value = target
        .wrapping_sub(scaled)
        .wrapping_sub(displacement as u64);
    if narrow {
        value = (value & 0xffff_ffff) | (rng.next() << 32);
    }
    regs.gpr[b] = value;
}

/// Whether the instruction loads each element at an index of its own.
pub fn is_gather(instruction: &Instruction) -> bool {
    use Mnemonic as M;
    matches!(
        instruction.mnemonic(),
        M::Vgatherdps
            | M::Vgatherdpd
            | M::Vgatherqps
            | M::Vgatherqpd
            | M::Vpgatherdd
            | M::Vpgatherdq
            | M::Vpgatherqd
            | M::Vpgatherqq
    )
}

/// Sets the base and the indices of a gather so that its elements are in the data pages, mostly.
fn place_gather(instruction: &mut Instruction, base: usize, regs: &mut Regs, rng: &mut Rng) {
    let scale = 1 << rng.below(4);
    instruction.set_memory_index_scale(scale);
    let b = 5 + rng.below(11);
    let narrow = rng.one_in(8);
    instruction.set_memory_base(nth(if narrow { Register::EAX } else { Register::RAX }, b));
    let displacement = i64::from(rng.next() as i8);
    instruction.set_memory_displacement64(displacement as u64);
    instruction.set_memory_displ_size(1);
    let middle = (base + DATA + PAGE) as u64;
    regs.gpr[b] = middle.wrapping_sub(displacement as u64);
    let wide = matches!(
        instruction.mnemonic(),
        Mnemonic::Vgatherqps | Mnemonic::Vgatherqpd | Mnemonic::Vpgatherqd | Mnemonic::Vpgatherqq
    );
    // Sometimes one of the elements is in the hole after the data, or far away.
    let far = rng.one_in(4);
    let mut index = || match far && rng.one_in(4) {
        true if rng.one_in(4) => rng.integer() as i64,
        true => (PAGE as i64 + rng.below(PAGE) as i64) / scale as i64,
        false => (rng.below(2 * PAGE - 16) as i64 - PAGE as i64) / scale as i64,
    };
    let i = instruction.memory_index().number();
    for half in regs.ymm_mut(i) {
        for bytes in half.chunks_exact_mut(if wide { 8 } else { 4 }) {
            bytes.copy_from_slice(&index().to_le_bytes()[..bytes.len()]);
        }
    }
}

/// Adjusts inputs so that a form can be judged: string pointers, branch targets, and shift counts for which Intel
/// leaves the result undefined.
pub fn tame(
    instruction: &mut Instruction,
    base: usize,
    case: &mut Case,
    rng: &mut Rng,
) -> Option<()> {
    use Mnemonic as M;
    let Case {
        regs, data, stack, ..
    } = case;
    let mnemonic = instruction.mnemonic();
    let target = (base + BRANCH_TARGET) as u64;
    let sp = (regs.gpr[4] as usize) - base - STACK;
    if instruction.is_string_instruction() {
        let span = if rng.one_in(12) {
            DATA_LEN
        } else {
            DATA_LEN - 0x400
        };
        regs.gpr[6] = (base + DATA + 0x200 + rng.below(span - 0x200)) as u64;
        regs.gpr[7] = (base + DATA + 0x200 + rng.below(span - 0x200)) as u64;
        if rng.one_in(8) {
            // The prefix is for the source only: the destination is always in ES.
            instruction.set_segment_prefix(Register::GS);
            regs.gpr[6] -= GS_BASE;
        }
        regs.gpr[1] = if rng.one_in(8) {
            0
        } else {
            rng.below(40) as u64
        };
        if rng.one_in(3) {
            // Most of the data are equal, so that repeated comparisons continue for some time.
            data.fill(regs.gpr[0] as u8);
            let odd = rng.below(DATA_LEN);
            data[odd] ^= 1;
        }
        return Some(());
    }
    match mnemonic {
        M::Maskmovq | M::Maskmovdqu | M::Vmaskmovdqu => {
            regs.gpr[7] = (base + DATA + rng.below(DATA_LEN)) as u64
        }
        M::Xlatb if rng.one_in(4) => {
            instruction.set_segment_prefix(Register::GS);
            regs.gpr[3] = (base + DATA + rng.below(DATA_LEN - 0x100)) as u64 - GS_BASE;
        }
        M::Xlatb => regs.gpr[3] = (base + DATA + rng.below(DATA_LEN - 0x100)) as u64,
        M::Leave | M::Enter => {
            regs.gpr[5] = (base + STACK + 0x400 + 8 * rng.below(0x100)) as u64;
            if mnemonic == M::Enter {
                // The old frame and the new one must not overlap, because the order of reading one and writing the
                // other is not architectural.
                regs.gpr[5] += 0xc00;
                instruction.set_immediate16(rng.below(0x200) as u16);
            }
        }
        M::Ret => stack[sp..sp + 8].copy_from_slice(&target.to_le_bytes()),
        M::Popf | M::Popfq => {
            let flags = 0x202 | rng.next() & (FREE_FLAGS | DF | 1 << 21);
            stack[sp..sp + 8].copy_from_slice(&flags.to_le_bytes());
        }
        M::Call | M::Jmp => match instruction.op0_kind() {
            OpKind::Register => {
                let r = instruction.op0_register();
                if r.size() != 8 || r == Register::RSP {
                    return None;
                }
                regs.gpr[r.number()] = target;
            }
            OpKind::Memory => {
                let address = address(instruction, regs) as usize;
                let at = address.checked_sub(base + DATA)?;
                if instruction.memory_size().size() != 8 {
                    return None;
                }
                if at + 8 <= DATA_LEN {
                    data[at..at + 8].copy_from_slice(&target.to_le_bytes());
                }
            }
            _ => {}
        },
        M::Bt | M::Bts | M::Btr | M::Btc
            if instruction.op0_kind() == OpKind::Memory
                && instruction.op1_kind() == OpKind::Register =>
        {
            // The offset may reach beyond the operand: keeps it within the data, and not in the address registers.
            let offset = instruction.op1_register();
            let full = offset.full_register();
            if full == instruction.memory_base().full_register()
                || full == instruction.memory_index().full_register()
                || full == Register::RSP
            {
                return None;
            }
            let near = rng.below(0x400) as i64 - 0x200;
            regs.gpr[offset.number()] = near as u64;
        }
        M::Shld | M::Shrd
            if instruction.op0_register().size() == 2 || instruction.memory_size().size() == 2 =>
        {
            let count = if instruction.op2_kind() == OpKind::Register {
                regs.gpr[1] as u8
            } else {
                instruction.immediate8()
            };
            if count & 31 > 16 {
                return None;
            }
        }
        // With a source of zero, the destination is undefined.
        M::Bsf | M::Bsr if instruction.op1_kind() == OpKind::Register => {
            regs.gpr[instruction.op1_register().number()] |= 1 << rng.below(16);
        }
        M::Fxrstor | M::Fxrstor64 => {
            let at = (address(instruction, regs) as usize).wrapping_sub(base + DATA);
            // Reserved bits of MXCSR would be #GP. Pointers that are not canonical are corrected differently by hosts:
            // some extend the sign of 48 bits.
            let keep = [(13, 0x7f), (14, 0), (15, 0), (21, 0x7f), (22, 0), (23, 0)];
            for (field, keep) in keep.into_iter().chain([(26, 0), (27, 0)]) {
                if let Some(byte) = data.get_mut(at.wrapping_add(field)) {
                    *byte &= keep;
                }
            }
        }
        M::Dpps | M::Dppd | M::Vdpps | M::Vdppd => {
            // If an exception of a product is unmasked, it ends the instruction before the sum has raised its own
            // exceptions.
            regs.fx[24] |= 0x80;
            regs.fx[25] |= 0x1f;
        }
        M::Div | M::Idiv if rng.one_in(2) => {
            // Often makes the quotient fit.
            regs.gpr[2] = if mnemonic == M::Idiv && rng.one_in(2) {
                u64::MAX
            } else {
                0
            };
        }
        _ => {}
    }
    Some(())
}

/// Returns the linear address of the memory operand.
pub fn address(instruction: &Instruction, regs: &Regs) -> u64 {
    let value = |register: Register| match register {
        Register::None => 0,
        r if r.size() == 4 => regs.gpr[r.number()] & 0xffff_ffff,
        r => regs.gpr[r.number()],
    };
    let segment = if instruction.segment_prefix() == Register::GS {
        GS_BASE
    } else {
        0
    };
    if matches!(instruction.memory_base(), Register::RIP | Register::EIP) {
        return instruction.memory_displacement64().wrapping_add(segment);
    }
    let sum = value(instruction.memory_base())
        .wrapping_add(
            value(instruction.memory_index()).wrapping_mul(instruction.memory_index_scale().into()),
        )
        .wrapping_add(instruction.memory_displacement64());
    let offset = if instruction.memory_base().size() == 4 {
        sum & 0xffff_ffff
    } else {
        sum
    };
    offset.wrapping_add(segment)
}
