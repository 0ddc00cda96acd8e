//! Segment descriptors: loads of segment registers, and checks for far transfers.

use crate::op::Break;
use crate::state::Segment;
use crate::{Cpu, vector};

/// A code, data or system descriptor, as in a descriptor table.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Descriptor(pub(crate) u64);

impl Descriptor {
    pub(crate) fn base(self) -> u64 {
        self.0 >> 16 & 0xff_ffff | (self.0 >> 56 & 0xff) << 24
    }
    pub(crate) fn limit(self) -> u32 {
        let raw = (self.0 & 0xffff | (self.0 >> 48 & 15) << 16) as u32;
        if self.0 & 1 << 55 != 0 {
            raw << 12 | 0xfff
        } else {
            raw
        }
    }
    /// Returns the access rights in the format of [`Segment::rights`].
    pub(crate) fn rights(self) -> u32 {
        (self.0 >> 40) as u32 & 0xf0ff
    }
    pub(crate) fn segment(self, selector: u16) -> Segment {
        Segment {
            selector,
            base: self.base(),
            limit: self.limit(),
            rights: self.rights(),
        }
    }
    pub(crate) fn dpl(self) -> u8 {
        (self.0 >> 45 & 3) as u8
    }
    pub(crate) fn present(self) -> bool {
        self.0 & 1 << 47 != 0
    }
    /// Returns the type and the S bit as 5 bits. The S bit is the highest one.
    pub(crate) fn kind(self) -> u8 {
        (self.0 >> 40 & 31) as u8
    }
    pub(crate) fn is_code(self) -> bool {
        self.kind() & 0x18 == 0x18
    }
    /// Returns the selector in a gate descriptor.
    pub(crate) fn gate_selector(self) -> u16 {
        (self.0 >> 16) as u16
    }
    pub(crate) fn conforming(self) -> bool {
        self.kind() & 0x1c == 0x1c
    }
    pub(crate) fn long(self) -> bool {
        self.0 & 1 << 53 != 0
    }
    pub(crate) fn big(self) -> bool {
        self.0 & 1 << 54 != 0
    }
}

impl Cpu {
    /// Reads the descriptor of a selector. If the selector is beyond its table, raises the exception `vector`, with the
    /// selector as the error code.
    pub(crate) fn descriptor(&mut self, selector: u16, vector: u8) -> Result<Descriptor, Break> {
        match self.try_descriptor(selector)? {
            Some(descriptor) => Ok(descriptor),
            None => Err(self.raise(vector, Some(u32::from(selector & !3)))),
        }
    }

    fn descriptor_address(&self, selector: u16, bytes: u64) -> Option<u64> {
        let (base, limit) = if selector & 4 != 0 {
            let ldt = &self.state.ldtr;
            if !ldt.usable() {
                return None;
            }
            (ldt.base, u64::from(ldt.limit))
        } else {
            (self.state.gdtr.base, u64::from(self.state.gdtr.limit))
        };
        let at = u64::from(selector & !7);
        (at + bytes - 1 <= limit).then(|| base.wrapping_add(at))
    }

    /// Reads the descriptor of a selector. Returns `None` if the selector is beyond the limit of its table.
    pub(crate) fn try_descriptor(&mut self, selector: u16) -> Result<Option<Descriptor>, Break> {
        match self.descriptor_address(selector, 8) {
            Some(address) => {
                let raw = self.as_system(|cpu| cpu.load::<u64>(address))?;
                Ok(Some(Descriptor(raw)))
            }
            None => Ok(None),
        }
    }

    /// Reads the upper half of a 16-byte system descriptor.
    pub(crate) fn descriptor_high(&mut self, selector: u16) -> Result<u64, Break> {
        match self.descriptor_address(selector, 16) {
            Some(address) => self.as_system(|cpu| cpu.load::<u64>(address + 8)),
            None => Err(self.raise(vector::GP, Some(u32::from(selector & !3)))),
        }
    }

    /// Sets bits in the access byte of a descriptor, such as accessed or busy.
    pub(crate) fn mark_descriptor(&mut self, selector: u16, bits: u8) -> Result<(), Break> {
        let Some(address) = self.descriptor_address(selector, 8) else {
            return Ok(());
        };
        let byte = self.as_system(|cpu| cpu.load::<u8>(address + 5))?;
        if byte & bits != bits {
            self.change_descriptor(selector, |old| old | bits)?;
        }
        Ok(())
    }

    /// Changes the access byte of a descriptor by a locked access. Returns the old byte, or `None` if the descriptor is
    /// beyond its table.
    pub(crate) fn change_descriptor(
        &mut self,
        selector: u16,
        change: impl FnMut(u8) -> u8,
    ) -> Result<Option<u8>, Break> {
        let Some(address) = self.descriptor_address(selector, 8) else {
            return Ok(None);
        };
        let (old, _) = self.as_system(|cpu| cpu.update::<u8>(address + 5, true, change))?;
        Ok(Some(old))
    }

    /// Checks that [`change_descriptor`](Self::change_descriptor) can write to the descriptor.
    pub(crate) fn probe_descriptor(&mut self, selector: u16) -> Result<(), Break> {
        match self.descriptor_address(selector, 8) {
            Some(address) => self.as_system(|cpu| cpu.probe_write(address + 5, 1)),
            None => Ok(()),
        }
    }

    /// Checks a selector and loads it into DS, ES, FS, GS or SS. The register changes only after all checks.
    pub(crate) fn load_segment(&mut self, number: u8, selector: u16) -> Result<(), Break> {
        if self.has_paragraphs() {
            let segment = self.segment(number);
            segment.selector = selector;
            segment.base = u64::from(selector) << 4;
            return Ok(());
        }
        let error = Some(u32::from(selector & !3));
        let is_ss = number == 2;
        if selector & !3 == 0 {
            let null_ss = self.is_64() && self.cpl < 3 && (selector & 3) as u8 == self.cpl;
            if is_ss && !null_ss {
                return Err(self.gp());
            }
            let cpl = u32::from(self.cpl);
            let segment = self.segment(number);
            segment.selector = selector;
            segment.rights = Segment::UNUSABLE;
            if is_ss {
                segment.rights |= cpl << 5;
            } else {
                segment.base = 0;
            }
            return Ok(());
        }
        let descriptor = self.descriptor(selector, vector::GP)?;
        let rpl = (selector & 3) as u8;
        let kind = descriptor.kind();
        let allowed = if is_ss {
            // SS needs a descriptor of a writable data segment, with RPL, DPL and CPL equal.
            kind & 0x1a == 0x12 && rpl == self.cpl && descriptor.dpl() == self.cpl
        } else {
            let readable = kind & 0x18 == 0x10 || kind & 0x1a == 0x1a;
            readable && (descriptor.conforming() || descriptor.dpl() >= self.cpl.max(rpl))
        };
        if !allowed {
            return Err(self.raise(vector::GP, error));
        }
        if !descriptor.present() {
            return Err(self.raise(if is_ss { vector::SS } else { vector::NP }, error));
        }
        self.mark_descriptor(selector, 1)?;
        *self.segment(number) = Descriptor(descriptor.0 | 1 << 40).segment(selector);
        Ok(())
    }

    /// Reads and checks the descriptor of the code segment for a far transfer to privilege level `cpl`.
    pub(crate) fn code_descriptor(
        &mut self,
        selector: u16,
        cpl: u8,
        is_return: bool,
    ) -> Result<Segment, Break> {
        if selector & !3 == 0 {
            return Err(self.gp());
        }
        let descriptor = self.descriptor(selector, vector::GP)?;
        self.check_code(descriptor, selector, cpl, is_return)
    }

    /// Makes the checks of [`code_descriptor`](Self::code_descriptor) for a descriptor that was read already.
    pub(crate) fn check_code(
        &mut self,
        descriptor: Descriptor,
        selector: u16,
        cpl: u8,
        is_return: bool,
    ) -> Result<Segment, Break> {
        let error = Some(u32::from(selector & !3));
        let rpl = (selector & 3) as u8;
        let dpl = descriptor.dpl();
        let allowed = descriptor.is_code()
            && !(self.long_mode() && descriptor.long() && descriptor.big())
            && match (descriptor.conforming(), is_return) {
                (true, _) => dpl <= cpl,
                (false, true) => dpl == rpl,
                (false, false) => dpl == cpl && rpl <= cpl,
            };
        if !allowed {
            return Err(self.raise(vector::GP, error));
        }
        if !descriptor.present() {
            return Err(self.raise(vector::NP, error));
        }
        self.mark_descriptor(selector, 1)?;
        let selector = selector & !3 | u16::from(cpl);
        Ok(Descriptor(descriptor.0 | 1 << 40).segment(selector))
    }

    /// Returns the flat code segment that SYSCALL, SYSRET, SYSENTER and SYSEXIT load.
    pub(crate) fn flat_code(selector: u16, dpl: u8, long: bool) -> Segment {
        let size = if long { 1 << 13 } else { 1 << 14 };
        let rights = 0x809b | u32::from(dpl) << 5 | size;
        Segment {
            selector,
            base: 0,
            limit: 0xffff_ffff,
            rights,
        }
    }

    /// Returns the flat stack segment that SYSCALL, SYSRET, SYSENTER and SYSEXIT load.
    pub(crate) fn flat_stack(selector: u16, dpl: u8) -> Segment {
        let rights = 0xc093 | u32::from(dpl) << 5;
        Segment {
            selector,
            base: 0,
            limit: 0xffff_ffff,
            rights,
        }
    }
}

/// Reads the descriptor of a system segment, and checks that its type is `kind`: 2 for an LDT, 9 for an available 32-
/// or 64-bit TSS, 1 for an available 16-bit TSS.
pub(crate) fn system_segment(cpu: &mut Cpu, selector: u16, kind: u8) -> Result<Segment, Break> {
    let error = Some(u32::from(selector & !3));
    if selector & 4 != 0 {
        return Err(cpu.raise(vector::GP, error));
    }
    let descriptor = cpu.descriptor(selector, vector::GP)?;
    let right =
        descriptor.kind() == kind || kind == 9 && descriptor.kind() == 1 && !cpu.long_mode();
    if !right {
        return Err(cpu.raise(vector::GP, error));
    }
    if !descriptor.present() {
        return Err(cpu.raise(vector::NP, error));
    }
    let mut segment = descriptor.segment(selector);
    if cpu.long_mode() {
        segment.base |= cpu.descriptor_high(selector)? << 32;
        if !cpu.canonical(segment.base) {
            return Err(cpu.raise(vector::GP, error));
        }
    }
    Ok(segment)
}
