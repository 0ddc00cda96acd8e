use std::os::fd::AsRawFd;

use rustix::fs::{Mode, OFlags, open};

fn main() {
    let device = open("/dev/kvm", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty()).expect("open");
    // SAFETY: plain requests without an argument.
    let (version, vm) = unsafe {
        (
            libc::ioctl(device.as_raw_fd(), 0xae00, 0),
            libc::ioctl(device.as_raw_fd(), 0xae01, 0),
        )
    };
    assert!(version == 12 && vm >= 0, "{version} {vm}");
}
