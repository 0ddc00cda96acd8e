//! Tests `slat stat`, `slat map` and `slat gdb` as a user sees them: clients run under `slat run`, and another
//! process watches them.
#![cfg(target_arch = "x86_64")]

mod client;
mod gdb;
mod harness;
mod map;
mod profile;
mod screen;

use std::collections::BTreeMap;
use std::fs;
use std::io::Read;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

use harness::{ANOTHER, Client, Scratch, as_another, is_root, poll, text, unless, vms};

/// Returns the counters that `slat run --stats` has printed in `text`.
fn account(text: &str) -> BTreeMap<String, u64> {
    let lines = text.lines().filter(|line| line.starts_with("  "));
    let pairs = lines.filter_map(|line| {
        let mut words = line.split_whitespace();
        let name = words.next()?.to_owned();
        Some((name, words.next()?.replace(',', "").parse().ok()?))
    });
    pairs.collect()
}

#[test]
fn totals_are_those_of_the_account_at_the_end() {
    let scratch = Scratch::new("totals");
    let mut client = scratch.start(&["--stats"], "halts");
    let process = scratch.published(client.pid());
    let total = &process["total"];
    assert_eq!((&total["vms"], &total["ended_vms"]), (&2.into(), &1.into()));
    assert_eq!(process["vms"].as_array().unwrap().len(), 1);
    client.proceed();
    let mut errors = String::new();
    let mut stderr = client.process.stderr.take().unwrap();
    stderr.read_to_string(&mut errors).unwrap();
    assert!(client.process.wait().unwrap().success(), "{errors}");
    let account = account(&errors);
    let both = ["memory", "cpu"].map(|kind| total[kind].as_object().unwrap());
    let mut compared = 0;
    for (name, value) in both.into_iter().flatten() {
        // The client drops its VM before it ends.
        if [
            "zapped",
            "slot_changes",
            "remote_tlb_flush",
            "remote_tlb_flush_requests",
        ]
        .contains(&name.as_str())
        {
            continue;
        }
        let printed = account.get(name).copied().unwrap_or(0);
        assert_eq!(value.as_u64().unwrap(), printed, "{name}: {errors}");
        compared += usize::from(printed != 0);
    }
    // Not only zeroes were compared: faults, leaves, instructions, blocks and others are not 0.
    assert!(compared > 5, "{compared}: {errors}");
    assert_eq!(scratch.sockets(), 0, "it has removed its socket");
}

#[test]
fn exits_are_those_of_the_trace() {
    for mmu in ["tdp", "direct", "shadow"] {
        let scratch = Scratch::new(&format!("traced-{mmu}"));
        let file = scratch.0.join("trace");
        let file = file.to_str().unwrap();
        let client = scratch.start(&["--mmu", mmu, "--trace", file], "maps");
        let process = scratch.published(client.pid());
        let report = scratch.slat(&["trace", "report", "--json", file]).output();
        let report: Value = serde_json::from_slice(&report.unwrap().stdout).unwrap();
        assert_eq!(
            (&report["dropped"], &report["lost"]),
            (&0.into(), &0.into())
        );
        let vcpu = &process["vms"][0]["vcpus"][0];
        let counted = |name: &str| {
            vcpu["exits"][name]
                .as_u64()
                .unwrap_or_else(|| panic!("{name}: {vcpu}"))
        };
        for (counter, reason) in [
            ("insn_emulation", "EPT_MISCONFIG"),
            ("io_exits", "IO_INSTRUCTION"),
            ("halt_exits", "HLT"),
            ("irq_exits", "EXTERNAL_INTERRUPT"),
            ("irq_window_exits", "INTERRUPT_WINDOW"),
        ] {
            let traced = report["exits"][reason]["samples"].as_u64().unwrap_or(0);
            assert_eq!(traced, counted(counter), "{mmu}: {reason}");
        }
        assert!(
            counted("halt_exits") == 1 && counted("insn_emulation") == 1,
            "{vcpu}"
        );
        for (point, counted) in [
            ("kvm_entry", counted("exits")),
            ("kvm_exit", counted("exits")),
            ("kvm_userspace_exit", 2),
            (
                "kvm_page_fault",
                process["total"]["memory"]["pf_taken"].as_u64().unwrap(),
            ),
        ] {
            assert_eq!(report["counts"][point], counted, "{mmu}: {point}");
        }
    }
}

#[test]
fn a_killed_process_leaves_nothing() {
    let scratch = Scratch::new("killed");
    let mut client = scratch.start(&[], "halts");
    let pid = client.pid();
    scratch.published(pid);
    client.kill();
    assert_eq!(scratch.sockets(), 1, "it could not remove its socket");
    let left = scratch.json(None);
    assert!(left.iter().all(|process| process["pid"] != pid), "{left:?}");
    assert_eq!(scratch.sockets(), 0);
}

#[test]
fn the_next_process_removes_what_dead_ones_have_left() {
    let scratch = Scratch::new("next");
    let living = scratch.start(&[], "halts");
    let mut killed = [(); 3].map(|()| scratch.start(&[], "halts"));
    for client in killed.iter().chain([&living]) {
        scratch.published(client.pid());
    }
    killed.iter_mut().for_each(Client::kill);
    assert_eq!(scratch.sockets(), 4, "they could not remove their sockets");
    // No command that asks processes runs from here on, because such a command would remove the dead sockets itself.
    let mut next = scratch.start(&[], "halts");
    poll(20, || {
        let sockets = scratch.sockets();
        unless(sockets == 2, &format!("{sockets} sockets"))
    });
    next.proceed();
    next.process.wait().unwrap();
    assert_eq!(scratch.sockets(), 1, "the living one's");
    scratch.published(living.pid());
}

#[test]
fn a_process_that_executes_another_program_is_gone() {
    let scratch = Scratch::new("executes");
    let mut client = scratch.start(&[], "executes");
    let pid = client.pid();
    scratch.published(pid);
    client.proceed();
    poll(20, || {
        let all = scratch.json(None);
        unless(
            all.iter().all(|process| process["pid"] != pid),
            "it is seen",
        )
    });
    let error = text(&scratch.stat(&[&pid.to_string()]).stderr);
    assert!(error.contains("no VM on slat"), "{error}");
    assert_eq!(scratch.sockets(), 0);
}

#[test]
fn many_vms_are_listed() {
    let scratch = Scratch::new("many");
    let client = scratch.start(&[], "many");
    let process = scratch.published(client.pid());
    let listed = process["vms"].as_array().unwrap();
    let numbers: Vec<_> = listed.iter().map(|vm| vm["vm"].as_u64().unwrap()).collect();
    assert_eq!(numbers, (0..vms() as u64).collect::<Vec<_>>());
    assert!(
        listed
            .iter()
            .all(|vm| vm["vcpus"].as_array().unwrap().len() == 1)
    );
    let table = text(&scratch.stat(&["--once", "--by-vcpu"]).stdout);
    let pid = format!(" {} ", client.pid());
    let rows = table
        .lines()
        .filter(|line| format!(" {line}").contains(&pid));
    assert_eq!(rows.count(), vms(), "{table}");
}

#[test]
fn forked_children_are_processes_of_their_own() {
    let scratch = Scratch::new("forks");
    let program_says = {
        let mut client = scratch.start(&[], "forks");
        let parent = scratch.published(client.pid());
        assert_eq!(parent["vms"].as_array().unwrap().len(), 1);
        // `start` has read the line that names the children. So this finds the children by their parent.
        let children = fs::read_to_string(format!("/proc/{0}/task/{0}/children", client.pid()));
        let mut children: Vec<u32> = match children {
            Ok(children) => children
                .split_whitespace()
                .map(|id| id.parse().unwrap())
                .collect(),
            Err(_) => Vec::new(),
        };
        if children.is_empty() {
            // The test harness runs a test on another thread than the main one.
            for task in fs::read_dir(format!("/proc/{}/task", client.pid())).unwrap() {
                let list = fs::read_to_string(task.unwrap().path().join("children")).unwrap();
                children.extend(list.split_whitespace().map(|id| id.parse::<u32>().unwrap()));
            }
        }
        let [without, with] = children[..] else {
            panic!("{children:?}")
        };
        // A process is seen as soon as it has a VM.
        poll(20, || match scratch.published(with)["vms"].as_array() {
            Some(vms) if vms.len() == 2 => Ok(()),
            vms => Err(format!("not two VMs: {vms:?}")),
        });
        client.kill();
        let pids: Vec<_> = scratch
            .json(None)
            .iter()
            .map(|it| it["pid"].clone())
            .collect();
        for child in [without, with] {
            // SAFETY: the processes are the client's children, which do not end by themselves.
            unsafe { libc::kill(child as i32, libc::SIGKILL) };
        }
        (pids, client.pid(), without, with)
    };
    let (pids, parent, without, with) = program_says;
    assert!(pids.contains(&with.into()), "{pids:?}");
    // A child that is still running does not keep its parent's socket alive.
    assert!(
        !pids.contains(&parent.into()) && !pids.contains(&without.into()),
        "{pids:?}"
    );
}

#[test]
fn a_seccomp_filter_does_not_hide_a_process() {
    let scratch = Scratch::new("seccomp");
    let client = scratch.start(&[], "is_confined");
    let process = scratch.published(client.pid());
    let faults = process["total"]["memory"]["pf_fixed"].as_u64().unwrap();
    assert!(faults >= 1, "{process}");
}

#[test]
fn a_seccomp_filter_does_not_end_a_trace() {
    let scratch = Scratch::new("seccomp-traced");
    let file = scratch.0.join("trace");
    let _client = scratch.start(&["--trace", file.to_str().unwrap()], "is_confined");
    let report = scratch
        .slat(&["trace", "report", "--json", file.to_str().unwrap()])
        .output();
    let report: Value = serde_json::from_slice(&report.unwrap().stdout).unwrap();
    // The vCPU of the client ran under the filter.
    assert_eq!(report["exits"]["HLT"]["samples"], 1, "{report}");
    assert_eq!(
        (&report["lost"], &report["unpaired"]),
        (&0.into(), &0.into())
    );
}

#[test]
fn a_guest_that_computes_is_seen_to() {
    let scratch = Scratch::new("computes");
    let client = scratch.start(&[], "computes");
    let pid = client.pid().to_string();
    scratch.published(client.pid());
    let arguments = [
        "--csv",
        "--count",
        "3",
        "--interval",
        "0.2",
        "--by-vcpu",
        &pid,
    ];
    let output = scratch.stat(&arguments);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let table = text(&output.stdout);
    let mut lines = table.lines();
    assert_eq!(
        lines.next(),
        Some("seconds,pid,vm,vcpu,counter,value,per_second")
    );
    let of_instructions = lines.filter(|line| line.contains(",instructions,"));
    let rows: Vec<Vec<_>> = of_instructions
        .map(|line| line.split(',').collect())
        .collect();
    assert_eq!(rows.len(), 3, "{table}");
    assert_eq!(rows[0][1..4], [pid.as_str(), "0", "0"]);
    assert_eq!(rows[0][6], "");
    // The guest never exits by itself. A ticker makes it report its counters.
    let rate: u64 = rows[2][6].parse().unwrap();
    assert!(rate > 100_000, "{table}");
    let process = scratch.published(client.pid());
    assert_eq!(process["vms"][0]["vcpus"][0]["state"], "runs");
}

#[test]
fn a_stopped_process_is_listed_and_said_to_be_silent() {
    let scratch = Scratch::new("stopped");
    let client = scratch.start(&[], "halts");
    scratch.published(client.pid());
    // The signal takes effect when a thread of the process notices it. SAFETY: the process is a child of this one.
    let stopped = unsafe {
        libc::kill(client.pid() as i32, libc::SIGSTOP);
        libc::waitpid(client.pid() as i32, std::ptr::null_mut(), libc::WUNTRACED)
    };
    assert_eq!(stopped, client.pid() as i32);
    let pid = client.pid().to_string();
    let table = text(&scratch.stat(&["--once", &pid]).stdout);
    assert!(
        table.contains("does not answer; it may be stopped"),
        "{table}"
    );
}

#[test]
fn what_is_not_there_is_explained_in_a_line() {
    let scratch = Scratch::new("errors");
    let refused = |pid: &str| {
        let output = scratch.stat(&["--once", pid]);
        assert_eq!(output.status.code(), Some(1));
        assert!(output.stdout.is_empty());
        let error = text(&output.stderr);
        assert_eq!(error.lines().count(), 1, "{error}");
        error
    };
    assert!(refused("2147483647").contains("there is no process 2147483647"));
    let own = std::process::id().to_string();
    assert!(
        refused(&own).contains("slat run"),
        "this process is not under slat"
    );
    assert_eq!(scratch.stat(&["--json"]).status.code(), Some(2));
    assert_eq!(scratch.stat(&["--interval", "0"]).status.code(), Some(2));
}

#[test]
fn another_user_sees_nothing() {
    let scratch = Scratch::new("another");
    let client = scratch.start(&[], "halts");
    let pid = client.pid().to_string();
    scratch.published(client.pid());
    let directory = scratch.0.join("slat-stat");
    let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!(mode(&directory), 0o700);
    let socket = fs::read_dir(&directory)
        .unwrap()
        .next()
        .unwrap()
        .unwrap()
        .path();
    assert_eq!(mode(&socket), 0o600);
    let Some(all) = as_another(&scratch, &["stat", "--once"]) else {
        return;
    };
    assert_eq!(
        text(&all.stdout),
        "No VM runs on slat. Start one: slat run -- PROGRAM\n"
    );
    let one = as_another(&scratch, &["stat", "--once", &pid]).unwrap();
    assert_eq!(one.status.code(), Some(1));
    assert!(
        text(&one.stderr).contains("another user"),
        "{}",
        text(&one.stderr)
    );
    for path in [&directory, &socket] {
        let opened = Command::new("setpriv")
            .args(["--reuid", ANOTHER, "--regid", ANOTHER, "--clear-groups"])
            .args(["ls", path.to_str().unwrap()])
            .output()
            .unwrap();
        assert!(!opened.status.success(), "{}", text(&opened.stdout));
    }
}

#[test]
fn a_directory_that_lets_others_in_is_not_used() {
    let scratch = Scratch::new("open");
    let directory = scratch.0.join("slat-stat");
    fs::create_dir(&directory).unwrap();
    fs::set_permissions(&directory, fs::Permissions::from_mode(0o755)).unwrap();
    let client = scratch.start(&[], "halts");
    // The process publishes in another directory, and is found there, too.
    scratch.published(client.pid());
    assert_eq!(scratch.sockets(), 0);
}

#[test]
fn a_process_that_cannot_publish_runs_all_the_same() {
    if !is_root() {
        eprintln!("skipped: only root can be another user");
        return;
    }
    let scratch = Scratch::new("unpublished");
    // Neither the runtime directory nor this directory belongs to the user.
    let blocked = PathBuf::from(format!("/tmp/slat-stat-{ANOTHER}"));
    fs::create_dir_all(&blocked).unwrap();
    let ran = as_another(&scratch, &["run"]);
    fs::remove_dir(&blocked).unwrap();
    let ran = ran.unwrap();
    assert!(ran.status.success(), "{}", text(&ran.stderr));
    assert!(text(&ran.stdout).contains("memory system of 1 VM"));
    assert_eq!(text(&ran.stderr), "");
}
