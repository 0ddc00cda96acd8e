//! No thread of the client can truncate the files that slat maps, not even while slat is making them.

mod common;

#[test]
fn files_that_slat_maps_cannot_be_cut_while_they_are_made() {
    common::under_the_library("stores_do_not_fail");
}

mod client {
    /// One thread makes statistics descriptors, whose files slat maps and stores to. Another thread truncates
    /// every file that gets the number of the next descriptor. A store beyond the end of a file would end this
    /// program with SIGBUS.
    #[test]
    #[ignore = "runs under the library"]
    fn stores_do_not_fail() {
        use std::os::fd::AsRawFd;
        use std::sync::atomic::{AtomicBool, Ordering};
        const KVM_GET_STATS_FD: u64 = 0xaece;
        const ROUNDS: usize = 20_000;
        let vm = kvm_ioctls::Kvm::new().unwrap().create_vm().unwrap();
        // SAFETY: the calls take no pointers. The next descriptor gets the lowest free number.
        let next = unsafe {
            let next = libc::dup(2);
            libc::close(next);
            next
        };
        let done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !done.load(Ordering::Relaxed) {
                    // The call is made by number, which is the fastest way.
                    // SAFETY: `next` is an unused descriptor, or a descriptor that the loop below makes.
                    unsafe { libc::syscall(libc::SYS_ftruncate, next, 0) };
                }
            });
            let mut word = [0u8; 4];
            for _ in 0..ROUNDS {
                // SAFETY: the calls use descriptors of this test, and a live buffer. The creation of a descriptor may
                // fail cleanly.
                unsafe {
                    let stats = libc::ioctl(vm.as_raw_fd(), KVM_GET_STATS_FD, 0);
                    if stats >= 0 {
                        assert_eq!(libc::pread(stats, word.as_mut_ptr().cast(), 4, 8), 4);
                        assert_ne!(u32::from_le_bytes(word), 0, "statistics without entries");
                        libc::close(stats);
                    }
                }
            }
            done.store(true, Ordering::Relaxed);
        });
    }
}
