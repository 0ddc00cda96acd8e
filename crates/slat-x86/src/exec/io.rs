//! Port access: IN, OUT, INS and OUTS.

use crate::Cpu;
use crate::devices::{PORT_BYTES, Port, PortKind};
use crate::machine::{Access, Exit};
use crate::op::{Break, Flow, Handler, NONE, Op, Row, rows};
use crate::state::flags;
use crate::vector;
use iced_x86::{Instruction, Register};

impl Cpu {
    /// Raises #GP(0) unless IOPL or the TSS's permission bitmap allows the ports.
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

    fn port_exit(&mut self, op: &Op, port: u16, kind: PortKind, count: u32) -> Break {
        let size = 1 << op.size;
        let write = matches!(kind, PortKind::Out | PortKind::Outs { .. });
        let (rip, next) = (self.rip_of(op), self.next_rip(op));
        let traps = self.port_hits(port, size) | self.traps_of_instruction();
        self.devices.port = Some(Port {
            rip,
            next,
            size,
            count,
            kind,
            traps,
            answered: false,
        });
        self.leave(Exit::Io {
            port,
            size,
            write,
            count,
        })
    }

    /// Returns how many units of a string access at `lin` one exit transfers. If addresses ascend and no debug feature
    /// observes single units, one exit transfers all units up to the end of the page, or up to where the offset wraps
    /// around at the address size.
    fn units(&mut self, op: &Op, port: u16, lin: u64, offset: u64) -> u32 {
        let observed = self.traps() || self.watch.data || self.port_hits(port, 1 << op.size) != 0;
        if op.rep == 0 || self.state.rflags & flags::DF != 0 || observed {
            return 1;
        }
        let in_page = 0x1000 - (lin & 0xfff);
        let before_wrap = Self::string_mask(op.address_size) - offset;
        let bytes = in_page
            .min(PORT_BYTES as u64)
            .min(before_wrap.saturating_add(1));
        self.string_count(op.address_size)
            .min(bytes >> op.size)
            .max(1) as u32
    }
}

/// EXITINFO1 bits of an intercepted port access (AMD64 volume 2, 15.10.2): IN, string instruction, repeated
/// instruction.
const IN: u64 = 1;
const STRING: u64 = 1 << 2;
const REPEATED: u64 = 1 << 3;

/// Returns the EXITINFO1 bit for the address size.
fn address_bits(op: &Op) -> u64 {
    u64::from(op.address_size >> 1) << 7
}

/// Returns the EXITINFO1 bits of a string instruction. `segment` is the segment of its memory operand.
fn string_bits(op: &Op, segment: u8) -> u64 {
    let repeated = if op.rep != 0 { REPEATED } else { 0 };
    STRING | repeated | address_bits(op) | u64::from(segment) << 10
}

/// Returns the number of the port: an immediate, or DX.
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
    cpu.intercept_port(op, port, IN | address_bits(op))?;
    Err(cpu.port_exit(op, port, PortKind::In, 1))
}

fn output(cpu: &mut Cpu, op: &Op) -> Flow {
    let port = port(cpu, op);
    cpu.port_allowed(port, 1 << op.size)?;
    cpu.intercept_port(op, port, address_bits(op))?;
    let rax = cpu.state.gpr[0].to_le_bytes();
    let bytes = 1 << op.size;
    cpu.fixed.output.start(bytes).copy_from_slice(&rax[..bytes]);
    Err(cpu.port_exit(op, port, PortKind::Out, 1))
}

fn input_string(cpu: &mut Cpu, op: &Op) -> Flow {
    let (address_size, rep) = (op.address_size, op.rep != 0);
    if rep && cpu.string_count(address_size) == 0 {
        return Ok(());
    }
    let port = cpu.state.gpr[2] as u16;
    cpu.port_allowed(port, 1 << op.size)?;
    cpu.intercept_port(op, port, IN | string_bits(op, 0))?;
    let lin = cpu.string_address(0, 7, address_size, 1 << op.size)?;
    cpu.check_alignment(lin, 1 << op.size)?;
    let is_memory = cpu.write_place(lin, 1 << op.size)?.is_some();
    let offset = cpu.string_register(7, address_size);
    // If the string is in MMIO, each unit has an exit of its own.
    let count = match is_memory {
        true => cpu.units(op, port, lin, offset),
        false => 1,
    };
    Err(cpu.port_exit(op, port, PortKind::Ins { address_size, rep }, count))
}

fn output_string(cpu: &mut Cpu, op: &Op) -> Flow {
    let (address_size, rep) = (op.address_size, op.rep != 0);
    if rep && cpu.string_count(address_size) == 0 {
        return Ok(());
    }
    let port = cpu.state.gpr[2] as u16;
    cpu.port_allowed(port, 1 << op.size)?;
    cpu.intercept_port(op, port, string_bits(op, op.seg))?;
    let lin = cpu.string_address(op.seg, 6, address_size, 1 << op.size)?;
    cpu.check_alignment(lin, 1 << op.size)?;
    let offset = cpu.string_register(6, address_size);
    let kind = PortKind::Outs { address_size, rep };
    let count = cpu.units(op, port, lin, offset);
    if count > 1 && output_run(cpu, op, offset, count)? {
        return Err(cpu.port_exit(op, port, kind, count));
    }
    let mut unit = [0; 4];
    let bytes = 1 << op.size;
    cpu.load_bytes(lin, &mut unit[..bytes])?;
    cpu.fixed
        .output
        .start(bytes)
        .copy_from_slice(&unit[..bytes]);
    Err(cpu.port_exit(op, port, kind, 1))
}

/// Fetches `count` units, which are in one page, for one exit. Returns `false` if the units are not in memory, or
/// exceed the segment's limit. The caller then outputs the units one by one.
fn output_run(cpu: &mut Cpu, op: &Op, offset: u64, count: u32) -> Result<bool, Break> {
    let bytes = (count as usize) << op.size;
    let Ok(lin) = cpu.segmented(op.seg, offset, bytes as u32) else {
        return Ok(false);
    };
    let Some(host) = cpu.read_place(lin, bytes)? else {
        return Ok(false);
    };
    // SAFETY: the address is a translation of guest memory, and the access is guarded.
    if unsafe { slat_guard::copy_in(cpu.fixed.output.start(bytes), host) }.is_err() {
        cpu.gone(lin, host, Access::Read)?;
        return Err(Break::Retry);
    }
    Ok(true)
}

/// Stores in `op` the size of operand number `data`, and whether the port (operand number `port`) is in DX.
fn operands(insn: &Instruction, op: &mut Op, data: u32, port: u32) {
    op.size = insn.op_register(data).size().trailing_zeros() as u8;
    op.aux = u8::from(op.r[port as usize] != NONE && insn.op_register(port) == Register::DX);
}

/// Stores in `op` the size of a string instruction's elements.
fn element(op: &mut Op, size: u8, handler: Handler) -> Handler {
    op.size = size;
    handler
}

pub(crate) const ROWS: &[Row] = rows! { |insn, op|
    In => {
        operands(insn, op, 0, 1);
        input
    },
    Out => {
        operands(insn, op, 1, 0);
        output
    },
    Insb => element(op, 0, input_string),
    Insw => element(op, 1, input_string),
    Insd => element(op, 2, input_string),
    Outsb => element(op, 0, output_string),
    Outsw => element(op, 1, output_string),
    Outsd => element(op, 2, output_string),
};
