//! Port access: IN OUT INS OUTS.

use crate::Cpu;
use crate::machine::Exit;
use crate::mmio::{INPUT_BYTES, Port, PortKind};
use crate::op::{Break, Flow, Handler, NONE, Op};
use crate::state::flags;
use crate::vector;
use iced_x86::{Instruction, Mnemonic, Register};

impl Cpu {
    /// IOPL, or else the TSS's permission bitmap.
    fn port_allowed(&mut self, port: u16, bytes: u8) -> Result<(), Break> {
        let iopl = (self.state.rflags & flags::IOPL) >> 12;
        if !self.protected() || u64::from(self.cpl) <= iopl && self.state.rflags & flags::VM == 0 {
            return Ok(());
        }
        let tr = self.state.tr;
        let allowed = self.as_system(|cpu| {
            if tr.limit < 0x67 {
                return Ok(false);
            }
            let map = cpu.load::<u16>(tr.base.wrapping_add(0x66))?;
            let at = u32::from(map) + u32::from(port / 8);
            if at + 1 > tr.limit {
                return Ok(false);
            }
            let bits = cpu.load::<u16>(tr.base.wrapping_add(at.into()))?;
            Ok(bits >> (port % 8) & ((1 << bytes) - 1) == 0)
        })?;
        if allowed {
            Ok(())
        } else {
            Err(self.raise(vector::GP, Some(0)))
        }
    }

    fn port_exit(&mut self, op: &Op, port: u16, kind: PortKind, count: u32, data: u32) -> Break {
        let size = 1 << op.size;
        let write = matches!(kind, PortKind::Out | PortKind::Outs { .. });
        let (rip, next) = (self.rip_of(op), self.next_rip(op));
        self.devices.port = Some(Port {
            rip,
            next,
            size,
            kind,
            answered: false,
        });
        self.leave(Exit::Io {
            port,
            size,
            write,
            count,
            data: data.to_le_bytes(),
        })
    }
}

/// The port: an immediate, or DX.
fn port(cpu: &Cpu, op: &Op) -> u16 {
    if op.aux == 0 {
        op.imm as u16 & 0xff
    } else {
        cpu.state.gpr[2] as u16
    }
}

fn input(cpu: &mut Cpu, op: &Op) -> Flow {
    let port = port(cpu, op);
    cpu.port_allowed(port, 1 << op.size)?;
    Err(cpu.port_exit(op, port, PortKind::In, 1, 0))
}

fn output(cpu: &mut Cpu, op: &Op) -> Flow {
    let port = port(cpu, op);
    cpu.port_allowed(port, 1 << op.size)?;
    let rax = cpu.state.gpr[0] as u32;
    let data = if op.size == 2 {
        rax
    } else {
        rax & ((1 << (8 << op.size)) - 1)
    };
    Err(cpu.port_exit(op, port, PortKind::Out, 1, data))
}

fn input_string(cpu: &mut Cpu, op: &Op) -> Flow {
    let (address_size, rep) = (op.address_size, op.rep != 0);
    if rep && cpu.string_count(address_size) == 0 {
        return Ok(());
    }
    let port = cpu.state.gpr[2] as u16;
    cpu.port_allowed(port, 1 << op.size)?;
    let lin = cpu.string_address(0, 7, address_size, 1 << op.size)?;
    cpu.probe_write(lin, 1 << op.size)?;
    // Upwards, all that goes into the page is read at once, up to KVM's limit.
    let in_page = (0x1000 - (lin & 0xfff)).min(INPUT_BYTES as u64) >> op.size;
    let count = match rep && cpu.state.rflags & flags::DF == 0 {
        true => cpu.string_count(address_size).min(in_page).max(1) as u32,
        false => 1,
    };
    Err(cpu.port_exit(op, port, PortKind::Ins { address_size, rep }, count, 0))
}

fn output_string(cpu: &mut Cpu, op: &Op) -> Flow {
    let (address_size, rep) = (op.address_size, op.rep != 0);
    if rep && cpu.string_count(address_size) == 0 {
        return Ok(());
    }
    let port = cpu.state.gpr[2] as u16;
    cpu.port_allowed(port, 1 << op.size)?;
    let lin = cpu.string_address(op.seg, 6, address_size, 1 << op.size)?;
    let mut bytes = [0; 4];
    cpu.load_bytes(lin, &mut bytes[..1 << op.size])?;
    let data = u32::from_le_bytes(bytes);
    Err(cpu.port_exit(op, port, PortKind::Outs { address_size, rep }, 1, data))
}

pub(crate) fn lower(insn: &Instruction, op: &mut Op) -> Option<Handler> {
    use Mnemonic::*;
    let mnemonic = insn.mnemonic();
    match mnemonic {
        In | Out => {
            let (data, port) = if mnemonic == In { (0, 1) } else { (1, 0) };
            op.size = insn.op_register(data).size().trailing_zeros() as u8;
            op.aux =
                u8::from(op.r[port as usize] != NONE && insn.op_register(port) == Register::DX);
            Some(if mnemonic == In { input } else { output })
        }
        Insb | Insw | Insd => {
            op.size = [Insb, Insw, Insd].iter().position(|m| *m == mnemonic)? as u8;
            Some(input_string)
        }
        Outsb | Outsw | Outsd => {
            op.size = [Outsb, Outsw, Outsd].iter().position(|m| *m == mnemonic)? as u8;
            Some(output_string)
        }
        _ => None,
    }
}
