//! Intercepts: the instructions and events that cause a #VMEXIT of a nested guest (AMD64 volume 2, 15.7 to 15.13).
//!
//! An intercept is identified by the exit code of its #VMEXIT, which is also the number of its bit in the intercept
//! vectors of the control area. The handler of an instruction that can be intercepted calls a function of this file,
//! after the checks whose exceptions have precedence (15.7). Compiled code does not translate these instructions, but
//! calls the same handlers. Outside guest mode the call costs one load and one branch.

use crate::Cpu;
use crate::nested::code;
use crate::nested::vmcb::VmExit;
use crate::op::{Break, Op};
use crate::state::Exception;
use crate::vector;

/// A bit of EXITINFO1 (decode assists): the access to the control register was made by MOV, and bits 3:0 are the number
/// of the general register.
const CR_BY_MOV: u64 = 1 << 63;

impl Cpu {
    /// Causes a #VMEXIT with exit code `code` before `op`, if the hypervisor intercepts it.
    #[inline(always)]
    pub(crate) fn intercept(&mut self, op: &Op, code: u64) -> Result<(), Break> {
        self.intercept_with(op, code, 0)
    }

    /// Causes a #VMEXIT like [`intercept`](Self::intercept), with `info_1` as its EXITINFO1.
    #[inline(always)]
    pub(crate) fn intercept_with(&mut self, op: &Op, code: u64, info_1: u64) -> Result<(), Break> {
        match self.svm.is_guest() {
            false => Ok(()),
            true => self.intercept_in_guest(op, code, info_1, 0),
        }
    }

    #[cold]
    #[inline(never)]
    fn intercept_in_guest(
        &mut self,
        op: &Op,
        code: u64,
        info_1: u64,
        info_2: u64,
    ) -> Result<(), Break> {
        match self.svm.control.intercepts(code) {
            true => Err(self.exit_at(op, code, info_1, info_2)),
            false => Ok(()),
        }
    }

    /// Causes a #VMEXIT before `op`, without looking at the intercept vectors.
    #[cold]
    pub(super) fn exit_at(&mut self, op: &Op, code: u64, info_1: u64, info_2: u64) -> Break {
        let next_rip = self.next_rip(op);
        self.leave_guest(VmExit {
            code,
            info_1,
            info_2,
            next_rip,
            int_info: 0,
        })
    }

    /// Causes a #VMEXIT if the hypervisor intercepts MOV from control register `number`.
    pub(crate) fn intercept_cr_read(&mut self, op: &Op, number: u8) -> Result<(), Break> {
        let info = CR_BY_MOV | u64::from(op.r[0] & 15);
        self.intercept_with(op, code::CR_READ + u64::from(number), info)
    }

    /// Causes a #VMEXIT if the hypervisor intercepts MOV of `value` to control register `number`.
    pub(crate) fn intercept_cr_write(
        &mut self,
        op: &Op,
        number: u8,
        value: u64,
    ) -> Result<(), Break> {
        use crate::state::control::{CR0_ET, CR0_MP, CR0_TS};
        let info = CR_BY_MOV | u64::from(op.r[1] & 15);
        self.intercept_with(op, code::CR_WRITE + u64::from(number), info)?;
        // The selective intercept of writes to CR0 ignores a write that changes only TS and MP.
        let changed = (value ^ self.state.cr0) & !(CR0_TS | CR0_MP | CR0_ET);
        match number == 0 && changed != 0 {
            true => self.intercept_with(op, code::CR0_SELECTIVE, info),
            false => Ok(()),
        }
    }

    /// Causes a #VMEXIT if the hypervisor intercepts LMSW. The selective intercept of CR0 applies to every LMSW, even
    /// if it changes only TS and MP.
    pub(crate) fn intercept_lmsw(&mut self, op: &Op) -> Result<(), Break> {
        self.intercept(op, code::CR_WRITE)?;
        self.intercept(op, code::CR0_SELECTIVE)
    }

    /// Causes a #VMEXIT if the map of MSR permissions intercepts this access (15.11). MSRs that the map does not cover
    /// are always intercepted.
    #[inline(always)]
    pub(crate) fn intercept_msr(&mut self, op: &Op, msr: u32, write: bool) -> Result<(), Break> {
        match self.svm.is_guest() {
            false => Ok(()),
            true => self.intercept_msr_in_guest(op, msr, write),
        }
    }

    #[cold]
    fn intercept_msr_in_guest(&mut self, op: &Op, msr: u32, write: bool) -> Result<(), Break> {
        if !self.svm.control.intercepts(code::MSR) {
            return Ok(());
        }
        let first_byte = match msr {
            0..0x2000 => Some(msr / 4),
            0xc000_0000..0xc000_2000 => Some(0x800 + (msr - 0xc000_0000) / 4),
            0xc001_0000..0xc001_2000 => Some(0x1000 + (msr - 0xc001_0000) / 4),
            _ => None,
        };
        let is_intercepted = match first_byte {
            Some(at) => {
                let mut byte = [0xff];
                let at = self.svm.control.msr_map() + u64::from(at);
                !self.read_physical(at, &mut byte)?
                    || byte[0] >> (msr % 4 * 2 + u32::from(write)) & 1 != 0
            }
            None => true,
        };
        match is_intercepted {
            true => Err(self.exit_at(op, code::MSR, write.into(), 0)),
            false => Ok(()),
        }
    }

    /// Causes a #VMEXIT if the map of I/O permissions intercepts this port access (15.10). `info` is EXITINFO1 without
    /// port and size.
    #[inline(always)]
    pub(crate) fn intercept_port(&mut self, op: &Op, port: u16, info: u64) -> Result<(), Break> {
        match self.svm.is_guest() {
            false => Ok(()),
            true => self.intercept_port_in_guest(op, port, info),
        }
    }

    #[cold]
    fn intercept_port_in_guest(&mut self, op: &Op, port: u16, info: u64) -> Result<(), Break> {
        if !self.svm.control.intercepts(code::IO) {
            return Ok(());
        }
        let bytes = 1u64 << op.size;
        let mut bits = [0xff; 2];
        let at = self.svm.control.io_map() + u64::from(port / 8);
        // The bits of an access to several ports may be in two bytes. So the map has another byte after the byte of
        // port 0xffff.
        if self.read_physical(at, &mut bits[..1])? && self.read_physical(at + 1, &mut bits[1..])? {
            let bits = u64::from(u16::from_le_bytes(bits)) >> (port % 8);
            if bits & ((1 << bytes) - 1) == 0 {
                return Ok(());
            }
        }
        let info_1 = info | bytes << 4 | u64::from(port) << 16;
        let next_rip = self.next_rip(op);
        Err(self.exit_at(op, code::IO, info_1, next_rip))
    }

    /// Causes a #VMEXIT if the hypervisor intercepts task switches (15.14.1), for a switch to the task of a TSS
    /// selector. EXITINFO2 depends on `initiator`. The old task would continue at `return_rip`.
    pub(crate) fn intercept_task_switch(
        &mut self,
        tss: u16,
        initiator: u64,
        return_rip: u64,
    ) -> Result<(), Break> {
        if !self.svm.is_guest() || !self.svm.control.intercepts(code::TASK_SWITCH) {
            return Ok(());
        }
        Err(self.leave_guest(VmExit {
            code: code::TASK_SWITCH,
            info_1: tss.into(),
            info_2: initiator,
            next_rip: return_rip,
            int_info: 0,
        }))
    }

    /// Causes a #VMEXIT if the hypervisor intercepts the exception that INT3, INTO or INT1 raises on purpose.
    pub(crate) fn intercept_trap(&mut self, op: &Op, vector: u8) -> Result<(), Break> {
        self.intercept(op, code::EXCEPTION + u64::from(vector))
    }

    /// Causes a #VMEXIT if the hypervisor intercepts PAUSE. With the PAUSE filter, a number of PAUSEs pass before that
    /// (15.14.4).
    pub(crate) fn intercept_pause(&mut self, op: &Op) -> Result<(), Break> {
        if !self.svm.is_guest() || !self.svm.control.intercepts(code::PAUSE) {
            return Ok(());
        }
        // Count instructions instead of cycles, so that the speed of the host has no influence.
        let now = self.instructions();
        let (count, threshold) = self.svm.control.pause_filter();
        let pauses = &mut self.svm.pauses;
        let since = now.wrapping_sub(pauses.last);
        pauses.last = now;
        if threshold != 0 && since > threshold.into() {
            // The guest has executed much other code since the last PAUSE. So this PAUSE belongs to another loop, and
            // the count starts again.
            pauses.left = count;
        }
        match pauses.left.checked_sub(1) {
            Some(left) => {
                pauses.left = left;
                Ok(())
            }
            None => Err(self.exit_at(op, code::PAUSE, 0, 0)),
        }
    }

    /// Whether the hypervisor intercepts exceptions with this vector. `false` outside guest mode.
    pub(crate) fn intercepts_exception(&self, vector: u8) -> bool {
        let code = code::EXCEPTION + u64::from(vector & 31);
        self.svm.is_guest() && self.svm.control.intercepts(code)
    }

    /// Records an exception: as pending for the guest's handler, or as a #VMEXIT if the hypervisor intercepts it. For a
    /// page fault that is not intercepted, `address` becomes CR2.
    pub(crate) fn queue_exception(&mut self, exception: Exception, address: u64) {
        self.slow = true;
        let Exception { vector, error } = exception;
        let is_page_fault = vector == vector::PF;
        if self.intercepts_exception(vector) {
            self.state.events.exception = None;
            let _recorded = self.leave_guest(VmExit {
                code: code::EXCEPTION + u64::from(vector & 31),
                info_1: error.unwrap_or(0).into(),
                info_2: if is_page_fault { address } else { 0 },
                next_rip: 0,
                int_info: 0,
            });
            return self.make_exit_due();
        }
        if is_page_fault {
            self.state.cr2 = address;
        }
        self.state.events.exception = Some(exception);
    }
}
