//! Intercepts: the instructions and events that cause a #VMEXIT of a nested guest (AMD64 volume 2, 15.7 to 15.13).
//!
//! The number of an intercept is the exit code of its #VMEXIT, and its bit is at that number in the intercept vectors
//! of the control area. If an instruction can be intercepted, its handler calls a function of this file, after the
//! checks whose exceptions have precedence (15.7). The compiler translates none of these instructions, so compiled code
//! calls the same handlers. Outside guest mode the call costs one load and one branch.

use crate::Cpu;
use crate::nested::code;
use crate::nested::vmcb::VmExit;
use crate::op::{Break, Op};
use crate::state::Exception;
use crate::vector;

/// The bit of EXITINFO1 that says that MOV made the access to a control register, and that bits 3:0 are the number of
/// the general register (decode assists).
const CR_BY_MOV: u64 = 1 << 63;

impl Cpu {
    /// Causes a #VMEXIT before `op` if the hypervisor intercepts `code`.
    #[inline(always)]
    pub(crate) fn intercept(&mut self, op: &Op, code: u64) -> Result<(), Break> {
        self.intercept_with(op, code, 0)
    }

    /// Like [`intercept`](Self::intercept), but with a value of EXITINFO1.
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

    /// Causes a #VMEXIT before `op`.
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

    /// Intercepts MOV from control register `number` to a general register, if the hypervisor asks for it.
    pub(crate) fn intercept_cr_read(&mut self, op: &Op, number: u8) -> Result<(), Break> {
        let info = CR_BY_MOV | u64::from(op.r[0] & 15);
        self.intercept_with(op, code::CR_READ + u64::from(number), info)
    }

    /// Intercepts MOV of `value` to control register `number`, if the hypervisor asks for it.
    pub(crate) fn intercept_cr_write(
        &mut self,
        op: &Op,
        number: u8,
        value: u64,
    ) -> Result<(), Break> {
        use crate::state::control::{CR0_ET, CR0_MP, CR0_TS};
        let info = CR_BY_MOV | u64::from(op.r[1] & 15);
        self.intercept_with(op, code::CR_WRITE + u64::from(number), info)?;
        // The selective intercept applies only if the write to CR0 changes bits other than TS and MP.
        let changed = (value ^ self.state.cr0) & !(CR0_TS | CR0_MP | CR0_ET);
        match number == 0 && changed != 0 {
            true => self.intercept_with(op, code::CR0_SELECTIVE, info),
            false => Ok(()),
        }
    }

    /// Intercepts LMSW, if the hypervisor asks for it. The selective intercept applies to every LMSW, even if it
    /// changes only TS and MP.
    pub(crate) fn intercept_lmsw(&mut self, op: &Op) -> Result<(), Break> {
        self.intercept(op, code::CR_WRITE)?;
        self.intercept(op, code::CR0_SELECTIVE)
    }

    /// Intercepts an access to an MSR, if the map of MSR permissions says so (15.11). An access to an MSR that the map
    /// does not cover is always intercepted.
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

    /// Intercepts a port access, if the map of I/O permissions says so (15.10). `info` is EXITINFO1
    /// without port and size.
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
        // The map has one more byte, which belongs to ports beyond 0xffff.
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

    /// Intercepts a switch to the task of a TSS selector, if the hypervisor asks for it (15.14.1). `initiator` gives
    /// EXITINFO2. The old task continues at `return_rip`.
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

    /// Intercepts an exception that an instruction raises on purpose (INT3, INTO, INT1), if the hypervisor asks for it.
    pub(crate) fn intercept_trap(&mut self, op: &Op, vector: u8) -> Result<(), Break> {
        self.intercept(op, code::EXCEPTION + u64::from(vector))
    }

    /// Intercepts PAUSE, if the hypervisor asks for it. The PAUSE filter lets a number of PAUSEs pass before that
    /// (15.14.4).
    pub(crate) fn intercept_pause(&mut self, op: &Op) -> Result<(), Break> {
        if !self.svm.is_guest() || !self.svm.control.intercepts(code::PAUSE) {
            return Ok(());
        }
        // The filter's cycles are counted in instructions, so that the speed of the host does not matter.
        let now = self.instructions();
        let (count, threshold) = self.svm.control.pause_filter();
        let pauses = &mut self.svm.pauses;
        let since = now.wrapping_sub(pauses.last);
        pauses.last = now;
        if threshold != 0 && since > threshold.into() {
            // The guest has executed other code since the last PAUSE, so this PAUSE belongs to another loop, and the
            // count starts again.
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

    /// Whether the hypervisor intercepts exceptions with this vector.
    pub(crate) fn intercepts_exception(&self, vector: u8) -> bool {
        let code = code::EXCEPTION + u64::from(vector & 31);
        self.svm.is_guest() && self.svm.control.intercepts(code)
    }

    /// Makes an exception pending for the guest's handler, or for the hypervisor if it intercepts the exception.
    /// `address` becomes CR2 for a page fault that is not intercepted.
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
