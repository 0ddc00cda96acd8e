//! The instructions of SVM (AMD64 volume 3, "System Instruction Reference").

use crate::Cpu;
use crate::machine::{GuestFlush, NestedPaging};
use crate::nested::code;
use crate::nested::vmcb::{SAVE_BYTES, SAVE_OFFSET, Save};
use crate::nested::world_of;
use crate::op::{Break, Flow, Handler, Op, Row, rows};
use crate::state::control::{EFER_LMA, EFER_SVME};
use crate::svm::feature;
use crate::svm::world_switch::VIRTUAL_GIF;
use crate::tlb::Which;
use iced_x86::{Code, Instruction};

/// Why the run ends if a control block is not in memory. KVM also ends the run then. A processor would use whatever
/// data the bus returns.
const NO_MEMORY: &str = "a control block of SVM that is not in memory";

/// Raises #UD unless SVM is enabled and the CPU is in protected mode. Raises #GP(0) if CPL is not 0.
fn enabled(cpu: &mut Cpu) -> Result<(), Break> {
    if cpu.state.efer & EFER_SVME == 0 || cpu.has_paragraphs() {
        return Err(cpu.ud());
    }
    cpu.privileged()
}

/// Returns the address of a control block, which is in RAX. Raises #GP(0) if it is not a multiple of 4096, or beyond
/// the physical address space.
fn vmcb_address(cpu: &mut Cpu, op: &Op) -> Result<u64, Break> {
    let address = rax(cpu, op);
    match address & (0xfff | cpu.features.beyond_physical()) {
        0 => Ok(address),
        _ => Err(cpu.gp()),
    }
}

/// Returns RAX, truncated to the address size.
fn rax(cpu: &Cpu, op: &Op) -> u64 {
    let rax = cpu.state.gpr[0];
    match op.address_size {
        2 => rax & 0xffff,
        4 => rax & 0xffff_ffff,
        _ => rax,
    }
}

fn vmrun(cpu: &mut Cpu, op: &Op) -> Flow {
    enabled(cpu)?;
    cpu.intercept(op, code::VMRUN)?;
    let vmcb = vmcb_address(cpu, op)?;
    // As in KVM, VMRUN raises #GP(0) if the hypervisor has not set the address of its host save area.
    if cpu.state.vm_hsave_pa == 0 {
        return Err(cpu.gp());
    }
    match cpu.read_vmcb(vmcb)? {
        Some(areas) => Err(cpu.enter_guest(op, vmcb, areas)?),
        None => Err(cpu.unimplemented(NO_MEMORY)),
    }
}

/// For VMLOAD and VMSAVE of a nested guest: if its hypervisor has virtualized them (15.33.1), returns the nested tables
/// that translate the address of the control block. Otherwise returns `None`. If they are virtualized and the nested
/// guest is not in long mode, causes a #VMEXIT with exit code `code`.
fn virtual_tables(cpu: &mut Cpu, op: &Op, code: u64) -> Result<Option<NestedPaging>, Break> {
    let is_offered = cpu.features.svm & feature::VIRTUAL_VMLOAD != 0;
    match cpu.svm.virtual_vmload_tables().filter(|_| is_offered) {
        Some(_) if cpu.state.efer & EFER_LMA == 0 => Err(cpu.exit_at(op, code, 0, 0)),
        tables => Ok(tables),
    }
}

fn vmload(cpu: &mut Cpu, op: &Op) -> Flow {
    enabled(cpu)?;
    cpu.intercept(op, code::VMLOAD)?;
    let nested = virtual_tables(cpu, op, code::VMLOAD)?;
    let vmcb = vmcb_address(cpu, op)?;
    let mut save = Save([0; SAVE_BYTES]);
    if !cpu.read_physical_of(nested.as_ref(), vmcb + SAVE_OFFSET as u64, &mut save.0)? {
        return Err(cpu.unimplemented(NO_MEMORY));
    }
    save.load_rest(&mut cpu.state);
    cpu.refresh();
    Err(Break::End)
}

fn vmsave(cpu: &mut Cpu, op: &Op) -> Flow {
    enabled(cpu)?;
    cpu.intercept(op, code::VMSAVE)?;
    let nested = virtual_tables(cpu, op, code::VMSAVE)?;
    let vmcb = vmcb_address(cpu, op)?;
    let mut save = Save([0; SAVE_BYTES]);
    save.save_rest(&cpu.state);
    let parts = Save::VMSAVE.map(|range| (range, save.0.as_slice()));
    match cpu.write_physical_of(nested.as_ref(), vmcb + SAVE_OFFSET as u64, &parts)? {
        true => cpu.stored(),
        false => Err(cpu.unimplemented(NO_MEMORY)),
    }
}

fn stgi(cpu: &mut Cpu, op: &Op) -> Flow {
    set_gif(cpu, op, code::STGI, true)
}

fn clgi(cpu: &mut Cpu, op: &Op) -> Flow {
    set_gif(cpu, op, code::CLGI, false)
}

/// Sets GIF to `gif`; in a guest with a virtual GIF, the virtual GIF instead.
fn set_gif(cpu: &mut Cpu, op: &Op, code: u64, gif: bool) -> Flow {
    enabled(cpu)?;
    cpu.intercept(op, code)?;
    match cpu.svm.has_virtual_gif() {
        true => {
            (cpu.svm.control).set_virtual_interrupt(VIRTUAL_GIF, if gif { VIRTUAL_GIF } else { 0 })
        }
        false => cpu.state.events.gif_clear = !gif,
    }
    cpu.slow = true;
    Err(Break::End)
}

/// Executes INVLPGA: drops the translations of a page under an ASID. If the ASID is not the current ASID, drops the
/// translations of all pages under this ASID.
fn invlpga(cpu: &mut Cpu, op: &Op) -> Flow {
    enabled(cpu)?;
    cpu.intercept(op, code::INVLPGA)?;
    let address = rax(cpu, op);
    let world = world_of(cpu.state.gpr[1] as u32);
    if !cpu.canonical(address) {
        // As INVLPG does, drop nothing if the address is not canonical.
    } else if world == cpu.svm.world() {
        cpu.flush_page(address, Which::CurrentAndGlobal);
        cpu.tell_flush(GuestFlush::Page(address));
    } else {
        cpu.tlb().forget_world(world);
        cpu.tell_flush(GuestFlush::Nested);
    }
    cpu.code.clock.serialize();
    Err(Break::End)
}

/// Executes SKINIT: raises #UD, because CPUID does not report SKINIT. For the same reason it is not intercepted.
fn skinit(cpu: &mut Cpu, _: &Op) -> Flow {
    Err(cpu.ud())
}

/// Stores in `op` the width of the address in RAX: the address size.
fn address_in_ax(insn: &Instruction, op: &mut Op, handler: Handler) -> Handler {
    op.address_size = match insn.code() {
        Code::Vmrunw | Code::Vmloadw | Code::Vmsavew | Code::Invlpgaw => 2,
        Code::Vmrund | Code::Vmloadd | Code::Vmsaved | Code::Invlpgad => 4,
        _ => 8,
    };
    handler
}

pub(crate) const ROWS: &[Row] = rows! { |insn, op|
    Vmrun => address_in_ax(insn, op, vmrun),
    Vmload => address_in_ax(insn, op, vmload),
    Vmsave => address_in_ax(insn, op, vmsave),
    Invlpga => address_in_ax(insn, op, invlpga),
    Stgi => stgi,
    Clgi => clgi,
    Skinit => skinit,
};
