//! Tests that a file can be read while its process runs, and after that process has ended or was killed.

use slat_trace::read::Trace;
use slat_trace::{
    AgeHva, Buffer, FlushBegin, Mmio, Quiesce, Selection, UserspaceExit, begin, point, run_vcpu,
};
use std::ffi::CString;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;

/// Runs `work` in a forked child that records `selected` in a new file. Returns the file's contents afterwards.
fn record(name: &str, selected: &str, work: fn()) -> Trace {
    let path = std::env::temp_dir().join(format!("slat-trace-{}-{name}", std::process::id()));
    let selected: Selection = selected.parse().unwrap();
    // SAFETY: the child has one thread, which ends without a return.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let done = std::panic::catch_unwind(|| {
            let made = begin(&path, selected, "1".parse::<Buffer>().unwrap());
            assert_eq!(made.unwrap().as_ref(), Some(&path));
            work();
        });
        // SAFETY: the child ends without a return.
        unsafe { libc::_exit(i32::from(done.is_err())) };
    }
    let mut status = 0;
    // SAFETY: the process is a child of this one, and the status is a live variable.
    unsafe { libc::waitpid(child, &mut status, 0) };
    assert!(
        status == 0 || libc::WTERMSIG(status) == libc::SIGKILL,
        "{status:#x}"
    );
    read(path)
}

fn read(path: PathBuf) -> Trace {
    let trace = Trace::read(&path).unwrap();
    std::fs::remove_file(path).unwrap();
    trace
}

fn mmio(gpa: u64) {
    point(|| Mmio {
        r#type: slat_trace::mmio::WRITE,
        len: 4,
        gpa,
        val: !gpa,
    });
}

#[test]
fn a_record_is_read_as_it_was_written() {
    let trace = record("plain", "kvm,slat", || {
        mmio(0xfee0_0000);
        let _on = run_vcpu(3, 7);
        point(|| UserspaceExit {
            reason: 9,
            errno: -1,
        });
    });
    let [thread] = &trace.threads[..] else {
        panic!("{:?}", trace.threads)
    };
    let [first, second] = &thread.events[..] else {
        panic!("{:?}", thread.events)
    };
    assert!(first.ns <= second.ns && second.ns - first.ns < 1_000_000_000);
    assert_eq!(trace.points[first.point].name, "kvm_mmio");
    let values: Vec<_> = trace.values(first).collect();
    let gpa = 0xfee0_0000;
    assert_eq!(
        values,
        [("type", 2), ("len", 4), ("gpa", gpa), ("val", !gpa)]
    );
    assert_eq!((first.vcpu, second.vcpu), (None, Some((3, 7))));
    assert_eq!(trace.value(second, "errno"), Some(u32::MAX.into()));
    assert_eq!(trace.value(second, "gpa"), None);
    assert_eq!(
        (trace.count("kvm_mmio"), trace.count("kvm_userspace_exit")),
        (1, 1)
    );
}

#[test]
fn only_what_is_selected_is_recorded() {
    let trace = record("selected", "kvm_age_hva,slat", || {
        mmio(1);
        point(|| AgeHva { start: 1, end: 2 });
        point(|| Quiesce {});
        point(|| panic!("evaluated") as UserspaceExit);
    });
    let names = trace.threads[0].events.iter();
    let names: Vec<_> = names
        .map(|event| trace.points[event.point].name.as_str())
        .collect();
    assert_eq!(names, ["kvm_age_hva", "quiesce"]);
    let recorded = |name| trace.records(trace.point(name).unwrap());
    assert!(recorded("flush_begin") && !recorded("kvm_mmio"));
}

#[test]
fn a_ring_is_read_while_its_thread_overwrites_it() {
    let path = std::env::temp_dir().join(format!("slat-trace-{}-live", std::process::id()));
    // SAFETY: the child has one thread, which ends without a return.
    let child = unsafe { libc::fork() };
    if child == 0 {
        // SAFETY: the child ends even if its parent does not end it.
        unsafe { libc::alarm(60) };
        let done = std::panic::catch_unwind(|| {
            begin(&path, Selection::ALL, Buffer::default()).unwrap();
            for gpa in 0.. {
                mmio(gpa);
            }
        });
        // SAFETY: the child ends without a return.
        unsafe { libc::_exit(i32::from(done.is_err())) };
    }
    let mut latest = 0;
    while latest < 2_000_000 {
        let trace = match Trace::read(&path) {
            Ok(trace) => trace,
            // At first the file does not exist, or is not complete.
            Err(error) => {
                assert_eq!(latest, 0, "{error}");
                continue;
            }
        };
        let Some(thread) = trace.threads.first() else {
            continue;
        };
        for (number, event) in (thread.dropped..).zip(&thread.events) {
            assert_eq!(trace.value(event, "gpa"), Some(number));
            latest = number;
        }
    }
    // SAFETY: the process is a child of this one, and the status is a live variable.
    unsafe {
        libc::kill(child, libc::SIGKILL);
        libc::waitpid(child, &mut 0, 0);
    }
    std::fs::remove_file(path).unwrap();
}

#[test]
fn a_full_ring_keeps_the_latest_records_and_counts_all() {
    const WRITTEN: u64 = 100_000;
    let trace = record("full", "kvm", || (0..WRITTEN).for_each(mmio));
    let thread = &trace.threads[0];
    let kept = thread.events.len() as u64;
    assert!(
        (16_000..16_384).contains(&kept),
        "{kept} of a MiB of 64 bytes each"
    );
    assert_eq!(thread.dropped, WRITTEN - kept);
    assert_eq!(trace.count("kvm_mmio"), WRITTEN);
    let gpas = thread
        .events
        .iter()
        .map(|event| trace.value(event, "gpa").unwrap());
    assert!(gpas.eq(thread.dropped..WRITTEN));
}

#[test]
fn a_killed_process_leaves_its_records() {
    let trace = record("killed", "kvm", || {
        (0..20_000).for_each(mmio);
        // SAFETY: the signal ends this process.
        unsafe { libc::kill(libc::getpid(), libc::SIGKILL) };
    });
    assert_eq!(trace.count("kvm_mmio"), 20_000);
    let last = trace.threads[0].events.last().unwrap();
    assert_eq!(trace.value(last, "gpa"), Some(19_999));
}

#[test]
fn threads_have_rings_of_their_own_until_none_is_left() {
    const THREADS: u64 = 20;
    let trace = record("threads", "slat", || {
        std::thread::scope(|scope| {
            for start in 0..THREADS {
                scope.spawn(move || (0..100).for_each(|end| point(|| FlushBegin { start, end })));
            }
        });
    });
    let threads = trace.threads.len() as u64;
    assert!((1..THREADS).contains(&threads));
    for thread in &trace.threads {
        let of = |field| {
            thread
                .events
                .iter()
                .map(|event| trace.value(event, field).unwrap())
                .collect::<Vec<_>>()
        };
        assert_eq!(of("end"), Vec::from_iter(0..100));
        assert!(of("start").windows(2).all(|pair| pair[0] == pair[1]));
    }
    assert_eq!(trace.lost, 100 * (THREADS - threads));
}

#[test]
fn a_forked_child_does_not_write_to_its_parents_file() {
    let trace = record("forked", "kvm", || {
        mmio(1);
        // SAFETY: the child only records a tracepoint, and ends.
        unsafe {
            let child = libc::fork();
            if child == 0 {
                mmio(2);
                libc::_exit(0);
            }
            libc::waitpid(child, &mut 0, 0);
        }
        mmio(3);
    });
    assert_eq!(trace.count("kvm_mmio"), 2);
}

#[test]
fn a_pipe_is_refused_at_once() {
    let path = std::env::temp_dir().join(format!("slat-trace-{}-pipe", std::process::id()));
    let name = CString::new(path.as_os_str().as_bytes()).unwrap();
    // SAFETY: the path ends with NUL.
    assert_eq!(unsafe { libc::mkfifo(name.as_ptr(), 0o600) }, 0);
    let refused = Trace::read(&path).unwrap_err();
    std::fs::remove_file(path).unwrap();
    assert!(refused.ends_with("is no file"), "{refused}");
}

#[test]
fn without_space_there_is_no_file_and_a_reason() {
    // Sets the limit of file lengths in a child. The limit acts like a full disk, but needs no root.
    let directory = std::env::temp_dir().join(format!("slat-trace-{}-full", std::process::id()));
    std::fs::create_dir(&directory).unwrap();
    // SAFETY: the child has one thread, which ends without a return.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let done = std::panic::catch_unwind(|| {
            let limit = libc::rlimit {
                rlim_cur: 1 << 20,
                rlim_max: 1 << 20,
            };
            // SAFETY: the arguments are numbers and a live struct.
            unsafe {
                libc::signal(libc::SIGXFSZ, libc::SIG_IGN);
                libc::setrlimit(libc::RLIMIT_FSIZE, &limit);
            }
            begin(&directory.join("trace"), Selection::ALL, Buffer::default()).unwrap_err();
        });
        // SAFETY: the child ends without a return.
        unsafe { libc::_exit(i32::from(done.is_err())) };
    }
    let mut status = 0;
    // SAFETY: the process is a child of this one, and the status is a live variable.
    unsafe { libc::waitpid(child, &mut status, 0) };
    assert_eq!(status, 0);
    // The directory must be empty. Otherwise its removal fails.
    std::fs::remove_dir(directory).unwrap();
}

#[test]
fn what_is_no_trace_is_refused() {
    let path = std::env::temp_dir().join(format!("slat-trace-{}-none", std::process::id()));
    for content in [&b""[..], &[7; 20_000]] {
        std::fs::write(&path, content).unwrap();
        assert!(Trace::read(&path).unwrap_err().contains("no trace"));
    }
    std::fs::remove_file(path).unwrap();
}
