//! Conditions, branches, exceptions, and system instructions.

use super::arithmetic::sum;
use super::{cut, get, operand, plus, set, x};
use crate::insn::{Barrier, Call, Insn, Operand, Otherwise, SystemName};
use crate::tier::{Exception, Next, Tier};
use crate::width::Width;

/// Whether a condition holds (ConditionHolds).
#[inline(always)]
pub(super) fn holds<T: Tier>(t: &mut T, condition: u8) -> T::Bool {
    let [n, z, c, v] = t.flags();
    let holds = match condition >> 1 {
        0 => z,
        1 => c,
        2 => n,
        3 => v,
        4 => {
            let not_z = t.opposite(z);
            t.both(c, not_z)
        }
        5 | 6 => {
            let differ = t.differ(n, v);
            let same = t.opposite(differ);
            if condition >> 1 == 5 {
                same
            } else {
                let not_z = t.opposite(z);
                t.both(same, not_z)
            }
        }
        _ => return t.truth(true),
    };
    if condition & 1 != 0 {
        t.opposite(holds)
    } else {
        holds
    }
}

pub(super) fn select<T: Tier>(
    t: &mut T,
    width: Width,
    otherwise: Otherwise,
    condition: u8,
    [rd, rn, rm]: [u8; 3],
) {
    let holds = holds(t, condition);
    let (a, b) = (get(t, width, rn), get(t, width, rm));
    let b = match otherwise {
        Otherwise::Same => b,
        Otherwise::Increment => plus(t, b, 1),
        Otherwise::Invert => t.not(b),
        Otherwise::Negate => {
            let zero = t.number(0);
            t.sub(zero, b)
        }
    };
    let result = t.select(holds, a, b);
    let result = cut(t, width, result);
    set(t, rd, result);
}

pub(super) fn conditional_compare<T: Tier>(
    t: &mut T,
    width: Width,
    subtracts: bool,
    [condition, nzcv]: [u8; 2],
    rn: u8,
    second: Operand,
) {
    let holds = holds(t, condition);
    let (a, b) = (get(t, width, rn), operand(t, width, second));
    let (_, mut flags) = sum(t, width, subtracts, a, b);
    for (i, flag) in flags.iter_mut().enumerate() {
        let given = t.truth(nzcv >> (3 - i) & 1 != 0);
        *flag = t.select_bool(holds, *flag, given);
    }
    t.set_flags(flags);
}

#[inline(always)]
pub(super) fn branch<T: Tier>(t: &mut T, insn: &Insn) -> Next<T> {
    let target = |t: &T, offset: i32| t.pc().wrapping_add(offset as u64);
    let link = |t: &mut T| {
        let following = t.pc().wrapping_add(4);
        let following = t.number(following);
        t.set_x(30, following);
    };
    match *insn {
        Insn::Branch { links, offset } => {
            if links {
                link(t);
            }
            Next::Jump(target(t, offset))
        }
        Insn::BranchIf { condition, offset } => {
            let holds = holds(t, condition);
            Next::JumpIf(holds, target(t, offset))
        }
        Insn::CompareBranch {
            width,
            if_zero,
            rt,
            offset,
        } => {
            let value = get(t, width, rt);
            let zero = t.is_zero(value);
            let jumps = if if_zero { zero } else { t.opposite(zero) };
            Next::JumpIf(jumps, target(t, offset))
        }
        Insn::TestBranch {
            bit,
            if_zero,
            rt,
            offset,
        } => {
            let value = x(t, rt);
            let one = t.bit(value, bit.into());
            let jumps = if if_zero { t.opposite(one) } else { one };
            Next::JumpIf(jumps, target(t, offset))
        }
        Insn::BranchRegister { links, rn } => {
            let value = x(t, rn);
            if links {
                link(t);
            }
            Next::Indirect(value)
        }
        _ => unreachable!("not a branch"),
    }
}

/// DC ZVA.
const ZERO_BLOCK: SystemName = SystemName::new(1, 3, 7, 4, 1);

pub(super) fn system<T: Tier>(t: &mut T, insn: &Insn) -> Result<Next<T>, T::Stop> {
    match *insn {
        Insn::Call { call, immediate } => Err(t.raise(match call {
            Call::Svc => Exception::Svc(immediate),
            Call::Hvc => Exception::Hvc(immediate),
            Call::Smc => Exception::Smc(immediate),
            Call::Brk => Exception::Brk(immediate),
            Call::Hlt => Exception::Hlt(immediate),
            Call::Dcps => Exception::Undefined,
        })),
        Insn::Eret => Ok(Next::Indirect(t.exception_return()?)),
        Insn::Hint(hint) => {
            t.check_hint(hint)?;
            Ok(Next::Hint(hint))
        }
        Insn::Barrier(Barrier::Isb) => Ok(Next::Synchronize),
        Insn::Barrier(Barrier::Memory) => {
            t.fence();
            Ok(Next::Following)
        }
        Insn::SetPstate { op1, op2, value } => {
            t.set_pstate(op1, op2, value)?;
            Ok(Next::Synchronize)
        }
        Insn::ReadSystem { name, rt } => {
            let value = t.read_system(name, rt)?;
            set(t, rt, value);
            Ok(Next::Following)
        }
        Insn::WriteSystem { name, rt } => {
            let value = x(t, rt);
            t.write_system(name, rt, value)?;
            Ok(Next::Synchronize)
        }
        Insn::SystemInstruction {
            name: ZERO_BLOCK,
            rt,
            reads: false,
        } => {
            t.check_zero_block(ZERO_BLOCK, rt)?;
            let address = x(t, rt);
            t.zero_block(address)?;
            Ok(Next::Following)
        }
        Insn::SystemInstruction { name, rt, reads } => {
            let operand = x(t, rt);
            let value = t.system_instruction(name, rt, reads, operand)?;
            if reads {
                set(t, rt, value);
            }
            Ok(Next::Synchronize)
        }
        _ => Ok(Next::Following),
    }
}
