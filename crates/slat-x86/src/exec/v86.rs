//! Virtual-8086 mode (SDM volume 3, "8086 Emulation"): how IRET enters it, and its sensitive instructions. The
//! extensions of CR4.VME and CR4.PVI let a program use VIF instead of IF.
//!
//! Events leave the mode in [`Cpu::deliver_protected`](crate::interrupt).

use crate::Cpu;
use crate::op::{Break, Flow};
use crate::state::{Segment, control, flags};

/// The access rights of all segment registers in virtual-8086 mode: present data segments of privilege level 3.
const RIGHTS: u32 = 0xf3;
/// The largest offset of a segment.
const LIMIT: u64 = 0xffff;
/// The offset of a 16-bit field in the 32-bit TSS. The field holds the offset of the I/O permission bitmap.
const IO_MAP: u64 = 0x66;
/// The size in bytes of the interrupt redirection bitmap, which ends where the I/O permission bitmap begins.
const REDIRECTION_BYTES: u64 = 32;
/// The flags that POPF and IRET load in virtual-8086 mode.
pub(crate) const LOADED: u64 = flags::ARITHMETIC | flags::TF | flags::IF | flags::DF | flags::NT;

/// The flag that an instruction uses as its interrupt flag.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum InterruptFlag {
    /// The interrupt flag is RFLAGS.IF.
    Real,
    /// RFLAGS.VIF, the virtual interrupt flag.
    Virtual,
}

/// Returns the RFLAGS in `image` as a virtual-8086 program sees them: VIF in the position of IF, and IOPL 3.
fn to_program(image: u64) -> u64 {
    let enabled = if image & flags::VIF != 0 {
        flags::IF
    } else {
        0
    };
    image & !flags::IF | flags::IOPL | enabled
}

impl Cpu {
    fn iopl(&self) -> u64 {
        (self.state.rflags & flags::IOPL) >> 12
    }

    /// Returns the flag that CLI and STI change. Raises #GP(0) if CLI and STI are not allowed in this mode.
    pub(crate) fn interrupt_flag(&mut self) -> Result<InterruptFlag, Break> {
        if u64::from(self.cpl) <= self.iopl() {
            return Ok(InterruptFlag::Real);
        }
        let extension = match self.virtual_8086() {
            true => control::CR4_VME,
            false => control::CR4_PVI,
        };
        match self.cpl == 3 && self.state.cr4 & extension != 0 {
            true => Ok(InterruptFlag::Virtual),
            false => Err(self.gp()),
        }
    }

    /// Returns the flag that PUSHF, POPF and IRET of operand size `size` use as IF. Raises #GP(0) if they are not
    /// allowed in virtual-8086 mode.
    pub(crate) fn pushed_interrupt_flag(&mut self, size: u8) -> Result<InterruptFlag, Break> {
        if !self.virtual_8086() || self.iopl() == 3 {
            return Ok(InterruptFlag::Real);
        }
        match self.state.cr4 & control::CR4_VME != 0 && size == 1 {
            true => Ok(InterruptFlag::Virtual),
            false => Err(self.gp()),
        }
    }

    /// Returns the value of RFLAGS that PUSHF pushes, with `flag` in the position of IF.
    pub(crate) fn flags_to_push(&mut self, flag: InterruptFlag) -> u64 {
        let image = self.flags() & !(flags::RF | flags::VM);
        match flag {
            InterruptFlag::Real => image,
            InterruptFlag::Virtual => to_program(image),
        }
    }

    /// For POPF and IRET of operand size `size` in virtual-8086 mode: returns a mask of the flags that they load from
    /// the popped `image`, and the values of these flags. Raises #GP(0) if the image enables virtual interrupts while a
    /// virtual interrupt is pending, or if the image sets TF.
    pub(crate) fn flags_to_load(
        &mut self,
        flag: InterruptFlag,
        size: u8,
        image: u64,
    ) -> Result<(u64, u64), Break> {
        if flag == InterruptFlag::Real {
            let wide = if size > 1 { flags::AC | flags::ID } else { 0 };
            return Ok((LOADED | wide, image));
        }
        let enables = image & flags::IF != 0;
        if enables && self.state.rflags & flags::VIP != 0 || image & flags::TF != 0 {
            return Err(self.gp());
        }
        let virtual_if = if enables { flags::VIF } else { 0 };
        let value = image & !flags::VIF | virtual_if;
        Ok((LOADED & !flags::IF | flags::VIF, value))
    }

    /// Sets VIF, for STI. If a virtual interrupt is pending, raises #GP(0) instead, so that the monitor can deliver it.
    pub(crate) fn enable_virtual_interrupts(&mut self) -> Flow {
        if self.state.rflags & flags::VIP != 0 {
            return Err(self.gp());
        }
        self.state.rflags |= flags::VIF;
        Ok(())
    }

    /// Finishes an IRET to virtual-8086 mode. The caller has read RIP, CS and RFLAGS (`image`) from the frame on the
    /// stack. This function reads the rest of the frame. It does not change the stack pointer of the mode that IRET
    /// leaves.
    pub(crate) fn enter_virtual_8086(&mut self, rip: u64, cs: u16, image: u64) -> Flow {
        if rip > LIMIT {
            return Err(self.gp());
        }
        // After EIP, CS and EFLAGS, the frame contains ESP, SS, ES, DS, FS and GS.
        let mut words = [0; 6];
        for (word, at) in words.iter_mut().zip((12..).step_by(4)) {
            *word = self.peek_sized(2, at)?;
        }
        let [esp, ss, es, ds, fs, gs] = words;
        for (number, selector) in [(0, es), (1, cs.into()), (2, ss), (3, ds), (4, fs), (5, gs)] {
            *self.segment(number) = Segment::real(selector as u16, RIGHTS);
        }
        self.state.gpr[4] = esp;
        self.state.rip = rip;
        let mask = LOADED | flags::IOPL | flags::RF | flags::VM | flags::AC | flags::VIF;
        self.set_flags(mask | flags::VIP | flags::ID, image);
        self.unblock_nmis();
        self.refresh();
        self.code.clock.serialize_return();
        Err(Break::Jump)
    }

    /// Decides how INT `vector` is executed in virtual-8086 mode. Returns `true` if it calls the program's own handler,
    /// which is found in the table at linear address 0. Raises #GP(0) if the monitor has to emulate the instruction.
    pub(crate) fn redirects(&mut self, vector: u8) -> Result<bool, Break> {
        if !self.virtual_8086() {
            return Ok(false);
        }
        if self.state.cr4 & control::CR4_VME != 0 && !self.is_left_to_monitor(vector)? {
            return Ok(true);
        }
        match self.iopl() {
            3 => Ok(false),
            _ => Err(self.gp()),
        }
    }

    /// Whether the bit of `vector` in the TSS's interrupt redirection bitmap leaves INT `vector` to the monitor. Raises
    /// #GP(0) if the TSS ends before the bit.
    fn is_left_to_monitor(&mut self, vector: u8) -> Result<bool, Break> {
        let tr = self.state.tr;
        let last = |at: u64, bytes: u64| at + bytes - 1 <= u64::from(tr.limit);
        if !last(IO_MAP, 2) {
            return Err(self.gp());
        }
        let map = self.as_system(|cpu| cpu.load::<u16>(tr.base.wrapping_add(IO_MAP)))?;
        let byte = u64::from(map) + u64::from(vector / 8);
        let Some(at) = byte
            .checked_sub(REDIRECTION_BYTES)
            .filter(|at| last(*at, 1))
        else {
            return Err(self.gp());
        };
        let bits = self.as_system(|cpu| cpu.load::<u8>(tr.base.wrapping_add(at)))?;
        Ok(bits >> (vector % 8) & 1 != 0)
    }

    /// Calls the program's own handler of INT `vector`. The handler will return to `return_rip`.
    pub(crate) fn deliver_redirected(&mut self, vector: u8, return_rip: u64) -> Flow {
        let entry = self.as_system(|cpu| cpu.load::<u32>(u64::from(vector) * 4))?;
        let (flag, cleared) = match self.iopl() {
            3 => (InterruptFlag::Real, flags::IF),
            _ => (InterruptFlag::Virtual, flags::VIF),
        };
        let image = self.flags_to_push(flag) as u16;
        self.enter_8086_handler(entry, image, cleared | flags::TF | flags::RF, return_rip)
    }
}
