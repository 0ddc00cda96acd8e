//! FXSAVE, FXRSTOR, LDMXCSR and STMXCSR.

use crate::Cpu;
use crate::op::{Break, Flow, Op, Row, rows};
use crate::state::control::EFER_FFXSR;
use crate::{mode, vector};

pub(crate) fn not_task_switched(cpu: &mut Cpu) -> Result<(), Break> {
    if cpu.mode & mode::TASK_SWITCHED != 0 {
        Err(cpu.raise(vector::NM, None))
    } else {
        Ok(())
    }
}

/// The `aux` of FXSAVE and FXRSTOR without REX.W. Their x87 pointers have 32 bits. The fields for selectors are not
/// written, because new processors no longer store selectors in these fields.
const POINTERS_32: u8 = 1;

/// The offset of the XMM registers in the FXSAVE area.
const XMM: usize = 160;

/// Whether FXSAVE and FXRSTOR leave out the XMM registers (AMD's manual, volume 2, "Fast FXSAVE/FXRSTOR").
fn is_fast(cpu: &Cpu) -> bool {
    cpu.state.efer & EFER_FFXSR != 0 && cpu.is_64() && cpu.cpl == 0
}

fn fxsave(cpu: &mut Cpu, op: &Op) -> Flow {
    if cpu.mode & mode::NO_X87 != 0 {
        return Err(cpu.raise(vector::NM, None));
    }
    not_task_switched(cpu)?;
    let lin = cpu.lin(op, 512)?;
    cpu.aligned16(lin)?;
    let mut image = cpu.state.to_fxsave();
    image[28..32].copy_from_slice(&cpu.features.mxcsr.to_le_bytes());
    if !cpu.is_64() {
        image[288..416].fill(0);
    }
    if op.aux == POINTERS_32 {
        image[12..16].fill(0);
        image[20..24].fill(0);
    }
    // The rest of the area is reserved or for software, and is not written. But the whole area must be writable.
    cpu.probe_write(lin, 512)?;
    let end = if is_fast(cpu) { XMM } else { XMM + 256 };
    cpu.store_bytes(lin, &image[..end])?;
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
    if mxcsr & !cpu.features.mxcsr != 0 {
        return Err(cpu.gp());
    }
    if op.aux == POINTERS_32 {
        image[12..16].fill(0);
        image[20..24].fill(0);
    }
    let before = cpu.state.xmm;
    cpu.state.set_fxsave(&image);
    let kept = match cpu.is_64() {
        _ if is_fast(cpu) => 0..16,
        true => 0..0,
        false => 8..16,
    };
    cpu.state.xmm[kept.clone()].copy_from_slice(&before[kept]);
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
    load_mxcsr(cpu, op)
}
fn stmxcsr(cpu: &mut Cpu, op: &Op) -> Flow {
    sse_enabled(cpu)?;
    store_mxcsr(cpu, op)?;
    cpu.stored()
}

/// Loads MXCSR from memory, for LDMXCSR and VLDMXCSR. The caller has checked that the instruction is enabled.
pub(crate) fn load_mxcsr(cpu: &mut Cpu, op: &Op) -> Flow {
    let v = cpu.load_mem::<u32>(op)?;
    if v & !cpu.features.mxcsr != 0 {
        return Err(cpu.gp());
    }
    cpu.state.mxcsr = v;
    Ok(())
}
/// Stores MXCSR to memory, for STMXCSR and VSTMXCSR. The store may end the block.
pub(crate) fn store_mxcsr(cpu: &mut Cpu, op: &Op) -> Flow {
    let v = cpu.state.mxcsr;
    cpu.store_mem::<u32>(op, v)
}

pub(crate) const ROWS: &[Row] = rows! { |insn, op|
    Fxsave64 => fxsave,
    Fxrstor64 => fxrstor,
    Fxsave => {
        op.aux = POINTERS_32;
        fxsave
    },
    Fxrstor => {
        op.aux = POINTERS_32;
        fxrstor
    },
    Ldmxcsr => ldmxcsr,
    Stmxcsr => stmxcsr,
};
