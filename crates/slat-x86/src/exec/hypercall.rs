//! Hypercalls: VMCALL, VMMCALL.

use crate::Cpu;
use crate::machine::{HypercallInstruction, HypercallOutcome, Hypercalls};
use crate::nested::code;
use crate::op::{Break, Flow, Op, Row, rows};

fn vmcall(cpu: &mut Cpu, op: &Op) -> Flow {
    hypercall_by(cpu, op, HypercallInstruction::Vmcall)
}
fn vmmcall(cpu: &mut Cpu, op: &Op) -> Flow {
    hypercall_by(cpu, op, HypercallInstruction::Vmmcall)
}
fn hypercall_by(cpu: &mut Cpu, op: &Op, which: HypercallInstruction) -> Flow {
    if cpu.svm.is_guest() {
        return nested_hypercall(cpu, op, which);
    }
    match cpu.machine().hypercall_instruction(which) {
        Hypercalls::Executed => hypercall(cpu, op),
        Hypercalls::Undefined => Err(cpu.ud()),
        Hypercalls::Patched(by) => patch(cpu, op, by),
    }
}
/// Executes VMMCALL or VMCALL of a nested guest. VMMCALL causes a #VMEXIT if the nested guest's hypervisor intercepts
/// it, and raises #UD otherwise. VMCALL is patched to VMMCALL, as in KVM, or raises #UD if the machine makes it
/// undefined.
fn nested_hypercall(cpu: &mut Cpu, op: &Op, which: HypercallInstruction) -> Flow {
    match which {
        HypercallInstruction::Vmmcall => cpu.intercept(op, code::VMMCALL)?,
        HypercallInstruction::Vmcall => {
            if cpu.machine().hypercall_instruction(which) != Hypercalls::Undefined {
                return patch(cpu, op, HypercallInstruction::Vmmcall);
            }
        }
    }
    Err(cpu.ud())
}
/// Overwrites the instruction in memory with the hypercall instruction `by`, which the CPU executes next.
fn patch(cpu: &mut Cpu, op: &Op, by: HypercallInstruction) -> Flow {
    let at = cpu.state.cs.base.wrapping_add(cpu.rip_of(op));
    cpu.store_bytes(at, &by.bytes())?;
    Err(Break::Retry)
}
fn hypercall(cpu: &mut Cpu, op: &Op) -> Flow {
    Err(match cpu.call_machine() {
        HypercallOutcome::Done => Break::End,
        HypercallOutcome::Outside => cpu.ask_hypercall(op),
        HypercallOutcome::Undefined => cpu.ud(),
        HypercallOutcome::Retry => Break::Retry,
    })
}

pub(crate) const ROWS: &[Row] = rows! { |insn, op|
    Vmcall => vmcall,
    Vmmcall => vmmcall,
};
