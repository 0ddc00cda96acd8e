//! KVM's descriptors look and behave like the kernel's. Every client here runs twice: under the library, and on the
//! machine's own KVM if that opens.

mod common;

use common::on_both;

on_both! {
    links_have_kvms_names
    a_link_is_cut_where_the_buffer_ends
    a_link_can_be_read_by_any_function
    stat_shows_the_kinds_of_files
    the_device_is_one_file
    status_flags_are_kvms
    reads_and_writes_are_refused_as_by_kvm
    seeks_move_nothing
    descriptors_are_polled_as_kvms
    what_is_no_device_cannot_be_opened_again
    a_closed_stream_leaves_nothing_behind
    the_device_stays_the_device_across_exec
}

mod client {
    use crate::common::{demand_slats, is_native};
    use std::ffi::{CStr, CString, c_char};
    use std::fs;
    use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
    use std::os::unix::fs::MetadataExt;

    const KVM_CREATE_VM: u64 = 0xae01;
    const KVM_CREATE_VCPU: u64 = 0xae41;
    const KVM_GET_STATS_FD: u64 = 0xaece;
    const KVM_CREATE_GUEST_MEMFD: u64 = 0xc040_aed4;
    /// The kernel's value: the C library's is 0.
    const O_LARGEFILE: i32 = match cfg!(target_arch = "x86_64") {
        true => 0o100_000,
        false => 0o400_000,
    };

    #[derive(Clone, Copy, Debug, PartialEq)]
    enum Kind {
        Device,
        Anonymous,
        Stats,
        GuestMemfd,
    }

    struct Descriptor {
        fd: OwnedFd,
        kind: Kind,
        link: &'static str,
    }

    impl Descriptor {
        fn fd(&self) -> RawFd {
            self.fd.as_raw_fd()
        }
    }

    /// Makes a descriptor of each kind; a guest_memfd only where the kernel supports it.
    fn all() -> Vec<Descriptor> {
        let mut all: Vec<Descriptor> = Vec::new();
        let mut add = |fd: i32, kind, link| {
            assert!(fd >= 0, "{link}: {}", std::io::Error::last_os_error());
            demand_slats(fd);
            // SAFETY: the descriptor was just made, and no other code owns it.
            let fd = unsafe { OwnedFd::from_raw_fd(fd) };
            all.push(Descriptor { fd, kind, link });
        };
        // SAFETY: the paths and structs that the calls use are live.
        unsafe {
            let kvm = libc::open(c"/dev/kvm".as_ptr(), libc::O_RDWR | libc::O_CLOEXEC);
            add(kvm, Kind::Device, "/dev/kvm");
            let vm = libc::ioctl(kvm, KVM_CREATE_VM, 0);
            add(vm, Kind::Anonymous, "anon_inode:kvm-vm");
            let stats = libc::ioctl(vm, KVM_GET_STATS_FD, 0);
            add(stats, Kind::Stats, "anon_inode:kvm-vm-stats");
            let vcpu = libc::ioctl(vm, KVM_CREATE_VCPU, 3);
            add(vcpu, Kind::Anonymous, "anon_inode:kvm-vcpu:3");
            let stats = libc::ioctl(vcpu, KVM_GET_STATS_FD, 0);
            add(stats, Kind::Stats, "anon_inode:kvm-vcpu-stats:3");
            let arguments = [0x5000u64, 0, 0, 0, 0, 0, 0, 0];
            let memory = libc::ioctl(vm, KVM_CREATE_GUEST_MEMFD, &arguments);
            if memory >= 0 || !is_native() {
                add(memory, Kind::GuestMemfd, "anon_inode:[kvm-gmem]");
            }
        }
        all
    }

    fn errno() -> i32 {
        std::io::Error::last_os_error().raw_os_error().unwrap()
    }

    /// Converts a call's result to a value or, for an error, to the negative errno.
    fn outcome(answer: impl TryInto<i64>) -> i64 {
        match answer.try_into().ok().unwrap() {
            -1 => -i64::from(errno()),
            answer => answer,
        }
    }

    #[test]
    #[ignore = "runs as a client"]
    fn links_have_kvms_names() {
        for descriptor in all() {
            let fd = descriptor.fd();
            // SAFETY: the call takes no pointer.
            let thread = unsafe { libc::syscall(libc::SYS_gettid) };
            for directory in [
                "/proc/self/fd".to_owned(),
                format!("/proc/{}/fd", std::process::id()),
                format!("/proc/self/task/{thread}/fd"),
                "/proc/thread-self/fd".to_owned(),
                "/dev/fd".to_owned(),
                "//proc/./self//fd".to_owned(),
                "/proc/self/../self/fd".to_owned(),
            ] {
                let link = fs::read_link(format!("{directory}/{fd}")).unwrap();
                assert_eq!(link.to_str(), Some(descriptor.link), "{directory}");
            }
            // lstat of the link itself shows a symbolic link.
            let link = fs::symlink_metadata(format!("/proc/self/fd/{fd}")).unwrap();
            assert!(link.file_type().is_symlink());
        }
        // The kernel itself reads a link of another process, or of a descriptor that is not KVM's.
        assert!(fs::read_link("/proc/self/fd/99999").is_err());
        let null = fs::File::open("/dev/null").unwrap();
        let link = fs::read_link(format!("/proc/self/fd/{}", null.as_raw_fd())).unwrap();
        assert_eq!(link.to_str(), Some("/dev/null"));
    }

    #[test]
    #[ignore = "runs as a client"]
    fn a_link_is_cut_where_the_buffer_ends() {
        for descriptor in all() {
            let path = CString::new(format!("/proc/self/fd/{}", descriptor.fd())).unwrap();
            let link = descriptor.link.as_bytes();
            let mut buffer = [0xff_u8; 64];
            for len in [1, 5, link.len() - 1, link.len(), link.len() + 1, 64] {
                buffer.fill(0xff);
                // SAFETY: the path is a C string, and the buffer is live.
                let written =
                    unsafe { libc::readlink(path.as_ptr(), buffer.as_mut_ptr().cast(), len) };
                let expected = len.min(link.len());
                assert_eq!(written, expected as isize);
                assert_eq!(buffer[..expected], link[..expected]);
                assert!(buffer[expected..].iter().all(|byte| *byte == 0xff));
            }
            // SAFETY: the kernel refuses both calls.
            unsafe {
                let none = libc::readlink(path.as_ptr(), buffer.as_mut_ptr().cast(), 0);
                assert_eq!(outcome(none), -i64::from(libc::EINVAL));
                let bad = libc::readlink(path.as_ptr(), 8 as *mut _, 64);
                assert_eq!(outcome(bad), -i64::from(libc::EFAULT));
            }
        }
        // The device itself is not a symbolic link, so readlink fails.
        // SAFETY: the path is a C string, and the buffer is live.
        let device = unsafe { libc::readlink(c"/dev/kvm".as_ptr(), [0; 8].as_mut_ptr(), 8) };
        assert_eq!(outcome(device), -i64::from(libc::EINVAL));
    }

    unsafe extern "C" {
        fn __readlink_chk(path: *const c_char, to: *mut c_char, len: usize, room: usize) -> isize;
        fn __readlinkat_chk(
            at: i32,
            path: *const c_char,
            to: *mut c_char,
            len: usize,
            room: usize,
        ) -> isize;
    }

    #[test]
    #[ignore = "runs as a client"]
    fn a_link_can_be_read_by_any_function() {
        let directory = fs::File::open("/proc/self/fd").unwrap();
        let at = directory.as_raw_fd();
        for descriptor in all() {
            let name = CString::new(descriptor.fd().to_string()).unwrap();
            let path = CString::new(format!("/proc/self/fd/{}", descriptor.fd())).unwrap();
            let (name, path) = (name.as_ptr(), path.as_ptr());
            let read = |function: &dyn Fn(*mut c_char) -> isize| {
                let mut buffer = [0 as c_char; 64];
                let written = function(buffer.as_mut_ptr());
                // SAFETY: the text ends with NUL, because the buffer is longer than any name.
                let text = unsafe { CStr::from_ptr(buffer.as_ptr()) };
                assert_eq!(written, text.to_bytes().len() as isize);
                assert_eq!(text.to_str(), Ok(descriptor.link));
            };
            // SAFETY: the paths are C strings, and the live buffers have 64 bytes.
            unsafe {
                read(&|to| libc::readlinkat(at, name, to, 64));
                read(&|to| libc::readlinkat(libc::AT_FDCWD, path, to, 64));
                read(&|to| __readlink_chk(path, to, 64, 64));
                read(&|to| __readlinkat_chk(at, name, to, 64, 64));
                #[cfg(target_arch = "x86_64")]
                read(&|to| libc::syscall(libc::SYS_readlink, path, to, 64) as isize);
                read(&|to| libc::syscall(libc::SYS_readlinkat, at, name, to, 64) as isize);
            }
        }
    }

    /// Mode, links, size, device number, device, inode.
    type Seen = (u32, libc::nlink_t, i64, u64, u64, u64);

    fn seen(stat: &libc::stat) -> Seen {
        (
            stat.st_mode,
            stat.st_nlink,
            stat.st_size,
            stat.st_rdev,
            stat.st_dev,
            stat.st_ino,
        )
    }

    unsafe extern "C" {
        fn __fxstat(version: i32, fd: i32, to: *mut libc::stat) -> i32;
        fn __fxstat64(version: i32, fd: i32, to: *mut libc::stat) -> i32;
        fn __fxstatat(
            version: i32,
            at: i32,
            path: *const c_char,
            to: *mut libc::stat,
            flags: i32,
        ) -> i32;
    }

    /// The version of `struct stat` that the architecture has.
    const VERSION: i32 = cfg!(target_arch = "x86_64") as i32;

    /// Returns the common result of all functions that take a descriptor; they must agree.
    fn stat_of(fd: RawFd) -> Seen {
        // SAFETY: the calls fill in live structs, and the paths are C strings.
        unsafe {
            let get = |function: &dyn Fn(*mut libc::stat) -> i64| {
                let mut stat: libc::stat = std::mem::zeroed();
                assert_eq!(function(&mut stat), 0, "{}", errno());
                seen(&stat)
            };
            let path = CString::new(format!("/proc/self/fd/{fd}")).unwrap();
            let path = path.as_ptr();
            let first = get(&|to| libc::fstat(fd, to).into());
            let empty = c"".as_ptr();
            let flags = libc::AT_EMPTY_PATH;
            let at = libc::AT_FDCWD;
            assert_eq!(get(&|to| libc::fstat64(fd, to.cast()).into()), first);
            assert_eq!(get(&|to| __fxstat(VERSION, fd, to).into()), first);
            assert_eq!(get(&|to| __fxstat64(VERSION, fd, to).into()), first);
            assert_eq!(get(&|to| libc::fstatat(fd, empty, to, flags).into()), first);
            assert_eq!(
                get(&|to| __fxstatat(VERSION, fd, empty, to, flags).into()),
                first
            );
            assert_eq!(get(&|to| libc::stat(path, to).into()), first);
            assert_eq!(get(&|to| libc::fstatat(at, path, to, 0).into()), first);
            assert_eq!(get(&|to| libc::syscall(libc::SYS_fstat, fd, to)), first);
            #[cfg(target_arch = "x86_64")]
            assert_eq!(get(&|to| libc::syscall(libc::SYS_stat, path, to)), first);
            assert_eq!(
                get(&|to| libc::syscall(libc::SYS_newfstatat, fd, empty, to, flags)),
                first
            );
            for by_number in [false, true] {
                let mut x: libc::statx = std::mem::zeroed();
                let mask = libc::STATX_BASIC_STATS;
                let answer = match by_number {
                    false => libc::statx(fd, empty, flags, mask, &mut x).into(),
                    true => libc::syscall(libc::SYS_statx, fd, empty, flags, mask, &mut x),
                };
                assert_eq!(answer, 0);
                assert_eq!(x.stx_mask & mask, mask);
                let rdev = libc::makedev(x.stx_rdev_major, x.stx_rdev_minor);
                let dev = libc::makedev(x.stx_dev_major, x.stx_dev_minor);
                let (mode, nlink) = (x.stx_mode.into(), x.stx_nlink as libc::nlink_t);
                let size = x.stx_size as i64;
                assert_eq!((mode, nlink, size, rdev, dev, x.stx_ino), first);
            }
            assert_eq!(libc::fstat(fd, 64 as *mut _), -1);
            assert_eq!(errno(), libc::EFAULT);
            first
        }
    }

    #[test]
    #[ignore = "runs as a client"]
    fn stat_shows_the_kinds_of_files() {
        // SAFETY: the call takes no pointer.
        let event = unsafe { OwnedFd::from_raw_fd(libc::eventfd(0, 0)) };
        let anonymous = stat_of(event.as_raw_fd());
        for descriptor in all() {
            let stat = stat_of(descriptor.fd());
            match descriptor.kind {
                Kind::Device => {
                    assert_eq!(stat.0 & libc::S_IFMT, libc::S_IFCHR);
                    assert_eq!((stat.1, stat.2, stat.3), (1, 0, libc::makedev(10, 232)));
                    if !is_native() {
                        assert_eq!(stat.0 & 0o7777, 0o666);
                    }
                }
                Kind::Anonymous | Kind::Stats => assert_eq!(stat, anonymous, "{}", descriptor.link),
                Kind::GuestMemfd => {
                    assert_eq!((stat.0, stat.1), (libc::S_IFREG | 0o600, 1));
                    assert_eq!((stat.2, stat.3), (0x5000, 0));
                    assert_ne!(stat.5, anonymous.5);
                }
            }
        }
    }

    #[test]
    #[ignore = "runs as a client"]
    fn the_device_is_one_file() {
        let file = |stat: &fs::Metadata| (stat.dev(), stat.ino(), stat.rdev(), stat.mode());
        let path = fs::metadata("/dev/kvm").unwrap();
        assert_eq!(
            file(&fs::symlink_metadata("/dev/kvm").unwrap()),
            file(&path)
        );
        let opened = fs::File::open("/dev/kvm").unwrap();
        assert_eq!(file(&opened.metadata().unwrap()), file(&path));
        let null = fs::metadata("/dev/null").unwrap();
        assert_eq!(path.dev(), null.dev());
        assert_ne!(path.ino(), null.ino());
    }

    #[test]
    #[ignore = "runs as a client"]
    fn status_flags_are_kvms() {
        for descriptor in all() {
            let expected = match descriptor.kind {
                Kind::Device | Kind::GuestMemfd => libc::O_RDWR | O_LARGEFILE,
                Kind::Anonymous => libc::O_RDWR,
                Kind::Stats => libc::O_RDONLY,
            };
            let fd = descriptor.fd();
            let close_on_exec = match descriptor.kind {
                Kind::GuestMemfd => 0,
                _ => libc::FD_CLOEXEC,
            };
            // SAFETY: the calls take no pointer.
            unsafe {
                assert_eq!(
                    libc::fcntl(fd, libc::F_GETFL),
                    expected,
                    "{}",
                    descriptor.link
                );
                assert_eq!(
                    libc::fcntl(fd, libc::F_GETFD),
                    close_on_exec,
                    "{}",
                    descriptor.link
                );
                let again = libc::dup(fd);
                assert_eq!(libc::fcntl(again, libc::F_GETFL), expected);
                libc::close(again);
                assert_eq!(libc::fcntl(fd, libc::F_GET_SEALS), -1);
                assert_eq!(errno(), libc::EINVAL, "it is no memfd");
            }
        }
    }

    #[test]
    #[ignore = "runs as a client"]
    fn reads_and_writes_are_refused_as_by_kvm() {
        for descriptor in all() {
            let fd = descriptor.fd();
            let mut bytes = [0u8; 8];
            let buffer = bytes.as_mut_ptr().cast::<libc::c_void>();
            let vector = libc::iovec {
                iov_base: buffer,
                iov_len: 8,
            };
            let vector = &raw const vector;
            // The expected results of calls at the descriptor's position, and at an offset.
            let einval = -i64::from(libc::EINVAL);
            let (read, write) = match descriptor.kind {
                Kind::Device => ([einval; 2], [einval; 2]),
                Kind::Anonymous | Kind::GuestMemfd => {
                    let both = [einval, -i64::from(libc::ESPIPE)];
                    (both, both)
                }
                Kind::Stats => ([8, 8], [-i64::from(libc::EBADF), -i64::from(libc::ESPIPE)]),
            };
            // SAFETY: the calls use a live buffer of 8 bytes, and an `iovec` that describes it.
            unsafe {
                let calls = [
                    ("read", outcome(libc::read(fd, buffer, 8)), read[0]),
                    ("readv", outcome(libc::readv(fd, vector, 1)), read[0]),
                    (
                        "preadv2 -1",
                        outcome(libc::preadv2(fd, vector, 1, -1, 0)),
                        read[0],
                    ),
                    ("pread", outcome(libc::pread(fd, buffer, 8, 0)), read[1]),
                    ("pread64", outcome(libc::pread64(fd, buffer, 8, 0)), read[1]),
                    ("preadv", outcome(libc::preadv(fd, vector, 1, 0)), read[1]),
                    (
                        "preadv2",
                        outcome(libc::preadv2(fd, vector, 1, 0, 0)),
                        read[1],
                    ),
                    ("pread -1", outcome(libc::pread(fd, buffer, 8, -1)), einval),
                    ("write", outcome(libc::write(fd, buffer, 8)), write[0]),
                    ("writev", outcome(libc::writev(fd, vector, 1)), write[0]),
                    (
                        "pwritev2 -1",
                        outcome(libc::pwritev2(fd, vector, 1, -1, 0)),
                        write[0],
                    ),
                    ("pwrite", outcome(libc::pwrite(fd, buffer, 8, 0)), write[1]),
                    (
                        "pwrite64",
                        outcome(libc::pwrite64(fd, buffer, 8, 0)),
                        write[1],
                    ),
                    (
                        "pwritev",
                        outcome(libc::pwritev(fd, vector, 1, 0)),
                        write[1],
                    ),
                    (
                        "pwritev2",
                        outcome(libc::pwritev2(fd, vector, 1, 0, 0)),
                        write[1],
                    ),
                    (
                        "pwrite -1",
                        outcome(libc::pwrite(fd, buffer, 8, -1)),
                        einval,
                    ),
                    (
                        "SYS_read",
                        outcome(libc::syscall(libc::SYS_read, fd, buffer, 8)),
                        read[0],
                    ),
                    (
                        "SYS_pread64",
                        outcome(libc::syscall(libc::SYS_pread64, fd, buffer, 8, 0)),
                        read[1],
                    ),
                    (
                        "SYS_write",
                        outcome(libc::syscall(libc::SYS_write, fd, buffer, 8)),
                        write[0],
                    ),
                    (
                        "SYS_writev",
                        outcome(libc::syscall(libc::SYS_writev, fd, vector, 1)),
                        write[0],
                    ),
                    (
                        "SYS_pwrite64",
                        outcome(libc::syscall(libc::SYS_pwrite64, fd, buffer, 8, 0)),
                        write[1],
                    ),
                ];
                for (call, answer, expected) in calls {
                    assert_eq!(answer, expected, "{call} {}", descriptor.link);
                }
            }
        }
        // The access mode is checked first.
        // SAFETY: the calls use only a live buffer.
        unsafe {
            for (mode, read, write) in [
                (libc::O_RDONLY, libc::EINVAL, libc::EBADF),
                (libc::O_WRONLY, libc::EBADF, libc::EINVAL),
            ] {
                let fd = libc::open(c"/dev/kvm".as_ptr(), mode);
                let mut byte = 0u8;
                let byte = (&raw mut byte).cast();
                assert_eq!(outcome(libc::read(fd, byte, 1)), -i64::from(read));
                assert_eq!(outcome(libc::write(fd, byte, 1)), -i64::from(write));
                libc::close(fd);
            }
        }
    }

    #[test]
    #[ignore = "runs as a client"]
    fn seeks_move_nothing() {
        for descriptor in all() {
            let fd = descriptor.fd();
            let seek = |offset: i64, whence: i32| {
                // SAFETY: the calls take no pointer.
                let (by_name, by_number) = unsafe {
                    let by_name = outcome(libc::lseek(fd, offset, whence));
                    let by_number = outcome(libc::syscall(libc::SYS_lseek, fd, offset, whence));
                    assert_eq!(outcome(libc::lseek64(fd, offset, whence)), by_name);
                    (by_name, by_number)
                };
                assert_eq!(by_name, by_number);
                by_name
            };
            let expected = match descriptor.kind {
                Kind::GuestMemfd => -i64::from(libc::ESPIPE),
                _ => 0,
            };
            for (offset, whence) in [
                (0, libc::SEEK_SET),
                (5, libc::SEEK_SET),
                (5, libc::SEEK_CUR),
                (0, libc::SEEK_END),
                (-1, libc::SEEK_SET),
                (7, libc::SEEK_DATA),
            ] {
                assert_eq!(seek(offset, whence), expected, "{}", descriptor.link);
            }
            assert_eq!(seek(0, 77), -i64::from(libc::EINVAL));
            if descriptor.kind == Kind::Stats {
                let mut byte = 0u8;
                // SAFETY: the buffer is live.
                unsafe { libc::read(fd, (&raw mut byte).cast(), 1) };
                assert_eq!(seek(0, libc::SEEK_SET), 1, "reads move the position");
            }
        }
    }

    #[test]
    #[ignore = "runs as a client"]
    fn descriptors_are_polled_as_kvms() {
        // SAFETY: the calls use live structs.
        unsafe {
            let epoll = OwnedFd::from_raw_fd(libc::epoll_create1(0));
            for descriptor in all() {
                // slat's descriptor is one on which the kernel allows no operation (`O_PATH`), so
                // poll returns POLLNVAL.
                if descriptor.kind == Kind::GuestMemfd && !is_native() {
                    continue;
                }
                let mut poll = libc::pollfd {
                    fd: descriptor.fd(),
                    events: libc::POLLIN | libc::POLLOUT | libc::POLLPRI,
                    revents: 0,
                };
                assert_eq!(libc::poll(&mut poll, 1, 0), 1);
                assert_eq!(
                    poll.revents,
                    libc::POLLIN | libc::POLLOUT,
                    "{}",
                    descriptor.link
                );
                let mut event = libc::epoll_event { events: 1, u64: 0 };
                let added = libc::epoll_ctl(
                    epoll.as_raw_fd(),
                    libc::EPOLL_CTL_ADD,
                    descriptor.fd(),
                    &mut event,
                );
                assert_eq!(
                    outcome(added),
                    -i64::from(libc::EPERM),
                    "{}",
                    descriptor.link
                );
            }
        }
    }

    #[test]
    #[ignore = "runs as a client"]
    fn what_is_no_device_cannot_be_opened_again() {
        for descriptor in all() {
            let path = CString::new(format!("/proc/self/fd/{}", descriptor.fd())).unwrap();
            let open = |flags| {
                // SAFETY: the path is a C string.
                outcome(unsafe { libc::open(path.as_ptr(), flags) })
            };
            assert_eq!(
                open(libc::O_RDONLY | libc::O_DIRECTORY),
                -i64::from(libc::ENOTDIR)
            );
            assert_eq!(
                open(libc::O_RDONLY | libc::O_NOFOLLOW),
                -i64::from(libc::ELOOP)
            );
            let again = open(libc::O_RDWR | libc::O_CLOEXEC);
            if descriptor.kind != Kind::Device {
                assert_eq!(again, -i64::from(libc::ENXIO), "{}", descriptor.link);
                continue;
            }
            // SAFETY: the descriptor was just opened, and no other code owns it.
            let again = unsafe { OwnedFd::from_raw_fd(again as i32) };
            // SAFETY: KVM_GET_API_VERSION takes no pointer.
            assert_eq!(unsafe { libc::ioctl(again.as_raw_fd(), 0xae00, 0) }, 12);
        }
    }

    #[test]
    #[ignore = "runs as a client"]
    fn a_closed_stream_leaves_nothing_behind() {
        // SAFETY: C strings, a live buffer, descriptors of our own.
        unsafe {
            let stream = libc::fopen(c"/dev/kvm".as_ptr(), c"r+e".as_ptr());
            assert!(!stream.is_null());
            let fd = libc::fileno(stream);
            assert_eq!(libc::fcntl(fd, libc::F_GETFD), libc::FD_CLOEXEC);
            assert_eq!(libc::ioctl(fd, 0xae00, 0), 12);
            assert_eq!(libc::fclose(stream), 0);
            // The pipe gets the number of the closed descriptor.
            let mut ends = [0; 2];
            assert_eq!(libc::pipe(ends.as_mut_ptr()), 0);
            assert_eq!(ends[0], fd);
            assert_eq!(libc::write(ends[1], b"x".as_ptr().cast(), 1), 1);
            let mut byte = 0u8;
            assert_eq!(libc::read(fd, (&raw mut byte).cast(), 1), 1);
        }
    }

    const HEIR: &str = "SLAT_TEST_INHERITED";

    #[test]
    #[ignore = "runs as a client"]
    fn the_device_stays_the_device_across_exec() {
        // SAFETY: the path is a C string.
        let fd = unsafe { OwnedFd::from_raw_fd(libc::open(c"/dev/kvm".as_ptr(), libc::O_RDWR)) };
        let output = std::process::Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "client::heir", "--ignored", "--nocapture"])
            .env(HEIR, fd.as_raw_fd().to_string())
            .output()
            .unwrap();
        let text = String::from_utf8_lossy(&output.stdout).into_owned()
            + &String::from_utf8_lossy(&output.stderr);
        assert!(
            output.status.success() && text.contains("1 passed"),
            "{text}"
        );
    }

    #[test]
    #[ignore = "runs as a client's child"]
    fn heir() {
        let Ok(fd) = std::env::var(HEIR) else { return };
        let fd: RawFd = fd.parse().unwrap();
        demand_slats(fd);
        // The loop body runs before and after the first use of KVM.
        for _ in 0..2 {
            let link = fs::read_link(format!("/proc/self/fd/{fd}")).unwrap();
            assert_eq!(link.to_str(), Some("/dev/kvm"));
            let path = fs::metadata("/dev/kvm").unwrap();
            let (mode, _, _, rdev, dev, inode) = stat_of_descriptor(fd);
            assert_eq!((mode, rdev), (path.mode(), libc::makedev(10, 232)));
            assert_eq!((dev, inode), (path.dev(), path.ino()));
            // SAFETY: KVM_GET_API_VERSION takes no pointer.
            assert_eq!(unsafe { libc::ioctl(fd, 0xae00, 0) }, 12);
        }
    }

    /// Returns the `stat` of a descriptor. Asserts that fstat and statx return the same values.
    fn stat_of_descriptor(fd: RawFd) -> Seen {
        // SAFETY: the calls fill in live structs.
        unsafe {
            let mut stat: libc::stat = std::mem::zeroed();
            assert_eq!(libc::fstat(fd, &mut stat), 0);
            let mut x: libc::statx = std::mem::zeroed();
            let mask = libc::STATX_BASIC_STATS;
            assert_eq!(
                libc::statx(fd, c"".as_ptr(), libc::AT_EMPTY_PATH, mask, &mut x),
                0
            );
            assert_eq!(
                (u32::from(x.stx_mode), x.stx_ino),
                (stat.st_mode, stat.st_ino)
            );
            let mut at: libc::stat = std::mem::zeroed();
            assert_eq!(
                libc::fstatat(fd, c"".as_ptr(), &mut at, libc::AT_EMPTY_PATH),
                0
            );
            assert_eq!(seen(&at), seen(&stat));
            seen(&stat)
        }
    }
}
