//! Tests userfaultfd(2) as slat serves it, against the kernel's own: each client runs under the library, which serves
//! the call, and without the library where the kernel permits the call. What a client asserts holds for both.

#[path = "../common/mod.rs"]
mod common;
#[cfg(target_arch = "x86_64")]
mod guests;
mod uffd;

/// Runs the client called `name` under the library, which serves userfaultfd.
fn on_slat(name: &str) {
    common::under_the_library_with(name, &[("SLAT_USERFAULTFD", "slat")]);
}

/// Runs the client called `name` on the kernel's userfaultfd.
fn on_the_kernels(name: &str) {
    match uffd::Uffd::open() {
        Ok(_) => common::without_the_library(name),
        Err(errno) => eprintln!("skipped: the kernel refuses userfaultfd here: errno {errno}"),
    }
}

macro_rules! on_both {
    ($($name:ident)*) => {
        mod on_slat { $(#[test] fn $name() { super::on_slat(stringify!($name)); })* }
        mod on_the_kernels { $(#[test] fn $name() { super::on_the_kernels(stringify!($name)); })* }
    };
}

on_both! {
    a_missing_page_comes_from_the_handler
    wrong_requests_get_the_kernels_errno
    a_write_waits_until_the_protection_is_lifted
    dropped_pages_are_missing_again
    a_woken_thread_asks_again
    closing_the_descriptor_ends_the_waiting
    ending_the_registration_ends_the_waiting
    a_system_call_waits_for_its_memory
    another_process_provides_the_pages
    a_descriptor_goes_to_another_program
    a_forked_child_sees_zeroes
    many_threads_wait_for_many_pages
    the_device_makes_a_descriptor
    threads_with_filters_wait_and_serve
    a_thread_with_a_filter_makes_a_userfaultfd
    a_signal_is_handled_while_its_thread_waits
}

mod client {
    use crate::uffd::*;
    use std::io::Write;
    use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::thread;

    #[test]
    #[ignore = "runs by itself"]
    fn a_missing_page_comes_from_the_handler() {
        let memory = map(8);
        store(memory + 3 * PAGE, 9);
        let uffd = Uffd::new(FEATURE_THREAD_ID);
        uffd.register(memory, 8 * PAGE, MODE_MISSING);
        // A page with content is not missing.
        assert_eq!(load(memory + 3 * PAGE), 9);
        assert!(!uffd.is_ready(0));
        let reader = thread::spawn(move || {
            // SAFETY: the call has no arguments.
            let me = unsafe { libc::syscall(libc::SYS_gettid) } as u64;
            (me, load(memory + PAGE + 123))
        });
        let Event(kind, [flags, address, thread]) = uffd.event();
        assert_eq!(
            (kind, flags, address),
            (PAGEFAULT, 0, (memory + PAGE) as u64)
        );
        assert_eq!(uffd.copy(memory + PAGE, &page_of(7)), (Ok(()), PAGE as i64));
        assert_eq!(reader.join().unwrap(), (thread, 7));
        let writer = thread::spawn(move || store(memory, 5));
        let Event(kind, [flags, address, _]) = uffd.event();
        assert_eq!((kind, flags, address), (PAGEFAULT, WRITE, memory as u64));
        assert_eq!(uffd.copy(memory, &page_of(6)), (Ok(()), PAGE as i64));
        writer.join().unwrap();
        assert_eq!((load(memory), load(memory + 1)), (5, 6));
        let reader = thread::spawn(move || load(memory + 2 * PAGE));
        assert!(uffd.is_ready(20_000));
        assert_eq!(uffd.zero(memory + 2 * PAGE, PAGE), (Ok(()), PAGE as i64));
        assert_eq!(reader.join().unwrap(), 0);
        // Pages that come before anybody asks for them, several at once.
        let content: Vec<u8> = (0..3 * PAGE)
            .map(|index| (index / PAGE) as u8 + 40)
            .collect();
        assert_eq!(
            uffd.copy(memory + 4 * PAGE, &content),
            (Ok(()), 3 * PAGE as i64)
        );
        let found: Vec<u8> = (4..7)
            .map(|page| load(memory + page * PAGE + 4095))
            .collect();
        assert_eq!(found, [40, 41, 42]);
    }

    #[test]
    #[ignore = "runs by itself"]
    fn wrong_requests_get_the_kernels_errno() {
        let memory = map(4) as u64;
        let (page, wrong) = (PAGE as u64, Err(libc::EINVAL));
        // SAFETY: the call takes no pointer.
        assert_eq!(unsafe { libc::syscall(libc::SYS_userfaultfd, 0x40) }, -1);
        assert_eq!(errno(), libc::EINVAL);
        let uffd = Uffd::open().unwrap();
        assert_eq!(uffd.request(REGISTER, [memory, page, 1, 0, 0]).0, wrong);
        // An unknown feature, and an unknown version: the structure is cleared.
        assert_eq!(uffd.request(API, [0xaa, 1 << 60, 0, 0, 0]), (wrong, [0; 5]));
        assert_eq!(uffd.request(API, [0xab, 0, 0, 0, 0]), (wrong, [0; 5]));
        assert_eq!(uffd.request(API, [0xaa, FEATURE_WP, 0, 0, 0]).0, Ok(()));
        assert_eq!(uffd.request(API, [0xaa, 0, 0, 0, 0]).0, wrong);
        for words in [
            [memory, page, 0, 0, 0],
            [memory, page, 1 << 10, 0, 0],
            [memory + 1, page, 1, 0, 0],
            [memory, page + 1, 1, 0, 0],
            [memory, 0, 1, 0, 0],
            [!0xfff, 2 * page, 1, 0, 0],
        ] {
            assert_eq!(uffd.request(REGISTER, words).0, wrong, "{words:x?}");
        }
        let refused = |errno: i32| (Err(errno), i64::from(-errno));
        let to = memory as usize;
        assert_eq!(uffd.copy(to, &page_of(1)), refused(libc::ENOENT));
        assert_eq!(uffd.zero(to, PAGE), refused(libc::ENOENT));
        assert_eq!(uffd.protect(to, PAGE, 1), Err(libc::ENOENT));
        uffd.register(to, 3 * PAGE, MODE_MISSING);
        // To register again what is registered changes nothing.
        uffd.register(to, 3 * PAGE, MODE_MISSING);
        let other = Uffd::new(0);
        let again = other.request(REGISTER, [memory, page, 1, 0, 0]).0;
        assert_eq!(again, Err(libc::EBUSY));
        assert_eq!(uffd.copy(to + PAGE, &page_of(1)), (Ok(()), PAGE as i64));
        assert_eq!(uffd.copy(to + PAGE, &page_of(2)), refused(libc::EEXIST));
        assert_eq!(uffd.zero(to + PAGE, PAGE), refused(libc::EEXIST));
        assert_eq!(load(to + PAGE), 1);
        // The first of two pages can be provided.
        let two = [page_of(3), page_of(3)].concat();
        assert_eq!(uffd.copy(to, &two), (Err(libc::EAGAIN), PAGE as i64));
        assert_eq!(load(to), 3);
        // The content cannot be read; wrong modes; not protectable.
        let words = [memory + 2 * page, 4096, page, 0, 0];
        assert_eq!(uffd.request(COPY, words).0, Err(libc::EFAULT));
        let words = [memory + 2 * page, memory, page, 1 << 5, 0];
        assert_eq!(uffd.request(COPY, words).0, wrong);
        let words = [memory + 2 * page, page, 1 << 5, 0, 0];
        assert_eq!(uffd.request(ZEROPAGE, words).0, wrong);
        assert_eq!(uffd.protect(to, PAGE, 1), Err(libc::ENOENT));
        assert_eq!(uffd.protect(to, PAGE, 3), wrong);
        assert_eq!(uffd.protect(to, PAGE, 4), wrong);
        assert_eq!(uffd.request(0xc020_aa3e, [0; 5]).0, wrong);
        // A structure that cannot be read.
        // SAFETY: the kernel checks the address.
        let answer = unsafe { libc::ioctl(uffd.0.as_raw_fd(), COPY as _, 8) };
        assert_eq!((answer, errno()), (-1, libc::EFAULT));
        // Registration may end where there is none.
        assert_eq!(
            uffd.request(UNREGISTER, [memory + 3 * page, page, 0, 0, 0])
                .0,
            Ok(())
        );
    }

    #[test]
    #[ignore = "runs by itself"]
    fn a_write_waits_until_the_protection_is_lifted() {
        let memory = map(3);
        (0..3).for_each(|page| store(memory + page * PAGE, 1));
        let uffd = Uffd::new(FEATURE_WP);
        uffd.register(memory, 3 * PAGE, MODE_WP);
        assert_eq!(uffd.protect(memory, 2 * PAGE, 1), Ok(()));
        store(memory + 2 * PAGE, 2);
        assert_eq!(load(memory), 1);
        assert!(!uffd.is_ready(0));
        let writer = thread::spawn(move || store(memory + PAGE, 4));
        uffd.fault(memory + PAGE, WRITE | WP);
        assert_eq!(load(memory + PAGE), 1);
        assert_eq!(uffd.protect(memory + PAGE, PAGE, 0), Ok(()));
        writer.join().unwrap();
        assert_eq!(load(memory + PAGE), 4);
        // Protected once more, lifted without waking, then woken.
        assert_eq!(uffd.protect(memory, 3 * PAGE, 1), Ok(()));
        let writer = thread::spawn(move || store(memory + 2 * PAGE, 5));
        uffd.fault(memory + 2 * PAGE, WRITE | WP);
        assert_eq!(uffd.protect(memory, 3 * PAGE, 2), Ok(()));
        uffd.wake(memory, 3 * PAGE);
        writer.join().unwrap();
        assert_eq!(load(memory + 2 * PAGE), 5);
        // A page that comes protected.
        let late = map(1);
        uffd.register(late, PAGE, MODE_MISSING | MODE_WP);
        let content = page_of(8);
        let words = [late as u64, content.as_ptr() as u64, PAGE as u64, 2, 0];
        assert_eq!(uffd.request(COPY, words).0, Ok(()));
        assert_eq!(load(late), 8);
        let writer = thread::spawn(move || store(late, 9));
        uffd.fault(late, WRITE | WP);
        assert_eq!(uffd.protect(late, PAGE, 0), Ok(()));
        writer.join().unwrap();
        assert_eq!((load(late), load(late + 1)), (9, 8));
    }

    /// Drops the content of pages.
    fn discard(start: usize, len: usize) {
        // SAFETY: the test's own memory is dropped.
        let answer = unsafe { libc::madvise(start as *mut _, len, libc::MADV_DONTNEED) };
        assert_eq!(answer, 0);
    }

    #[test]
    #[ignore = "runs by itself"]
    fn dropped_pages_are_missing_again() {
        let memory = map(4);
        let uffd = Uffd::new(FEATURE_REMOVE);
        uffd.register(memory, 4 * PAGE, MODE_MISSING);
        let content = [page_of(1), page_of(2), page_of(3), page_of(4)].concat();
        assert_eq!(uffd.copy(memory, &content), (Ok(()), 4 * PAGE as i64));
        let dropping = thread::spawn(move || {
            discard(memory + PAGE, 2 * PAGE);
            load(memory + PAGE)
        });
        assert!(uffd.is_ready(20_000));
        // While the event is not read, nothing is provided, and the pages are still there.
        assert_eq!(uffd.zero(memory + PAGE, PAGE).0, Err(libc::EAGAIN));
        let range = [memory + PAGE, memory + 3 * PAGE].map(|address| address as u64);
        assert_eq!(uffd.event(), Event(REMOVE, [range[0], range[1], 0]));
        uffd.fault(memory + PAGE, 0);
        assert_eq!(uffd.copy(memory + PAGE, &page_of(5)).0, Ok(()));
        assert_eq!(dropping.join().unwrap(), 5);
        assert_eq!((load(memory), load(memory + 3 * PAGE)), (1, 4));
    }

    #[test]
    #[ignore = "runs by itself"]
    fn a_woken_thread_asks_again() {
        let memory = map(1);
        let uffd = Uffd::new(0);
        uffd.register(memory, PAGE, MODE_MISSING);
        let reader = thread::spawn(move || load(memory));
        uffd.fault(memory, 0);
        assert!(!uffd.is_ready(30));
        uffd.wake(memory, PAGE);
        uffd.fault(memory, 0);
        assert_eq!(uffd.copy(memory, &page_of(3)).0, Ok(()));
        assert_eq!(reader.join().unwrap(), 3);
    }

    #[test]
    #[ignore = "runs by itself"]
    fn closing_the_descriptor_ends_the_waiting() {
        let memory = map(2);
        let uffd = Uffd::new(0);
        uffd.register(memory, 2 * PAGE, MODE_MISSING);
        let reader = thread::spawn(move || load(memory));
        uffd.fault(memory, 0);
        let copy = uffd.0.try_clone().unwrap();
        drop(uffd);
        thread::sleep(std::time::Duration::from_millis(30));
        assert!(!reader.is_finished());
        drop(copy);
        assert_eq!(reader.join().unwrap(), 0);
        store(memory + PAGE, 1);
        assert_eq!(load(memory + PAGE), 1);
    }

    #[test]
    #[ignore = "runs by itself"]
    fn ending_the_registration_ends_the_waiting() {
        let memory = map(3);
        let uffd = Uffd::new(0);
        uffd.register(memory, 3 * PAGE, MODE_MISSING);
        let reader = thread::spawn(move || load(memory + PAGE));
        uffd.fault(memory + PAGE, 0);
        let words = [(memory + PAGE) as u64, PAGE as u64, 0, 0, 0];
        assert_eq!(uffd.request(UNREGISTER, words).0, Ok(()));
        assert_eq!(reader.join().unwrap(), 0);
        // The neighbours are registered still.
        assert_eq!(uffd.copy(memory, &page_of(1)).0, Ok(()));
        assert_eq!(uffd.copy(memory + PAGE, &page_of(1)).0, Err(libc::ENOENT));
        assert_eq!(uffd.copy(memory + 2 * PAGE, &page_of(3)).0, Ok(()));
        // Memory that replaces registered memory is not registered.
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED;
        let rights = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: the test's own memory is replaced.
        let mapped = unsafe { libc::mmap(memory as *mut _, PAGE, rights, flags, -1, 0) };
        assert_eq!(mapped as usize, memory);
        assert_eq!(load(memory), 0);
        assert_eq!(uffd.copy(memory, &page_of(1)).0, Err(libc::ENOENT));
        assert_eq!(load(memory + 2 * PAGE), 3);
    }

    #[test]
    #[ignore = "runs by itself"]
    fn a_system_call_waits_for_its_memory() {
        let memory = map(4);
        let uffd = Uffd::new(0);
        uffd.register(memory, 4 * PAGE, MODE_MISSING);
        let (from, mut to) = std::io::pipe().unwrap();
        to.write_all(b"hello").unwrap();
        let reader = thread::spawn(move || {
            // SAFETY: the memory is the test's own.
            unsafe { libc::read(from.as_raw_fd(), (memory + 10) as *mut _, 5) }
        });
        uffd.fault(memory, WRITE);
        assert_eq!(uffd.copy(memory, &page_of(b'.')).0, Ok(()));
        assert_eq!(reader.join().unwrap(), 5);
        let found: Vec<u8> = (9..16).map(|index| load(memory + index)).collect();
        assert_eq!(found, b".hello.");
        let (mut from, to) = std::io::pipe().unwrap();
        let writer = thread::spawn(move || {
            let part = |page: usize| libc::iovec {
                iov_base: (memory + page * PAGE) as *mut _,
                iov_len: 3,
            };
            let parts = [part(1), part(2)];
            // SAFETY: the memory is the test's own.
            unsafe { libc::writev(to.as_raw_fd(), parts.as_ptr(), 2) }
        });
        uffd.fault(memory + PAGE, 0);
        assert_eq!(uffd.copy(memory + PAGE, &page_of(b'a')).0, Ok(()));
        uffd.fault(memory + 2 * PAGE, 0);
        assert_eq!(uffd.copy(memory + 2 * PAGE, &page_of(b'b')).0, Ok(()));
        assert_eq!(writer.join().unwrap(), 6);
        let mut text = [0; 6];
        std::io::Read::read_exact(&mut from, &mut text).unwrap();
        assert_eq!(&text, b"aaabbb");
    }

    /// Provides page after page, each filled with its index, until `pages` were provided.
    fn serve(uffd: &Uffd, memory: usize, pages: usize) {
        for _ in 0..pages {
            let Event(kind, [_, address, _]) = uffd.event();
            assert_eq!(kind, PAGEFAULT);
            let index = (address as usize - memory) / PAGE;
            let (result, copied) = uffd.copy(address as usize, &page_of(index as u8));
            assert_eq!((result, copied), (Ok(()), PAGE as i64));
        }
    }

    /// Forks. The child runs `child`, and ends with status 0 if that returns.
    fn fork(child: impl FnOnce()) -> i32 {
        // SAFETY: the child only runs `child`, which uses no lock that another thread could hold.
        let process = unsafe { libc::fork() };
        assert!(process >= 0);
        if process == 0 {
            let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(child));
            // SAFETY: the call takes no pointer.
            unsafe { libc::_exit(i32::from(result.is_err())) };
        }
        process
    }

    fn wait_for(process: i32) {
        let mut status = -1;
        // SAFETY: the status is live.
        unsafe { libc::waitpid(process, &mut status, 0) };
        assert_eq!(status, 0);
    }

    #[test]
    #[ignore = "runs by itself"]
    fn another_process_provides_the_pages() {
        const PAGES: usize = 40;
        let memory = map(PAGES + 64);
        let uffd = Uffd::new(0);
        uffd.register(memory, (PAGES + 64) * PAGE, MODE_MISSING);
        let handler = fork(|| {
            serve(&uffd, memory, PAGES);
            // Errors are the same as in the process itself.
            let exists = (Err(libc::EEXIST), i64::from(-libc::EEXIST));
            assert_eq!(uffd.copy(memory, &page_of(1)), exists);
            // Much content at once, of which the last page is there.
            let last = memory + (PAGES + 63) * PAGE;
            assert_eq!(uffd.zero(last, PAGE).0, Ok(()));
            let content = vec![77; 64 * PAGE];
            let result = uffd.copy(memory + PAGES * PAGE, &content);
            assert_eq!(result, (Err(libc::EAGAIN), 63 * PAGE as i64));
            let bad = [(memory as u64), 4096, PAGE as u64, 0, 0];
            assert!(uffd.request(COPY, bad).0.is_err());
        });
        for page in (0..PAGES).rev() {
            assert_eq!(load(memory + page * PAGE + page), page as u8);
        }
        wait_for(handler);
        assert_eq!(load(memory + PAGES * PAGE), 77);
        assert_eq!(load(memory + (PAGES + 62) * PAGE + 4095), 77);
        assert_eq!(load(memory + (PAGES + 63) * PAGE), 0);
    }

    /// The descriptor of the socket by which [`serves_a_descriptor`] gets its userfaultfd.
    const SOCKET: &str = "SLAT_TEST_SOCKET";

    #[test]
    #[ignore = "runs by itself"]
    fn a_descriptor_goes_to_another_program() {
        use std::os::unix::net::UnixStream;
        use std::os::unix::process::CommandExt;
        let (here, there) = UnixStream::pair().unwrap();
        let mut handler = std::process::Command::new(std::env::current_exe().unwrap());
        let inherited = there.as_raw_fd();
        handler
            .args(["--exact", "client::serves_a_descriptor", "--ignored"])
            .env(SOCKET, inherited.to_string());
        // SAFETY: the closure only makes a system call.
        let mut handler = unsafe {
            handler.pre_exec(move || {
                libc::fcntl(inherited, libc::F_SETFD, 0);
                Ok(())
            })
        }
        .spawn()
        .unwrap();
        drop(there);
        let memory = map(16);
        let uffd = Uffd::new(0);
        uffd.register(memory, 16 * PAGE, MODE_MISSING);
        send(&here, memory as u64, uffd.0.as_raw_fd());
        // As Firecracker does, this process keeps its own copy of the descriptor.
        for page in 0..16 {
            assert_eq!(load(memory + page * PAGE), page as u8);
        }
        assert!(handler.wait().unwrap().success());
    }

    /// Receives a userfaultfd and the address of its memory, and provides 16 pages.
    #[test]
    #[ignore = "is run by a_descriptor_goes_to_another_program"]
    fn serves_a_descriptor() {
        let socket: i32 = std::env::var(SOCKET).unwrap().parse().unwrap();
        // SAFETY: the descriptor was inherited for this.
        let socket = unsafe { OwnedFd::from_raw_fd(socket) };
        let (memory, fd) = receive(&socket);
        serve(&Uffd(fd), memory as usize, 16);
    }

    fn message(word: &mut u64, control: &mut [u64; 3], call: impl FnOnce(*mut libc::msghdr)) {
        let mut part = libc::iovec {
            iov_base: std::ptr::from_mut(word).cast(),
            iov_len: 8,
        };
        // SAFETY: all-zero is a valid value.
        let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
        (message.msg_iov, message.msg_iovlen) = (&raw mut part, 1);
        message.msg_control = control.as_mut_ptr().cast();
        message.msg_controllen = size_of_val(control);
        call(&raw mut message);
    }

    fn send(socket: &impl AsRawFd, word: u64, fd: i32) {
        // The header of the control message (length, level, type), and the descriptor.
        let kind = (libc::SCM_RIGHTS as u64) << 32 | libc::SOL_SOCKET as u64;
        let (mut word, mut control) = (word, [20, kind, fd as u64]);
        message(&mut word, &mut control, |message| {
            // SAFETY: the message and what it refers to are live.
            assert_eq!(unsafe { libc::sendmsg(socket.as_raw_fd(), message, 0) }, 8);
        });
    }

    fn receive(socket: &impl AsRawFd) -> (u64, OwnedFd) {
        let (mut word, mut control) = (0, [0; 3]);
        message(&mut word, &mut control, |message| {
            // SAFETY: the message and what it refers to are live.
            assert_eq!(unsafe { libc::recvmsg(socket.as_raw_fd(), message, 0) }, 8);
        });
        // SAFETY: the kernel has just opened the descriptor.
        (word, unsafe { OwnedFd::from_raw_fd(control[2] as i32) })
    }

    #[test]
    #[ignore = "runs by itself"]
    fn a_forked_child_sees_zeroes() {
        let memory = map(4);
        let uffd = Uffd::new(0);
        uffd.register(memory, 4 * PAGE, MODE_MISSING);
        assert_eq!(uffd.copy(memory, &page_of(1)).0, Ok(()));
        wait_for(fork(|| {
            assert_eq!((load(memory), load(memory + PAGE)), (1, 0));
            store(memory + 2 * PAGE, 3);
            assert_eq!(load(memory + 2 * PAGE), 3);
        }));
        assert!(!uffd.is_ready(0));
        assert_eq!(uffd.copy(memory + 2 * PAGE, &page_of(2)).0, Ok(()));
        assert_eq!(load(memory + 2 * PAGE), 2);
    }

    #[test]
    #[ignore = "runs by itself"]
    fn many_threads_wait_for_many_pages() {
        const PAGES: usize = 500;
        let memory = map(PAGES);
        let uffd = Uffd::new(0);
        uffd.register(memory, PAGES * PAGE, MODE_MISSING);
        let threads: Vec<_> = (0..4)
            .map(|thread| {
                thread::spawn(move || {
                    for index in 0..PAGES {
                        let page = index * [1, 3, 7, 9][thread] % PAGES;
                        assert_eq!(load(memory + page * PAGE + 5), page as u8);
                    }
                })
            })
            .collect();
        let is_over =
            |threads: &[thread::JoinHandle<()>]| threads.iter().all(|it| it.is_finished());
        let mut provided = 0;
        while !is_over(&threads) {
            if !uffd.is_ready(1) {
                continue;
            }
            let Event(_, [_, address, _]) = uffd.event();
            let index = (address as usize - memory) / PAGE;
            match uffd.copy(address as usize, &page_of(index as u8)).0 {
                Ok(()) => provided += 1,
                // Another thread has asked for the page, too.
                error => assert_eq!(error, Err(libc::EEXIST)),
            }
        }
        threads
            .into_iter()
            .for_each(|thread| thread.join().unwrap());
        assert_eq!(provided, PAGES);
    }

    #[test]
    #[ignore = "runs by itself"]
    fn the_device_makes_a_descriptor() {
        const USERFAULTFD_IOC_NEW: u64 = 0xaa00;
        let device = match std::fs::File::options().read(true).open("/dev/userfaultfd") {
            Ok(device) => device,
            Err(error) => return eprintln!("skipped: /dev/userfaultfd: {error}"),
        };
        let flags = libc::O_CLOEXEC | libc::O_NONBLOCK;
        // SAFETY: the request takes no pointer, and no other code owns the new descriptor.
        let uffd = unsafe {
            let fd = libc::ioctl(device.as_raw_fd(), USERFAULTFD_IOC_NEW as _, flags);
            assert!(fd >= 0, "{}", errno());
            Uffd::of(OwnedFd::from_raw_fd(fd))
        };
        assert_eq!(uffd.request(API, [0xaa, 0, 0, 0, 0]).0, Ok(()));
        let memory = map(1);
        uffd.register(memory, PAGE, MODE_MISSING);
        let reader = thread::spawn(move || load(memory));
        uffd.fault(memory, 0);
        assert_eq!(uffd.copy(memory, &page_of(6)).0, Ok(()));
        assert_eq!(reader.join().unwrap(), 6);
    }

    /// Installs a filter for this thread that makes the calls in `forbidden` fail, among them sendto.
    fn forbid_calls(forbidden: &[i64]) {
        use libc::{BPF_ABS, BPF_JEQ, BPF_JMP, BPF_K, BPF_LD, BPF_RET, BPF_W};
        let step = |code: u32, jt: u8, k: u32| libc::sock_filter {
            code: code as u16,
            jt,
            jf: 0,
            k,
        };
        let mut program = vec![step(BPF_LD | BPF_W | BPF_ABS, 0, 0)];
        for (index, number) in forbidden.iter().enumerate() {
            let to_the_end = (forbidden.len() - index) as u8;
            program.push(step(BPF_JMP | BPF_JEQ | BPF_K, to_the_end, *number as u32));
        }
        program.push(step(BPF_RET | BPF_K, 0, libc::SECCOMP_RET_ALLOW));
        program.push(step(
            BPF_RET | BPF_K,
            0,
            libc::SECCOMP_RET_ERRNO | libc::EPERM as u32,
        ));
        let program = libc::sock_fprog {
            len: program.len() as u16,
            filter: program.as_mut_ptr(),
        };
        // SAFETY: the program is live, and the kernel copies it.
        unsafe {
            assert_eq!(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
            let mode = libc::SECCOMP_MODE_FILTER;
            assert_eq!(
                libc::prctl(libc::PR_SET_SECCOMP, mode, &raw const program),
                0
            );
            assert_eq!(
                libc::sendto(-1, std::ptr::null(), 0, 0, std::ptr::null(), 0),
                -1
            );
        }
        assert_eq!(errno(), libc::EPERM);
    }

    #[test]
    #[ignore = "runs by itself"]
    fn threads_with_filters_wait_and_serve() {
        use std::sync::mpsc::channel;
        // The calls by which slat serves userfaultfd.
        let serving = [
            libc::SYS_mprotect,
            libc::SYS_madvise,
            libc::SYS_pwrite64,
            libc::SYS_sendto,
            libc::SYS_sendmsg,
            libc::SYS_socketpair,
        ];
        let memory = map(3);
        let uffd = Uffd::new(FEATURE_WP);
        uffd.register(memory, 3 * PAGE, MODE_MISSING | MODE_WP);
        let (ready, is_ready) = channel();
        let server = thread::spawn(move || {
            forbid_calls(&serving);
            ready.send(()).unwrap();
            uffd.fault(memory, 0);
            assert_eq!(uffd.copy(memory, &page_of(4)).0, Ok(()));
            uffd.fault(memory + PAGE, WRITE);
            assert_eq!(uffd.zero(memory + PAGE, PAGE).0, Ok(()));
            assert_eq!(uffd.protect(memory, PAGE, 1), Ok(()));
            uffd.fault(memory, WRITE | WP);
            assert_eq!(uffd.protect(memory, PAGE, 0), Ok(()));
        });
        is_ready.recv().unwrap();
        let client = thread::spawn(move || {
            forbid_calls(&serving);
            assert_eq!(load(memory), 4);
            store(memory + PAGE, 6);
            // The handler has protected the first page when it has provided the second, or does so soon.
            thread::sleep(std::time::Duration::from_millis(100));
            store(memory, 7);
        });
        client.join().unwrap();
        server.join().unwrap();
        assert_eq!((load(memory), load(memory + PAGE)), (7, 6));
    }

    /// cloud-hypervisor makes its userfaultfd so. Its filter forbids ppoll, and allows the calls that make a pair of
    /// sockets.
    #[test]
    #[ignore = "runs by itself"]
    fn a_thread_with_a_filter_makes_a_userfaultfd() {
        const MISSING_SHMEM: u64 = 1 << 5;
        drop(Uffd::new(0));
        let memory = map(1);
        let server = thread::spawn(move || {
            forbid_calls(&[libc::SYS_sendto, libc::SYS_ppoll]);
            let uffd = Uffd::open().unwrap();
            let (result, _) = uffd.request(API, [0xaa, MISSING_SHMEM, 0, 0, 0]);
            assert_eq!(result, Ok(()));
            uffd.register(memory, PAGE, MODE_MISSING);
            let reader = thread::spawn(move || load(memory));
            uffd.fault(memory, 0);
            // If the thread that serves the userfaultfd has ended, the memory is not missing any more.
            thread::sleep(std::time::Duration::from_millis(100));
            assert_eq!(uffd.copy(memory, &page_of(4)).0, Ok(()));
            assert_eq!(reader.join().unwrap(), 4);
        });
        server.join().unwrap();
    }

    static HANDLED: AtomicBool = AtomicBool::new(false);

    #[test]
    #[ignore = "runs by itself"]
    fn a_signal_is_handled_while_its_thread_waits() {
        use std::os::unix::thread::JoinHandleExt;
        extern "C" fn note(_: i32) {
            HANDLED.store(true, Ordering::SeqCst);
        }
        let memory = map(1);
        let uffd = Uffd::new(0);
        uffd.register(memory, PAGE, MODE_MISSING);
        // SAFETY: the handler only stores to an atomic.
        unsafe { libc::signal(libc::SIGUSR1, note as *const () as usize) };
        let reader = thread::spawn(move || load(memory));
        uffd.fault(memory, 0);
        // SAFETY: the thread waits for its page.
        unsafe { libc::pthread_kill(reader.as_pthread_t(), libc::SIGUSR1) };
        while !HANDLED.load(Ordering::SeqCst) {
            thread::yield_now();
        }
        assert!(!reader.is_finished());
        assert_eq!(uffd.copy(memory, &page_of(3)).0, Ok(()));
        assert_eq!(reader.join().unwrap(), 3);
    }
}
