//! Exchanges: XCHG, XADD, CMPXCHG and its 8- and 16-byte forms.

use crate::Cpu;
use crate::int::{Int, by_size};
use crate::op::{Break, Flow, MEM, Op, Row, rows};
use crate::sem::alu::Add;
use crate::sem::{Now, Operation};
use crate::state::flags::ZF;

fn xchg<T: Int>(cpu: &mut Cpu, op: &Op) -> Flow {
    let (memory, other) = if op.r[0] == MEM {
        (true, op.r[1])
    } else {
        (op.r[1] == MEM, op.r[0])
    };
    if memory {
        let lin = cpu.lin(op, T::BYTES as u32)?;
        let new = T::get(cpu, other);
        let (old, _) = cpu.update::<T>(lin, op.lock, move |_| new)?;
        T::set(cpu, other, old);
        return cpu.stored();
    }
    let (a, b) = (T::get(cpu, op.r[0]), T::get(cpu, op.r[1]));
    T::set(cpu, op.r[0], b);
    T::set(cpu, op.r[1], a);
    Ok(())
}

fn xadd<T: Int>(cpu: &mut Cpu, op: &Op) -> Flow {
    let add = T::get(cpu, op.r[1]);
    let sum = move |old| Add::apply(&mut Now::new(), old, add, false);
    let old = if op.r[0] == MEM {
        let lin = cpu.lin(op, T::BYTES as u32)?;
        cpu.update::<T>(lin, op.lock, move |old| sum(old).0)?.0
    } else {
        T::get(cpu, op.r[0])
    };
    let (new, flags) = sum(old);
    cpu.note(flags);
    T::set(cpu, op.r[1], old);
    if op.r[0] != MEM {
        T::set(cpu, op.r[0], new);
    }
    cpu.stored()
}

fn cmpxchg<T: Int>(cpu: &mut Cpu, op: &Op) -> Flow {
    let expected = T::get(cpu, 0);
    let new = T::get(cpu, op.r[1]);
    let old = if op.r[0] == MEM {
        let lin = cpu.lin(op, T::BYTES as u32)?;
        // As in hardware, CMPXCHG writes memory even if the comparison fails.
        let exchange = move |old| if old == expected { new } else { old };
        cpu.update::<T>(lin, op.lock, exchange)?.0
    } else {
        T::get(cpu, op.r[0])
    };
    cpu.note_comparison(expected, old);
    if old != expected {
        T::set(cpu, 0, old);
    } else if op.r[0] != MEM {
        T::set(cpu, op.r[0], new);
    }
    cpu.stored()
}

fn pair(cpu: &Cpu, high: usize, low: usize) -> u64 {
    cpu.state.gpr[high] << 32 | cpu.state.gpr[low] & 0xffff_ffff
}

fn cmpxchg8b(cpu: &mut Cpu, op: &Op) -> Flow {
    let lin = cpu.lin(op, 8)?;
    let (expected, new) = (pair(cpu, 2, 0), pair(cpu, 1, 3));
    let exchange = move |old| if old == expected { new } else { old };
    let (old, _) = cpu.update::<u64>(lin, op.lock, exchange)?;
    if old == expected {
        cpu.set_flags(ZF, ZF);
    } else {
        cpu.set_flags(ZF, 0);
        cpu.state.gpr[0] = old & 0xffff_ffff;
        cpu.state.gpr[2] = old >> 32;
    }
    cpu.stored()
}

fn cmpxchg16b(cpu: &mut Cpu, op: &Op) -> Flow {
    let lin = cpu.lin(op, 16)?;
    cpu.aligned16(lin)?;
    let wide = |low: u64, high: u64| u128::from(low) | u128::from(high) << 64;
    let expected = wide(cpu.state.gpr[0], cpu.state.gpr[2]);
    let new = wide(cpu.state.gpr[3], cpu.state.gpr[1]);
    let seen = loop {
        let Some(to) = cpu.write_place(lin, 16)? else {
            return Err::<(), Break>(cpu.unimplemented("CMPXCHG16B on MMIO"));
        };
        // SAFETY: the address is a translation of guest memory, and the access is guarded. Guest and host addresses
        // have the same low 12 bits, so the host address is aligned, too.
        let exchange = |host: *mut u8| unsafe {
            slat_guard::compare_exchange(host.cast::<u128>(), expected, new)
        };
        if let Some(seen) = cpu.write_to(to, exchange)? {
            break seen;
        }
    };
    match seen {
        Ok(_) => cpu.set_flags(ZF, ZF),
        Err(old) => {
            cpu.set_flags(ZF, 0);
            cpu.state.gpr[0] = old as u64;
            cpu.state.gpr[2] = (old >> 64) as u64;
        }
    }
    cpu.stored()
}

pub(crate) const ROWS: &[Row] = rows! { |insn, op|
    Xchg => {
        // XCHG with memory is always locked, with or without the LOCK prefix.
        op.lock = true;
        by_size!(op.size, xchg)
    },
    Xadd => by_size!(op.size, xadd),
    Cmpxchg => by_size!(op.size, cmpxchg),
    Cmpxchg8b => cmpxchg8b,
    Cmpxchg16b => cmpxchg16b,
};
