//! `/dev/kvm` opens like a device, in any spelling of its path. Every client here runs twice: under the library, and on
//! the machine's own KVM if that opens.

mod common;

use common::on_both;

on_both! {
    any_spelling_opens_the_device
    any_spelling_can_be_asked_about
    relative_paths_begin_where_the_call_says
    flags_do_what_they_do_to_a_device
    a_path_descriptor_only_names_the_device
    openat2_resolves_as_the_kernel_does
    every_function_opens
    bad_pointers_are_the_kernels_to_refuse
    parameters_open_by_any_spelling
}

#[test]
fn owner_mode_and_attributes_can_be_asked_for_and_set() {
    common::under_the_library("owner_mode_and_attributes");
}

// The text differs from the kernel's on x86 alone.
#[cfg(target_arch = "x86_64")]
#[test]
fn cpuinfo_opens_as_the_file_that_slat_run_has_written() {
    common::under_the_library("cpuinfo");
}

#[test]
fn a_handler_may_open_files_at_any_time() {
    common::under_the_library("a_handler_opens_files");
}

mod client {
    use crate::common::{demand_slats, is_native};
    use std::ffi::{CString, c_char};
    use std::fs;
    use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
    use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt, symlink};
    use std::path::PathBuf;

    const KVM_GET_API_VERSION: u64 = 0xae00;
    /// A parameter of KVM's module that slat shows, its rights, and the kernel's O_LARGEFILE (the C library's is 0).
    const PARAMETER: &str = match IS_X86 {
        true => "nx_huge_pages_recovery_ratio",
        false => "halt_poll_ns",
    };
    const RIGHTS: u32 = match IS_X86 {
        true => 0o644,
        false => 0o444,
    };
    const O_LARGEFILE: i32 = match IS_X86 {
        true => 0o100_000,
        false => 0o400_000,
    };
    const IS_X86: bool = cfg!(target_arch = "x86_64");

    /// Makes another program read `/proc/cpuinfo`, because slat reads the variable only at a program's start.
    #[cfg(target_arch = "x86_64")]
    #[test]
    #[ignore = "runs as a client"]
    fn cpuinfo() {
        if let Err(error) = std::process::Command::new("python3").arg("-V").output() {
            return eprintln!("skipped: python3 does not run here: {error}");
        }
        let file = std::env::temp_dir().join(format!("slat-cpuinfo-{}", std::process::id()));
        let script = "import os, ctypes, struct
c = ctypes.CDLL(None, use_errno=True)
c.fopen.restype = ctypes.c_void_p
c.fgetc.argtypes = c.fileno.argtypes = [ctypes.c_void_p]
fopen = lambda path: chr(c.fgetc(c.fopen(path, b'r')))
by_number = lambda path: os.fdopen(c.syscall(257, -100, path, 0)).read()
print(open('/proc/cpuinfo').read(), fopen(b'/proc/cpuinfo'), by_number(b'/proc/cpuinfo'))
print(open('/proc/./cpuinfo').read()[:9], os.access('/proc/cpuinfo', os.R_OK), os.path.realpath('/proc/cpuinfo'))
print(c.open(b'/proc/cpuinfo/', 0), ctypes.get_errno(), oct(os.stat('/proc/cpuinfo').st_mode))
fd, bytes = os.open('/proc/cpuinfo', 0), [ctypes.create_string_buffer(256) for _ in range(2)]
c.statx(fd, b'', 0x1000, 0x7ff, bytes[0]), c.statx(-100, b'/proc/cpuinfo', 0, 0x7ff, bytes[1])
looks = [x[28:48] + x[136:144] for x in bytes]
print(os.path.samestat(os.stat('/proc/cpuinfo'), os.fstat(fd)), looks[0] == looks[1])
class Program(ctypes.Structure): _fields_ = [('len', ctypes.c_ushort), ('filter', ctypes.c_char_p)]
# Kills the process at dup, dup2, dup3, fstat, newfstatat and statx.
one = lambda code, yes, k: struct.pack('<HBBI', code, yes, 0, k)
kills = [one(0x15, 6 - i, number) for i, number in enumerate((32, 33, 292, 5, 262, 332))]
program = Program(9, one(0x20, 0, 0) + b''.join(kills) + one(6, 0, 0x7fff0000) + one(6, 0, 0x80000000))
text = ctypes.create_string_buffer(9)
assert c.prctl(38, 1, 0, 0, 0) == 0 and c.prctl(22, 2, ctypes.byref(program)) == 0
print(os.read(c.open(b'/proc/cpuinfo', 0), 9), c.read(c.fileno(c.fopen(b'/proc/cpuinfo', b'r')), text, 9), text.raw, flush=True)
os._exit(0)";
        let run = || {
            let mut python = std::process::Command::new("python3");
            python.args(["-c", script]).env("SLAT_CPUINFO", &file);
            String::from_utf8(python.output().unwrap().stdout).unwrap()
        };
        let rest = "processor True /proc/cpuinfo\n-1 20 0o100444\nTrue True\n";
        fs::write(&file, "written").unwrap();
        let filtered = "b'written' 7 b'written\\x00\\x00'\n";
        assert_eq!(run(), format!("written w written\n{rest}{filtered}"));
        // If the file does not exist, programs read the kernel's file.
        fs::remove_file(&file).unwrap();
        let filtered = "b'processor' 9 b'processor'\n";
        assert!(run().starts_with("processor") && run().ends_with(&format!("{rest}{filtered}")));
    }

    /// Does what libvirt does with a device that libvirt offers to a guest. The machine may have the device or not.
    #[test]
    #[ignore = "runs as a client"]
    fn owner_mode_and_attributes() {
        let before = fs::metadata("/dev/kvm").unwrap().mode();
        for path in [
            "/dev/kvm",
            &format!("/sys/module/kvm/parameters/{PARAMETER}"),
        ] {
            let path = CString::new(path).unwrap();
            let path = path.as_ptr();
            let list = c"system.posix_acl_access".as_ptr();
            let to = std::ptr::null_mut();
            // SAFETY: the paths are C strings, and no buffer is given.
            unsafe {
                let may = if libc::geteuid() == 0 { 0 } else { libc::EPERM };
                let result = |returned| if returned == 0 { 0 } else { errno() };
                assert_eq!(libc::getxattr(path, list, to, 0), -1);
                assert_eq!(errno(), libc::EOPNOTSUPP);
                assert_eq!(libc::lgetxattr(path, list, to, 0), -1);
                assert_eq!(libc::listxattr(path, to.cast(), 0), 0);
                assert_eq!(libc::lsetxattr(path, list, to, 0, 0), -1);
                assert_eq!(errno(), libc::EOPNOTSUPP);
                assert_eq!(result(libc::lchown(path, 0, 1)), may);
                assert_eq!(result(libc::chown(path, u32::MAX, u32::MAX)), 0);
                assert_eq!(result(libc::chmod(path, 0o600)), may);
                let chmod = libc::syscall(libc::SYS_fchmodat, libc::AT_FDCWD, path, 0o600);
                assert_eq!(result(chmod as i32), may);
            }
        }
        // SAFETY: the path is a C string.
        assert_eq!(unsafe { libc::chown(c"/dev/kvm/".as_ptr(), 0, 0) }, -1);
        assert_eq!(errno(), libc::ENOTDIR);
        assert_eq!(fs::metadata("/dev/kvm").unwrap().mode(), before);
        // The kernel serves calls about other files.
        assert_eq!(fs::metadata("/dev/null").unwrap().uid(), 0);
        // SAFETY: the paths are C strings.
        let none = unsafe { libc::chmod(c"/no/kvm".as_ptr(), 0o600) };
        assert_eq!((none, errno()), (-1, libc::ENOENT));
    }

    fn errno() -> i32 {
        std::io::Error::last_os_error().raw_os_error().unwrap()
    }

    /// Checks that a descriptor is KVM's. Returns the errno if it was not opened. Closes it.
    fn is_kvm(fd: i32) -> Result<(), i32> {
        if fd < 0 {
            return Err(errno());
        }
        // SAFETY: the descriptor was just opened, and the request has no argument.
        unsafe {
            let fd = OwnedFd::from_raw_fd(fd);
            demand_slats(fd.as_raw_fd());
            match libc::ioctl(fd.as_raw_fd(), KVM_GET_API_VERSION, 0) {
                12 => Ok(()),
                _ => Err(errno()),
            }
        }
    }

    fn open_at(directory: i32, path: &str, flags: i32) -> i32 {
        let path = CString::new(path).unwrap();
        // SAFETY: the path is a C string.
        unsafe { libc::openat(directory, path.as_ptr(), flags, 0o600) }
    }

    fn open(path: &str, flags: i32) -> Result<(), i32> {
        is_kvm(open_at(libc::AT_FDCWD, path, flags))
    }

    /// A directory of this test, with a link to /dev and one to the device.
    struct Links(PathBuf);

    impl Links {
        fn new(name: &str) -> Self {
            let name = format!("{name}-{}", std::process::id());
            let path = std::env::temp_dir().join(format!("slat-{name}"));
            fs::create_dir_all(&path).unwrap();
            symlink("/dev", path.join("devices")).unwrap();
            symlink("/tmp", path.join("elsewhere")).unwrap();
            Links(path)
        }

        fn at(&self, path: &str) -> String {
            format!("{}/{path}", self.0.display())
        }
    }

    impl Drop for Links {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    /// Returns paths of the device, and other paths, each with the errno of opening it.
    fn spellings(links: &Links) -> (Vec<String>, Vec<(String, i32)>) {
        let device = [
            "/dev/kvm",
            "//dev/kvm",
            "/dev//kvm",
            "/dev/./kvm",
            "/./dev/kvm",
            "/dev/../dev/kvm",
            "/proc/../dev/./kvm",
            "/proc/self/root/dev/kvm",
        ];
        let mut device: Vec<_> = device.map(str::to_owned).to_vec();
        device.push(links.at("devices/kvm"));
        device.push(links.at("devices/../dev/kvm"));
        let long = format!("/{}dev/kvm", "./".repeat(2000));
        assert!(long.len() < 4096);
        device.push(long);
        let none = [
            ("/dev/kvm/", libc::ENOTDIR),
            ("/dev//kvm//", libc::ENOTDIR),
            ("/kvm", libc::ENOENT),
            ("/dev/kvm2", libc::ENOENT),
            ("/dev/xkvm", libc::ENOENT),
            ("/proc/kvm", libc::ENOENT),
            ("/dev/no-such-directory/kvm", libc::ENOENT),
            ("/dev/no-such-directory/../kvm", libc::ENOENT),
            ("/dev/null/kvm", libc::ENOTDIR),
            ("/dev/null/../kvm", libc::ENOTDIR),
            ("kvm", libc::ENOENT),
            ("dev/kvm", libc::ENOENT),
            ("", libc::ENOENT),
        ];
        let mut none: Vec<_> = none.map(|(path, errno)| (path.to_owned(), errno)).to_vec();
        none.push((links.at("elsewhere/kvm"), libc::ENOENT));
        none.push((format!("{}/dev/kvm", "/".repeat(4096)), libc::ENAMETOOLONG));
        (device, none)
    }

    #[test]
    #[ignore = "runs as a client"]
    fn any_spelling_opens_the_device() {
        let links = Links::new("opens");
        let (device, none) = spellings(&links);
        for path in device {
            assert_eq!(open(&path, libc::O_RDWR), Ok(()), "{path}");
        }
        for (path, errno) in none {
            assert_eq!(open(&path, libc::O_RDWR), Err(errno), "{path}");
        }
    }

    #[test]
    #[ignore = "runs as a client"]
    fn any_spelling_can_be_asked_about() {
        let links = Links::new("asked");
        let (device, none) = spellings(&links);
        let access = |path: &str, mode| {
            let path = CString::new(path).unwrap();
            // SAFETY: the paths are C strings.
            unsafe {
                let by_name = libc::access(path.as_ptr(), mode);
                let by_name = if by_name == 0 { 0 } else { errno() };
                let by_number =
                    libc::syscall(libc::SYS_faccessat, libc::AT_FDCWD, path.as_ptr(), mode);
                assert_eq!(if by_number == 0 { 0 } else { errno() }, by_name);
                by_name
            }
        };
        let inode = fs::metadata("/dev/kvm").unwrap().ino();
        for path in device {
            let stat = fs::metadata(&path).unwrap();
            assert!(stat.file_type().is_char_device(), "{path}");
            assert_eq!((stat.rdev(), stat.ino()), (libc::makedev(10, 232), inode));
            assert_eq!(fs::symlink_metadata(&path).unwrap().ino(), inode);
            let canonical = fs::canonicalize(&path).unwrap();
            assert_eq!(canonical.to_str(), Some("/dev/kvm"), "{path}");
            assert_eq!(access(&path, libc::F_OK), 0, "{path}");
            assert_eq!(access(&path, libc::R_OK | libc::W_OK), 0, "{path}");
            assert_eq!(access(&path, libc::X_OK), libc::EACCES, "{path}");
            assert_eq!(access(&path, 0x40), libc::EINVAL, "{path}");
        }
        for (path, errno) in none {
            let refused = fs::metadata(&path).unwrap_err().raw_os_error();
            assert_eq!(refused, Some(errno), "{path}");
            // The C library resolves the directories itself, and accepts a slash after the device, and a path of any
            // length.
            if errno == libc::ENOENT {
                let refused = fs::canonicalize(&path).unwrap_err().raw_os_error();
                assert_eq!(refused, Some(errno), "{path}");
            }
            assert_eq!(access(&path, libc::F_OK), errno, "{path}");
        }
    }

    #[test]
    #[ignore = "runs as a client"]
    fn relative_paths_begin_where_the_call_says() {
        let dev = fs::File::open("/dev").unwrap();
        let root = fs::OpenOptions::new()
            .read(true)
            .custom_flags(libc::O_PATH)
            .open("/")
            .unwrap();
        let null = fs::File::open("/dev/null").unwrap();
        let (dev, root, null) = (dev.as_raw_fd(), root.as_raw_fd(), null.as_raw_fd());
        let open = |directory, path| is_kvm(open_at(directory, path, libc::O_RDWR));
        assert_eq!(open(dev, "kvm"), Ok(()));
        assert_eq!(open(dev, "./kvm"), Ok(()));
        assert_eq!(open(dev, ".//../dev/kvm"), Ok(()));
        assert_eq!(open(dev, "/dev/kvm"), Ok(()));
        assert_eq!(open(root, "dev/kvm"), Ok(()));
        assert_eq!(open(-1, "/dev/kvm"), Ok(()));
        assert_eq!(open(root, "kvm"), Err(libc::ENOENT));
        assert_eq!(open(dev, "kvm/"), Err(libc::ENOTDIR));
        assert_eq!(open(null, "kvm"), Err(libc::ENOTDIR));
        assert_eq!(open(-1, "kvm"), Err(libc::EBADF));
        std::env::set_current_dir("/dev").unwrap();
        assert_eq!(open(libc::AT_FDCWD, "kvm"), Ok(()));
        assert_eq!(open(libc::AT_FDCWD, "./kvm"), Ok(()));
        assert_eq!(open(libc::AT_FDCWD, "../dev/kvm"), Ok(()));
        assert!(fs::metadata("kvm").unwrap().file_type().is_char_device());
        std::env::set_current_dir("/").unwrap();
        assert_eq!(open(libc::AT_FDCWD, "dev/kvm"), Ok(()));
        assert_eq!(open(libc::AT_FDCWD, "kvm"), Err(libc::ENOENT));
    }

    #[test]
    #[ignore = "runs as a client"]
    fn flags_do_what_they_do_to_a_device() {
        let rdwr = libc::O_RDWR;
        for flags in [
            libc::O_CREAT | libc::O_EXCL,
            libc::O_DIRECTORY,
            libc::O_TMPFILE,
            libc::O_DIRECTORY | libc::O_PATH,
        ] {
            let expected = match flags {
                _ if flags == libc::O_CREAT | libc::O_EXCL => libc::EEXIST,
                _ => libc::ENOTDIR,
            };
            assert_eq!(open("/dev/kvm", rdwr | flags), Err(expected), "{flags:o}");
        }
        // The flags of the call, and the flags that `fcntl` shows afterwards.
        for (flags, shown) in [
            (rdwr, rdwr),
            (libc::O_RDONLY, libc::O_RDONLY),
            (libc::O_WRONLY, libc::O_WRONLY),
            (rdwr | libc::O_NONBLOCK, rdwr | libc::O_NONBLOCK),
            (
                rdwr | libc::O_APPEND | libc::O_SYNC,
                rdwr | libc::O_APPEND | libc::O_SYNC,
            ),
            (rdwr | libc::O_CLOEXEC, rdwr),
            (rdwr | libc::O_CREAT, rdwr),
            (rdwr | libc::O_TRUNC, rdwr),
            (rdwr | libc::O_NOCTTY, rdwr),
            (rdwr | libc::O_NOFOLLOW, rdwr | libc::O_NOFOLLOW),
        ] {
            let fd = open_at(libc::AT_FDCWD, "/dev/kvm", flags);
            assert!(fd >= 0, "{flags:o}: {}", errno());
            // SAFETY: the calls take no pointer.
            let (status, close_on_exec) = unsafe {
                (
                    libc::fcntl(fd, libc::F_GETFL),
                    libc::fcntl(fd, libc::F_GETFD),
                )
            };
            // The kernel keeps O_NOFOLLOW, but slat has followed a link of its own.
            let kept = !libc::O_NOFOLLOW;
            assert_eq!(status & kept, (shown | O_LARGEFILE) & kept, "{flags:o}");
            assert_eq!(
                close_on_exec != 0,
                flags & libc::O_CLOEXEC != 0,
                "{flags:o}"
            );
            assert_eq!(is_kvm(fd), Ok(()), "{flags:o}");
        }
    }

    #[test]
    #[ignore = "runs as a client"]
    fn a_path_descriptor_only_names_the_device() {
        let fd = open_at(libc::AT_FDCWD, "/dev/kvm", libc::O_PATH | libc::O_CLOEXEC);
        assert!(fd >= 0);
        demand_slats(fd);
        // SAFETY: the calls take no pointer.
        unsafe {
            assert_eq!(libc::ioctl(fd, KVM_GET_API_VERSION, 0), -1);
            assert_eq!(errno(), libc::EBADF);
            assert_eq!(libc::fcntl(fd, libc::F_GETFL), libc::O_PATH);
            let mut byte = 0u8;
            assert_eq!(libc::read(fd, (&raw mut byte).cast(), 1), -1);
            assert_eq!(errno(), libc::EBADF);
            let again = libc::dup(fd);
            assert_eq!(libc::ioctl(again, KVM_GET_API_VERSION, 0), -1);
            assert_eq!(errno(), libc::EBADF);
            libc::close(again);
        }
        let link = format!("/proc/self/fd/{fd}");
        assert_eq!(fs::read_link(&link).unwrap().to_str(), Some("/dev/kvm"));
        assert!(fs::metadata(&link).unwrap().file_type().is_char_device());
        // The link of such a descriptor opens a descriptor that works.
        assert_eq!(open(&link, libc::O_RDWR), Ok(()));
        // SAFETY: the descriptor belongs to this test.
        drop(unsafe { OwnedFd::from_raw_fd(fd) });
    }

    #[test]
    #[ignore = "runs as a client"]
    fn openat2_resolves_as_the_kernel_does() {
        let links = Links::new("openat2");
        let via_link = links.at("devices/kvm");
        let dev = fs::File::open("/dev").unwrap();
        let root = fs::File::open("/").unwrap();
        let (dev, root) = (dev.as_raw_fd(), root.as_raw_fd());
        let cwd = libc::AT_FDCWD;
        let rdwr = libc::O_RDWR as u64;
        let open = |directory: i32, path: &str, flags: u64, mode: u64, resolve: u64| {
            let path = CString::new(path).unwrap();
            let how = [flags, mode, resolve];
            // SAFETY: the path is a C string, and the struct is live.
            is_kvm(unsafe {
                libc::syscall(
                    libc::SYS_openat2,
                    directory,
                    path.as_ptr(),
                    how.as_ptr(),
                    24,
                )
            } as i32)
        };
        assert_eq!(open(cwd, "/dev/kvm", rdwr, 0, 0), Ok(()));
        assert_eq!(open(dev, "kvm", rdwr, 0, 0), Ok(()));
        assert_eq!(open(cwd, &via_link, rdwr, 0, 0), Ok(()));
        assert_eq!(open(cwd, "/dev/kvm/", rdwr, 0, 0), Err(libc::ENOTDIR));
        // Invalid flags are refused.
        assert_eq!(open(cwd, "/dev/kvm", rdwr, 0o600, 0), Err(libc::EINVAL));
        assert_eq!(open(cwd, "/dev/kvm", 1 << 40, 0, 0), Err(libc::EINVAL));
        assert_eq!(open(cwd, "/dev/kvm", rdwr, 0, 1 << 40), Err(libc::EINVAL));
        let exclusive = rdwr | (libc::O_CREAT | libc::O_EXCL) as u64;
        assert_eq!(
            open(cwd, "/dev/kvm", exclusive, 0o600, 0),
            Err(libc::EEXIST)
        );
        // The `RESOLVE_` flags apply to the path of the device.
        let (xdev, beneath) = (libc::RESOLVE_NO_XDEV, libc::RESOLVE_BENEATH);
        let (links_off, in_root) = (libc::RESOLVE_NO_SYMLINKS, libc::RESOLVE_IN_ROOT);
        assert_eq!(
            open(dev, "kvm", rdwr, 0, beneath | xdev | links_off),
            Ok(())
        );
        assert_eq!(open(dev, "./kvm", rdwr, 0, beneath), Ok(()));
        assert_eq!(open(root, "dev/kvm", rdwr, 0, beneath), Ok(()));
        assert_eq!(open(dev, "/dev/kvm", rdwr, 0, beneath), Err(libc::EXDEV));
        assert_eq!(open(dev, "../dev/kvm", rdwr, 0, beneath), Err(libc::EXDEV));
        assert_eq!(open(root, "dev/kvm", rdwr, 0, xdev), Err(libc::EXDEV));
        assert_eq!(open(cwd, &via_link, rdwr, 0, links_off), Err(libc::ELOOP));
        assert_eq!(open(cwd, "/dev/kvm", rdwr, 0, links_off), Ok(()));
        assert_eq!(open(root, "/dev/kvm", rdwr, 0, in_root), Ok(()));
        assert_eq!(open(dev, "/kvm", rdwr, 0, in_root), Ok(()));
        assert_eq!(open(dev, "../../kvm", rdwr, 0, in_root), Ok(()));
        assert_eq!(open(dev, "/dev/kvm", rdwr, 0, in_root), Err(libc::ENOENT));
        // Memory that cannot be read is an error.
        // SAFETY: the kernel refuses the pointers.
        unsafe {
            let path = c"/dev/kvm".as_ptr();
            let bad = 64 as *const libc::c_char;
            let how = [rdwr, 0, 0];
            for (path, how, size, expected) in [
                (path, bad.cast(), 24, libc::EFAULT),
                (bad, how.as_ptr(), 24, libc::EFAULT),
                (path, how.as_ptr(), 8, libc::EINVAL),
            ] {
                let fd = libc::syscall(libc::SYS_openat2, cwd, path, how, size);
                assert_eq!(is_kvm(fd as i32), Err(expected));
            }
        }
    }

    unsafe extern "C" {
        fn __open_2(path: *const c_char, flags: i32) -> i32;
        fn __open64_2(path: *const c_char, flags: i32) -> i32;
        fn __openat_2(at: i32, path: *const c_char, flags: i32) -> i32;
        fn __openat64_2(at: i32, path: *const c_char, flags: i32) -> i32;
    }

    /// Opens a path by the calls that newer architectures do not have. The path is a C string.
    #[cfg(target_arch = "x86_64")]
    unsafe fn opened_by_older_calls(path: *const c_char) -> [i32; 2] {
        // SAFETY: the path is a C string, as this function's caller promises.
        unsafe {
            [
                libc::syscall(libc::SYS_open, path, libc::O_RDWR) as i32,
                libc::syscall(libc::SYS_creat, path, 0o600) as i32,
            ]
        }
    }

    /// Opens nothing: there are no such calls.
    #[cfg(not(target_arch = "x86_64"))]
    unsafe fn opened_by_older_calls(_: *const c_char) -> [i32; 0] {
        []
    }

    #[test]
    #[ignore = "runs as a client"]
    fn every_function_opens() {
        let path = c"/dev/../dev/kvm".as_ptr();
        let (at, rdwr) = (libc::AT_FDCWD, libc::O_RDWR);
        // SAFETY: the paths are C strings.
        unsafe {
            for fd in [
                libc::open(path, rdwr),
                libc::open64(path, rdwr),
                libc::openat(at, path, rdwr),
                libc::openat64(at, path, rdwr),
                __open_2(path, rdwr),
                __open64_2(path, rdwr),
                __openat_2(at, path, rdwr),
                __openat64_2(at, path, rdwr),
                libc::creat(path, 0o600),
                libc::creat64(path, 0o600),
                libc::syscall(libc::SYS_openat, at, path, rdwr) as i32,
            ]
            .into_iter()
            .chain(opened_by_older_calls(path))
            {
                assert_eq!(is_kvm(fd), Ok(()));
            }
            for mode in [c"r", c"r+", c"w", c"a+", c"we"] {
                let stream = libc::fopen(path, mode.as_ptr());
                assert!(!stream.is_null(), "{mode:?}");
                demand_slats(libc::fileno(stream));
                assert_eq!(
                    libc::ioctl(libc::fileno(stream), KVM_GET_API_VERSION, 0),
                    12
                );
                libc::fclose(stream);
            }
            assert!(libc::fopen(path, c"wx".as_ptr()).is_null());
            assert_eq!(errno(), libc::EEXIST);
        }
    }

    #[test]
    #[ignore = "runs as a client"]
    fn bad_pointers_are_the_kernels_to_refuse() {
        // The loop body runs before and after this process's first use of KVM.
        for _ in 0..2 {
            for address in [0usize, 1, 8, 0x1000, usize::MAX, usize::MAX - 15, 1 << 63] {
                let path = address as *const c_char;
                // SAFETY: the kernel refuses bad pointers.
                unsafe {
                    assert_eq!(libc::open(path, libc::O_RDONLY), -1);
                    assert_eq!(errno(), libc::EFAULT, "{address:#x}");
                    assert_eq!(libc::access(path, libc::F_OK), -1);
                    assert_eq!(errno(), libc::EFAULT, "{address:#x}");
                    let mut stat = std::mem::zeroed();
                    assert_eq!(libc::stat(path, &mut stat), -1);
                    assert_eq!(errno(), libc::EFAULT, "{address:#x}");
                    let mut link = [0; 8];
                    assert_eq!(libc::readlink(path, link.as_mut_ptr(), 8), -1);
                    assert_eq!(errno(), libc::EFAULT, "{address:#x}");
                }
            }
            // A part of this path cannot be read.
            // SAFETY: the calls map two new pages, and make the second one unreadable.
            unsafe {
                let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
                let rights = libc::PROT_READ | libc::PROT_WRITE;
                let start = libc::mmap(std::ptr::null_mut(), 8192, rights, flags, -1, 0);
                let end = start.cast::<u8>().add(4096);
                assert_eq!(libc::mprotect(end.cast(), 4096, libc::PROT_NONE), 0);
                for text in [&b"/dev/kvm"[..], b"/dev/kv", b"/dev/", b"/", b"kvm"] {
                    let path = end.sub(text.len());
                    path.copy_from_nonoverlapping(text.as_ptr(), text.len());
                    assert_eq!(libc::open(path.cast(), libc::O_RDWR), -1);
                    assert_eq!(errno(), libc::EFAULT);
                }
                let path = end.sub(9);
                path.copy_from_nonoverlapping(c"/dev/kvm".as_ptr().cast(), 9);
                assert_eq!(is_kvm(libc::open(path.cast(), libc::O_RDWR)), Ok(()));
                libc::munmap(start, 8192);
            }
        }
    }

    #[test]
    #[ignore = "runs as a client"]
    fn parameters_open_by_any_spelling() {
        let plain = format!("/sys/module/kvm/parameters/{PARAMETER}");
        if is_native() && !fs::exists(&plain).unwrap() {
            return;
        }
        let value = fs::read_to_string(&plain).unwrap();
        assert!(value.trim().parse::<u32>().is_ok());
        for path in [
            format!("//sys/module/./kvm//parameters/{PARAMETER}"),
            format!("/proc/self/root/sys/module/kvm/parameters/{PARAMETER}"),
        ] {
            // Links can be followed only where the directories exist.
            if path.starts_with("/proc") && !fs::exists("/sys/module/kvm/parameters").unwrap() {
                continue;
            }
            assert_eq!(fs::read_to_string(&path).unwrap(), value, "{path}");
        }
        let stat = fs::metadata(&plain).unwrap();
        assert!(stat.is_file());
        assert_eq!((stat.len(), stat.nlink()), (4096, 1));
        if !is_native() {
            assert_eq!(stat.mode() & 0o777, RIGHTS);
        }
        let slash = fs::read_to_string(plain.clone() + "/").unwrap_err();
        assert_eq!(slash.raw_os_error(), Some(libc::ENOTDIR));
        // The parameter is opened for reading only.
        let path = CString::new(plain).unwrap();
        // SAFETY: the path is a C string, the descriptor belongs to this test, and the buffer is live.
        unsafe {
            let fd = libc::open(path.as_ptr(), libc::O_RDONLY);
            assert_eq!(libc::write(fd, c"1".as_ptr().cast(), 1), -1);
            assert_eq!(errno(), libc::EBADF);
            libc::close(fd);
        }
    }

    /// A handler opens files and asks about them, while its thread does the same and also allocates. Code that took a
    /// lock or allocated would wait for itself.
    #[test]
    #[ignore = "runs as a client"]
    fn a_handler_opens_files() {
        use std::sync::atomic::{AtomicUsize, Ordering};
        static HANDLED: AtomicUsize = AtomicUsize::new(0);
        static FAILED: AtomicUsize = AtomicUsize::new(0);
        extern "C" fn handle(_: i32) {
            // SAFETY: the paths are C strings, the struct is live, and all calls are async-signal-safe.
            unsafe {
                let before = *libc::__errno_location();
                let mut stat = std::mem::zeroed();
                let paths = [
                    c"/dev/./null",
                    c"/dev/../dev/kvm",
                    c"/proc/self/fd/0",
                    c"/no/kvm",
                ];
                let found = paths.map(|path| libc::stat(path.as_ptr(), &mut stat) == 0);
                if found[..2] != [true; 2] || found[3] {
                    FAILED.fetch_add(1, Ordering::Relaxed);
                }
                let fd = libc::open(c"/dev/./null".as_ptr(), libc::O_RDONLY);
                libc::close(fd);
                *libc::__errno_location() = before;
            }
            HANDLED.fetch_add(1, Ordering::Relaxed);
        }
        let kvm = fs::File::open("/dev/kvm").unwrap();
        // SAFETY: the handler is async-signal-safe.
        let me = unsafe {
            libc::signal(libc::SIGUSR1, handle as *const () as usize);
            libc::pthread_self()
        };
        let mut rounds = 0u64;
        std::thread::scope(|scope| {
            let sender = scope.spawn(move || {
                for sent in 1..=300 {
                    // SAFETY: the thread waits for the scope's end.
                    unsafe { libc::pthread_kill(me, libc::SIGUSR1) };
                    while HANDLED.load(Ordering::Relaxed) < sent {
                        std::thread::yield_now();
                    }
                }
            });
            while !sender.is_finished() {
                rounds += 1;
                let path = format!("/proc/self/fd/{}", kvm.as_raw_fd());
                assert_eq!(fs::read_link(path).unwrap().to_str(), Some("/dev/kvm"));
                assert!(fs::metadata("/dev/./kvm").is_ok());
                assert!(kvm.metadata().unwrap().file_type().is_char_device());
                drop(fs::File::open("/dev/../dev/null"));
            }
        });
        assert_eq!(FAILED.load(Ordering::Relaxed), 0, "after {rounds} rounds");
    }
}
