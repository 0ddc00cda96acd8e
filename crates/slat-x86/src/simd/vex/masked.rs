//! Accesses to the elements of memory that a mask selects: VMASKMOVPS and similar instructions, and gathers.
//!
//! An element is selected if the sign bit of its mask element is set. The memory of other elements is not accessed.

use super::host::Ymm;
use super::is_wide;
use crate::Cpu;
use crate::int::Int;
use crate::op::{Break, Flow, Handler, MEM, NONE, Op, Row, rows};
use iced_x86::Instruction;

/// The element of [`Op::r`] with the register of a gather's indices.
const INDICES: usize = 3;

pub(super) const ROWS: &[Row] = rows! { |insn, op|
    Vmaskmovps | Vpmaskmovd => masked::<u32>(insn, op),
    Vmaskmovpd | Vpmaskmovq => masked::<u64>(insn, op),
    Vgatherdps | Vpgatherdd => gathering(insn, op, gather::<u32, u32>),
    Vgatherdpd | Vpgatherdq => gathering(insn, op, gather::<u32, u64>),
    Vgatherqps | Vpgatherqd => gathering(insn, op, gather::<u64, u32>),
    Vgatherqpd | Vpgatherqq => gathering(insn, op, gather::<u64, u64>),
};

fn masked<T: Int>(insn: &Instruction, op: &mut Op) -> Handler {
    op.aux = if is_wide(insn) { 32 } else { 16 };
    match op.r[0] {
        MEM => masked_store::<T>,
        _ => masked_load::<T>,
    }
}

fn gathering(insn: &Instruction, op: &mut Op, handler: Handler) -> Handler {
    // The size in bytes of the wider of two vectors: the indices or the result.
    op.aux = match is_wide(insn) || insn.memory_index().is_ymm() {
        true => 32,
        false => 16,
    };
    op.r[INDICES] = op.index;
    op.index = NONE;
    handler
}

/// Returns element `n` of a vector.
fn element<T: Int>(v: &Ymm, n: usize) -> T {
    let bit = n as u32 * T::BITS;
    T::of((v[bit as usize / 128] >> (bit % 128)) as u64)
}

fn set_element<T: Int>(v: &mut Ymm, n: usize, value: T) {
    let bit = n as u32 * T::BITS;
    let half = &mut v[bit as usize / 128];
    let ones = u128::from(u64::MAX >> (64 - T::BITS)) << (bit % 128);
    *half = *half & !ones | u128::from(value.zx()) << (bit % 128);
}

/// Returns the linear address of element `n` of the memory operand. `None`: the mask does not select the element.
fn selected<T: Int>(cpu: &mut Cpu, op: &Op, mask: &Ymm, n: usize) -> Result<Option<u64>, Break> {
    if !element::<T>(mask, n).top() {
        return Ok(None);
    }
    let offset = cpu.offset(op).wrapping_add(n as u64 * T::BYTES);
    at_offset::<T>(cpu, op, offset).map(Some)
}

/// Returns the linear address of an element at `offset` in the segment of the memory operand.
fn at_offset<T: Int>(cpu: &mut Cpu, op: &Op, offset: u64) -> Result<u64, Break> {
    let offset = match op.address_size {
        2 => offset & 0xffff,
        4 => offset & 0xffff_ffff,
        _ => offset,
    };
    cpu.segmented(op.seg, offset, T::BYTES as u32)
}

fn masked_load<T: Int>(cpu: &mut Cpu, op: &Op) -> Flow {
    let mask = cpu.ymm(op.r[1]);
    let mut result = Ymm::default();
    for n in 0..usize::from(op.aux) / T::BYTES as usize {
        if let Some(lin) = selected::<T>(cpu, op, &mask, n)? {
            set_element(&mut result, n, cpu.load::<T>(lin)?);
        }
    }
    cpu.set_ymm(op.r[0], result);
    Ok(())
}

/// Stores the selected elements, after checking that all of them are writable.
fn masked_store<T: Int>(cpu: &mut Cpu, op: &Op) -> Flow {
    let (mask, data) = (cpu.ymm(op.r[1]), cpu.ymm(op.r[2]));
    let elements = usize::from(op.aux) / T::BYTES as usize;
    for n in 0..elements {
        if let Some(lin) = selected::<T>(cpu, op, &mask, n)? {
            cpu.probe_write(lin, T::BYTES as usize)?;
        }
    }
    for n in 0..elements {
        if let Some(lin) = selected::<T>(cpu, op, &mask, n)? {
            cpu.store(lin, element::<T>(&data, n))?;
        }
    }
    Ok(())
}

/// Returns a mask in which all bits of an element are equal to its sign bit in `mask`.
fn whole_elements<T: Int>(mask: &Ymm, elements: usize) -> Ymm {
    let mut whole = Ymm::default();
    for n in 0..elements {
        let ones = if element::<T>(mask, n).top() {
            u64::MAX
        } else {
            0
        };
        set_element(&mut whole, n, T::of(ones));
    }
    whole
}

/// Executes a gather: loads elements of type `T`, whose addresses are a base plus indices of type `I`. When an element
/// is loaded, clears its element of the mask. So if a later element causes an exception, the elements loaded before
/// stay loaded, and the instruction, executed again, continues with the later element.
fn gather<I: Int, T: Int>(cpu: &mut Cpu, op: &Op) -> Flow {
    let bytes = u64::from(op.aux);
    let elements = (bytes / I::BYTES.max(T::BYTES)) as usize;
    let indices = cpu.ymm(op.r[INDICES]);
    let mut result = cpu.ymm(op.r[0]);
    let mut mask = whole_elements::<T>(&cpu.ymm(op.r[2]), (bytes / T::BYTES) as usize);
    let mut loaded = false;
    let mut load = |cpu: &mut Cpu, n: usize| -> Flow {
        if element::<T>(&mask, n).top() {
            let index = element::<I>(&indices, n).sx() as u64;
            let offset = cpu.offset(op).wrapping_add(index << (op.scale & 3));
            let lin = at_offset::<T>(cpu, op, offset)?;
            let value = cpu.load::<T>(lin)?;
            set_element(&mut result, n, value);
            set_element(&mut mask, n, T::of(0));
            loaded = true;
        }
        Ok(())
    };
    let done = (0..elements).try_for_each(|n| load(cpu, n));
    match done {
        Ok(()) => {
            cpu.set_ymm(op.r[0], low_bits(result, elements as u32 * T::BITS));
            cpu.set_ymm(op.r[2], Ymm::default());
        }
        Err(Break::Exception) => {
            // As on Intel's CPUs, write the destination only if an element was loaded.
            if loaded {
                cpu.set_ymm(op.r[0], low_bits(result, 8 * bytes as u32));
            }
            cpu.set_ymm(op.r[2], mask);
        }
        // The instruction will be executed again, and repeat all its reads in the same order.
        Err(_) => {}
    }
    done
}

/// Clears all bits of `v` except the lowest `bits` bits, which are 64, 128 or 256.
fn low_bits(v: Ymm, bits: u32) -> Ymm {
    match bits {
        64 => [v[0] & u128::from(u64::MAX), 0],
        128 => [v[0], 0],
        _ => v,
    }
}
