//! Stretches: sequences of a repeated string instruction's elements that are handled at once.
//!
//! A stretch begins at the element to which the registers point, and goes in the direction of DF. It has one or two
//! sides: the source and the destination. On each side it stays in one page, in its segment, and in the range of
//! offsets of the address size. Some elements cannot be in a stretch: an element that crosses into another page or
//! beyond its segment's limit, an element whose offset wraps around, and MMIO. The instruction handles such an element
//! alone, and raises its exceptions.

use crate::int::Int;
use crate::mem::Destination;
use crate::op::{Break, Op};
use crate::{Access, Cpu};
use slat_guard::Gone;

/// The result of a stretch: the number of handled elements, at least one. All registers except RCX already describe the
/// remaining elements.
pub(super) struct Stretch {
    pub(super) elements: u64,
    pub(super) then: Then,
}

pub(super) enum Then {
    Continue,
    /// The result of the last comparison ends the instruction.
    End,
    /// The access to the next element has failed. The caller may have kicked the CPU to stop it, so `attention` is
    /// checked before the next access.
    Leave,
}

/// One side of a string instruction: the memory to which a register points.
#[derive(Clone, Copy)]
struct Side {
    seg: u8,
    register: usize,
    address_size: u8,
}

impl Side {
    fn source(op: &Op) -> Self {
        Side {
            seg: op.seg,
            register: 6,
            address_size: op.address_size,
        }
    }

    fn destination(op: &Op) -> Self {
        Side {
            seg: 0,
            register: 7,
            address_size: op.address_size,
        }
    }

    /// Returns how many elements of `bytes` bytes a stretch can have on this side, at most `left`. The stretch begins
    /// at the element to which the register points, and proceeds in the direction of DF. It ends with the page, or
    /// where the offset would wrap around. Returns 0 if the first element is not inside the segment.
    fn room(self, cpu: &mut Cpu, bytes: u64, left: u64) -> u64 {
        let offset = cpu.string_register(self.register, self.address_size);
        let Some(lin) = cpu.linear(self.seg, offset, bytes) else {
            return 0;
        };
        let in_page = lin & 0xfff;
        let (page, offsets) = match cpu.is_descending() {
            _ if in_page + bytes > 0x1000 => return 0,
            false => {
                let last = Cpu::string_mask(self.address_size);
                ((0x1000 - in_page) / bytes, (last - offset) / bytes)
            }
            true => (in_page / bytes + 1, (offset / bytes).saturating_add(1)),
        };
        left.min(page).min(offsets)
    }

    /// Returns the linear address of the lowest of `elements` elements of `bytes` bytes; [`room`](Self::room) has
    /// returned at least this number. `None`: not all of them are inside the segment.
    fn lowest(self, cpu: &mut Cpu, bytes: u64, elements: u64) -> Option<u64> {
        let offset = cpu.string_register(self.register, self.address_size);
        let lowest = match cpu.is_descending() {
            false => offset,
            true => offset - (elements - 1) * bytes,
        };
        cpu.linear(self.seg, lowest, elements * bytes)
    }

    /// Prepares to read `elements` elements: returns the linear and the host address of the lowest. `None`: not all of
    /// the elements are inside the segment, or they are not in memory.
    ///
    /// # Errors
    /// The exception of the first element.
    fn read(
        self,
        cpu: &mut Cpu,
        bytes: u64,
        elements: u64,
    ) -> Result<Option<(u64, *mut u8)>, Break> {
        let Some(lin) = self.lowest(cpu, bytes, elements) else {
            return Ok(None);
        };
        if cpu.is_descending() {
            cpu.read_place(lin + (elements - 1) * bytes, bytes as usize)?;
        }
        let host = cpu.read_place(lin, (elements * bytes) as usize)?;
        Ok(host.map(|host| (lin, host)))
    }

    /// Prepares to write the elements, as [`Self::read`] prepares to read elements.
    fn write(self, cpu: &mut Cpu, bytes: u64, elements: u64) -> Result<Option<Destination>, Break> {
        let Some(lin) = self.lowest(cpu, bytes, elements) else {
            return Ok(None);
        };
        if cpu.is_descending() {
            let _ = cpu.write_place(lin + (elements - 1) * bytes, bytes as usize)?;
        }
        cpu.write_place(lin, (elements * bytes) as usize)
    }

    fn advance(self, cpu: &mut Cpu, bytes: u64) {
        cpu.advance_by(self.register, self.address_size, bytes);
    }
}

/// Returns the result of a stretch of `n` elements. `all` is the result of its guarded access: `Ok`, or the number of
/// bytes that were accessed before the access failed.
fn progress<T: Int>(n: u64, all: Result<(), usize>) -> Option<Stretch> {
    let (elements, then) = match all {
        Ok(()) => (n, Then::Continue),
        Err(bytes) => (bytes as u64 / T::BYTES, Then::Leave),
    };
    (elements > 0).then_some(Stretch { elements, then })
}

/// Copies `bytes` bytes as elements of `T`, one after another, beginning with the last element. Copies words of 8 bytes
/// instead if this has the same result: if no word overlaps its own destination. On failure, `Err` contains the number
/// of bytes that were copied.
///
/// # Safety
/// - as for [`slat_guard::copy`].
unsafe fn copy_descending<T: Int>(
    to: *mut u8,
    from: *const u8,
    bytes: usize,
    distance: usize,
) -> Result<(), usize> {
    let (mut left, word) = (bytes, 8);
    let copied = (|| -> Result<(), Gone> {
        if distance >= word && distance.wrapping_neg() >= word {
            while left >= word {
                let at = left - word;
                // SAFETY: guarded accesses to both ranges are allowed, as this function's `# Safety` demands.
                unsafe {
                    let v = slat_guard::load(from.wrapping_add(at).cast::<u64>())?;
                    slat_guard::store(to.wrapping_add(at).cast::<u64>(), v)?;
                }
                left = at;
            }
        }
        while left > 0 {
            let at = left - T::BYTES as usize;
            // SAFETY: guarded accesses to both ranges are allowed, as this function's `# Safety` demands.
            unsafe {
                let v = slat_guard::load(from.wrapping_add(at).cast::<T>())?;
                slat_guard::store(to.wrapping_add(at).cast::<T>(), v)?;
            }
            left = at;
        }
        Ok(())
    })();
    copied.map_err(|Gone| bytes - left)
}

/// Copies elements: MOVS.
pub(super) fn copy<T: Int>(cpu: &mut Cpu, op: &Op, left: u64) -> Result<Option<Stretch>, Break> {
    let (source, destination) = (Side::source(op), Side::destination(op));
    let room = source.room(cpu, T::BYTES, left);
    let n = destination.room(cpu, T::BYTES, room);
    if n < 2 {
        return Ok(None);
    }
    let bytes = (n * T::BYTES) as usize;
    // If both addresses of an element fault, the fault of the source is raised.
    let Some((lin, from)) = source.read(cpu, T::BYTES, n)? else {
        return Ok(None);
    };
    let Some(to) = destination.write(cpu, T::BYTES, n)? else {
        return Ok(None);
    };
    let (distance, descending) = (to.distance_from(from), cpu.is_descending());
    // Copying bytes in ascending order has the same result as copying elements, even if source and destination overlap,
    // unless an element overlaps its own destination.
    let element = T::BYTES as usize;
    if distance != 0 && (distance < element || distance.wrapping_neg() < element) {
        return Ok(None);
    }
    let mut all = Ok(());
    let result = cpu.write_to(to, |to| {
        // SAFETY: both addresses are translations of guest memory, and the accesses are guarded.
        all = unsafe {
            match descending {
                false => slat_guard::copy(to, from, bytes),
                true => copy_descending::<T>(to, from, bytes, distance),
            }
        };
        all
    });
    if all.is_err() {
        // The memory of the source or of the destination is inaccessible.
        let gone = cpu.gone(lin, from, Access::Read);
        if progress::<T>(n, all).is_none() {
            result?;
            gone?;
            return Err(Break::Retry);
        }
    }
    Ok(progress::<T>(n, all).inspect(|stretch| {
        source.advance(cpu, stretch.elements * T::BYTES);
        destination.advance(cpu, stretch.elements * T::BYTES);
    }))
}

/// Stores the accumulator in all elements: STOS.
pub(super) fn fill<T: Int>(cpu: &mut Cpu, op: &Op, left: u64) -> Result<Option<Stretch>, Break> {
    let destination = Side::destination(op);
    let n = destination.room(cpu, T::BYTES, left);
    if n < 2 {
        return Ok(None);
    }
    let Some(to) = destination.write(cpu, T::BYTES, n)? else {
        return Ok(None);
    };
    let (value, descending) = (T::get(cpu, 0).zx(), cpu.is_descending());
    let mut all = Ok(());
    let result = cpu.write_to(to, |to| {
        let times = n as usize;
        // SAFETY: the address is a translation of guest memory, and the access is guarded.
        let filled = unsafe {
            match T::BYTES {
                1 => slat_guard::fill_elements::<1>(to, value, times),
                2 => slat_guard::fill_elements::<2>(to, value, times),
                4 => slat_guard::fill_elements::<4>(to, value, times),
                _ => slat_guard::fill_elements::<8>(to, value, times),
            }
        };
        all = filled.map_err(|elements| match descending {
            false => elements * T::BYTES as usize,
            // The elements with the lowest addresses were filled. In this direction they come last, so the registers
            // cannot describe the elements that are left. So all elements are filled again.
            true => 0,
        });
        all
    });
    let stretch = progress::<T>(n, all);
    if stretch.is_none() {
        result?;
        return Err(Break::Retry);
    }
    Ok(stretch.inspect(|stretch| destination.advance(cpu, stretch.elements * T::BYTES)))
}

/// Reads only the last element of the stretch: LODS. The stretch is in one page of memory, so reading the other
/// elements would have no effect.
pub(super) fn load_last<T: Int>(
    cpu: &mut Cpu,
    op: &Op,
    left: u64,
) -> Result<Option<Stretch>, Break> {
    let source = Side::source(op);
    let n = source.room(cpu, T::BYTES, left);
    if n < 2 {
        return Ok(None);
    }
    let bytes = (n * T::BYTES) as usize;
    let Some((lin, from)) = source.read(cpu, T::BYTES, n)? else {
        return Ok(None);
    };
    let last = match cpu.is_descending() {
        false => from.wrapping_add(bytes - T::BYTES as usize),
        true => from,
    };
    // SAFETY: the address is a translation of guest memory, and the access is guarded.
    let Ok(v) = (unsafe { slat_guard::load(last.cast::<T>()) }) else {
        cpu.gone(lin, from, Access::Read)?;
        return Err(Break::Retry);
    };
    T::set(cpu, 0, v);
    source.advance(cpu, n * T::BYTES);
    Ok(progress::<T>(n, Ok(())))
}

/// The left operand of a comparison.
pub(super) enum Left<T> {
    /// The left operand is AL, AX, EAX or RAX (SCAS).
    Accumulator(T),
    /// The left operand is memory at RSI (CMPS).
    Source,
}

/// Returns an 8-byte word in which each element of type `T` is 1.
const fn ones<T: Int>() -> u64 {
    u64::MAX / (u64::MAX >> (64 - T::BITS))
}

/// Returns the index of the first element at which the prefix ends the instruction. `difference` is the exclusive or of
/// eight bytes of the left operand and eight bytes of the right operand.
#[inline(always)]
fn first_end<T: Int>(difference: u64, repe: bool) -> Option<u64> {
    let ends = match repe {
        true => difference,
        // The lowest bit that is set in this word belongs to the lowest element that is 0.
        false => difference.wrapping_sub(ones::<T>()) & !difference & ones::<T>() << (T::BITS - 1),
    };
    (ends != 0).then(|| u64::from(ends.trailing_zeros() / T::BITS))
}

/// Compares elements: CMPS and SCAS. In ascending direction, compares eight bytes at once. If less than eight bytes
/// remain, the caller handles their elements.
pub(super) fn compare<T: Int>(
    cpu: &mut Cpu,
    op: &Op,
    left: u64,
    side: Left<T>,
) -> Result<Option<Stretch>, Break> {
    let source = match side {
        Left::Accumulator(_) => None,
        Left::Source => Some(Side::source(op)),
    };
    let (destination, descending) = (Side::destination(op), cpu.is_descending());
    let room = source.map_or(left, |source| source.room(cpu, T::BYTES, left));
    let at_once = if descending { 1 } else { 8 / T::BYTES };
    let n = destination.room(cpu, T::BYTES, room) / at_once * at_once;
    if n == 0 {
        return Ok(None);
    }
    let bytes = (n * T::BYTES) as usize;
    let a_host = match source {
        None => None,
        Some(source) => match source.read(cpu, T::BYTES, n)? {
            None => return Ok(None),
            some => some,
        },
    };
    let Some((b_lin, b_host)) = destination.read(cpu, T::BYTES, n)? else {
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
            let done = (elements * T::BYTES) as usize;
            let (a, b, end) = if descending {
                let at = bytes - done - T::BYTES as usize;
                // SAFETY: the address is within the `bytes` bytes of guest memory that were translated, and the access
                // is guarded.
                let load =
                    |host: *mut u8| unsafe { slat_guard::load(host.wrapping_add(at).cast()) };
                let a = a_host.map_or(Ok(T::of(same)), |(_, host)| load(host))?;
                let b: T = load(b_host)?;
                (a.zx(), b.zx(), ((a == b) != repe).then_some(0))
            } else {
                // SAFETY: the address is within the `bytes` bytes of guest memory that were translated, and the access
                // is guarded.
                let load =
                    |host: *mut u8| unsafe { slat_guard::load(host.wrapping_add(done).cast()) };
                let a = a_host.map_or(Ok(same), |(_, host)| load(host))?;
                let b: u64 = load(b_host)?;
                (a, b, first_end::<T>(a ^ b, repe))
            };
            let index = end.unwrap_or(at_once - 1);
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
        let gone = match a_host {
            Some((lin, host)) => cpu.gone(lin, host, Access::Read),
            None => Ok(()),
        };
        let other = cpu.gone(b_lin, b_host, Access::Read);
        if elements == 0 {
            gone?;
            other?;
            return Err(Break::Retry);
        }
    }
    if let Some((a, b)) = last {
        cpu.note_comparison(a, b);
    }
    if let Some(source) = source {
        source.advance(cpu, elements * T::BYTES);
    }
    destination.advance(cpu, elements * T::BYTES);
    Ok(Some(Stretch { elements, then }))
}
