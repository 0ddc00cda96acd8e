//! A VM's calls for its clock and the frequency of its vCPUs' TSC.

use crate::clock::{self, FLAGS};
use crate::errno::{Result, fail};
use crate::thread::bits;
use crate::vm::VmObject;
use kvm_bindings::*;

impl VmObject {
    /// `KVM_SET_TSC_KHZ`: sets the frequency of the VM's vCPUs; 0 is the host's.
    ///
    /// # Errors
    /// `EINVAL` for a frequency beyond KVM's own limits, and once there are vCPUs: so does KVM since Linux 6.17; before, the call
    /// succeeded and concerned later vCPUs only.
    pub fn set_tsc_khz(&self, khz: u32) -> Result<()> {
        let _call = self.begin()?;
        let khz = clock::frequency(khz)?;
        self.before_vcpus(|| {
            self.clock.set_tsc_khz(khz);
            Ok(())
        })
    }

    /// `KVM_GET_TSC_KHZ`.
    pub fn tsc_khz(&self) -> u32 {
        self.clock.tsc_khz()
    }

    /// `KVM_GET_CLOCK`.
    ///
    /// # Errors
    /// `EIO` in a forked child.
    pub fn get_clock(&self) -> Result<kvm_clock_data> {
        let _call = self.begin()?;
        let now = self.clock.read();
        Ok(kvm_clock_data {
            clock: now.clock,
            flags: FLAGS,
            realtime: now.realtime,
            host_tsc: now.host_tsc,
            ..Default::default()
        })
    }

    /// `KVM_SET_CLOCK`. With `KVM_CLOCK_REALTIME`, adds the time that has passed since `data.realtime`.
    ///
    /// # Errors
    /// `EINVAL` for unknown flags.
    pub fn set_clock(&self, data: &kvm_clock_data) -> Result<()> {
        let _call = self.begin()?;
        if data.flags & !FLAGS != 0 {
            return fail(libc::EINVAL);
        }
        let since = match data.flags & KVM_CLOCK_REALTIME {
            0 => 0,
            // A `data.realtime` in the future does not set the clock back.
            _ => clock::realtime().saturating_sub(data.realtime),
        };
        self.clock.set_kvmclock(data.clock.wrapping_add(since));
        self.hyperv.clock_changed();
        self.engine
            .visit_attention(&mut |attention| attention.raise(bits::RETRY));
        Ok(())
    }
}
