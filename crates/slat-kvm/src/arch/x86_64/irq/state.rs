//! The controllers' state in KVM's structs.

use crate::arch::x86_64::chips::{Chips, Timer};
use crate::arch::x86_64::same_fields::same_fields;
use crate::errno::{Result, fail};
use crate::irq::Interrupts;
use kvm_bindings::*;
use slat_irqchip::ioapic::IoApicState;
use slat_irqchip::pic::{Chip, PicState};
use slat_irqchip::pit::{ChannelState, PitState};

same_fields!(
    PicState,
    kvm_pic_state,
    kvm_pic,
    pic_state {
        last_irr,
        irr,
        imr,
        isr,
        priority_add,
        irq_base,
        read_reg_select,
        poll,
        special_mask,
        init_state,
        auto_eoi,
        rotate_on_auto_eoi,
        special_fully_nested_mode,
        init4,
        elcr,
        elcr_mask,
    }
);
same_fields!(
    ChannelState,
    kvm_pit_channel_state,
    kvm_channel,
    channel_state {
        count,
        latched_count,
        count_latched,
        status_latched,
        status,
        read_state,
        write_state,
        write_latch,
        rw_mode,
        mode,
        bcd,
        gate,
        count_load_time,
    }
);

fn kvm_ioapic(ours: &IoApicState) -> kvm_ioapic_state {
    let mut theirs = kvm_ioapic_state {
        base_address: ours.base_address,
        ioregsel: ours.ioregsel,
        id: ours.id,
        irr: ours.irr,
        pad: ours.pad,
        ..Default::default()
    };
    for (to, from) in theirs.redirtbl.iter_mut().zip(ours.redirtbl) {
        to.bits = from;
    }
    theirs
}

fn ioapic_state(theirs: &kvm_ioapic_state) -> IoApicState {
    IoApicState {
        base_address: theirs.base_address,
        ioregsel: theirs.ioregsel,
        id: theirs.id,
        irr: theirs.irr,
        pad: theirs.pad,
        // SAFETY: all fields of the union consist of integers, so every bit pattern is valid, whichever field was
        // written.
        redirtbl: theirs.redirtbl.map(|entry| unsafe { entry.bits }),
    }
}

fn pic_chip(id: u32) -> Option<Chip> {
    match id {
        KVM_IRQCHIP_PIC_MASTER => Some(Chip::Master),
        KVM_IRQCHIP_PIC_SLAVE => Some(Chip::Slave),
        _ => None,
    }
}

impl Interrupts {
    fn has_chips(&self) -> Result<&Chips> {
        match self.chips() {
            Some(chips) => Ok(chips),
            None => fail(libc::ENXIO),
        }
    }

    fn has_timer(&self) -> Result<&Timer> {
        match self.timer() {
            Some(timer) => Ok(timer),
            None => fail(libc::ENXIO),
        }
    }

    /// Carries out `KVM_GET_IRQCHIP`: fills in the state of the chip that `chip` names.
    ///
    /// # Errors
    /// `ENXIO` without these controllers, `EINVAL` for a chip that does not exist.
    pub(crate) fn save_chip(&self, chip: &mut kvm_irqchip) -> Result<()> {
        let chips = self.has_chips()?;
        self.irqfds.inject_signalled();
        match (pic_chip(chip.chip_id), chip.chip_id) {
            (Some(which), _) => chip.chip.pic = kvm_pic(&chips.save_pic(which)),
            (None, KVM_IRQCHIP_IOAPIC) => chip.chip.ioapic = kvm_ioapic(&chips.save_ioapic()),
            _ => return fail(libc::EINVAL),
        }
        Ok(())
    }

    /// Carries out `KVM_SET_IRQCHIP`.
    ///
    /// # Errors
    /// `ENXIO` without these controllers, `EINVAL` for a chip that does not exist.
    pub(crate) fn restore_chip(&self, chip: &kvm_irqchip) -> Result<()> {
        let chips = self.has_chips()?;
        match (pic_chip(chip.chip_id), chip.chip_id) {
            (Some(which), _) => {
                // SAFETY: all fields of the union consist of integers, so every bit pattern is valid, whichever field
                // was written.
                chips.restore_pic(&self.vcpus, which, &pic_state(unsafe { &chip.chip.pic }));
            }
            (None, KVM_IRQCHIP_IOAPIC) => {
                // SAFETY: all fields of the union consist of integers, so every bit pattern is valid, whichever field
                // was written.
                chips.restore_ioapic(&self.vcpus, &ioapic_state(unsafe { &chip.chip.ioapic }));
            }
            _ => return fail(libc::EINVAL),
        }
        Ok(())
    }

    /// Carries out `KVM_GET_PIT2`.
    ///
    /// # Errors
    /// `ENXIO` without 8254.
    pub(crate) fn save_timer(&self) -> Result<kvm_pit_state2> {
        let PitState { channels, flags } = self.has_timer()?.save();
        Ok(kvm_pit_state2 {
            channels: channels.each_ref().map(kvm_channel),
            flags,
            ..Default::default()
        })
    }

    /// Carries out `KVM_SET_PIT2`: restarts all counts.
    ///
    /// # Errors
    /// `ENXIO` without 8254.
    pub(crate) fn restore_timer(&self, state: &kvm_pit_state2) -> Result<()> {
        self.has_timer()?.restore(&PitState {
            channels: state.channels.each_ref().map(channel_state),
            flags: state.flags,
        });
        Ok(())
    }

    /// Sets whether ticks of the 8254 that a slow guest has missed are injected later.
    ///
    /// # Errors
    /// `ENXIO` without 8254.
    pub(crate) fn set_reinject(&self, on: bool) -> Result<()> {
        self.has_timer()?.set_reinject(on);
        Ok(())
    }
}
