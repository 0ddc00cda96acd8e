//! Checks the signatures of the methods of kvm-ioctls, in both crates: this file compiles if programs for kvm-ioctls
//! do.
#![cfg(target_arch = "x86_64")]

use kvm_bindings::*;
use std::ffi::{CStr, CString, c_int, c_ulong};
use std::fmt::Debug;
use std::num::NonZeroUsize;
use std::os::fd::{AsRawFd, FromRawFd, RawFd};
use vmm_sys_util::eventfd::EventFd;

/// Checks the type of each method, for both crates. Generic methods are listed with their type arguments.
macro_rules! signatures {
    ($($receiver:ident { $($method:ident $(::<$($parameter:ty),*>)?: $signature:ty,)* })*) => {
        fn of_kvm_ioctls() {
            use kvm_ioctls::*;
            $($(let _: $signature = $receiver::$method$(::<$($parameter),*>)?;)*)*
        }

        fn of_slat_kvm() {
            use slat_kvm::*;
            $($(let _: $signature = $receiver::$method$(::<$($parameter),*>)?;)*)*
        }
    };
}

type Result<T> = std::result::Result<T, vmm_sys_util::errno::Error>;

signatures! {
    Kvm {
        new: fn() -> Result<Kvm>,
        new_with_path::<CString>: fn(CString) -> Result<Kvm>,
        new_with_path::<&CStr>: fn(&'static CStr) -> Result<Kvm>,
        open_with_cloexec: fn(bool) -> Result<RawFd>,
        open_with_cloexec_at::<&CString>: fn(&'static CString, bool) -> Result<RawFd>,
        from_raw_fd: unsafe fn(RawFd) -> Kvm,
        as_raw_fd: fn(&Kvm) -> RawFd,
        get_api_version: fn(&Kvm) -> i32,
        check_extension_raw: fn(&Kvm, c_ulong) -> i32,
        check_extension_int: fn(&Kvm, Cap) -> i32,
        check_extension: fn(&Kvm, Cap) -> bool,
        get_vcpu_mmap_size: fn(&Kvm) -> Result<usize>,
        get_nr_vcpus: fn(&Kvm) -> usize,
        get_nr_memslots: fn(&Kvm) -> usize,
        get_max_vcpus: fn(&Kvm) -> usize,
        get_max_vcpu_id: fn(&Kvm) -> usize,
        get_emulated_cpuid: fn(&Kvm, usize) -> Result<CpuId>,
        get_supported_cpuid: fn(&Kvm, usize) -> Result<CpuId>,
        get_msr_index_list: fn(&Kvm) -> Result<MsrList>,
        get_msr_feature_index_list: fn(&Kvm) -> Result<MsrList>,
        get_msrs: fn(&Kvm, &mut Msrs) -> Result<usize>,
        create_vm: fn(&Kvm) -> Result<VmFd>,
        create_vm_with_type: fn(&Kvm, u64) -> Result<VmFd>,
        create_vmfd_from_rawfd: unsafe fn(&Kvm, RawFd) -> Result<VmFd>,
    }
    VmFd {
        as_raw_fd: fn(&VmFd) -> RawFd,
        set_user_memory_region: unsafe fn(&VmFd, kvm_userspace_memory_region) -> Result<()>,
        set_user_memory_region2: unsafe fn(&VmFd, kvm_userspace_memory_region2) -> Result<()>,
        set_tss_address: fn(&VmFd, usize) -> Result<()>,
        set_identity_map_address: fn(&VmFd, u64) -> Result<()>,
        create_irq_chip: fn(&VmFd) -> Result<()>,
        get_irqchip: fn(&VmFd, &mut kvm_irqchip) -> Result<()>,
        set_irqchip: fn(&VmFd, &kvm_irqchip) -> Result<()>,
        create_pit2: fn(&VmFd, kvm_pit_config) -> Result<()>,
        get_pit2: fn(&VmFd) -> Result<kvm_pit_state2>,
        set_pit2: fn(&VmFd, &kvm_pit_state2) -> Result<()>,
        get_clock: fn(&VmFd) -> Result<kvm_clock_data>,
        set_clock: fn(&VmFd, &kvm_clock_data) -> Result<()>,
        set_msr_filter_unchecked: unsafe fn(&VmFd, &kvm_msr_filter) -> Result<()>,
        set_msr_filter: fn(&VmFd, MsrFilterDefaultAction, &[MsrFilterRange<'_>]) -> Result<()>,
        signal_msi: fn(&VmFd, kvm_msi) -> Result<c_int>,
        set_gsi_routing: fn(&VmFd, &KvmIrqRouting) -> Result<()>,
        register_ioevent::<u32>: fn(&VmFd, &EventFd, &IoEventAddress, u32) -> Result<()>,
        register_ioevent::<NoDatamatch>: fn(&VmFd, &EventFd, &IoEventAddress, NoDatamatch) -> Result<()>,
        unregister_ioevent::<u32>: fn(&VmFd, &EventFd, &IoEventAddress, u32) -> Result<()>,
        get_dirty_log: fn(&VmFd, u32, usize) -> Result<Vec<u64>>,
        register_irqfd: fn(&VmFd, &EventFd, u32) -> Result<()>,
        register_irqfd_with_resample: fn(&VmFd, &EventFd, &EventFd, u32) -> Result<()>,
        unregister_irqfd: fn(&VmFd, &EventFd, u32) -> Result<()>,
        set_irq_line: fn(&VmFd, u32, bool) -> Result<()>,
        create_vcpu: fn(&VmFd, u64) -> Result<VcpuFd>,
        create_vcpu_from_rawfd: unsafe fn(&VmFd, RawFd) -> Result<VcpuFd>,
        create_device: fn(&VmFd, &mut kvm_create_device) -> Result<DeviceFd>,
        enable_cap: fn(&VmFd, &kvm_enable_cap) -> Result<()>,
        run_size: fn(&VmFd) -> usize,
        check_extension_int: fn(&VmFd, Cap) -> i32,
        check_extension_raw: fn(&VmFd, c_ulong) -> i32,
        check_extension: fn(&VmFd, Cap) -> bool,
        create_guest_memfd: fn(&VmFd, kvm_create_guest_memfd) -> Result<RawFd>,
        set_memory_attributes: fn(&VmFd, kvm_memory_attributes) -> Result<()>,
        encrypt_op::<u64>: unsafe fn(&VmFd, *mut u64) -> Result<()>,
        encrypt_op_sev: fn(&VmFd, &mut kvm_sev_cmd) -> Result<()>,
        register_enc_memory_region: fn(&VmFd, &kvm_enc_region) -> Result<()>,
        unregister_enc_memory_region: fn(&VmFd, &kvm_enc_region) -> Result<()>,
        register_coalesced_mmio: fn(&VmFd, IoEventAddress, u32) -> Result<()>,
        unregister_coalesced_mmio: fn(&VmFd, IoEventAddress, u32) -> Result<()>,
    }
    VcpuFd {
        as_raw_fd: fn(&VcpuFd) -> RawFd,
        get_regs: fn(&VcpuFd) -> Result<kvm_regs>,
        set_regs: fn(&VcpuFd, &kvm_regs) -> Result<()>,
        get_sregs: fn(&VcpuFd) -> Result<kvm_sregs>,
        set_sregs: fn(&VcpuFd, &kvm_sregs) -> Result<()>,
        get_fpu: fn(&VcpuFd) -> Result<kvm_fpu>,
        set_fpu: fn(&VcpuFd, &kvm_fpu) -> Result<()>,
        set_cpuid2: fn(&VcpuFd, &CpuId) -> Result<()>,
        get_cpuid2: fn(&VcpuFd, usize) -> Result<CpuId>,
        enable_cap: fn(&VcpuFd, &kvm_enable_cap) -> Result<()>,
        get_lapic: fn(&VcpuFd) -> Result<kvm_lapic_state>,
        set_lapic: fn(&VcpuFd, &kvm_lapic_state) -> Result<()>,
        get_msrs: fn(&VcpuFd, &mut Msrs) -> Result<usize>,
        set_msrs: fn(&VcpuFd, &Msrs) -> Result<usize>,
        get_mp_state: fn(&VcpuFd) -> Result<kvm_mp_state>,
        set_mp_state: fn(&VcpuFd, kvm_mp_state) -> Result<()>,
        get_xsave: fn(&VcpuFd) -> Result<kvm_xsave>,
        get_xsave2: unsafe fn(&VcpuFd, &mut Xsave) -> Result<()>,
        set_xsave: unsafe fn(&VcpuFd, &kvm_xsave) -> Result<()>,
        set_xsave2: unsafe fn(&VcpuFd, &Xsave) -> Result<()>,
        get_xcrs: fn(&VcpuFd) -> Result<kvm_xcrs>,
        set_xcrs: fn(&VcpuFd, &kvm_xcrs) -> Result<()>,
        get_debug_regs: fn(&VcpuFd) -> Result<kvm_debugregs>,
        set_debug_regs: fn(&VcpuFd, &kvm_debugregs) -> Result<()>,
        get_vcpu_events: fn(&VcpuFd) -> Result<kvm_vcpu_events>,
        set_vcpu_events: fn(&VcpuFd, &kvm_vcpu_events) -> Result<()>,
        set_guest_debug: fn(&VcpuFd, &kvm_guest_debug) -> Result<()>,
        set_one_reg: fn(&VcpuFd, u64, &[u8]) -> Result<usize>,
        get_one_reg: fn(&VcpuFd, u64, &mut [u8]) -> Result<usize>,
        kvmclock_ctrl: fn(&VcpuFd) -> Result<()>,
        run: for<'a> fn(&'a mut VcpuFd) -> Result<VcpuExit<'a>>,
        get_kvm_run: for<'a> fn(&'a mut VcpuFd) -> &'a mut kvm_run,
        set_kvm_immediate_exit: fn(&mut VcpuFd, u8),
        get_tsc_khz: fn(&VcpuFd) -> Result<u32>,
        set_tsc_khz: fn(&VcpuFd, u32) -> Result<()>,
        translate_gva: fn(&VcpuFd, u64) -> Result<kvm_translation>,
        set_sync_valid_reg: fn(&mut VcpuFd, SyncReg),
        set_sync_dirty_reg: fn(&mut VcpuFd, SyncReg),
        clear_sync_valid_reg: fn(&mut VcpuFd, SyncReg),
        clear_sync_dirty_reg: fn(&mut VcpuFd, SyncReg),
        sync_regs: fn(&VcpuFd) -> kvm_sync_regs,
        sync_regs_mut: for<'a> fn(&'a mut VcpuFd) -> &'a mut kvm_sync_regs,
        smi: fn(&VcpuFd) -> Result<()>,
        nested_state: fn(&VcpuFd, &mut KvmNestedStateBuffer) -> Result<Option<NonZeroUsize>>,
        set_nested_state: fn(&VcpuFd, &KvmNestedStateBuffer) -> Result<()>,
        nmi: fn(&VcpuFd) -> Result<()>,
        map_coalesced_mmio_ring: fn(&mut VcpuFd) -> Result<()>,
        coalesced_mmio_read: fn(&mut VcpuFd) -> Result<Option<kvm_coalesced_mmio>>,
    }
    DeviceFd {
        as_raw_fd: fn(&DeviceFd) -> RawFd,
        from_raw_fd: unsafe fn(RawFd) -> DeviceFd,
        has_device_attr: fn(&DeviceFd, &kvm_device_attr) -> Result<()>,
        set_device_attr: fn(&DeviceFd, &kvm_device_attr) -> Result<()>,
        get_device_attr: unsafe fn(&DeviceFd, &mut kvm_device_attr) -> Result<()>,
    }
    KvmRunWrapper {
        mmap_from_fd::<VcpuFd>: fn(&VcpuFd, usize) -> Result<KvmRunWrapper>,
        as_mut_ref: for<'a> fn(&'a mut KvmRunWrapper) -> &'a mut kvm_run,
    }
}

/// Checks the traits that programs need: to share the types between threads, and to print them.
fn traits<T: Send + Sync + Debug>() {}

#[test]
fn the_methods_of_kvm_ioctls_are_there_with_their_types() {
    of_kvm_ioctls();
    of_slat_kvm();
    traits::<(
        slat_kvm::Kvm,
        slat_kvm::VmFd,
        slat_kvm::VcpuFd,
        slat_kvm::DeviceFd,
    )>();
    traits::<(
        kvm_ioctls::Kvm,
        kvm_ioctls::VmFd,
        kvm_ioctls::VcpuFd,
        kvm_ioctls::DeviceFd,
    )>();
    assert_eq!(slat_kvm::reg_size(KVM_REG_SIZE_U64), 8);
}
