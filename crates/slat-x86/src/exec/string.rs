//! String instructions: MOVS STOS LODS SCAS CMPS, with REP.
//!
//! An instruction can be interrupted between two iterations, because the registers always describe the remaining
//! iterations. So a repeated instruction stops after a bounded number of iterations and starts again at its own RIP. It
//! also stops after each iteration that accesses MMIO; the device model sees each such iteration as an instruction.
//!
//! A repeated instruction usually has 64-bit addresses and DF clear, with no watchpoints and no alignment checks. Then
//! the elements of a page are handled at once. They are called a *stretch*. Elements that cross into another page, and
//! those in MMIO, are handled one by one.

use crate::Cpu;
use crate::int::{Int, by_size};
use crate::op::{Break, Flow, Handler, Op, Row, rows};
use crate::state::flags::{DF, RF};
use iced_x86::Instruction;
use slat_guard::Gone;

/// Iterations between checks of `attention`; in a stretch, [`AT_ONCE`] bytes count as one.
const BATCH: u64 = 4096;
const AT_ONCE: u64 = 16;

/// The result of a stretch. At least one element is done, and all registers except RCX describe the remaining elements.
struct Stretch {
    elements: u64,
    then: Then,
}

enum Then {
    Continue,
    /// The comparison ends the instruction.
    End,
    /// An access failed after these elements. The reason may be that the caller kicks the vCPU, so `attention` is
    /// checked before the next access.
    Leave,
}

impl Cpu {
    pub(crate) fn string_mask(address_size: u8) -> u64 {
        match address_size {
            2 => 0xffff,
            4 => 0xffff_ffff,
            _ => u64::MAX,
        }
    }

    /// Returns RSI (6), RDI (7) or RCX (1) in the width of the address size.
    pub(crate) fn string_register(&self, register: usize, address_size: u8) -> u64 {
        self.state.gpr[register] & Self::string_mask(address_size)
    }

    pub(crate) fn set_string_register(&mut self, register: usize, address_size: u8, v: u64) {
        let reg = &mut self.state.gpr[register];
        *reg = match address_size {
            2 => *reg & !0xffff | v & 0xffff,
            4 => v & 0xffff_ffff,
            _ => v,
        };
    }

    pub(crate) fn string_count(&self, address_size: u8) -> u64 {
        self.string_register(1, address_size)
    }

    /// Returns the linear address that `register` points to in segment `seg`.
    pub(crate) fn string_address(
        &mut self,
        seg: u8,
        register: usize,
        address_size: u8,
        bytes: u32,
    ) -> Result<u64, Break> {
        let offset = self.string_register(register, address_size);
        self.segmented(seg, offset, bytes)
    }

    /// Moves RSI or RDI by one element of `bytes` in the direction of DF.
    pub(crate) fn advance_string(&mut self, register: usize, address_size: u8, bytes: u8) {
        self.advance_by(register, address_size, u64::from(bytes));
    }

    fn advance_by(&mut self, register: usize, address_size: u8, bytes: u64) {
        let by = if self.state.rflags & DF != 0 {
            bytes.wrapping_neg()
        } else {
            bytes
        };
        let v = self
            .string_register(register, address_size)
            .wrapping_add(by);
        self.set_string_register(register, address_size, v);
    }

    /// Leaves a repeated instruction before its last iteration. Sets RF, so that an instruction breakpoint is not hit
    /// again (SDM volume 3, "Instruction-Breakpoint Exception Condition").
    fn iterate_later(&mut self, op: &Op) -> Flow {
        self.state.rflags |= RF;
        self.slow = true;
        let rip = self.rip_of(op);
        self.jump(rip)
    }

    /// Returns the number of elements of `bytes` between `lin` and the end of its page.
    fn elements_in_page(lin: u64, bytes: u64) -> u64 {
        (0x1000 - (lin & 0xfff)) / bytes
    }
}

/// Runs `once` as often as the prefix says, or until `once` returns `false`. In each step, first tries `stretch`, which
/// gets the number of elements left and handles many of them at once. If `stretch` returns `None`, `once` handles the
/// next element.
#[inline(always)]
fn repeat<T: Int>(
    cpu: &mut Cpu,
    op: &Op,
    mut stretch: impl FnMut(&mut Cpu, u64) -> Result<Option<Stretch>, Break>,
    mut once: impl FnMut(&mut Cpu) -> Result<bool, Break>,
) -> Flow {
    if op.rep == 0 {
        once(cpu)?;
        return cpu.stored();
    }
    let address_size = op.address_size;
    let alone = cpu.traps() || cpu.watch.data || cpu.checks_alignment();
    let has_stretches = cpu.state.rflags & DF == 0 && cpu.is_64() && address_size == 8 && !alone;
    let mut done = 0;
    loop {
        let left = cpu.string_count(address_size);
        if left == 0 {
            return cpu.stored();
        }
        let ends = done >= BATCH || cpu.stop || cpu.has_answers() || cpu.traps_after_iteration();
        if done > 0 && ends {
            break;
        }
        let step = match has_stretches {
            true => stretch(cpu, left),
            false => Ok(None),
        };
        let step = step.and_then(|step| match step {
            Some(stretch) => Ok(stretch),
            None => once(cpu).map(|goes_on| Stretch {
                elements: 1,
                then: if goes_on { Then::Continue } else { Then::End },
            }),
        });
        match step {
            Ok(Stretch { elements, then }) => {
                cpu.set_string_register(1, address_size, left - elements);
                done += 1 + elements * T::BYTES / AT_ONCE;
                match then {
                    Then::Continue => {}
                    Then::End => return cpu.stored(),
                    Then::Leave => break,
                }
            }
            // The finished iterations count. The remaining ones start again as an instruction, which then fails at its
            // first access.
            Err(_) if done > 0 => break,
            Err(why) => return Err(why),
        }
    }
    cpu.iterate_later(op)
}

fn movs<T: Int>(cpu: &mut Cpu, op: &Op) -> Flow {
    let once = |cpu: &mut Cpu| {
        let source = cpu.string_address(op.seg, 6, op.address_size, T::BYTES as u32)?;
        let v = cpu.load::<T>(source)?;
        let destination = cpu.string_address(0, 7, op.address_size, T::BYTES as u32)?;
        cpu.store::<T>(destination, v)?;
        cpu.advance_string(6, op.address_size, T::BYTES as u8);
        cpu.advance_string(7, op.address_size, T::BYTES as u8);
        Ok(true)
    };
    repeat::<T>(
        cpu,
        op,
        |cpu, left| copy_stretch::<T>(cpu, op.seg, left),
        once,
    )
}

/// Returns the result of a stretch of `n` elements, given the result of its guarded access: `Ok` if all bytes are done,
/// or the number of bytes done.
fn progress<T: Int>(n: u64, all: Result<(), usize>) -> Option<Stretch> {
    let (elements, then) = match all {
        Ok(()) => (n, Then::Continue),
        Err(bytes) => (bytes as u64 / T::BYTES, Then::Leave),
    };
    (elements > 0).then_some(Stretch { elements, then })
}

fn copy_stretch<T: Int>(cpu: &mut Cpu, seg: u8, left: u64) -> Result<Option<Stretch>, Break> {
    let source = cpu.string_address(seg, 6, 8, T::BYTES as u32)?;
    let destination = cpu.string_address(0, 7, 8, T::BYTES as u32)?;
    let n = left
        .min(Cpu::elements_in_page(source, T::BYTES))
        .min(Cpu::elements_in_page(destination, T::BYTES));
    if n < 2 {
        return Ok(None);
    }
    let bytes = (n * T::BYTES) as usize;
    let Some(from) = cpu.read_place(source, bytes)? else {
        return Ok(None);
    };
    let Some(to) = cpu.write_place(destination, bytes)? else {
        return Ok(None);
    };
    // Copying byte by byte has the same result as copying element by element, even if the memory overlaps, unless an
    // element overlaps itself.
    let distance = to.distance_from(from);
    let element = T::BYTES as usize;
    if distance != 0 && (distance < element || distance.wrapping_neg() < element) {
        return Ok(None);
    }
    let mut all = Ok(());
    let result = cpu.write_to(to, |to| {
        // SAFETY: translations of guest memory, which is accessed guarded only.
        all = unsafe { slat_guard::copy(to, from, bytes) };
        all
    });
    if all.is_err() {
        // The memory of the source or of the destination is inaccessible.
        let source = cpu.gone(source, from, crate::Access::Read);
        if progress::<T>(n, all).is_none() {
            result?;
            source?;
            return Err(Break::Retry);
        }
    }
    Ok(progress::<T>(n, all).inspect(|stretch| {
        cpu.advance_by(6, 8, stretch.elements * T::BYTES);
        cpu.advance_by(7, 8, stretch.elements * T::BYTES);
    }))
}

fn stos<T: Int>(cpu: &mut Cpu, op: &Op) -> Flow {
    let once = |cpu: &mut Cpu| {
        let destination = cpu.string_address(0, 7, op.address_size, T::BYTES as u32)?;
        let v = T::get(cpu, 0);
        cpu.store::<T>(destination, v)?;
        cpu.advance_string(7, op.address_size, T::BYTES as u8);
        Ok(true)
    };
    repeat::<T>(cpu, op, fill_stretch::<T>, once)
}

fn fill_stretch<T: Int>(cpu: &mut Cpu, left: u64) -> Result<Option<Stretch>, Break> {
    let destination = cpu.string_address(0, 7, 8, T::BYTES as u32)?;
    let n = left.min(Cpu::elements_in_page(destination, T::BYTES));
    if n < 2 {
        return Ok(None);
    }
    let Some(to) = cpu.write_place(destination, (n * T::BYTES) as usize)? else {
        return Ok(None);
    };
    let value = T::get(cpu, 0).zx();
    let mut all = Ok(());
    let result = cpu.write_to(to, |to| {
        let times = n as usize;
        // SAFETY: a translation of guest memory, which is accessed guarded only.
        let filled = unsafe {
            match T::BYTES {
                1 => slat_guard::fill_elements::<1>(to, value, times),
                2 => slat_guard::fill_elements::<2>(to, value, times),
                4 => slat_guard::fill_elements::<4>(to, value, times),
                _ => slat_guard::fill_elements::<8>(to, value, times),
            }
        };
        all = filled.map_err(|elements| elements * T::BYTES as usize);
        all
    });
    let stretch = progress::<T>(n, all);
    if stretch.is_none() {
        result?;
        return Err(Break::Retry);
    }
    Ok(stretch.inspect(|stretch| cpu.advance_by(7, 8, stretch.elements * T::BYTES)))
}

fn lods<T: Int>(cpu: &mut Cpu, op: &Op) -> Flow {
    let once = |cpu: &mut Cpu| {
        let source = cpu.string_address(op.seg, 6, op.address_size, T::BYTES as u32)?;
        let v = cpu.load::<T>(source)?;
        T::set(cpu, 0, v);
        cpu.advance_string(6, op.address_size, T::BYTES as u8);
        Ok(true)
    };
    repeat::<T>(cpu, op, |_, _| Ok(None), once)
}

/// Whether the REPE or REPNE prefix continues after a comparison.
fn goes_on(cpu: &Cpu, op: &Op) -> bool {
    cpu.zf() == (op.rep == 1)
}

fn scas<T: Int>(cpu: &mut Cpu, op: &Op) -> Flow {
    let once = |cpu: &mut Cpu| {
        let destination = cpu.string_address(0, 7, op.address_size, T::BYTES as u32)?;
        let b = cpu.load::<T>(destination)?;
        let a = T::get(cpu, 0);
        cpu.note_comparison(a, b);
        cpu.advance_string(7, op.address_size, T::BYTES as u8);
        Ok(goes_on(cpu, op))
    };
    let stretch = |cpu: &mut Cpu, left| {
        let a = T::get(cpu, 0);
        compare_stretch::<T>(cpu, op, left, Left::Accumulator(a))
    };
    repeat::<T>(cpu, op, stretch, once)
}

fn cmps<T: Int>(cpu: &mut Cpu, op: &Op) -> Flow {
    let once = |cpu: &mut Cpu| {
        let source = cpu.string_address(op.seg, 6, op.address_size, T::BYTES as u32)?;
        let a = cpu.load::<T>(source)?;
        let destination = cpu.string_address(0, 7, op.address_size, T::BYTES as u32)?;
        let b = cpu.load::<T>(destination)?;
        cpu.note_comparison(a, b);
        cpu.advance_string(6, op.address_size, T::BYTES as u8);
        cpu.advance_string(7, op.address_size, T::BYTES as u8);
        Ok(goes_on(cpu, op))
    };
    let stretch = |cpu: &mut Cpu, left| compare_stretch::<T>(cpu, op, left, Left::Source);
    repeat::<T>(cpu, op, stretch, once)
}

/// The left side of comparisons.
enum Left<T> {
    /// AL, AX, EAX or RAX.
    Accumulator(T),
    /// Memory at RSI.
    Source,
}

/// Returns a word that has 1 in each of its elements.
const fn ones<T: Int>() -> u64 {
    u64::MAX / (u64::MAX >> (64 - T::BITS))
}

/// Returns the index of the first element at which the prefix ends the instruction. `difference` is the exclusive or of
/// eight bytes of each side.
#[inline(always)]
fn first_end<T: Int>(difference: u64, repe: bool) -> Option<u64> {
    let ends = match repe {
        true => difference,
        // The lowest bit that is set is in the lowest element that is 0.
        false => difference.wrapping_sub(ones::<T>()) & !difference & ones::<T>() << (T::BITS - 1),
    };
    (ends != 0).then(|| u64::from(ends.trailing_zeros() / T::BITS))
}

/// Compares elements, eight bytes at once. The caller compares the elements of a last part of less than eight bytes.
fn compare_stretch<T: Int>(
    cpu: &mut Cpu,
    op: &Op,
    left: u64,
    side: Left<T>,
) -> Result<Option<Stretch>, Break> {
    let mut n = left;
    let mut from = None;
    if let Left::Source = side {
        let source = cpu.string_address(op.seg, 6, 8, T::BYTES as u32)?;
        n = n.min(Cpu::elements_in_page(source, T::BYTES));
        from = Some(source);
    }
    let destination = cpu.string_address(0, 7, 8, T::BYTES as u32)?;
    n = n.min(Cpu::elements_in_page(destination, T::BYTES));
    let in_word = 8 / T::BYTES;
    n -= n % in_word;
    if n == 0 {
        return Ok(None);
    }
    let bytes = (n * T::BYTES) as usize;
    let a_host = match from {
        Some(source) => match cpu.read_place(source, bytes)? {
            Some(host) => Some(host),
            None => return Ok(None),
        },
        None => None,
    };
    let Some(b_host) = cpu.read_place(destination, bytes)? else {
        return Ok(None);
    };
    let same = match side {
        Left::Accumulator(a) => a.zx().wrapping_mul(ones::<T>()),
        Left::Source => 0,
    };
    let repe = op.rep == 1;
    let (mut elements, mut then) = (0, Then::Continue);
    let mut last = None;
    let result: Result<(), Gone> = (|| {
        while elements < n {
            let at = (elements * T::BYTES) as usize;
            // SAFETY: translations of guest memory, up to `bytes`.
            let load =
                |host: *mut u8| unsafe { slat_guard::load(host.wrapping_add(at).cast::<u64>()) };
            let (a, b) = (a_host.map_or(Ok(same), load)?, load(b_host)?);
            let end = first_end::<T>(a ^ b, repe);
            let index = end.unwrap_or(in_word - 1);
            let shift = index as u32 * T::BITS;
            last = Some((T::of(a >> shift), T::of(b >> shift)));
            elements += index + 1;
            if end.is_some() {
                then = Then::End;
                break;
            }
        }
        Ok(())
    })();
    if result.is_err() {
        then = Then::Leave;
        let gone = match (from, a_host) {
            (Some(source), Some(host)) => cpu.gone(source, host, crate::Access::Read),
            _ => Ok(()),
        };
        let other = cpu.gone(destination, b_host, crate::Access::Read);
        if elements == 0 {
            gone?;
            other?;
            return Err(Break::Retry);
        }
    }
    if let Some((a, b)) = last {
        cpu.note_comparison(a, b);
    }
    if from.is_some() {
        cpu.advance_by(6, 8, elements * T::BYTES);
    }
    cpu.advance_by(7, 8, elements * T::BYTES);
    Ok(Some(Stretch { elements, then }))
}

/// Stores the size of the elements in `op`, and returns the size.
fn element(insn: &Instruction, op: &mut Op) -> u8 {
    op.size = insn.memory_size().size().trailing_zeros() as u8;
    op.size
}

/// Lowers MOVS.
pub(crate) fn moving(insn: &Instruction, op: &mut Op) -> Option<Handler> {
    Some(by_size!(element(insn, op), movs))
}

/// Lowers CMPS.
pub(crate) fn comparing(insn: &Instruction, op: &mut Op) -> Option<Handler> {
    Some(by_size!(element(insn, op), cmps))
}

/// MOVSD and CMPSD have no rows here: their mnemonics are also those of SSE2 instructions (`lower`).
pub(crate) const ROWS: &[Row] = rows! { |insn, op|
    Movsb | Movsw | Movsq => moving(insn, op)?,
    Cmpsb | Cmpsw | Cmpsq => comparing(insn, op)?,
    Stosb | Stosw | Stosd | Stosq => by_size!(element(insn, op), stos),
    Lodsb | Lodsw | Lodsd | Lodsq => by_size!(element(insn, op), lods),
    Scasb | Scasw | Scasd | Scasq => by_size!(element(insn, op), scas),
};
