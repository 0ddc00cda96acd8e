//! The system calls that VMMs allow their vCPU threads.

use crate::filter::{ALL, Allowed, calls, requests, with};
use libc::*;
use slat_process::calls::{Call, Instead};

pub const KVM_RUN: u32 = 0xae80;
const KVM_CHECK_EXTENSION: u32 = 0xae03;
const KVM_IOEVENTFD: u32 = 0x4040_ae79;
const KVM_IRQFD: u32 = 0x4020_ae76;
const KVM_SET_GSI_ROUTING: u32 = 0x4008_ae6a;
const KVM_SET_USER_MEMORY_REGION: u32 = 0x4020_ae46;
const KVM_NMI: u32 = 0xae9a;

/// Returns Firecracker 1.17's list: the part `vcpu` of `resources/seccomp/x86_64-unknown-linux-musl.json`.
pub fn firecracker() -> Vec<Allowed> {
    let mut list = calls![
        SYS_exit,
        SYS_exit_group,
        SYS_write,
        SYS_open,
        SYS_close,
        SYS_eventfd2,
        SYS_io_uring_enter,
        SYS_epoll_ctl,
        SYS_fstat,
        SYS_brk,
        SYS_gettid,
        SYS_clock_gettime,
        SYS_mremap,
        SYS_munmap,
        SYS_rt_sigprocmask,
        SYS_rt_sigreturn,
        SYS_sigaltstack,
        SYS_sched_yield,
        SYS_sendmsg,
        SYS_restart_syscall,
    ]
    .to_vec();
    for operation in [
        FUTEX_WAIT,
        FUTEX_WAKE,
        FUTEX_WAIT | FUTEX_PRIVATE_FLAG,
        FUTEX_WAKE | FUTEX_PRIVATE_FLAG,
        FUTEX_WAIT_BITSET | FUTEX_PRIVATE_FLAG,
    ] {
        list.push(with(SYS_futex, &[(1, ALL, operation as u32)]));
    }
    list.extend([
        with(SYS_madvise, &[(2, ALL, MADV_DONTNEED as u32)]),
        with(
            SYS_mmap,
            &[(3, ALL, MAP_SHARED as u32), (2, PROT_EXEC as u32, 0)],
        ),
        with(
            SYS_mmap,
            &[
                (3, ALL, (MAP_ANONYMOUS | MAP_PRIVATE) as u32),
                (2, ALL, (PROT_READ | PROT_WRITE) as u32),
            ],
        ),
        with(SYS_rt_sigaction, &[(0, ALL, SIGABRT as u32)]),
        with(SYS_timerfd_settime, &[(1, ALL, 0)]),
        with(SYS_tkill, &[(1, ALL, SIGABRT as u32)]),
    ]);
    // The requests that read a vCPU's state for a snapshot are left out: this client makes none.
    list.extend(requests![
        KVM_RUN,
        KVM_SET_GSI_ROUTING,
        KVM_IRQFD,
        KVM_CHECK_EXTENSION
    ]);
    list
}

/// Returns cloud-hypervisor 53's list: `vcpu_thread_rules` and `common_thread_rules` of
/// `vmm/src/seccomp_filters.rs`, for KVM on x86-64.
pub fn cloud_hypervisor() -> Vec<Allowed> {
    let mut list = calls![
        SYS_brk,
        SYS_clock_gettime,
        SYS_clock_nanosleep,
        SYS_close,
        SYS_dup,
        SYS_exit,
        SYS_epoll_ctl,
        SYS_fcntl,
        SYS_fstat,
        SYS_fsync,
        SYS_futex,
        SYS_getcwd,
        SYS_getrandom,
        SYS_lseek,
        SYS_madvise,
        SYS_mmap,
        SYS_mprotect,
        SYS_mremap,
        SYS_munmap,
        SYS_nanosleep,
        SYS_newfstatat,
        SYS_open,
        SYS_pread64,
        SYS_pwrite64,
        SYS_pwritev2,
        SYS_readlink,
        SYS_recvfrom,
        SYS_recvmsg,
        SYS_rt_sigreturn,
        SYS_sched_yield,
        SYS_sendmsg,
        SYS_sendto,
        SYS_shutdown,
        SYS_sigaltstack,
        SYS_statx,
        SYS_unlink,
        SYS_writev,
        SYS_getpid,
        SYS_gettid,
        SYS_read,
        SYS_rt_sigaction,
        SYS_rt_sigprocmask,
        SYS_tgkill,
        SYS_tkill,
        SYS_write,
    ]
    .to_vec();
    list.push(with(
        SYS_fallocate,
        &[(1, ALL, (FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE) as u32)],
    ));
    list.extend(requests![
        KVM_CHECK_EXTENSION,
        KVM_IOEVENTFD,
        KVM_IRQFD,
        KVM_SET_GSI_ROUTING,
        KVM_SET_USER_MEMORY_REGION,
        KVM_RUN,
        KVM_NMI,
    ]);
    list
}

/// Returns the calls that slat needs, and those of the client itself.
pub fn needed() -> Vec<Allowed> {
    let mut list = requests![KVM_RUN, KVM_SET_GSI_ROUTING, KVM_IRQFD].to_vec();
    let calls = Call::ALL.iter().map(|call| call.entry());
    list.extend(
        (calls.filter(|entry| entry.instead == Instead::Nobody)).map(|entry| {
            let fixed = entry.arguments.iter();
            let arguments: Vec<_> = fixed
                .map(|(index, value)| (*index as u32, ALL, *value as u32))
                .collect();
            with(entry.number, &arguments)
        }),
    );
    list
}
