//! Finds out whether an access is to watched bytes: those of breakpoints (`watch`) or of probes (`probe`).

use crate::Cpu;
use crate::flow::Break;
use crate::machine::Access;
use crate::state::{State, control};
use crate::watch::{Breakpoints, kind};

impl Cpu {
    /// Returns the breakpoints in effect: the debugger's if it has set any, else the guest's.
    pub(crate) fn breakpoints(&self) -> Breakpoints {
        let State { dr, dr7, .. } = self.state;
        self.requests.debugger.breakpoints.unwrap_or(Breakpoints {
            addresses: dr,
            control: dr7,
        })
    }

    /// Call after a change of debug registers, of CR4.DE, or of the debugger's requests.
    pub(crate) fn update_watch(&mut self) {
        let breakpoints = self.breakpoints();
        let ports = self.state.cr4 & control::CR4_DE != 0 && breakpoints.any(&[kind::PORT]);
        let watch = &mut self.watch;
        watch.ports = ports;
        if watch.breakpoints != breakpoints {
            watch.breakpoints = breakpoints;
            self.apply_watch();
        }
    }

    /// Call after a change of breakpoints or probes. Records which kinds exist now. Flushes the TLB if data is watched
    /// now or was watched before.
    pub(crate) fn apply_watch(&mut self) {
        let Cpu { watch, probes, .. } = self;
        let watched_data = watch.data;
        watch.code = watch.breakpoints.any(&[kind::EXECUTE]) || probes.has_code();
        watch.data = watch.breakpoints.any(&[kind::WRITE, kind::READ_WRITE]) || probes.has_data();
        if watched_data || self.watch.data {
            // The TLB may have entries of pages that are watched now.
            self.flush_other();
        }
    }

    /// Whether the page of `lin` has watched bytes: if so, it must not be entered into the TLB.
    pub(crate) fn is_watched_page(&self, lin: u64) -> bool {
        const DATA: [u64; 2] = [kind::WRITE, kind::READ_WRITE];
        self.watch.data
            && (self.watch.breakpoints.hits(&DATA, lin & !0xfff, 0x1000) != 0
                || self.probes.watch_page(lin))
    }

    /// Call before an access that misses the TLB. If the access is to watched bytes: records the hit if the instruction
    /// is in a block of its own; otherwise abandons the instruction, which is then executed again in a block of its
    /// own.
    #[cold]
    pub(crate) fn watch(&mut self, lin: u64, len: usize, access: Access) -> Result<(), Break> {
        let kinds: &[u64] = match access {
            Access::Write => &[kind::WRITE, kind::READ_WRITE],
            Access::Read | Access::Execute => &[kind::READ_WRITE],
        };
        let hits = self.watch.breakpoints.hits(kinds, lin, len as u64)
            | self.probes.accessed(lin, len as u64, access);
        if hits == 0 {
            return Ok(());
        }
        if !self.watch.collects {
            self.watch.alone = true;
            self.slow = true;
            return Err(Break::Retry);
        }
        self.watch.hits |= hits;
        Ok(())
    }
}
