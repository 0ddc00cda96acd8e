//! FXSAVE FXRSTOR, XSAVE XRSTOR and kin, LDMXCSR STMXCSR.
//!
//! The state components are x87 and SSE: XCR0 has no other bit.

use crate::Cpu;
use crate::op::{Break, Flow, Handler, Op};
use crate::state::{MXCSR_MASK, control};
use crate::{cpu::mode, vector};
use iced_x86::{Instruction, Mnemonic};

/// Size of the legacy area and the XSAVE header.
const XSAVE_BYTES: usize = 576;

fn not_task_switched(cpu: &mut Cpu) -> Result<(), Break> {
    if cpu.mode & mode::TASK_SWITCHED != 0 {
        Err(cpu.raise(vector::NM, None))
    } else {
        Ok(())
    }
}

/// `aux` of FXSAVE and FXRSTOR without REX.W: the x87 pointers have 32 bits, and selectors that are not kept any more.
const POINTERS_32: u8 = 1;

fn fxsave(cpu: &mut Cpu, op: &Op) -> Flow {
    if cpu.mode & mode::NO_X87 != 0 {
        return Err(cpu.raise(vector::NM, None));
    }
    not_task_switched(cpu)?;
    let lin = cpu.lin(op, 512)?;
    cpu.aligned16(lin)?;
    let mut image = cpu.state.to_fxsave();
    if !cpu.is_64() {
        image[288..416].fill(0);
    }
    if op.aux == POINTERS_32 {
        image[12..16].fill(0);
        image[20..24].fill(0);
    }
    // The rest is reserved or the software's: it has to be writable, and is left as it is.
    cpu.probe_write(lin, 512)?;
    cpu.store_bytes(lin, &image[..416])?;
    cpu.stored()
}

fn fxrstor(cpu: &mut Cpu, op: &Op) -> Flow {
    if cpu.mode & mode::NO_X87 != 0 {
        return Err(cpu.raise(vector::NM, None));
    }
    not_task_switched(cpu)?;
    let lin = cpu.lin(op, 512)?;
    cpu.aligned16(lin)?;
    let mut image = [0; 512];
    cpu.load_bytes(lin, &mut image)?;
    let mxcsr = u32::from_le_bytes([image[24], image[25], image[26], image[27]]);
    if mxcsr & !MXCSR_MASK != 0 {
        return Err(cpu.gp());
    }
    if op.aux == POINTERS_32 {
        image[12..16].fill(0);
        image[20..24].fill(0);
    }
    let high: [u128; 8] = std::array::from_fn(|i| cpu.state.xmm[8 + i]);
    cpu.state.set_fxsave(&image);
    if !cpu.is_64() {
        cpu.state.xmm[8..].copy_from_slice(&high);
    }
    Ok(())
}

fn xsave_enabled(cpu: &mut Cpu) -> Result<(), Break> {
    if cpu.state.cr4 & control::CR4_OSXSAVE == 0 {
        return Err(cpu.ud());
    }
    not_task_switched(cpu)
}

/// The components that the instruction asks for (EDX:EAX) and XCR0 has.
fn requested(cpu: &Cpu) -> u64 {
    let mask = cpu.state.gpr[0] & 0xffff_ffff | cpu.state.gpr[2] << 32;
    mask & cpu.state.xcr0
}

/// XSAVE, XSAVEOPT, and (`aux` 1) XSAVEC, whose format for these two components differs in the header only.
fn xsave(cpu: &mut Cpu, op: &Op) -> Flow {
    xsave_enabled(cpu)?;
    let lin = cpu.lin(op, XSAVE_BYTES as u32)?;
    if lin & 63 != 0 {
        return Err(cpu.gp());
    }
    let components = requested(cpu);
    let mut area = [0; XSAVE_BYTES];
    cpu.load_bytes(lin, &mut area)?;
    let image = cpu.state.to_fxsave();
    if components & 1 != 0 {
        area[..24].copy_from_slice(&image[..24]);
        area[32..160].copy_from_slice(&image[32..160]);
    }
    if components & 2 != 0 {
        area[24..32].copy_from_slice(&image[24..32]);
        area[160..416].copy_from_slice(&image[160..416]);
    }
    if op.aux == 1 {
        area[512..520].copy_from_slice(&components.to_le_bytes());
        area[520..528].copy_from_slice(&(components | 1 << 63).to_le_bytes());
        area[528..576].fill(0);
    } else {
        let mut present = [0; 8];
        present.copy_from_slice(&area[512..520]);
        let asked = cpu.state.gpr[0] & 0xffff_ffff | cpu.state.gpr[2] << 32;
        let present = u64::from_le_bytes(present) & !(asked & 3) | components;
        area[512..520].copy_from_slice(&present.to_le_bytes());
    }
    cpu.store_bytes(lin, &area)?;
    cpu.stored()
}

fn xrstor(cpu: &mut Cpu, op: &Op) -> Flow {
    xsave_enabled(cpu)?;
    let lin = cpu.lin(op, XSAVE_BYTES as u32)?;
    if lin & 63 != 0 {
        return Err(cpu.gp());
    }
    let mut area = [0; XSAVE_BYTES];
    cpu.load_bytes(lin, &mut area)?;
    let word = |at: usize| {
        let mut bytes = [0; 8];
        bytes.copy_from_slice(&area[at..at + 8]);
        u64::from_le_bytes(bytes)
    };
    let (present, compaction) = (word(512), word(520));
    let header_fine = present & !cpu.state.xcr0 == 0
        && (compaction == 0
            || compaction >> 63 == 1 && compaction & !(1 << 63 | cpu.state.xcr0) == 0)
        && (compaction != 0 || area[528..536].iter().all(|&b| b == 0));
    let components = requested(cpu);
    let mxcsr = word(24) as u32;
    let takes_mxcsr = components & 2 != 0 && (compaction == 0 || present & 2 != 0);
    if !header_fine || takes_mxcsr && mxcsr & !MXCSR_MASK != 0 {
        return Err(cpu.gp());
    }
    let mut image = [0; 512];
    image.copy_from_slice(&area[..512]);
    if components & 1 != 0 {
        if present & 1 == 0 {
            // Not in the area: the initial state.
            image[..24].fill(0);
            image[32..160].fill(0);
            image[..2].copy_from_slice(&0x37fu16.to_le_bytes());
        }
        cpu.state.set_fxsave_x87(&image);
    }
    if components & 2 != 0 {
        for i in 0..16 {
            let mut xmm = [0; 16];
            if present & 2 != 0 {
                xmm.copy_from_slice(&image[160 + 16 * i..176 + 16 * i]);
            }
            cpu.state.xmm[i] = u128::from_le_bytes(xmm);
        }
        cpu.state.mxcsr = if takes_mxcsr { mxcsr } else { 0x1f80 };
    }
    Ok(())
}

fn sse_enabled(cpu: &mut Cpu) -> Result<(), Break> {
    if cpu.mode & mode::NO_SSE != 0 {
        return Err(cpu.ud());
    }
    not_task_switched(cpu)
}
fn ldmxcsr(cpu: &mut Cpu, op: &Op) -> Flow {
    sse_enabled(cpu)?;
    let v = cpu.load_mem::<u32>(op)?;
    if v & !MXCSR_MASK != 0 {
        return Err(cpu.gp());
    }
    cpu.state.mxcsr = v;
    Ok(())
}
fn stmxcsr(cpu: &mut Cpu, op: &Op) -> Flow {
    sse_enabled(cpu)?;
    let v = cpu.state.mxcsr;
    cpu.store_mem::<u32>(op, v)?;
    cpu.stored()
}

fn xgetbv(cpu: &mut Cpu, _: &Op) -> Flow {
    if cpu.state.cr4 & control::CR4_OSXSAVE == 0 {
        return Err(cpu.ud());
    }
    let v = match cpu.state.gpr[1] as u32 {
        0 => cpu.state.xcr0,
        // XINUSE: what is not in its initial state. All of it may be.
        1 => cpu.state.xcr0 & 3,
        _ => return Err(cpu.gp()),
    };
    cpu.state.gpr[0] = v & 0xffff_ffff;
    cpu.state.gpr[2] = v >> 32;
    Ok(())
}
fn xsetbv(cpu: &mut Cpu, _: &Op) -> Flow {
    if cpu.state.cr4 & control::CR4_OSXSAVE == 0 {
        return Err(cpu.ud());
    }
    cpu.privileged()?;
    let v = cpu.state.gpr[0] & 0xffff_ffff | cpu.state.gpr[2] << 32;
    if cpu.state.gpr[1] as u32 != 0 || v & 1 == 0 || v & !3 != 0 {
        return Err(cpu.gp());
    }
    cpu.state.xcr0 = v;
    Ok(())
}

pub(crate) fn lower(insn: &Instruction, op: &mut Op) -> Option<Handler> {
    use Mnemonic::*;
    Some(match insn.mnemonic() {
        Fxsave64 => fxsave,
        Fxrstor64 => fxrstor,
        Fxsave => {
            op.aux = POINTERS_32;
            fxsave
        }
        Fxrstor => {
            op.aux = POINTERS_32;
            fxrstor
        }
        Xsave | Xsave64 | Xsaveopt | Xsaveopt64 => xsave,
        Xsavec | Xsavec64 => {
            op.aux = 1;
            xsave
        }
        Xrstor | Xrstor64 => xrstor,
        Ldmxcsr => ldmxcsr,
        Stmxcsr => stmxcsr,
        Xgetbv => xgetbv,
        Xsetbv => xsetbv,
        _ => return None,
    })
}
