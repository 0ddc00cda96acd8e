//! The interrupt controllers as devices of KVM's API: `KVM_CREATE_DEVICE`, device attributes, `KVM_CREATE_IRQCHIP` and
//! `KVM_ARM_SET_DEVICE_ADDR`. The crate `slat-gic` implements the attributes. This file copies their values from and to
//! the client, puts MMIO frames on the bus, and refuses accesses to attributes that a running vCPU would notice.

use crate::arch::aarch64::chips::{Chips, names, refused};
use crate::arch::aarch64::devices::Device as OnBus;
use crate::arch::aarch64::tables::Tables;
use crate::entered::Entered;
use crate::errno::{Result, fail};
use crate::io_bus::{Range, Space};
use crate::io_devices::Device;
use crate::irqfd;
use crate::user;
use crate::vm::VmObject;
use kvm_bindings::*;
use slat_gic::device::{Vm, address, control, group, value_size};
use slat_gic::error::Error;
use slat_gic::gic::{Gic, Model};
use slat_gic::its::ITS_SIZE;

const V2: u32 = kvm_device_type_KVM_DEV_TYPE_ARM_VGIC_V2;
const V3: u32 = kvm_device_type_KVM_DEV_TYPE_ARM_VGIC_V3;
const ITS: u32 = kvm_device_type_KVM_DEV_TYPE_ARM_VGIC_ITS;

/// A device that `KVM_CREATE_DEVICE` has created.
#[derive(Clone, Copy, Debug)]
pub(crate) enum VmDevice {
    Gic(Model),
    /// The ITS with this number.
    Its(usize),
}

impl VmDevice {
    /// Whether there are devices of this type.
    pub(crate) fn exists(kind: u32) -> bool {
        matches!(kind, V2 | V3 | ITS)
    }

    /// Returns the name to which the link of the device's descriptor in `/proc/self/fd` points.
    pub(crate) fn link(&self) -> &'static str {
        match self {
            VmDevice::Gic(Model::V2) => "anon_inode:kvm-arm-vgic-v2",
            VmDevice::Gic(Model::V3) => "anon_inode:kvm-arm-vgic-v3",
            VmDevice::Its(_) => "anon_inode:kvm-arm-vgic-its",
        }
    }

    /// Whether a running vCPU could notice an access to the attribute.
    fn needs_rest(self, attribute: &kvm_device_attr) -> bool {
        match attribute.group {
            group::DISTRIBUTOR
            | group::CPU_INTERFACE
            | group::REDISTRIBUTOR
            | group::SYSTEM_REGISTERS
            | group::LINES
            | group::ITS_REGISTERS => true,
            group::CONTROL => attribute.attr != control::INITIALIZE,
            _ => false,
        }
    }

    /// If a running vCPU could notice an access to the attribute, checks that no vCPU runs.
    ///
    /// # Errors
    /// `EBUSY`.
    fn check_rest(self, vm: &VmObject, attribute: &kvm_device_attr) -> Result<()> {
        match self.needs_rest(attribute) {
            true => vm.check_rest(),
            false => Ok(()),
        }
    }

    /// Carries out `KVM_HAS_DEVICE_ATTR`.
    ///
    /// # Errors
    /// `ENXIO` for an attribute that does not exist; `EINVAL` for a vCPU that does not exist.
    pub(crate) fn has(self, vm: &VmObject, attribute: &kvm_device_attr) -> Result<()> {
        let (group, number) = (attribute.group, attribute.attr);
        let chips = vm.chips();
        let vcpus = names(&vm.interrupts.in_order());
        let vm = context(chips, &vcpus);
        let found = chips.change(|parts| match self {
            VmDevice::Gic(_) => match &parts.device {
                Some(device) => device.has(&vm, group, number),
                None => Err(Error::NoAttribute),
            },
            VmDevice::Its(its) => parts.itses[its].has(group, number),
        });
        found.map_err(refused)
    }

    /// Carries out `KVM_GET_DEVICE_ATTR`: writes the attribute to the client's memory.
    ///
    /// # Errors
    /// KVM's: `ENXIO` for an attribute that does not exist, `EFAULT`, `EBUSY` while a vCPU runs, and the errors of the
    /// attribute.
    pub(crate) fn get(self, vm: &VmObject, attribute: &kvm_device_attr) -> Result<()> {
        let (group, number) = (attribute.group, attribute.attr);
        check_group(group)?;
        self.check_rest(vm, attribute)?;
        let input = match (group, number) {
            (group::ADDRESS, address::REDISTRIBUTOR_REGION) => user::read(attribute.addr)?,
            _ => 0,
        };
        vm.interrupts.irqfds.inject_signalled();
        let chips = vm.chips();
        let value = vm.interrupts.initialising(chips, |parts, vcpus| {
            let vm = context(chips, vcpus);
            match self {
                VmDevice::Gic(_) => match &mut parts.device {
                    Some(device) => device.get(&vm, group, number, input),
                    None => Err(Error::NoAttribute),
                },
                VmDevice::Its(its) => parts.itses[its].get(group, number),
            }
        });
        let value = value.map_err(refused)?;
        match value_size(group) {
            8 => user::write(attribute.addr, &value),
            _ => user::write(attribute.addr, &(value as u32)),
        }
    }

    /// Carries out `KVM_SET_DEVICE_ATTR`.
    ///
    /// # Errors
    /// The errors are those of [`get`](Self::get).
    pub(crate) fn set(self, vm: &VmObject, attribute: &kvm_device_attr) -> Result<()> {
        let group = attribute.group;
        check_group(group)?;
        self.check_rest(vm, attribute)?;
        // Some attributes save tables to guest memory. These tables must include the interrupts of irqfds that are
        // already signalled.
        vm.interrupts.irqfds.inject_signalled();
        let value = match value_size(group) {
            0 => 0,
            8 => user::read::<u64>(attribute.addr)?,
            _ => user::read::<u32>(attribute.addr)?.into(),
        };
        self.set_value(vm, group, attribute.attr, value)
    }

    /// Sets an attribute to a value.
    fn set_value(self, vm: &VmObject, group: u32, number: u64, value: u64) -> Result<()> {
        let chips = vm.chips();
        let mut visitor = chips.tables.visitor()?;
        let entered = Entered::enter(&mut visitor);
        let done = vm.interrupts.initialising(chips, |parts, vcpus| {
            let vm = context(chips, vcpus);
            match self {
                VmDevice::Gic(_) => match &mut parts.device {
                    Some(device) => device.set(&vm, group, number, value),
                    None => Err(Error::NoAttribute),
                },
                VmDevice::Its(its) => match parts.its(its) {
                    Some((its, gic)) => its.set(&vm, gic, group, number, value),
                    None if group == group::CONTROL && number != control::INITIALIZE => {
                        Err(Error::Busy)
                    }
                    // Without a GIC no interrupt exists, so an attribute of the ITS cannot change one. A temporary GIC
                    // is used instead.
                    None => {
                        let mut none =
                            Gic::new(Model::V3, *slat_gic::gic::INTERRUPTS.start(), &[])?;
                        parts.itses[its].set(&vm, &mut none, group, number, value)
                    }
                },
            }
        });
        drop(entered);
        done.map_err(refused)?;
        chips.restored();
        match self {
            VmDevice::Its(its) if group == group::ADDRESS => {
                vm.place_device(value, ITS_SIZE, OnBus::Its(its))
            }
            _ => Ok(()),
        }
    }
}

/// Refuses groups of attributes that no device has.
fn check_group(group: u32) -> Result<()> {
    match group <= group::ITS_REGISTERS {
        true => Ok(()),
        false => fail(libc::ENXIO),
    }
}

/// Returns the parts of a VM that the GIC's attributes use.
fn context<'a>(chips: &'a Chips, vcpus: &'a [slat_gic::gic::VcpuName]) -> Vm<'a, Tables> {
    Vm {
        vcpus,
        memory: &chips.tables,
        address_bits: chips.address_bits,
    }
}

impl VmObject {
    /// Returns the interrupt controllers. Creates an empty set of controllers on the first call.
    fn chips(&self) -> &Chips {
        self.interrupts.arch.chips.get_or_init(|| {
            let tables = Tables::new(self.engine.clone());
            Chips::new(tables, self.arch.ipa_bits())
        })
    }

    /// Puts a device on the VM's bus.
    ///
    /// # Errors
    /// `ENOMEM`.
    pub(crate) fn place_device(&self, start: u64, len: u64, device: OnBus) -> Result<()> {
        let range = Range::new(Space::Memory, start, len);
        let make = |_: &[_]| Ok([(range, Device::OfArch(device))]);
        self.bus.add(&self.engine, make, || Ok(()))
    }

    /// Creates a device of a type that only arm64 has.
    ///
    /// # Errors
    /// For a GIC: `EEXIST` when there is one, `EBUSY` when a vCPU has run, `E2BIG` when the GIC does not support that
    /// many vCPUs. `ENODEV` for an unknown type.
    pub(crate) fn create_arch_device(&self, kind: u32) -> Result<VmDevice> {
        let model = match kind {
            V2 => Model::V2,
            V3 => Model::V3,
            ITS => {
                let its = self.chips().create_its();
                self.arch.need_device_ids();
                return Ok(VmDevice::Its(its));
            }
            _ => return fail(libc::ENODEV),
        };
        irqfd::prepare();
        // While this thread holds this lock, no other thread can create a vCPU.
        let vcpus = self.vcpus_mut();
        let chips = self.chips();
        if chips.model().is_some() {
            return fail(libc::EEXIST);
        }
        if vcpus.iter().any(|vcpu| vcpu.arch.has_run()) {
            return fail(libc::EBUSY);
        }
        chips.create_gic(model, vcpus.len())?;
        self.arch.limit_vcpus(model);
        Ok(VmDevice::Gic(model))
    }

    /// Carries out `KVM_CREATE_IRQCHIP`: creates a GICv2.
    ///
    /// # Errors
    /// The errors are those of [`create_device`](Self::create_device).
    pub fn create_irqchip(&self) -> Result<()> {
        let _call = self.begin()?;
        self.create_arch_device(V2).map(drop)
    }

    /// Carries out `KVM_ARM_SET_DEVICE_ADDR`: sets the address of a frame of a GICv2.
    ///
    /// # Errors
    /// `ENODEV` for another device or frame, and without GICv2. The errors of the attribute.
    pub fn set_device_address(&self, address: &kvm_arm_device_addr) -> Result<()> {
        let _call = self.begin()?;
        let field = |shift: u32| (address.id >> shift & u64::from(u16::MAX)) as u32;
        let frame = field(KVM_ARM_DEVICE_TYPE_SHIFT);
        let is_v2 = self.interrupts.gic().and_then(Chips::model) == Some(Model::V2);
        let is_known = matches!(
            frame,
            KVM_VGIC_V2_ADDR_TYPE_DIST | KVM_VGIC_V2_ADDR_TYPE_CPU
        );
        if field(KVM_ARM_DEVICE_ID_SHIFT) != KVM_ARM_DEVICE_VGIC_V2 || !is_v2 || !is_known {
            return fail(libc::ENODEV);
        }
        let gic = VmDevice::Gic(Model::V2);
        gic.set_value(self, group::ADDRESS, frame.into(), address.addr)
    }
}
