//! Tests accesses to inaccessible memory, and signals that are not slat's.

use slat_guard::{Gone, *};
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicUsize, Ordering};

/// A multiple of each size of a page that a kernel may have.
const PAGE: usize = 65536;

fn map(pages: usize, prot: i32) -> *mut u8 {
    install().unwrap();
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    // SAFETY: the call makes a new anonymous mapping at an address of the kernel's choice.
    let p = unsafe { libc::mmap(ptr::null_mut(), pages * PAGE, prot, flags, -1, 0) };
    assert_ne!(p, libc::MAP_FAILED);
    p.cast()
}

const RW: i32 = libc::PROT_READ | libc::PROT_WRITE;

#[test]
fn words_of_every_size_go_in_and_out_unaligned() {
    let p = map(1, RW);
    // SAFETY: the page is mapped and ours.
    unsafe {
        store(
            p.add(1).cast::<u128>(),
            0x0f0e_0d0c_0b0a_0908_0706_0504_0302_0100,
        )
        .unwrap();
        assert_eq!(load(p.add(3)), Ok(2u8));
        assert_eq!(load(p.add(3).cast::<u16>()), Ok(0x0302));
        assert_eq!(load(p.add(3).cast::<u32>()), Ok(0x0504_0302));
        assert_eq!(load(p.add(3).cast::<u64>()), Ok(0x0908_0706_0504_0302));
        assert_eq!(
            load(p.add(1).cast()),
            Ok(0x0f0e_0d0c_0b0a_0908_0706_0504_0302_0100u128)
        );
        store(p.add(3), 0xffu8).unwrap();
        store(p.add(5).cast::<u16>(), 0xeeee).unwrap();
        store(p.add(7).cast::<u32>(), 0xdddd_dddd).unwrap();
        store(p.add(11).cast::<u64>(), 1).unwrap();
        assert_eq!(load(p.add(3).cast()), Ok(0xdddd_dddd_eeee_03ffu64));
    }
}

#[test]
fn locked_operations_return_what_was_there() {
    let p = map(1, RW);
    // SAFETY: the page is mapped and ours.
    unsafe {
        let q = p.cast::<u32>();
        assert_eq!(fetch_add(q, 5), Ok(0));
        assert_eq!(fetch_or(q, 8), Ok(5));
        assert_eq!(fetch_and(q, 12), Ok(13));
        assert_eq!(swap(q, 7), Ok(12));
        assert_eq!(compare_exchange(q, 7, 9), Ok(Ok(7)));
        assert_eq!(compare_exchange(q, 7, 9), Ok(Err(9)));
        let w = p.add(16).cast::<u128>();
        assert_eq!(compare_exchange(w, 0, 1 << 100), Ok(Ok(0)));
        assert_eq!(compare_exchange(w, 0, 1), Ok(Err(1 << 100)));
        assert_eq!(swap(w, 3), Ok(1 << 100));
        let b = p.add(64);
        assert_eq!(compare_exchange(b, 0, 9), Ok(Ok(0)));
        assert_eq!(swap(b, 4), Ok(9));
        assert_eq!(fetch_add(b, 255), Ok(4));
        assert_eq!(load(b), Ok(3));
    }
}

/// Applies each locked operation to a word at `p`, as to a variable, and compares the results and the bytes around it.
///
/// # Safety
/// The 16 bytes before the word, the word, and the 16 bytes after it are the caller's.
unsafe fn locked_operations_at<T: Word + std::fmt::Debug>(p: *mut T, values: [T; 3], sum: T) {
    let [a, b, c] = values;
    let around = p.cast::<u8>().wrapping_sub(16);
    let bytes = size_of::<T>();
    let mut expected: Vec<u8> = (1..=32 + bytes as u8).collect();
    // SAFETY: all these bytes are the caller's, as this function's `# Safety` says.
    unsafe {
        assert_eq!(copy_out(around, &expected), Ok(()));
        assert_eq!(store(p, a), Ok(()));
        assert_eq!(compare_exchange(p, a, b), Ok(Ok(a)));
        assert_eq!(compare_exchange(p, a, c), Ok(Err(b)));
        assert_eq!(swap(p, a), Ok(b));
        assert_eq!(fetch_add(p, b), Ok(a));
        assert_eq!(fetch_and(p, c), Ok(sum));
        assert_eq!(fetch_or(p, b), Ok(sum & c));
        assert_eq!(load(p), Ok(sum & c | b));
        assert_eq!(copy_in(&mut expected[16..16 + bytes], p.cast()), Ok(()));
        assert_eq!(matches(around, &expected), Ok(true));
    }
    assert_eq!(expected[15], 16);
    assert_eq!(expected[16 + bytes], 17 + bytes as u8);
}

#[test]
fn locked_operations_change_nothing_around_a_word_at_any_alignment() {
    let p = map(1, RW);
    for offset in 64..64 + 64 {
        // SAFETY: the page is mapped and ours.
        unsafe {
            let p = p.add(offset);
            locked_operations_at(p, [0xf0u8, 0x93, 0x7f], 0x83);
            locked_operations_at(p.cast(), [0xfff0u16, 0x8093, 0x7fff], 0x8083);
            locked_operations_at(p.cast(), [!15u32, 0x8000_0093, 0x7fff_ffff], 0x8000_0083);
            locked_operations_at(
                p.cast(),
                [!15u64, 1 << 63 | 0x93, 0x7f << 50],
                1 << 63 | 0x83,
            );
            if offset % 16 == 0 {
                locked_operations_at(
                    p.cast(),
                    [!15u128, 1 << 99 | 0x93, 0x7f << 95],
                    1 << 99 | 0x83,
                );
            } else {
                assert_eq!(compare_exchange(p.cast(), 0u128, 0), Err(Gone));
            }
        }
    }
}

#[test]
fn a_locked_operation_needs_memory_that_may_be_written_even_if_it_changes_nothing() {
    let p = map(1, libc::PROT_READ);
    for offset in [0, 1, 15] {
        // SAFETY: the mapping is ours, and every access is guarded.
        unsafe {
            let p = p.add(offset);
            assert_eq!(compare_exchange(p, 1u8, 2), Err(Gone));
            assert_eq!(compare_exchange(p.cast(), 1u32, 2), Err(Gone));
            assert_eq!(fetch_add(p.cast::<u64>(), 0), Err(Gone));
            assert_eq!(swap(p.cast::<u16>(), 0), Err(Gone));
            assert_eq!(fetch_or(p.cast::<u32>(), 0), Err(Gone));
        }
    }
    // SAFETY: all accesses are guarded, so the memory need not be mapped.
    assert_eq!(unsafe { compare_exchange(p.cast(), 1u128, 2) }, Err(Gone));
}

/// Threads add to words that share 16 bytes, each thread by another operation. No addition is lost.
#[test]
fn locked_operations_of_several_threads_are_atomic() {
    const ROUNDS: u64 = 20_000;
    let p = map(1, RW) as usize;
    std::thread::scope(|scope| {
        for _ in 0..2 {
            // SAFETY: the page is mapped; all accesses are guarded.
            scope.spawn(move || unsafe {
                let (word, half, byte) = (
                    (p + 1) as *mut u64,
                    (p + 10) as *mut u16,
                    (p + 15) as *mut u8,
                );
                for _ in 0..ROUNDS {
                    fetch_add(word, 1).unwrap();
                    fetch_add(byte, 1).unwrap();
                    let mut old = load(half).unwrap();
                    while let Err(seen) = compare_exchange(half, old, old.wrapping_add(3)).unwrap()
                    {
                        old = seen;
                    }
                    fetch_add((p + 16) as *mut u128, u128::MAX / 3).unwrap();
                }
            });
        }
    });
    let times = 2 * ROUNDS;
    // SAFETY: the memory is mapped, and all accesses are guarded.
    unsafe {
        assert_eq!(load((p + 1) as *const u64), Ok(times));
        assert_eq!(load((p + 10) as *const u16), Ok((3 * times) as u16));
        assert_eq!(load((p + 15) as *const u8), Ok(times as u8));
        let sum = (u128::MAX / 3).wrapping_mul(times.into());
        assert_eq!(load((p + 16) as *const u128), Ok(sum));
    }
}

/// One thread stores a number to a first word, and then to a second. Another thread loads the second word, and then the
/// first. Only the lowest byte of each word changes, so that no word is seen half written, whatever its alignment.
#[test]
fn a_store_is_seen_after_the_stores_before_it() {
    const LAPS: usize = 40;
    let p = map(1, RW) as usize;
    for (first, second) in [(0, 64), (1, 65), (0, 65), (1, 64), (13, 125)] {
        let (first, second) = (p + first, p + second);
        for _ in 0..LAPS {
            for word in [first, second] {
                // SAFETY: the page is mapped, and all accesses are guarded.
                assert_eq!(unsafe { store(word as *mut u64, 0) }, Ok(()));
            }
            std::thread::scope(|scope| {
                scope.spawn(move || {
                    for number in 1..256 {
                        for word in [first, second] {
                            // SAFETY: the page is mapped, and all accesses are guarded.
                            assert_eq!(unsafe { store(word as *mut u64, number) }, Ok(()));
                        }
                    }
                });
                let mut later = 0;
                while later < 255 {
                    // SAFETY: the page is mapped, and all accesses are guarded.
                    unsafe {
                        later = load(second as *const u64).unwrap();
                        let earlier = load(first as *const u64).unwrap();
                        assert!(earlier >= later, "{earlier} {later}");
                    }
                }
            });
        }
    }
}

#[test]
fn long_runs_are_copied_and_filled_up_to_the_hole() {
    let p = map(3, RW);
    let pattern: Vec<u8> = (0..3000u32).map(|n| (n * 7 + n / 251) as u8).collect();
    // SAFETY: the mapping is ours, and every access is guarded.
    unsafe {
        libc::mprotect(p.add(2 * PAGE).cast(), PAGE, libc::PROT_NONE);
        for len in [15, 16, 17, 31, 32, 1000, 1001] {
            for missing in 0..40.min(len) {
                // First the destination ends at the hole, then the source does.
                let end = p.add(2 * PAGE);
                assert_eq!(copy_out(p, &pattern), Ok(()));
                let to = end.sub(len - missing);
                let expected = if missing == 0 {
                    Ok(())
                } else {
                    Err(len - missing)
                };
                assert_eq!(copy(to, p.add(3), len), expected);
                assert_eq!(matches(to, &pattern[3..3 + len - missing]), Ok(true));
                assert_eq!(copy(p.add(5), to, len), expected);
                assert_eq!(matches(p.add(5), &pattern[3..3 + len - missing]), Ok(true));
                assert_eq!(
                    matches(p.add(5 + len - missing), &pattern[5 + len - missing..3000]),
                    Ok(true)
                );
            }
        }
        for distance in 1..40 {
            // A copy to overlapping higher addresses repeats a pattern. A copy to lower addresses moves the bytes.
            assert_eq!(copy_out(p, &pattern), Ok(()));
            assert_eq!(copy(p.add(distance), p, 500), Ok(()));
            let repeated: Vec<u8> = (0..500 + distance).map(|n| pattern[n % distance]).collect();
            assert_eq!(matches(p, &repeated), Ok(true), "{distance}");
            assert_eq!(copy_out(p, &pattern), Ok(()));
            assert_eq!(copy(p, p.add(distance), 500), Ok(()));
            assert_eq!(
                matches(p, &pattern[distance..distance + 500]),
                Ok(true),
                "{distance}"
            );
        }
        for len in 0..100 {
            let at = p.add(PAGE - 7);
            assert_eq!(copy_out(at.sub(1), &pattern[..102]), Ok(()));
            assert_eq!(fill_elements::<1>(at, 0x1_23, len), Ok(()));
            assert_eq!(matches(at, &vec![0x23; len]), Ok(true));
            assert_eq!(matches(at.add(len), &pattern[1 + len..102]), Ok(true));
            for (size, done) in [
                (2, fill_elements::<2>(p, 0x1_3412, len)),
                (4, fill_elements::<4>(p, 0x1_7856_3412, len)),
                (8, fill_elements::<8>(p, 0xf0de_bc9a_7856_3412, len)),
            ] {
                assert_eq!(done, Ok(()), "{size}");
            }
            let element = 0xf0de_bc9a_7856_3412u64.to_le_bytes();
            assert_eq!(matches(p, &element.repeat(len)), Ok(true));
        }
    }
}

#[test]
fn unmapped_memory_is_gone_for_every_access() {
    let p = map(1, RW);
    // SAFETY: the mapping is ours, and every access is guarded.
    unsafe {
        libc::munmap(p.cast(), PAGE);
        assert_eq!(load(p), Err(Gone));
        assert_eq!(load(p.cast::<u128>()), Err(Gone));
        assert_eq!(store(p.cast::<u64>(), 1), Err(Gone));
        assert_eq!(store(p.cast::<u128>(), 1), Err(Gone));
        assert_eq!(swap(p.cast::<u16>(), 1), Err(Gone));
        assert_eq!(fetch_add(p.cast::<u32>(), 1), Err(Gone));
        assert_eq!(compare_exchange(p.cast::<u128>(), 1, 1), Err(Gone));
        assert_eq!(matches(p, &[0; 9]), Err(Gone));
    }
}

#[test]
fn protection_is_respected() {
    let p = map(2, libc::PROT_READ);
    // SAFETY: the mapping is ours, and every access is guarded.
    unsafe {
        assert_eq!(load(p), Ok(0));
        assert_eq!(store(p, 1), Err(Gone));
        libc::mprotect(p.cast(), PAGE, libc::PROT_NONE);
        assert_eq!(load(p), Err(Gone));
        libc::mprotect(p.cast(), PAGE, RW);
        assert_eq!(store(p, 1), Ok(()));
    }
}

#[test]
fn a_copy_between_two_places_goes_forward_and_stops_at_a_hole_of_either() {
    let p = map(2, RW);
    // SAFETY: the mapping is ours, and every access is guarded.
    unsafe {
        assert_eq!(copy_out(p, b"ab"), Ok(()));
        assert_eq!(copy(p.add(2), p, 6), Ok(()));
        assert_eq!(matches(p, b"abababab"), Ok(true));
        libc::mprotect(p.add(PAGE).cast(), PAGE, libc::PROT_NONE);
        assert_eq!(copy(p.add(PAGE - 3), p, 8), Err(3));
        assert_eq!(copy(p, p.add(PAGE - 2), 8), Err(2));
        assert_eq!(fill_elements::<1>(p.add(PAGE - 2), 7, 10), Err(2));
        assert_eq!(fill_elements::<2>(p.add(PAGE - 4), 7, 10), Err(2));
        assert_eq!(fill_elements::<4>(p.add(PAGE - 8), 7, 10), Err(2));
        assert_eq!(
            fill_elements::<8>(p.add(PAGE - 16), 7 << 56 | 8, 10),
            Err(2)
        );
        assert_eq!(matches(p.add(PAGE - 8), b"\x08\0\0\0\0\0\0\x07"), Ok(true));
    }
}

#[test]
fn copies_stop_at_the_hole_and_say_where() {
    let p = map(2, RW);
    // SAFETY: the mapping is ours, and every access is guarded.
    unsafe {
        libc::mprotect(p.add(PAGE).cast(), PAGE, libc::PROT_NONE);
        assert_eq!(copy_out(p.add(PAGE - 3), b"abcdef"), Err(3));
        let mut buffer = [0; 6];
        assert_eq!(copy_in(&mut buffer, p.add(PAGE - 3)), Err(3));
        assert_eq!(&buffer[..3], b"abc");
        assert_eq!(fill(p.add(PAGE - 2), b'z', 10), Err(2));
        assert_eq!(matches(p.add(PAGE - 3), b"azz"), Ok(true));
        assert_eq!(
            matches(p.add(PAGE - 20), &[&[0u8; 17][..], b"azz"].concat()),
            Ok(true)
        );
        assert_eq!(
            matches(p.add(PAGE - 20), &[&[0u8; 17][..], b"azy"].concat()),
            Ok(false)
        );
    }
}

#[test]
fn a_comparison_sees_each_byte_and_no_others() {
    let p = map(2, RW);
    // SAFETY: the mapping is ours, and every access is guarded.
    unsafe {
        libc::mprotect(p.add(PAGE).cast(), PAGE, libc::PROT_NONE);
        for len in 1..200 {
            let mut bytes: Vec<u8> = (0..len as u8).collect();
            let at = p.add(PAGE - len);
            assert_eq!(copy_out(at, &bytes), Ok(()));
            assert_eq!(matches(at, &bytes), Ok(true));
            assert_eq!(matches(at.add(1), &bytes[..len - 1]), Ok(len == 1));
            for changed in 0..len {
                bytes[changed] ^= 0x80;
                assert_eq!(matches(at, &bytes), Ok(false), "{changed} of {len}");
                bytes[changed] ^= 0x80;
            }
            // An access beyond the page fails, whichever quarter of a line it is in.
            bytes.push(0);
            assert_eq!(matches(at, &bytes), Err(Gone), "{len}");
        }
    }
}

#[test]
fn a_file_that_shrank_is_gone() {
    install().unwrap();
    // SAFETY: the memory file belongs to this test, and the access beyond its end is guarded.
    unsafe {
        let fd = libc::memfd_create(c"shrinks".as_ptr(), 0);
        assert!(fd >= 0);
        assert_eq!(libc::ftruncate(fd, PAGE as i64), 0);
        let p = libc::mmap(ptr::null_mut(), PAGE, RW, libc::MAP_SHARED, fd, 0).cast::<u8>();
        assert_eq!(store(p, 1), Ok(()));
        assert_eq!(libc::ftruncate(fd, 0), 0);
        assert_eq!(load(p), Err(Gone));
        assert_eq!(store(p, 1), Err(Gone));
        libc::close(fd);
    }
}

/// Runs `f` in a child process and returns how it ended.
fn in_child(f: impl FnOnce()) -> i32 {
    // SAFETY: the child runs `f`, which only makes system calls and accesses, and ends.
    unsafe {
        let pid = libc::fork();
        if pid == 0 {
            f();
            libc::_exit(0);
        }
        let mut status = 0;
        assert_eq!(libc::waitpid(pid, &mut status, 0), pid);
        status
    }
}

/// Makes an action of the client's; `None` is the default action.
fn client_action(handler: Option<extern "C" fn(i32)>, flags: i32) -> libc::sigaction {
    // SAFETY: all-zero is a valid action.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    action.sa_sigaction = handler.map_or(libc::SIG_DFL, |h| h as *const () as usize);
    action.sa_flags = flags;
    action
}

static SEEN: AtomicI32 = AtomicI32::new(0);

#[test]
fn a_foreign_fault_reaches_the_chained_handler() {
    extern "C" fn exit_42(_: i32) {
        // SAFETY: the call ends the process.
        unsafe { libc::_exit(42) }
    }
    let p = map(1, libc::PROT_NONE);
    let status = in_child(|| {
        set_chained(libc::SIGSEGV, Some(&client_action(Some(exit_42), 0)));
        // SAFETY: the fault is intended: an unguarded access.
        unsafe { p.write_volatile(1) };
    });
    assert!(
        libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 42,
        "{status:#x}"
    );
}

#[test]
fn a_handler_that_was_there_before_is_chained_once_when_it_asks_for_reset() {
    extern "C" fn note(_: i32) {
        SEEN.fetch_add(1, Ordering::SeqCst);
    }
    install().unwrap();
    let status = in_child(|| {
        set_chained(
            libc::SIGSEGV,
            Some(&client_action(Some(note), libc::SA_RESETHAND)),
        );
        // SAFETY: the calls send the signal to this thread. The first one runs the handler, and the second one takes
        // the default action.
        unsafe {
            libc::raise(libc::SIGSEGV);
            if SEEN.load(Ordering::SeqCst) != 1 {
                libc::_exit(1);
            }
            libc::raise(libc::SIGSEGV);
        }
    });
    assert!(
        libc::WIFSIGNALED(status) && libc::WTERMSIG(status) == libc::SIGSEGV,
        "{status:#x}"
    );
}

#[test]
fn the_default_action_still_kills() {
    let p = map(1, libc::PROT_NONE);
    for sent in [false, true] {
        let status = in_child(|| {
            set_chained(libc::SIGSEGV, Some(&client_action(None, 0)));
            // SAFETY: the fault, or the signal, is intended.
            unsafe {
                if sent {
                    libc::raise(libc::SIGSEGV);
                } else {
                    p.write_volatile(1);
                }
            }
        });
        assert!(libc::WIFSIGNALED(status) && libc::WTERMSIG(status) == libc::SIGSEGV);
    }
}

#[test]
fn set_chained_answers_the_previous_action() {
    extern "C" fn nothing(_: i32) {}
    install().unwrap();
    let status = in_child(|| {
        set_chained(
            libc::SIGBUS,
            Some(&client_action(Some(nothing), libc::SA_RESTART)),
        );
        let old = set_chained(libc::SIGBUS, None).unwrap();
        let same = old.sa_sigaction == nothing as *const () as usize;
        let ok =
            same && old.sa_flags == libc::SA_RESTART && set_chained(libc::SIGINT, None).is_none();
        // SAFETY: the call ends the process.
        unsafe { libc::_exit(if ok { 7 } else { 1 }) }
    });
    assert_eq!(libc::WEXITSTATUS(status), 7);
}

#[test]
fn a_kick_outside_of_an_access_does_nothing() {
    install().unwrap();
    // SAFETY: asks for our own thread id.
    kick(unsafe { libc::gettid() });
}

#[test]
fn kicks_among_accesses_lose_nothing() {
    let p = map(1, RW) as usize;
    static STOP: AtomicBool = AtomicBool::new(false);
    static TID: AtomicI32 = AtomicI32::new(0);
    static KICKED: AtomicUsize = AtomicUsize::new(0);
    let worker = std::thread::spawn(move || {
        // SAFETY: the call takes no pointer.
        TID.store(unsafe { libc::gettid() }, Ordering::SeqCst);
        let mut added = 0u64;
        while !STOP.load(Ordering::Relaxed) {
            // SAFETY: the page stays mapped.
            match unsafe { fetch_add(p as *mut u64, 1) } {
                Ok(_) => added += 1,
                Err(Gone) => _ = KICKED.fetch_add(1, Ordering::Relaxed),
            }
        }
        added
    });
    while TID.load(Ordering::SeqCst) == 0 {
        std::thread::yield_now();
    }
    for _ in 0..20_000 {
        kick(TID.load(Ordering::SeqCst));
    }
    STOP.store(true, Ordering::Relaxed);
    let added = worker.join().unwrap();
    // SAFETY: the page stays mapped.
    assert_eq!(unsafe { load(p as *const u64) }, Ok(added));
}

/// A kick ends the access of a thread that sleeps in a page handled by userfaultfd. Where ordinary users may not use
/// userfaultfd, the test checks nothing.
#[test]
fn a_kick_wakes_a_thread_blocked_in_a_page_fault() {
    const UFFD_USER_MODE_ONLY: i32 = 1;
    const UFFDIO_API: libc::Ioctl = 0xc018_aa3f_u32 as _;
    const UFFDIO_REGISTER: libc::Ioctl = 0xc020_aa00_u32 as _;
    let p = map(1, RW);
    // SAFETY: the calls use only a descriptor and a mapping of this test.
    unsafe {
        let flags = libc::O_CLOEXEC | UFFD_USER_MODE_ONLY;
        let fd = libc::syscall(libc::SYS_userfaultfd, flags) as i32;
        if fd < 0 {
            eprintln!("skipped: this host does not permit userfaultfd");
            return;
        }
        let mut api = [0xaau64, 0, 0];
        assert_eq!(libc::ioctl(fd, UFFDIO_API, api.as_mut_ptr()), 0);
        let mut register = [p as u64, PAGE as u64, 1, 0];
        assert_eq!(libc::ioctl(fd, UFFDIO_REGISTER, register.as_mut_ptr()), 0);
        let (tx, rx) = std::sync::mpsc::channel();
        let address = p as usize;
        let worker = std::thread::spawn(move || {
            tx.send(libc::gettid()).unwrap();
            load(address as *const u64)
        });
        let tid = rx.recv().unwrap();
        // The text of the fault's message says that the thread sleeps.
        let mut message = [0u8; 32];
        assert_eq!(libc::read(fd, message.as_mut_ptr().cast(), 32), 32);
        kick(tid);
        assert_eq!(worker.join().unwrap(), Err(Gone));
        libc::close(fd);
    }
}

#[test]
fn a_comparison_sees_each_bit() {
    let p = map(1, RW);
    let mut bytes: Vec<u8> = (0..40u32).map(|n| (n * 37) as u8).collect();
    // SAFETY: the mapping is ours, and every access is guarded.
    unsafe {
        assert_eq!(copy_out(p, &bytes), Ok(()));
        for (start, end) in (0..8).flat_map(|start| (start..=40).map(move |end| (start, end))) {
            assert_eq!(matches(p.add(start), &bytes[start..end]), Ok(true));
            for bit in 8 * start..8 * end {
                bytes[bit / 8] ^= 1 << (bit % 8);
                let same = matches(p.add(start), &bytes[start..end]);
                assert_eq!(same, Ok(false), "bit {bit} of {start}..{end}");
                bytes[bit / 8] ^= 1 << (bit % 8);
            }
        }
    }
}
