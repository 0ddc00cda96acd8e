//! Tests VMMs that use Landlock to give up the right to open files, as uhyve does: rules for `/dev/kvm` are accepted,
//! and VMs work afterwards.
#![cfg(target_arch = "x86_64")]

mod common;

use common::on_both;

on_both! {
    a_vm_works_after_the_program_has_restricted_itself
}

mod client {
    use crate::common::demand_slats;
    use crate::common::guest::guest;
    use kvm_ioctls::VcpuExit;
    use std::fs::File;
    use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

    /// `struct landlock_ruleset_attr` of the first version.
    #[repr(C)]
    struct Ruleset {
        handled_access_fs: u64,
    }

    /// `struct landlock_path_beneath_attr`.
    #[repr(C, packed)]
    struct PathBeneath {
        allowed_access: u64,
        parent_fd: i32,
    }

    const PATH_BENEATH: i32 = 1;
    const WRITE_FILE: u64 = 1 << 1;
    const READ_FILE: u64 = 1 << 2;
    /// All rights of Landlock's first version.
    const EVERYTHING: u64 = (1 << 13) - 1;

    /// Gives up all rights except those to read and write `/dev/kvm`. Returns `false` if the kernel has no Landlock.
    fn restrict() -> bool {
        let all = Ruleset {
            handled_access_fs: EVERYTHING,
        };
        // SAFETY: the structs are live, and the paths end with 0.
        unsafe {
            let rules = libc::syscall(libc::SYS_landlock_create_ruleset, &raw const all, 8, 0);
            if rules < 0 {
                return false;
            }
            let rules = OwnedFd::from_raw_fd(rules as i32);
            let device = libc::open(c"/dev/kvm".as_ptr(), libc::O_PATH | libc::O_CLOEXEC);
            assert!(device >= 0);
            let device = OwnedFd::from_raw_fd(device);
            // The descriptor is checked now, because the program that checks descriptors cannot be started after the
            // restriction.
            demand_slats(device.as_raw_fd());
            let beneath = PathBeneath {
                allowed_access: READ_FILE | WRITE_FILE,
                parent_fd: device.as_raw_fd(),
            };
            let add = |rule: i32, flags: i32| {
                let rule = libc::syscall(
                    libc::SYS_landlock_add_rule,
                    rules.as_raw_fd(),
                    rule,
                    &raw const beneath,
                    flags,
                );
                match rule {
                    0 => Ok(()),
                    _ => Err(std::io::Error::last_os_error().raw_os_error()),
                }
            };
            assert_eq!(add(PATH_BENEATH, 0), Ok(()));
            assert_eq!(add(PATH_BENEATH, 1), Err(Some(libc::EINVAL)));
            assert_eq!(add(77, 0), Err(Some(libc::EINVAL)));
            assert_eq!(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
            let restricted = libc::syscall(libc::SYS_landlock_restrict_self, rules.as_raw_fd(), 0);
            assert_eq!(restricted, 0);
        }
        true
    }

    #[test]
    #[ignore = "a client"]
    fn a_vm_works_after_the_program_has_restricted_itself() {
        if !restrict() {
            return eprintln!("skipped: no Landlock");
        }
        assert!(File::open("/etc/passwd").is_err());
        // OUT 0x10, AL; HLT.
        let (_vm, mut vcpu, _) = guest(&[0xe6, 0x10, 0xf4]);
        assert!(matches!(vcpu.run(), Ok(VcpuExit::IoOut(0x10, _))));
        assert!(matches!(vcpu.run(), Ok(VcpuExit::Hlt)));
    }
}
