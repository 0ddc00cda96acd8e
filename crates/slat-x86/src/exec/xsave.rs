//! XSAVE, XSAVEOPT, XSAVEC, XSAVES, XRSTOR, XRSTORS, XGETBV, XSETBV, RDPKRU and WRPKRU (SDM volume 1, "Managing State
//! Using the XSAVE Feature Set").
//!
//! The state components are x87, SSE, AVX and PKRU; there are no supervisor components. The manual allows XSAVES to
//! save components that were not modified, so here XSAVES is a privileged XSAVEC. An instruction that needs to know
//! whether a component is in its initial state compares the component with that state.

use crate::Cpu;
use crate::exec::fpu_state::not_task_switched;
use crate::nested::code;
use crate::op::{Break, Flow, Handler, Op, Row, rows};
use crate::state::{MXCSR_INIT, control, xcr0};

/// The offset of the header, which follows the legacy region.
const HEADER: usize = 512;
const HEADER_END: usize = 576;
/// The offset of the AVX component (the upper halves of the YMM registers), in both formats.
const AVX: usize = HEADER_END;
const AVX_END: usize = AVX + 256;
const PKRU_BYTES: usize = 8;
/// Bit 63 of XCOMP_BV: the area is in the compacted format.
const COMPACTED: u64 = 1 << 63;

/// The values of `aux` that distinguish the instructions that save.
const XSAVE: u8 = 0;
const XSAVEOPT: u8 = 1;
const XSAVEC: u8 = 2;
const XSAVES: u8 = 3;
/// The values of `aux` that distinguish the instructions that restore.
const XRSTOR: u8 = 0;
const XRSTORS: u8 = 1;

fn enabled(cpu: &mut Cpu) -> Result<(), Break> {
    if cpu.state.cr4 & control::CR4_OSXSAVE == 0 {
        return Err(cpu.ud());
    }
    not_task_switched(cpu)
}

/// Returns RFBM: the components that EDX:EAX requests and that XCR0 enables.
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
        (xcr0::AVX, state.ymm_high != [0; 16]),
        (xcr0::PKRU, state.pkru != 0),
    ] {
        components |= if used { component } else { 0 };
    }
    components
}

/// Returns the number of vector registers that the current mode has.
fn registers(cpu: &Cpu) -> usize {
    if cpu.is_64() { 16 } else { 8 }
}

/// The offset of the XMM registers in the area.
const XMM: usize = 160;

/// Returns the bytes of 16 halves of vector registers, in memory order.
fn halves_to_bytes(halves: &[u128; 16]) -> [u8; 256] {
    let mut bytes = [0; 256];
    for (to, half) in bytes.chunks_exact_mut(16).zip(halves) {
        to.copy_from_slice(&half.to_le_bytes());
    }
    bytes
}

/// Sets halves of vector registers from `bytes`. If `bytes` is shorter, the rest of the halves becomes zero.
fn set_halves(halves: &mut [u128], bytes: &[u8]) {
    let (from, _) = bytes.as_chunks::<16>();
    for (n, half) in halves.iter_mut().enumerate() {
        *half = from.get(n).map_or(0, |bytes| u128::from_le_bytes(*bytes));
    }
}

/// Returns the offset of PKRU in an area. `compacted`: the components of an area in the compacted format; `None` for
/// the standard format.
fn pkru_offset(cpu: &Cpu, compacted: Option<u64>) -> usize {
    match compacted {
        None => cpu.features.pkru_offset,
        Some(components) if components & xcr0::AVX != 0 => AVX_END,
        Some(_) => HEADER_END,
    }
}

/// Returns the size in bytes of an area that holds `components`, including its header. `compacted`: see
/// [`pkru_offset`].
fn end(cpu: &Cpu, components: u64, compacted: Option<u64>) -> usize {
    let mut end = HEADER_END;
    if components & xcr0::AVX != 0 {
        end = AVX_END;
    }
    if components & xcr0::PKRU != 0 {
        end = end.max(pkru_offset(cpu, compacted) + PKRU_BYTES);
    }
    end
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
        XSAVES => cpu.features.xsaves,
        _ => true,
    };
    if !there {
        return Err(cpu.ud());
    }
    enabled(cpu)?;
    if op.aux == XSAVES {
        cpu.privileged()?;
    }
    let compacts = matches!(op.aux, XSAVEC | XSAVES);
    let requested = requested(cpu);
    let in_use = in_use(cpu) & requested;
    // XSAVE also writes components that are in their initial state. XSAVEOPT, XSAVEC and XSAVES do not.
    let written = if op.aux == XSAVE { requested } else { in_use };
    let compacted = compacts.then_some(requested);
    let pkru_at = pkru_offset(cpu, compacted);
    let end = end(cpu, written, compacted);
    let lin = area(cpu, op, end)?;
    let mut image = cpu.state.to_fxsave();
    image[28..32].copy_from_slice(&cpu.features.mxcsr.to_le_bytes());
    let header = cpu.load::<u64>(lin.wrapping_add(HEADER as u64))?;
    // Check all parts before writing any, so that a fault changes nothing.
    cpu.probe_write(lin, HEADER_END)?;
    cpu.probe_write(lin.wrapping_add(end as u64 - 8), 8)?;
    if written & xcr0::AVX != 0 {
        cpu.probe_write(lin.wrapping_add(AVX as u64), AVX_END - AVX)?;
    }
    let put = |cpu: &mut Cpu, at: usize, bytes: &[u8]| {
        cpu.store_bytes(lin.wrapping_add(at as u64), bytes)
    };
    if written & xcr0::X87 != 0 {
        put(cpu, 0, &image[..24])?;
        put(cpu, 32, &image[32..160])?;
    }
    // In the compacted format, MXCSR belongs to the SSE component only. In the standard format, it also belongs to the
    // AVX component.
    let with_mxcsr = match compacts {
        true => written & xcr0::SSE,
        false => requested & (xcr0::SSE | xcr0::AVX),
    };
    if with_mxcsr != 0 {
        put(cpu, 24, &image[24..32])?;
    }
    let bytes = 16 * registers(cpu);
    if written & xcr0::SSE != 0 {
        put(cpu, XMM, &image[XMM..XMM + bytes])?;
    }
    if written & xcr0::AVX != 0 {
        let high = halves_to_bytes(&cpu.state.ymm_high);
        put(cpu, AVX, &high[..bytes])?;
    }
    if written & xcr0::PKRU != 0 {
        let pkru = u64::from(cpu.state.pkru).to_le_bytes();
        put(cpu, pkru_at, &pkru)?;
    }
    if compacts {
        put(cpu, HEADER, &in_use.to_le_bytes())?;
        put(cpu, HEADER + 8, &(requested | COMPACTED).to_le_bytes())?;
    } else {
        put(cpu, HEADER, &(header & !requested | in_use).to_le_bytes())?;
    }
    cpu.stored()
}

fn xrstor(cpu: &mut Cpu, op: &Op) -> Flow {
    if op.aux == XRSTORS && !cpu.features.xsaves {
        return Err(cpu.ud());
    }
    enabled(cpu)?;
    if op.aux == XRSTORS {
        cpu.privileged()?;
    }
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
        && (compacted || op.aux != XRSTORS)
        && allowed & !cpu.state.xcr0 == 0
        && image[reserved].iter().all(|byte| *byte == 0);
    let requested = requested(cpu);
    let mxcsr = word(24) as u32;
    // In the standard format, MXCSR is loaded if SSE or AVX is restored, even if the component is in its initial state.
    let takes_mxcsr = match compacted {
        true => requested & present & xcr0::SSE != 0,
        false => requested & (xcr0::SSE | xcr0::AVX) != 0,
    };
    if !fine || takes_mxcsr && mxcsr & !cpu.features.mxcsr != 0 {
        return Err(cpu.gp());
    }
    let mut pkru = 0;
    if requested & present & xcr0::PKRU != 0 {
        let at = pkru_offset(cpu, compacted.then_some(allowed));
        pkru = cpu.load::<u32>(lin.wrapping_add(at as u64))?;
    }
    let mut high = [0; AVX_END - AVX];
    let n = registers(cpu);
    if requested & present & xcr0::AVX != 0 {
        cpu.load_bytes(lin.wrapping_add(AVX as u64), &mut high[..16 * n])?;
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
        let from: &[u8] = match present & xcr0::SSE != 0 {
            true => &image[XMM..HEADER],
            false => &[],
        };
        set_halves(&mut cpu.state.xmm[..n], from);
        cpu.state.mxcsr = MXCSR_INIT;
    }
    if takes_mxcsr {
        cpu.state.mxcsr = mxcsr;
    }
    if requested & xcr0::AVX != 0 {
        set_halves(&mut cpu.state.ymm_high[..n], &high);
    }
    if requested & xcr0::PKRU != 0 {
        cpu.set_pkru(pkru);
    }
    Ok(())
}

impl Cpu {
    /// Writes PKRU. Flushes the TLB, because its entries hold access rights that depend on PKRU.
    pub(crate) fn set_pkru(&mut self, pkru: u32) {
        let changed = self.state.pkru != pkru;
        self.state.pkru = pkru;
        if changed && self.state.cr4 & control::CR4_PKE != 0 {
            self.flush_data();
        }
    }

    /// Returns the size in bytes of an XSAVE area in the standard format that holds the components enabled in XCR0.
    pub(crate) fn xsave_bytes(&self) -> usize {
        end(self, self.state.xcr0, None)
    }

    /// Returns the size of the XSAVE area in the compacted format; [`xsave_bytes`](Self::xsave_bytes) is the size in
    /// the standard format.
    pub(crate) fn compacted_bytes(&self) -> usize {
        let components = self.state.xcr0;
        end(self, components, Some(components))
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
fn xsetbv(cpu: &mut Cpu, op: &Op) -> Flow {
    if cpu.state.cr4 & control::CR4_OSXSAVE == 0 {
        return Err(cpu.ud());
    }
    cpu.privileged()?;
    cpu.intercept(op, code::XSETBV)?;
    let v = cpu.state.gpr[0] & 0xffff_ffff | cpu.state.gpr[2] << 32;
    if cpu.state.gpr[1] as u32 != 0 || !xcr0::is_valid(v, cpu.features.xcr0) {
        return Err(cpu.gp());
    }
    cpu.state.xcr0 = v;
    // XCR0 affects the CPU's mode, which says whether AVX instructions raise #UD.
    cpu.refresh();
    Err(Break::End)
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

/// Stores `variant` in `op`, as `aux`. By it, a handler that several instructions share knows which of them it
/// executes.
fn variant(op: &mut Op, variant: u8, handler: Handler) -> Handler {
    op.aux = variant;
    handler
}

pub(crate) const ROWS: &[Row] = rows! { |insn, op|
    Xsave | Xsave64 => xsave,
    Xsaveopt | Xsaveopt64 => variant(op, XSAVEOPT, xsave),
    Xsavec | Xsavec64 => variant(op, XSAVEC, xsave),
    Xsaves | Xsaves64 => variant(op, XSAVES, xsave),
    Xrstor | Xrstor64 => variant(op, XRSTOR, xrstor),
    Xrstors | Xrstors64 => variant(op, XRSTORS, xrstor),
    Xgetbv => xgetbv,
    Xsetbv => xsetbv,
    Rdpkru => rdpkru,
    Wrpkru => wrpkru,
};
