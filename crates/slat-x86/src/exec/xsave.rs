//! XSAVE XSAVEOPT XSAVEC XRSTOR, XGETBV XSETBV, RDPKRU WRPKRU (SDM volume 1, "Managing State Using the XSAVE Feature Set").
//!
//! The state components are x87, SSE and PKRU. Whether one is in its initial state is computed when an instruction needs it.

use crate::Cpu;
use crate::exec::fpu_state::not_task_switched;
use crate::op::{Break, Flow, Handler, Op};
use crate::state::{MXCSR_INIT, MXCSR_MASK, control, xcr0};
use iced_x86::{Instruction, Mnemonic};

/// Offset of the header, after the legacy region.
const HEADER: usize = 512;
const HEADER_END: usize = 576;
/// XCOMP_BV: the area is in the compacted format.
const COMPACTED: u64 = 1 << 63;

/// `aux`: the instruction that saves.
const XSAVE: u8 = 0;
const XSAVEOPT: u8 = 1;
const XSAVEC: u8 = 2;

fn enabled(cpu: &mut Cpu) -> Result<(), Break> {
    if cpu.state.cr4 & control::CR4_OSXSAVE == 0 {
        return Err(cpu.ud());
    }
    not_task_switched(cpu)
}

/// Returns RFBM: the components that the instruction asks for (EDX:EAX) and XCR0 has.
fn requested(cpu: &Cpu) -> u64 {
    let mask = cpu.state.gpr[0] & 0xffff_ffff | cpu.state.gpr[2] << 32;
    mask & cpu.state.xcr0
}

/// Returns XINUSE: the components that are not in their initial state.
fn in_use(cpu: &Cpu) -> u64 {
    let state = &cpu.state;
    let sse = state.mxcsr != MXCSR_INIT || state.xmm != [0; 16];
    let mut components = 0;
    for (component, used) in [
        (xcr0::X87, !state.x87_is_initial()),
        (xcr0::SSE, sse),
        (xcr0::PKRU, state.pkru != 0),
    ] {
        components |= if used { component } else { 0 };
    }
    components
}

/// Returns the end of the XMM registers that the mode has.
fn xmm_end(cpu: &Cpu) -> usize {
    if cpu.is_64() { 416 } else { 288 }
}

fn area(cpu: &mut Cpu, op: &Op, bytes: usize) -> Result<u64, Break> {
    let lin = cpu.lin(op, bytes as u32)?;
    if lin & 63 != 0 {
        return Err(cpu.gp());
    }
    Ok(lin)
}

fn xsave(cpu: &mut Cpu, op: &Op) -> Flow {
    let there = match op.aux {
        XSAVEOPT => cpu.features.xsaveopt,
        XSAVEC => cpu.features.xsavec,
        _ => true,
    };
    if !there {
        return Err(cpu.ud());
    }
    enabled(cpu)?;
    let requested = requested(cpu);
    let in_use = in_use(cpu) & requested;
    // XSAVE writes initial components, too.
    let written = if op.aux == XSAVE { requested } else { in_use };
    let pkru_at = match op.aux {
        XSAVEC => HEADER_END,
        _ => cpu.features.pkru_offset,
    };
    let end = match written & xcr0::PKRU != 0 {
        true => pkru_at + 8,
        false => HEADER_END,
    };
    let lin = area(cpu, op, end)?;
    let image = cpu.state.to_fxsave();
    let header = cpu.load::<u64>(lin.wrapping_add(HEADER as u64))?;
    // Nothing is written before everything can be written.
    cpu.probe_write(lin, HEADER_END)?;
    cpu.probe_write(lin.wrapping_add(end as u64 - 8), 8)?;
    let put = |cpu: &mut Cpu, at: usize, bytes: &[u8]| {
        cpu.store_bytes(lin.wrapping_add(at as u64), bytes)
    };
    if written & xcr0::X87 != 0 {
        put(cpu, 0, &image[..24])?;
        put(cpu, 32, &image[32..160])?;
    }
    let sse = if op.aux == XSAVEC { written } else { requested };
    if sse & xcr0::SSE != 0 {
        put(cpu, 24, &image[24..32])?;
    }
    if written & xcr0::SSE != 0 {
        put(cpu, 160, &image[160..xmm_end(cpu)])?;
    }
    if written & xcr0::PKRU != 0 {
        let pkru = u64::from(cpu.state.pkru).to_le_bytes();
        put(cpu, pkru_at, &pkru)?;
    }
    if op.aux == XSAVEC {
        put(cpu, HEADER, &in_use.to_le_bytes())?;
        put(cpu, HEADER + 8, &(requested | COMPACTED).to_le_bytes())?;
    } else {
        put(cpu, HEADER, &(header & !requested | in_use).to_le_bytes())?;
    }
    cpu.stored()
}

fn xrstor(cpu: &mut Cpu, op: &Op) -> Flow {
    enabled(cpu)?;
    let lin = area(cpu, op, HEADER_END)?;
    let mut image = [0; HEADER_END];
    cpu.load_bytes(lin, &mut image)?;
    let word = |at: usize| {
        let mut bytes = [0; 8];
        bytes.copy_from_slice(&image[at..at + 8]);
        u64::from_le_bytes(bytes)
    };
    let (present, compaction) = (word(HEADER), word(HEADER + 8));
    let compacted = compaction & COMPACTED != 0;
    let (allowed, reserved) = match compacted {
        true => (compaction & !COMPACTED, HEADER + 16..HEADER_END),
        false => (cpu.state.xcr0, HEADER + 8..HEADER + 24),
    };
    let fine = present & !allowed == 0
        && allowed & !cpu.state.xcr0 == 0
        && image[reserved].iter().all(|byte| *byte == 0);
    let requested = requested(cpu);
    let mxcsr = word(24) as u32;
    // The standard format holds MXCSR also when the SSE state is initial.
    let takes_mxcsr = requested & xcr0::SSE != 0 && (!compacted || present & xcr0::SSE != 0);
    if !fine || takes_mxcsr && mxcsr & !MXCSR_MASK != 0 {
        return Err(cpu.gp());
    }
    let mut pkru = 0;
    if requested & present & xcr0::PKRU != 0 {
        let at = match compacted {
            true => HEADER_END,
            false => cpu.features.pkru_offset,
        };
        pkru = cpu.load::<u32>(lin.wrapping_add(at as u64))?;
    }
    if requested & xcr0::X87 != 0 {
        match present & xcr0::X87 != 0 {
            true => {
                let mut legacy = [0; 512];
                legacy.copy_from_slice(&image[..512]);
                cpu.state.set_fxsave_x87(&legacy);
            }
            false => cpu.state.initialize_x87(),
        }
    }
    if requested & xcr0::SSE != 0 {
        for (i, at) in (160..xmm_end(cpu)).step_by(16).enumerate() {
            let mut xmm = [0; 16];
            if present & xcr0::SSE != 0 {
                xmm.copy_from_slice(&image[at..at + 16]);
            }
            cpu.state.xmm[i] = u128::from_le_bytes(xmm);
        }
        cpu.state.mxcsr = if takes_mxcsr { mxcsr } else { MXCSR_INIT };
    }
    if requested & xcr0::PKRU != 0 {
        cpu.set_pkru(pkru);
    }
    Ok(())
}

impl Cpu {
    /// Writes PKRU. Flushes the TLB, whose entries hold rights of the old PKRU.
    pub(crate) fn set_pkru(&mut self, pkru: u32) {
        let changed = self.state.pkru != pkru;
        self.state.pkru = pkru;
        if changed && self.state.cr4 & control::CR4_PKE != 0 {
            self.flush_data();
        }
    }

    /// Returns the bytes of an XSAVE area in the standard format with the components of XCR0.
    pub(crate) fn xsave_bytes(&self) -> usize {
        match self.state.xcr0 & xcr0::PKRU != 0 {
            true => self.features.pkru_offset + 8,
            false => HEADER_END,
        }
    }

    /// Like [`xsave_bytes`](Self::xsave_bytes), but in the compacted format.
    pub(crate) fn compacted_bytes(&self) -> usize {
        match self.state.xcr0 & xcr0::PKRU != 0 {
            true => HEADER_END + 8,
            false => HEADER_END,
        }
    }
}

fn xgetbv(cpu: &mut Cpu, _: &Op) -> Flow {
    if cpu.state.cr4 & control::CR4_OSXSAVE == 0 {
        return Err(cpu.ud());
    }
    let v = match cpu.state.gpr[1] as u32 {
        0 => cpu.state.xcr0,
        1 => cpu.state.xcr0 & in_use(cpu),
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
    if cpu.state.gpr[1] as u32 != 0 || v & xcr0::X87 == 0 || v & !cpu.features.xcr0 != 0 {
        return Err(cpu.gp());
    }
    cpu.state.xcr0 = v;
    Ok(())
}

fn pkru_allowed(cpu: &mut Cpu) -> Result<(), Break> {
    if cpu.state.cr4 & control::CR4_PKE == 0 {
        return Err(cpu.ud());
    }
    match cpu.state.gpr[1] as u32 {
        0 => Ok(()),
        _ => Err(cpu.gp()),
    }
}
fn rdpkru(cpu: &mut Cpu, _: &Op) -> Flow {
    pkru_allowed(cpu)?;
    cpu.state.gpr[0] = cpu.state.pkru.into();
    cpu.state.gpr[2] = 0;
    Ok(())
}
fn wrpkru(cpu: &mut Cpu, _: &Op) -> Flow {
    pkru_allowed(cpu)?;
    if cpu.state.gpr[2] as u32 != 0 {
        return Err(cpu.gp());
    }
    cpu.set_pkru(cpu.state.gpr[0] as u32);
    Ok(())
}

pub(crate) fn lower(insn: &Instruction, op: &mut Op) -> Option<Handler> {
    use Mnemonic::*;
    Some(match insn.mnemonic() {
        Xsave | Xsave64 => xsave,
        Xsaveopt | Xsaveopt64 => {
            op.aux = XSAVEOPT;
            xsave
        }
        Xsavec | Xsavec64 => {
            op.aux = XSAVEC;
            xsave
        }
        Xrstor | Xrstor64 => xrstor,
        Xgetbv => xgetbv,
        Xsetbv => xsetbv,
        Rdpkru => rdpkru,
        Wrpkru => wrpkru,
        _ => return None,
    })
}
