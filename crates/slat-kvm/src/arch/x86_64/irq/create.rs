//! Creation of interrupt controllers.

use crate::arch::x86_64::chips::{Chips, Model, Timer, Vectors};
use crate::arch::x86_64::devices::VmTimer;
use crate::arch::x86_64::irq::routes;
use crate::errno::{Result, fail, no_memory};
use crate::irq::Interrupts;
use crate::irqfd;
use crate::routing::{MAX_ROUTES, Routes};
use crate::ticker::{Alarm, VmTimers};
use kvm_bindings::{KVM_X2APIC_API_DISABLE_BROADCAST_QUIRK, KVM_X2APIC_API_USE_32BIT_IDS};
use slat::Shared;
use slat_irqchip::message::MsiIds;
use std::sync::{Arc, Weak};

impl Interrupts {
    fn alarm(self: &Arc<Self>, timer: VmTimer) -> Alarm {
        let this: Weak<dyn VmTimers> = Arc::<Self>::downgrade(self);
        (this, timer).into()
    }

    /// Creates an I/O APIC and the 8259 pair. Every vCPU that is created later has a local APIC.
    ///
    /// # Errors
    /// `EEXIST` when there are controllers already, `EINVAL` when there are vCPUs already, `ENOMEM`.
    pub(crate) fn create_pc(self: &Arc<Self>) -> Result<()> {
        let vcpus = self.vcpus.write();
        if self.exist() {
            return fail(libc::EEXIST);
        }
        if !vcpus.is_empty() {
            return fail(libc::EINVAL);
        }
        let routes = routes::pc()?;
        let chips = Chips::new(self.alarm(VmTimer::Storm))?;
        let chips = Shared::try_new(chips).map_err(no_memory)?;
        self.set_model(Model::Pc(chips), routes)
    }

    /// Carries out `KVM_CAP_SPLIT_IRQCHIP`: creates only local APICs. The first `pins` GSIs are the pins of the
    /// client's I/O APIC.
    ///
    /// # Errors
    /// `EINVAL` for more than 4096 pins, `EEXIST` when there are controllers or vCPUs already.
    pub(crate) fn create_split(&self, pins: u64) -> Result<()> {
        let vcpus = self.vcpus.write();
        let Some(pins) = u32::try_from(pins).ok().filter(|pins| *pins <= MAX_ROUTES) else {
            return fail(libc::EINVAL);
        };
        if self.exist() || !vcpus.is_empty() {
            return fail(libc::EEXIST);
        }
        let model = Model::Split {
            pins,
            reported: Vectors::default(),
        };
        self.set_model(model, Routes::default())
    }

    /// Sets the VM's controllers and first routes. Call with the vCPUs locked.
    fn set_model(&self, model: Model, routes: Routes) -> Result<()> {
        irqfd::prepare();
        self.replace_routes(routes);
        match self.arch.model.set(model) {
            Ok(()) => Ok(()),
            Err(_) => fail(libc::EEXIST),
        }
    }

    /// Creates the 8254. If `speaker`, the 8254 also has port 0x61.
    ///
    /// # Errors
    /// `EEXIST` when there is an 8254 already, `ENOENT` without an 8259 pair, `ENOMEM`.
    pub(crate) fn create_timer(self: &Arc<Self>, speaker: bool) -> Result<()> {
        let Some(chips) = self.chips() else {
            return fail(libc::ENOENT);
        };
        let timer = Timer::new(self.alarm(VmTimer::Pit), speaker)?;
        match chips.timer.set(timer) {
            Ok(()) => Ok(()),
            Err(_) => fail(libc::EEXIST),
        }
    }

    /// Carries out `KVM_CAP_X2APIC_API`: ids have 32 bits in routes, messages and `KVM_GET_LAPIC`.
    ///
    /// # Errors
    /// `EINVAL` for unknown flags.
    pub(crate) fn enable_x2apic_api(&self, flags: u64) -> Result<()> {
        let wide_ids = u64::from(KVM_X2APIC_API_USE_32BIT_IDS);
        let no_quirk = u64::from(KVM_X2APIC_API_DISABLE_BROADCAST_QUIRK);
        if flags & !(wide_ids | no_quirk) != 0 {
            return fail(libc::EINVAL);
        }
        if flags & wide_ids != 0 {
            // A second call has no effect. QEMU and other clients call this once, before they create vCPUs.
            let _ = self.arch.msi_ids.set(MsiIds::ThirtyTwo {
                wide_broadcast: flags & no_quirk != 0,
            });
        }
        Ok(())
    }
}
