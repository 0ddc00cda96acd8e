//! The device KVM_DEV_TYPE_ARM_VGIC_ITS: an ITS and its attributes.

use super::{Vm, address, control, group};
use crate::addresses::{PAGE_64K, UNSET, check_range};
use crate::error::Error;
use crate::gic::Gic;
use crate::its::{ITS_SIZE, Its};
use crate::memory::Memory;

/// An ITS as a device of KVM's API. Several may belong to one GIC.
#[derive(Clone, Debug, Default)]
pub struct ItsDevice {
    base: Option<u64>,
    its: Its,
}

impl ItsDevice {
    /// Creates the device. Its creator then calls [`Device::attach_its`](super::Device::attach_its) of the GIC.
    pub const fn new() -> Self {
        ItsDevice {
            base: None,
            its: Its::new(),
        }
    }

    /// Returns the ITS.
    pub fn its(&mut self) -> &mut Its {
        &mut self.its
    }

    /// Returns the first guest-physical address of the ITS's frames, if the VMM has set it.
    pub fn base(&self) -> Option<u64> {
        self.base
    }

    /// Returns the offset of a guest-physical address in the ITS's frames. Messages go to
    /// [`TRANSLATER`](crate::its::TRANSLATER).
    pub fn find(&self, gpa: u64) -> Option<u64> {
        let offset = gpa.checked_sub(self.base?)?;
        (offset < ITS_SIZE).then_some(offset)
    }

    /// Checks that the address of the ITS is set, without which the ITS cannot be used.
    fn check_base(&self) -> Result<(), Error> {
        self.base.map(|_| ()).ok_or(Error::NoAttribute)
    }

    /// Sets an attribute: KVM_SET_DEVICE_ATTR.
    ///
    /// # Errors
    /// The errors are those of KVM for the attribute.
    pub fn set<M: Memory>(
        &mut self,
        vm: &Vm<'_, M>,
        gic: &mut Gic,
        group: u32,
        attribute: u64,
        value: u64,
    ) -> Result<(), Error> {
        match group {
            group::ADDRESS if attribute != address::ITS => Err(Error::NoDevice),
            group::ADDRESS => {
                check_range(self.base, value, PAGE_64K, ITS_SIZE, vm.address_bits)?;
                self.base = Some(value);
                Ok(())
            }
            group::CONTROL => match attribute {
                control::RESET_ITS => {
                    self.its.reset(gic);
                    Ok(())
                }
                control::SAVE_ITS_TABLES => self.its.save_tables(gic, vm.memory),
                control::RESTORE_ITS_TABLES => self.its.restore_tables(gic, vm.memory),
                // The command that initializes the ITS has nothing to do. As in KVM, unknown commands do nothing,
                // either.
                _ => Ok(()),
            },
            group::ITS_REGISTERS => {
                self.its.has_register(attribute)?;
                self.check_base()?;
                self.its.client_write(attribute, value, gic, vm.memory)
            }
            _ => Err(Error::NoAttribute),
        }
    }

    /// Gets an attribute: KVM_GET_DEVICE_ATTR.
    ///
    /// # Errors
    /// The errors are those of KVM for the attribute.
    pub fn get(&self, group: u32, attribute: u64) -> Result<u64, Error> {
        match group {
            group::ADDRESS if attribute != address::ITS => Err(Error::NoDevice),
            group::ADDRESS => Ok(self.base.unwrap_or(UNSET)),
            group::ITS_REGISTERS => {
                self.its.has_register(attribute)?;
                self.check_base()?;
                self.its.client_read(attribute)
            }
            _ => Err(Error::NoAttribute),
        }
    }

    /// Whether an attribute exists: KVM_HAS_DEVICE_ATTR.
    ///
    /// # Errors
    /// [`Error::NoAttribute`]: the attribute does not exist. [`Error::Invalid`]: the offset of a register is not
    /// aligned.
    pub fn has(&self, group: u32, attribute: u64) -> Result<(), Error> {
        let exists = match group {
            group::ADDRESS => attribute == address::ITS,
            group::CONTROL => {
                attribute <= control::RESET_ITS && attribute != control::SAVE_PENDING_TABLES
            }
            group::ITS_REGISTERS => return self.its.has_register(attribute),
            _ => false,
        };
        match exists {
            true => Ok(()),
            false => Err(Error::NoAttribute),
        }
    }
}
