//! All requests of the API. For each request, this module says how its argument is made, and which errnos it may
//! return.
//!
//! The errnos are those that `Documentation/virt/kvm/api.rst` lists for the request, and those that every request may
//! return: `EFAULT` for a bad pointer, `ENOMEM`, and `ENOTTY` or `EINVAL` for a request that an object does not know.

use super::argument::{BOUNDARIES, bytes_of, mutate};
use super::world::{PAGES, World};
use crate::memory::PAGE;
use kvm_bindings::*;
use libc::*;
use slat_kvm::abi::*;
use slat_model::Rng;
use std::os::fd::AsRawFd;

/// The kind of object that serves a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum On {
    /// `/dev/kvm`.
    System,
    /// A VM.
    Vm,
    /// A vCPU.
    Vcpu,
}

/// What the functions that make arguments need to know.
pub struct Context<'a> {
    /// The memory and objects of the stream.
    pub world: &'a World,
    /// The address of memory for a bitmap, to which a pointer in a struct can refer.
    pub bitmap: u64,
}

/// The kind of a request's argument.
#[derive(Clone, Copy)]
pub enum Argument {
    /// The argument is a number, which this function chooses.
    Value(fn(&mut Rng) -> u64),
    /// A struct that is valid, except for a few changed fields.
    Struct(fn(&mut Rng, &Context<'_>) -> Vec<u8>),
    /// A struct of this size in bytes, which the call fills in.
    Out(usize),
    /// The result of another request, with a few changed fields. Here are the number of that request, and the size in
    /// bytes.
    Back(u32, usize),
    /// A table: a count, and then `step` bytes for each entry. The first entry is at offset `entries`.
    Table {
        make: fn(&mut Rng) -> Vec<u8>,
        entries: u64,
        step: u64,
    },
}

/// A request (ioctl) that streams make.
#[derive(Clone, Copy)]
pub struct Request {
    /// The request's number.
    pub number: u32,
    /// The kind of object that serves the request.
    pub on: On,
    /// The request's argument.
    pub argument: Argument,
    /// The errnos that the request may return.
    pub errnos: &'static [i32],
}

/// The size of an XSAVE area in bytes.
const XSAVE: usize = 4096;

macro_rules! requests {
    ($($on:ident: $number:ident $argument:expr, [$($errno:ident)*];)*) => {
        /// All requests.
        pub const REQUESTS: &[Request] = &[$(Request {
            number: $number,
            on: On::$on,
            argument: { use Argument::*; $argument },
            errnos: &[$($errno),*],
        },)*];
    };
}

requests! {
    System: KVM_GET_API_VERSION Value(nothing), [EINVAL];
    System: KVM_CREATE_VM Value(vm_type), [EINVAL ENOMEM];
    System: KVM_GET_MSR_INDEX_LIST Table { make: index_list, entries: 4, step: 4 }, [E2BIG EFAULT];
    System: KVM_GET_MSR_FEATURE_INDEX_LIST Table { make: index_list, entries: 4, step: 4 }, [E2BIG EFAULT];
    System: KVM_CHECK_EXTENSION Value(number), [];
    System: KVM_GET_VCPU_MMAP_SIZE Value(nothing), [EINVAL];
    System: KVM_GET_SUPPORTED_CPUID Table { make: cpuid, entries: 8, step: 40 }, [E2BIG EFAULT ENOMEM];
    System: KVM_GET_SUPPORTED_HV_CPUID Table { make: cpuid, entries: 8, step: 40 }, [E2BIG EFAULT];
    System: KVM_GET_EMULATED_CPUID Table { make: cpuid, entries: 8, step: 40 }, [E2BIG EFAULT ENOMEM];
    System: KVM_GET_MSRS Table { make: msrs, entries: 8, step: 16 }, [E2BIG EFAULT ENOMEM];
    Vm: KVM_CHECK_EXTENSION Value(number), [];
    Vm: KVM_CREATE_VCPU Value(vcpu_id), [EINVAL EEXIST ENOMEM];
    Vm: KVM_SET_USER_MEMORY_REGION Struct(region), [EINVAL EEXIST EFAULT ENOMEM];
    Vm: KVM_SET_USER_MEMORY_REGION2 Struct(region2), [EINVAL EEXIST EFAULT ENOMEM EBADF];
    Vm: KVM_SET_MEMORY_ATTRIBUTES Struct(attributes), [EINVAL EFAULT ENOMEM];
    Vm: KVM_CREATE_GUEST_MEMFD Struct(guest_memfd), [EINVAL EFAULT ENOMEM EFBIG];
    Vm: KVM_GET_DIRTY_LOG Struct(dirty_log), [EINVAL ENOENT EFAULT ENXIO ENOMEM];
    Vm: KVM_CLEAR_DIRTY_LOG Struct(clear_dirty_log), [EINVAL ENOENT EFAULT ENXIO ENOMEM];
    Vm: KVM_RESET_DIRTY_RINGS Value(number), [EINVAL];
    Vm: KVM_REGISTER_COALESCED_MMIO Struct(zone), [EINVAL ENOSPC EFAULT ENOMEM];
    Vm: KVM_UNREGISTER_COALESCED_MMIO Struct(zone), [EINVAL EFAULT];
    Vm: KVM_GET_STATS_FD Value(nothing), [ENOMEM];
    Vm: KVM_SET_NR_MMU_PAGES Value(number), [EINVAL];
    Vm: KVM_GET_NR_MMU_PAGES Value(nothing), [ENOTTY];
    Vm: KVM_SET_TSS_ADDR Value(number), [EINVAL];
    Vm: KVM_SET_IDENTITY_MAP_ADDR Struct(word), [EINVAL EFAULT];
    Vm: KVM_SET_BOOT_CPU_ID Value(vcpu_id), [EINVAL EBUSY];
    Vm: KVM_CREATE_IRQCHIP Value(nothing), [EEXIST EINVAL ENOMEM];
    Vm: KVM_IRQ_LINE Struct(irq_level), [ENXIO EINVAL EFAULT ENOTTY];
    Vm: KVM_IRQ_LINE_STATUS Struct(irq_level), [ENXIO EINVAL EFAULT ENOTTY];
    Vm: KVM_GET_IRQCHIP Struct(irqchip), [ENXIO EINVAL EFAULT ENOTTY];
    Vm: KVM_SET_IRQCHIP Struct(irqchip), [ENXIO EINVAL EFAULT ENOTTY];
    Vm: KVM_SET_GSI_ROUTING Table { make: routing, entries: 8, step: 48 }, [EINVAL EFAULT ENOMEM];
    Vm: KVM_SIGNAL_MSI Struct(msi), [EINVAL EFAULT];
    Vm: KVM_IRQFD Struct(irqfd), [EINVAL EBADF EBUSY EFAULT ENOMEM];
    Vm: KVM_IOEVENTFD Struct(ioeventfd), [EINVAL EBADF EEXIST ENOENT EFAULT ENOMEM];
    Vm: KVM_HYPERV_EVENTFD Struct(hyperv_eventfd), [EINVAL EBADF EEXIST ENOENT EFAULT ENOMEM];
    Vm: KVM_CREATE_PIT Value(nothing), [EEXIST ENOENT ENOMEM];
    Vm: KVM_CREATE_PIT2 Struct(pit_config), [EEXIST ENOENT EFAULT ENOMEM];
    Vm: KVM_GET_PIT Out(size_of::<kvm_pit_state>()), [ENXIO EFAULT];
    Vm: KVM_SET_PIT Back(KVM_GET_PIT, size_of::<kvm_pit_state>()), [ENXIO EFAULT];
    Vm: KVM_GET_PIT2 Out(size_of::<kvm_pit_state2>()), [ENXIO EFAULT];
    Vm: KVM_SET_PIT2 Back(KVM_GET_PIT2, size_of::<kvm_pit_state2>()), [ENXIO EFAULT];
    Vm: KVM_REINJECT_CONTROL Struct(reinjection), [ENXIO EFAULT];
    Vm: KVM_GET_CLOCK Out(size_of::<kvm_clock_data>()), [EFAULT];
    Vm: KVM_SET_CLOCK Struct(clock), [EINVAL EFAULT];
    Vm: KVM_GET_TSC_KHZ Value(nothing), [];
    Vm: KVM_SET_TSC_KHZ Value(number), [EINVAL ENOTTY];
    Vm: KVM_ENABLE_CAP Struct(capability), [EINVAL E2BIG EEXIST ENXIO EPERM EFAULT];
    Vcpu: KVM_GET_REGS Out(size_of::<kvm_regs>()), [EFAULT];
    Vcpu: KVM_SET_REGS Back(KVM_GET_REGS, size_of::<kvm_regs>()), [EFAULT];
    Vcpu: KVM_GET_SREGS Out(size_of::<kvm_sregs>()), [EFAULT];
    Vcpu: KVM_SET_SREGS Back(KVM_GET_SREGS, size_of::<kvm_sregs>()), [EINVAL EFAULT];
    Vcpu: KVM_GET_SREGS2 Out(size_of::<kvm_sregs2>()), [EFAULT];
    Vcpu: KVM_SET_SREGS2 Back(KVM_GET_SREGS2, size_of::<kvm_sregs2>()), [EINVAL EFAULT];
    Vcpu: KVM_TRANSLATE Struct(translation), [EINVAL EFAULT];
    Vcpu: KVM_INTERRUPT Struct(interrupt), [EINVAL ENXIO EFAULT EEXIST];
    Vcpu: KVM_NMI Value(nothing), [];
    Vcpu: KVM_SMI Value(nothing), [];
    Vcpu: KVM_GET_MSRS Table { make: msrs, entries: 8, step: 16 }, [E2BIG EFAULT ENOMEM];
    Vcpu: KVM_SET_MSRS Table { make: msrs, entries: 8, step: 16 }, [E2BIG EFAULT ENOMEM];
    Vcpu: KVM_SET_SIGNAL_MASK Struct(signal_mask), [EINVAL EFAULT];
    Vcpu: KVM_GET_FPU Out(size_of::<kvm_fpu>()), [EFAULT];
    Vcpu: KVM_SET_FPU Back(KVM_GET_FPU, size_of::<kvm_fpu>()), [EINVAL EFAULT];
    Vcpu: KVM_GET_LAPIC Out(size_of::<kvm_lapic_state>()), [EINVAL EFAULT];
    Vcpu: KVM_SET_LAPIC Back(KVM_GET_LAPIC, size_of::<kvm_lapic_state>()), [EINVAL EFAULT];
    Vcpu: KVM_GET_CPUID2 Table { make: cpuid, entries: 8, step: 40 }, [E2BIG EFAULT];
    Vcpu: KVM_GET_SUPPORTED_HV_CPUID Table { make: cpuid, entries: 8, step: 40 }, [E2BIG EFAULT];
    Vcpu: KVM_SET_CPUID2 Table { make: cpuid, entries: 8, step: 40 }, [E2BIG EINVAL EPERM EFAULT ENOMEM];
    Vcpu: KVM_GET_MP_STATE Out(size_of::<kvm_mp_state>()), [EFAULT];
    Vcpu: KVM_SET_MP_STATE Back(KVM_GET_MP_STATE, size_of::<kvm_mp_state>()), [EINVAL EFAULT];
    Vcpu: KVM_GET_VCPU_EVENTS Out(size_of::<kvm_vcpu_events>()), [EFAULT];
    Vcpu: KVM_SET_VCPU_EVENTS Back(KVM_GET_VCPU_EVENTS, size_of::<kvm_vcpu_events>()), [EINVAL EFAULT];
    Vcpu: KVM_GET_DEBUGREGS Out(size_of::<kvm_debugregs>()), [EFAULT];
    Vcpu: KVM_SET_DEBUGREGS Back(KVM_GET_DEBUGREGS, size_of::<kvm_debugregs>()), [EINVAL EFAULT];
    Vcpu: KVM_GET_XSAVE Out(XSAVE), [EFAULT];
    Vcpu: KVM_GET_XSAVE2 Out(XSAVE), [EFAULT];
    Vcpu: KVM_SET_XSAVE Back(KVM_GET_XSAVE, XSAVE), [EINVAL EFAULT];
    Vcpu: KVM_GET_XCRS Out(size_of::<kvm_xcrs>()), [EFAULT];
    Vcpu: KVM_SET_XCRS Back(KVM_GET_XCRS, size_of::<kvm_xcrs>()), [EINVAL EFAULT];
    Vcpu: KVM_GET_TSC_KHZ Value(nothing), [EIO];
    Vcpu: KVM_SET_TSC_KHZ Value(number), [EINVAL];
    Vcpu: KVM_PRE_FAULT_MEMORY Struct(pre_fault), [EINVAL ENOENT EFAULT EINTR EAGAIN ENOMEM EOPNOTSUPP EIO];
    Vcpu: KVM_GET_STATS_FD Value(nothing), [ENOMEM];
    Vcpu: KVM_KVMCLOCK_CTRL Value(nothing), [EINVAL];
    Vcpu: KVM_GET_ONE_REG Struct(one_reg), [EINVAL EFAULT];
    Vcpu: KVM_SET_ONE_REG Struct(one_reg), [EINVAL EFAULT];
    Vcpu: KVM_GET_REG_LIST Struct(word), [EFAULT];
    Vcpu: KVM_ENABLE_CAP Struct(capability), [EINVAL EFAULT];
}

/// Returns the argument of a call that takes none: usually 0, which such calls require.
fn nothing(rng: &mut Rng) -> u64 {
    if rng.one_in(8) { number(rng) } else { 0 }
}

fn number(rng: &mut Rng) -> u64 {
    match rng.below(3) {
        0 => rng.pick(&BOUNDARIES),
        1 => rng.below(512),
        _ => rng.word(),
    }
}

fn vm_type(rng: &mut Rng) -> u64 {
    if rng.one_in(8) {
        number(rng)
    } else {
        rng.below(2)
    }
}

fn vcpu_id(rng: &mut Rng) -> u64 {
    if rng.one_in(8) {
        number(rng)
    } else {
        rng.below(4)
    }
}

/// Returns the guest-physical address of a page. All these addresses are near one another, so that slots overlap.
fn gpa(rng: &mut Rng) -> u64 {
    match rng.below(16) {
        0 => rng.pick(&BOUNDARIES),
        1 => 1 << 32,
        2 => 0xfee0_0000,
        _ => rng.below(PAGES as u64) * PAGE as u64,
    }
}

/// Returns a slot's number, which may include the address space of system management mode.
fn slot(rng: &mut Rng) -> u32 {
    let space = u32::from(rng.one_in(8)) << 16;
    space | rng.below(4) as u32
}

fn region(rng: &mut Rng, context: &Context<'_>) -> Vec<u8> {
    let ram = &context.world.ram;
    let size = match rng.below(8) {
        0 => 0,
        1 => rng.pick(&[1 << 21, 1 << 30, 1 << 36, 1 << 40]),
        _ => (1 + rng.below(64)) * PAGE as u64,
    };
    let value = kvm_userspace_memory_region {
        slot: slot(rng),
        flags: rng.pick(&[
            0,
            0,
            KVM_MEM_LOG_DIRTY_PAGES,
            KVM_MEM_LOG_DIRTY_PAGES,
            KVM_MEM_READONLY,
            3,
            4,
        ]),
        guest_phys_addr: gpa(rng),
        memory_size: size,
        userspace_addr: ram.pages(rng.below(PAGES as u64) as usize, 0).start as u64,
    };
    let mut bytes = bytes_of(&value);
    mutate(rng, &mut bytes);
    give(context, &mut bytes);
    bytes
}

/// Replaces the backing of a slot if it is outside the guests' memory. Records that a guest may write to the backing.
fn give(context: &Context<'_>, region: &mut [u8]) {
    let field = |at: usize| u64::from_le_bytes(region[at..at + 8].try_into().expect("eight bytes"));
    let (size, address) = (field(16), field(24));
    let ram = &context.world.ram;
    let address = ram.harmless(address, size);
    ram.give(address..address.saturating_add(size));
    region[24..32].copy_from_slice(&address.to_le_bytes());
}

fn region2(rng: &mut Rng, context: &Context<'_>) -> Vec<u8> {
    let mut value = kvm_userspace_memory_region2 {
        guest_memfd: context
            .world
            .others
            .pick(rng)
            .map_or(u32::MAX, |other| other.fd.as_raw_fd() as u32),
        guest_memfd_offset: rng.below(4) * PAGE as u64,
        ..Default::default()
    };
    let private = rng.one_in(2);
    let mut bytes = region(rng, context);
    let field = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"));
    (value.slot, value.flags) = (field(0) as u32, (field(0) >> 32) as u32);
    if private {
        value.flags = KVM_MEM_GUEST_MEMFD;
    }
    (
        value.guest_phys_addr,
        value.memory_size,
        value.userspace_addr,
    ) = (field(8), field(16), field(24));
    bytes = bytes_of(&value);
    mutate(rng, &mut bytes[40..]);
    bytes
}

fn attributes(rng: &mut Rng, _: &Context<'_>) -> Vec<u8> {
    let mut bytes = bytes_of(&kvm_memory_attributes {
        address: gpa(rng),
        size: (1 + rng.below(64)) * PAGE as u64,
        attributes: rng.pick(&[0, 8]),
        flags: 0,
    });
    mutate(rng, &mut bytes);
    bytes
}

fn guest_memfd(rng: &mut Rng, _: &Context<'_>) -> Vec<u8> {
    let size = (1 + rng.below(16)) * PAGE as u64;
    let mut bytes = bytes_of(&kvm_create_guest_memfd {
        size,
        flags: rng.below(4),
        ..Default::default()
    });
    mutate(rng, &mut bytes);
    bytes
}

fn dirty_log(rng: &mut Rng, context: &Context<'_>) -> Vec<u8> {
    let mut log = kvm_dirty_log {
        slot: slot(rng),
        ..Default::default()
    };
    log.__bindgen_anon_1.padding2 = context.bitmap;
    let mut bytes = bytes_of(&log);
    // `mutate` does not change the pointer, because KVM would accept any address and write to it.
    mutate(rng, &mut bytes[..8]);
    bytes
}

fn clear_dirty_log(rng: &mut Rng, context: &Context<'_>) -> Vec<u8> {
    let mut log = kvm_clear_dirty_log {
        slot: slot(rng),
        num_pages: 1 + rng.below(64) as u32,
        first_page: 64 * rng.below(2),
        ..Default::default()
    };
    log.__bindgen_anon_1.padding2 = context.bitmap;
    let mut bytes = bytes_of(&log);
    mutate(rng, &mut bytes);
    bytes
}

fn zone(rng: &mut Rng, _: &Context<'_>) -> Vec<u8> {
    let mut zone = kvm_coalesced_mmio_zone {
        addr: rng.pick(&[0x10, 0x10_0000, 0x4_0000, 0x8000]),
        size: rng.pick(&[1, 8, 0x1000]),
        ..Default::default()
    };
    zone.__bindgen_anon_1.pio = rng.below(2) as u32;
    let mut bytes = bytes_of(&zone);
    mutate(rng, &mut bytes);
    bytes
}

fn word(rng: &mut Rng, _: &Context<'_>) -> Vec<u8> {
    bytes_of(&number(rng))
}

fn clock(rng: &mut Rng, _: &Context<'_>) -> Vec<u8> {
    let clock = number(rng);
    let mut bytes = bytes_of(&kvm_clock_data {
        clock,
        ..Default::default()
    });
    if rng.one_in(4) {
        mutate(rng, &mut bytes);
    }
    bytes
}

fn irq_level(rng: &mut Rng, _: &Context<'_>) -> Vec<u8> {
    bytes_of(&[rng.below(32) as u32, rng.below(2) as u32])
}

fn msi(rng: &mut Rng, _: &Context<'_>) -> Vec<u8> {
    let mut bytes = bytes_of(&kvm_msi {
        address_lo: 0xfee0_0000 | (rng.below(4) as u32) << 12 | rng.below(16) as u32,
        data: rng.word() as u32 & 0xc7ff,
        ..Default::default()
    });
    mutate(rng, &mut bytes);
    bytes
}

/// Makes the state of an interrupt controller, with random values in every field.
fn irqchip(rng: &mut Rng, _: &Context<'_>) -> Vec<u8> {
    let mut bytes = bytes_of(&kvm_irqchip {
        chip_id: rng.below(3) as u32,
        ..Default::default()
    });
    for _ in 0..rng.below(64) {
        mutate(rng, &mut bytes[8..]);
    }
    if rng.one_in(2) {
        // Gives the I/O APIC its usual address.
        bytes[8..16].copy_from_slice(&0xfec0_0000u64.to_le_bytes());
    }
    mutate(rng, &mut bytes[..8]);
    bytes
}

/// Returns one of a few interrupt numbers (GSIs).
fn gsi(rng: &mut Rng) -> u32 {
    match rng.below(16) {
        0 => rng.below(4097) as u32,
        _ => rng.below(32) as u32,
    }
}

fn routing(rng: &mut Rng) -> Vec<u8> {
    let entries = rng.pick(&[1, 2, 4, 24, 0, 200]);
    let mut bytes = count(rng, entries).to_le_bytes().to_vec();
    bytes.resize(8, 0);
    for _ in 0..entries {
        let mut entry = kvm_irq_routing_entry {
            gsi: gsi(rng),
            type_: KVM_IRQ_ROUTING_IRQCHIP,
            ..Default::default()
        };
        match rng.below(5) {
            0 | 1 => {
                entry.u.irqchip = kvm_irq_routing_irqchip {
                    irqchip: rng.below(3) as u32,
                    pin: rng.below(8) as u32,
                };
            }
            2 => {
                entry.type_ = KVM_IRQ_ROUTING_HV_SINT;
                entry.u.hv_sint = kvm_irq_routing_hv_sint {
                    vcpu: rng.below(4) as u32,
                    sint: rng.below(17) as u32,
                };
            }
            _ => {
                entry.type_ = KVM_IRQ_ROUTING_MSI;
                entry.u.msi.address_lo = 0xfee0_0000 | (rng.below(4) as u32) << 12;
                entry.u.msi.data = rng.word() as u32 & 0xc7ff;
            }
        }
        bytes.extend(bytes_of(&entry));
    }
    if rng.one_in(4) {
        mutate(rng, &mut bytes[4..]);
    }
    bytes
}

fn irqfd(rng: &mut Rng, context: &Context<'_>) -> Vec<u8> {
    let mut bytes = bytes_of(&kvm_irqfd {
        fd: context.world.event(rng) as u32,
        gsi: gsi(rng),
        flags: rng.pick(&[0, 0, 0, KVM_IRQFD_FLAG_DEASSIGN, KVM_IRQFD_FLAG_RESAMPLE, 3]),
        resamplefd: context.world.event(rng) as u32,
        ..Default::default()
    });
    mutate(rng, &mut bytes);
    bytes
}

fn hyperv_eventfd(rng: &mut Rng, context: &Context<'_>) -> Vec<u8> {
    let mut bytes = bytes_of(&kvm_hyperv_eventfd {
        conn_id: rng.pick(&[0, 1, 2, 2, 0xff_ffff, 1 << 24]),
        fd: context.world.event(rng),
        flags: rng.pick(&[0, 0, KVM_HYPERV_EVENTFD_DEASSIGN, 2]),
        ..Default::default()
    });
    mutate(rng, &mut bytes);
    bytes
}

fn ioeventfd(rng: &mut Rng, context: &Context<'_>) -> Vec<u8> {
    let mut bytes = bytes_of(&kvm_ioeventfd {
        // The guests' programs write to some of these addresses.
        addr: rng.pick(&[0x10, 0x10, 0xf008, 0xf008, 0x8_0000]),
        len: rng.pick(&[0, 1, 1, 2, 4, 8]),
        fd: context.world.event(rng),
        flags: rng.pick(&[0, 1, 2, 2, 3, 4, 5, 6, 7, 8]),
        datamatch: rng.below(2),
        ..Default::default()
    });
    mutate(rng, &mut bytes);
    bytes
}

fn pit_config(rng: &mut Rng, _: &Context<'_>) -> Vec<u8> {
    bytes_of(&kvm_pit_config {
        flags: rng.below(2) as u32,
        ..Default::default()
    })
}

fn reinjection(rng: &mut Rng, _: &Context<'_>) -> Vec<u8> {
    bytes_of(&kvm_reinject_control {
        pit_reinject: rng.below(2) as u8,
        ..Default::default()
    })
}

fn capability(rng: &mut Rng, _: &Context<'_>) -> Vec<u8> {
    const CAPABILITIES: &[(u32, &[u64])] = &[
        (KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2, &[0, 1, 2, 3]),
        (
            KVM_CAP_DIRTY_LOG_RING,
            &[4096, 8192, 0, 1 << 20, 1 << 21, 1 << 32],
        ),
        (KVM_CAP_DIRTY_LOG_RING_ACQ_REL, &[4096, 4097]),
        (KVM_CAP_MAX_VCPU_ID, &[0, 1, 2, 4096, 4097]),
        (KVM_CAP_VM_DISABLE_NX_HUGE_PAGES, &[0, 1]),
        (KVM_CAP_EXIT_HYPERCALL, &[0, 1 << 12, 1]),
        (KVM_CAP_DISABLE_QUIRKS2, &[0, 1, 0xff, u64::MAX]),
        (KVM_CAP_SPLIT_IRQCHIP, &[24, 24, 0, 4096, 4097]),
        (KVM_CAP_X2APIC_API, &[0, 1, 2, 3, 4]),
        (KVM_CAP_X86_BUS_LOCK_EXIT, &[0, 1, 2, 3, 4]),
        (KVM_CAP_X86_NOTIFY_VMEXIT, &[0, 1, 2, 3, 4, 1 << 32 | 3]),
        (
            KVM_CAP_X86_APIC_BUS_CYCLES_NS,
            &[0, 1, 10, 1 << 20, 1 << 26, u64::MAX],
        ),
        (KVM_CAP_NR_VCPUS, &[0]),
        (KVM_CAP_HYPERV_SYNIC, &[0, 1]),
        (KVM_CAP_HYPERV_SYNIC2, &[0, 0, 1]),
        (KVM_CAP_HYPERV_ENFORCE_CPUID, &[0, 1]),
    ];
    let (cap, arguments) = rng.pick(CAPABILITIES);
    let mut value = kvm_enable_cap {
        cap,
        ..Default::default()
    };
    value.args[0] = rng.pick(arguments);
    let mut bytes = bytes_of(&value);
    mutate(rng, &mut bytes);
    bytes
}

/// Makes the argument of a request that reads or sets one register by its id. The id is usually that of an MSR.
fn one_reg(rng: &mut Rng, context: &Context<'_>) -> Vec<u8> {
    let (first, range) = rng.pick(&MSRS);
    let kind = rng.pick(&[2, 2, 2, 3, 0]);
    let mut bytes = bytes_of(&kvm_one_reg {
        id: KVM_REG_X86 | KVM_REG_SIZE_U64 | kind << 32 | (u64::from(first) + rng.below(range)),
        addr: context.bitmap,
    });
    // `mutate` does not change the pointer, because KVM would accept any address and write to it.
    mutate(rng, &mut bytes[..8]);
    bytes
}

fn translation(rng: &mut Rng, _: &Context<'_>) -> Vec<u8> {
    let address = number(rng);
    bytes_of(&kvm_translation {
        linear_address: address,
        ..Default::default()
    })
}

fn interrupt(rng: &mut Rng, _: &Context<'_>) -> Vec<u8> {
    let irq = if rng.one_in(8) {
        number(rng) as u32
    } else {
        rng.below(257) as u32
    };
    bytes_of(&kvm_interrupt { irq })
}

fn pre_fault(rng: &mut Rng, _: &Context<'_>) -> Vec<u8> {
    let mut bytes = bytes_of(&kvm_pre_fault_memory {
        gpa: gpa(rng),
        size: (1 + rng.below(64)) * PAGE as u64,
        ..Default::default()
    });
    mutate(rng, &mut bytes);
    bytes
}

/// Makes a signal mask that does not block the signal by which the stream kicks vCPUs.
fn signal_mask(rng: &mut Rng, _: &Context<'_>) -> Vec<u8> {
    let set = number(rng) & !(1 << (crate::watch::kick_signal() - 1));
    let len = if rng.one_in(8) { number(rng) as u32 } else { 8 };
    [&len.to_le_bytes()[..], &set.to_le_bytes()[..]].concat()
}

/// Returns a count for a table. It is usually `right`, the table's real count.
fn count(rng: &mut Rng, right: usize) -> u32 {
    if rng.one_in(6) {
        number(rng) as u32
    } else {
        right as u32
    }
}

fn index_list(rng: &mut Rng) -> Vec<u8> {
    let entries = rng.pick(&[0, 1, 24, 25, 64]);
    let mut bytes = count(rng, entries).to_le_bytes().to_vec();
    bytes.resize(4 + 4 * entries, 0);
    bytes
}

fn cpuid(rng: &mut Rng) -> Vec<u8> {
    let entries = rng.pick(&[0, 1, 3, 40, 100, 256]);
    let mut bytes = count(rng, entries).to_le_bytes().to_vec();
    bytes.resize(8, 0);
    for index in 0..entries as u32 {
        bytes.extend(bytes_of(&kvm_cpuid_entry2 {
            function: index,
            ..Default::default()
        }));
    }
    mutate(rng, &mut bytes[8..]);
    bytes
}

/// Ranges of MSR numbers, each given by its first number and its length. The ranges are a little larger than those of
/// existing MSRs.
const MSRS: [(u32, u64); 18] = [
    (0x10, 3),
    (0x1b, 1),
    (0x3a, 2),
    (0x174, 8),
    (0x1a0, 1),
    (0x1d9, 1),
    (0x200, 0x80),
    (0x2ff, 1),
    (0x6e0, 1),
    (0x800, 0x40),
    (0x11, 2),
    (0x4b56_4d00, 2),
    (0x4b56_4d00, 2),
    (0x4b56_4d00, 8),
    (0xc000_0080, 0x84),
    (0x4000_0000, 0x24),
    (0x4000_0070, 0x48),
    (0x4000_00f0, 0x2a),
];

fn msrs(rng: &mut Rng) -> Vec<u8> {
    let entries = rng.pick(&[1, 1, 1, 1, 1, 2, 3, 0, 255]);
    let mut bytes = count(rng, entries).to_le_bytes().to_vec();
    bytes.resize(8, 0);
    let (first, range) = rng.pick(&MSRS);
    let (start, data) = (rng.below(range), number(rng));
    for index in 0..entries as u64 {
        let index = first + ((start + index) % range) as u32;
        bytes.extend(bytes_of(&kvm_msr_entry {
            index,
            reserved: 0,
            data,
        }));
    }
    mutate(rng, &mut bytes[8..]);
    bytes
}
