//! Tests `slat run` as a user sees it.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use object::{Object, ObjectSymbol};

/// A directory for one test, into which the preload library is written, too. Dropping this removes it.
struct Scratch(PathBuf);

impl Scratch {
    fn new(name: &str) -> Self {
        let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
        let _ = fs::remove_dir_all(&path);
        fs::create_dir_all(&path).unwrap();
        Scratch(path)
    }

    fn file(&self, name: &str, mode: u32, content: &[u8]) -> PathBuf {
        let path = self.0.join(name);
        fs::write(&path, content).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
        path
    }

    fn slat(&self, arguments: &[&str]) -> Output {
        self.command(arguments).output().unwrap()
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_slat"));
        command
            .args(arguments)
            .env("XDG_CACHE_HOME", self.0.join("cache"))
            .env_remove("LD_PRELOAD");
        command
    }

    /// Runs `slat run -- program`, which must refuse the program with one line.
    fn refused(&self, program: &Path) -> (i32, String) {
        let output = self.slat(&["run", "--", program.to_str().unwrap()]);
        let message = text(&output.stderr);
        assert!(output.stdout.is_empty());
        assert_eq!(message.lines().count(), 1, "{message}");
        (output.status.code().unwrap(), message)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

/// For this architecture: the machine number in an ELF file, the name of programs in messages, and the paths of glibc's
/// and musl's dynamic linkers. Zeros follow musl's path, so that both paths have the same length.
const MACHINE: (u8, &str, &[u8], &[u8]) = match IS_X86 {
    true => (
        62,
        "not an x86-64 program",
        b"/lib64/ld-linux-x86-64.so.2\0",
        b"/lib64/ld-musl-x86_64.so.1\0\0",
    ),
    false => (
        183,
        "not an arm64 program",
        b"/lib/ld-linux-aarch64.so.1\0",
        b"/lib/ld-musl-aarch64.so.1\0\0",
    ),
};
const IS_X86: bool = cfg!(target_arch = "x86_64");

/// Makes an ELF program that needs no dynamic linker: a header and one loadable segment. The program's exit status is
/// the result of KVM_GET_API_VERSION on `/dev/kvm`.
fn static_program() -> Vec<u8> {
    const BASE: u64 = 0x40_0000;
    const HEADERS: u64 = 64 + 56;
    let code = match IS_X86 {
        // A system call takes its number in EAX and its arguments in EDI, ESI and EDX.
        true => [
            &[0x48, 0x8d, 0x3d, 0x27, 0, 0, 0][..], // lea rdi, [rip + 0x27]: the path
            &[0xbe, 2, 0, 0, 0],                    // O_RDWR
            &[0xb8, 2, 0, 0, 0, 0x0f, 0x05],        // open
            &[0x89, 0xc7],
            &[0xbe, 0x00, 0xae, 0, 0], // KVM_GET_API_VERSION
            &[0x31, 0xd2],
            &[0xb8, 16, 0, 0, 0, 0x0f, 0x05], // ioctl
            &[0x89, 0xc7],
            &[0xb8, 231, 0, 0, 0, 0x0f, 0x05], // exit_group
            &[0xcc, 0xcc],
            b"/dev/kvm\0",
        ]
        .concat(),
        // A system call takes its number in x8 and its arguments in x0, x1 and x2.
        false => {
            const SVC: u32 = 0xd400_0001;
            let instructions = [
                0x9280_0c60, // mov x0, #-100: AT_FDCWD
                0x1000_0161, // adr x1, . + 44: the path
                0xd280_0042, // mov x2, #2: O_RDWR
                0xd280_0708, // mov x8, #56: openat
                SVC,
                0xd295_c001, // mov x1, #0xae00: KVM_GET_API_VERSION
                0xd280_0002, // mov x2, #0
                0xd280_03a8, // mov x8, #29: ioctl
                SVC,
                0xd280_0bc8, // mov x8, #94: exit_group
                SVC,
                0xd420_0000, // brk #0
            ];
            let mut code: Vec<_> = instructions
                .into_iter()
                .flat_map(u32::to_le_bytes)
                .collect();
            code.extend(b"/dev/kvm\0");
            code
        }
    };
    let mut file = vec![0x7f, b'E', b'L', b'F', 2, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    file.extend([2, 0, MACHINE.0, 0, 1, 0, 0, 0]); // executable
    for word in [BASE + HEADERS, 64, 0] {
        file.extend(word.to_le_bytes()); // entry, program headers, section headers
    }
    file.extend([0, 0, 0, 0, 64, 0, 56, 0, 1, 0, 64, 0, 0, 0, 0, 0]);
    file.extend([1, 0, 0, 0, 5, 0, 0, 0]); // PT_LOAD, read and execute
    let size = HEADERS + code.len() as u64;
    for word in [0, BASE, BASE, size, size, 0x1000] {
        file.extend(word.to_le_bytes());
    }
    file.extend(code);
    file
}

/// The exit status of [`static_program`]: the API version of `/dev/kvm`.
const API_VERSION: i32 = 12;

#[test]
fn the_exit_status_is_the_programs() {
    let scratch = Scratch::new("status");
    for status in [0, 1, 4, 77, 255] {
        let output = scratch.slat(&["run", "--", "sh", "-c", &format!("exit {status}")]);
        assert_eq!(output.status.code(), Some(status));
    }
}

#[test]
fn a_program_that_dies_of_a_signal_dies_of_it_for_its_parent_too() {
    let scratch = Scratch::new("signal");
    let output = scratch.slat(&["run", "--", "sh", "-c", "kill -TERM $$"]);
    assert_eq!(output.status.signal(), Some(15));
}

#[test]
fn output_and_arguments_pass_untouched() {
    let scratch = Scratch::new("arguments");
    let output = scratch.slat(&["run", "--", "printf", "%s|", "--stats", "a b", "-h", ""]);
    assert_eq!(text(&output.stdout), "--stats|a b|-h||");
    assert_eq!(text(&output.stderr), "");
}

#[test]
fn a_missing_program_is_127() {
    let scratch = Scratch::new("missing");
    let (status, message) = scratch.refused(Path::new("no-such-kvm-program"));
    assert_eq!(status, 127);
    assert!(message.contains("no-such-kvm-program"), "{message}");
    assert_eq!(scratch.refused(Path::new("/no/such/program")).0, 127);
}

#[test]
fn a_program_without_execute_permission_is_126() {
    let scratch = Scratch::new("mode");
    let file = scratch.file("program", 0o644, &fs::read("/bin/true").unwrap());
    let (status, message) = scratch.refused(&file);
    assert_eq!(status, 126);
    assert!(message.contains("not executable"), "{message}");
}

/// Whether slat can load programs on this host. If not, prints why.
fn can_load(scratch: &Scratch) -> bool {
    let info = text(&scratch.slat(&["info"]).stdout);
    let loading = info
        .lines()
        .find_map(|line| line.trim().strip_prefix("loading"));
    let can = loading.unwrap().trim().starts_with("yes");
    if !can {
        eprintln!("skipped: loading {}", loading.unwrap().trim());
    }
    can
}

/// In such a root slat cannot ask how memory is mapped.
#[test]
fn without_a_proc_the_built_in_program_runs() {
    let within = |words: &[&str]| {
        let hidden = "mount -t tmpfs none /proc && exec \"$@\"";
        let mut command = Command::new("unshare");
        command
            .args([
                "--user",
                "--map-root-user",
                "--mount",
                "sh",
                "-c",
                hidden,
                "sh",
            ])
            .args(words);
        command.output()
    };
    match within(&["true"]) {
        Ok(output) if output.status.success() => {}
        other => return eprintln!("skipped: no user namespace with mounts: {other:?}"),
    }
    let output = within(&[env!("CARGO_BIN_EXE_slat"), "run"]).unwrap();
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert!(text(&output.stdout).contains("slot_changes"));
}

#[test]
fn a_statically_linked_program_uses_slat() {
    let scratch = Scratch::new("static");
    if !can_load(&scratch) {
        return;
    }
    let file = scratch.file("program", 0o755, &static_program());
    let output = scratch.slat(&["run", "--", file.to_str().unwrap()]);
    assert_eq!(text(&output.stderr), "");
    assert_eq!(output.status.code(), Some(API_VERSION));
}

#[test]
fn a_statically_linked_program_that_another_one_starts_uses_slat() {
    let scratch = Scratch::new("started");
    if !can_load(&scratch) {
        return;
    }
    let file = scratch.file("program", 0o755, &static_program());
    let command = format!("{}; exit $?", file.display());
    let output = scratch.slat(&["run", "--", "sh", "-c", &command]);
    assert_eq!(text(&output.stderr), "");
    assert_eq!(output.status.code(), Some(API_VERSION));
}

#[test]
fn a_program_for_another_machine_is_refused() {
    let scratch = Scratch::new("foreign");
    let mut other = static_program();
    other[18] = 243; // RISC-V
    let mut narrow = static_program();
    narrow[4] = 1;
    for (name, content, reason) in [
        ("other", other, MACHINE.1),
        ("narrow", narrow, "32-bit"),
        ("text", b"hello\n".to_vec(), "neither an ELF program nor"),
        ("cut", static_program()[..70].to_vec(), "damaged"),
    ] {
        let (status, message) = scratch.refused(&scratch.file(name, 0o755, &content));
        assert_eq!(status, 126, "{name}");
        assert!(message.contains(reason), "{name}: {message}");
    }
}

#[test]
fn a_script_runs_when_its_interpreter_can() {
    let scratch = Scratch::new("script");
    let good = scratch.file("good", 0o755, b"#!/bin/sh\necho \"script $1\"; exit 3\n");
    let output = scratch.slat(&["run", "--", good.to_str().unwrap(), "x"]);
    assert_eq!(text(&output.stdout), "script x\n");
    assert_eq!(output.status.code(), Some(3));

    let bad = scratch.file("bad", 0o755, b"#!/no/such/shell\n");
    assert_eq!(scratch.refused(&bad).0, 127);

    if !can_load(&scratch) {
        return;
    }
    let interpreter = scratch.file("static", 0o755, &static_program());
    let line = format!("#! {} -x\n", interpreter.display());
    let script = scratch.file("onstatic", 0o755, line.as_bytes());
    let output = scratch.slat(&["run", "--", script.to_str().unwrap()]);
    assert_eq!(output.status.code(), Some(API_VERSION));
}

#[test]
fn a_program_whose_dynamic_linker_is_missing_is_127() {
    let scratch = Scratch::new("linker");
    // /bin/true, with its interpreter's name replaced by musl's.
    let mut musl = fs::read("/bin/true").unwrap();
    let (_, _, interpreter, musls) = MACHINE;
    let at = musl
        .windows(interpreter.len())
        .position(|w| w == interpreter)
        .unwrap();
    musl[at..at + interpreter.len()].copy_from_slice(musls);
    let (status, message) = scratch.refused(&scratch.file("musl", 0o755, &musl));
    assert_eq!(status, 127);
    assert!(message.contains("ld-musl"), "{message}");
}

#[test]
fn children_are_followed_even_when_descriptors_were_closed() {
    let scratch = Scratch::new("children");
    // A shell closes its inherited descriptors and then starts a grandchild.
    let inner = "exec 3>&- 4>&- 5>&- 6>&- 7>&- 8>&- 9>&-; sh -c 'cat /proc/self/maps; :'; :";
    let output = scratch.slat(&["run", "--", "sh", "-c", inner]);
    assert_eq!(text(&output.stderr), "");
    assert!(text(&output.stdout).contains("libslat_preload-"));
}

#[test]
fn the_library_that_programs_get_is_the_one_just_built() {
    let scratch = Scratch::new("embedded");
    let output = scratch.slat(&["run", "--", "sh", "-c", "echo $LD_PRELOAD"]);
    let written = fs::read(text(&output.stdout).trim()).unwrap();
    // Cargo puts the library beside this test, so its path does not depend on what a build script printed.
    let test = std::env::current_exe().unwrap();
    let built = fs::read(test.with_file_name("libslat_preload.so")).unwrap();
    assert!(written == built, "slat embeds another libslat_preload.so");
}

#[test]
fn libraries_that_the_user_preloads_stay() {
    let scratch = Scratch::new("present");
    let output = scratch
        .command(&["run", "--", "sh", "-c", "echo $LD_PRELOAD"])
        .env("LD_PRELOAD", "libm.so.6")
        .output()
        .unwrap();
    assert!(
        text(&output.stdout).ends_with(".so:libm.so.6\n"),
        "{}",
        text(&output.stdout)
    );
}

#[test]
fn a_sanitizers_runtime_comes_first_and_one_that_only_the_program_needs_is_not_its_childrens() {
    let scratch = Scratch::new("sanitizer");
    let cc = |arguments: &[&str]| {
        let mut command = Command::new("cc");
        command.current_dir(&scratch.0).args(arguments);
        assert!(command.status().unwrap().success());
    };
    // A library with the runtime's name. The runtime itself is not on every machine.
    scratch.file("runtime.c", 0o644, b"int slat_test_runtime = 1;\n");
    let soname = "-Wl,-soname,libasan.so.8";
    cc(&[
        "-shared",
        "-fPIC",
        soname,
        "-o",
        "libasan.so.8",
        "runtime.c",
    ]);
    let source = b"#include <stdlib.h>\nextern int slat_test_runtime;\nint main(void) {\
        return !slat_test_runtime || system(\"tr '\\\\0' '\\\\n' </proc/$PPID/environ | grep ^LD_PRELOAD; echo $LD_PRELOAD\"); }\n";
    scratch.file("program.c", 0o644, source);
    cc(&[
        "-o",
        "program",
        "program.c",
        "libasan.so.8",
        "-Wl,-rpath,$ORIGIN",
    ]);

    let program = scratch.0.join("program");
    let run = |users: &str| {
        let mut command = scratch.command(&["run", "--", program.to_str().unwrap()]);
        let output = command.env("LD_PRELOAD", users).output().unwrap();
        assert_eq!(text(&output.stderr), "");
        let output = text(&output.stdout);
        let names = output.trim().lines().map(|line| {
            let entries = line.trim_start_matches("LD_PRELOAD=").split(':');
            let name = |entry: &str| entry.rsplit('/').next().unwrap().to_owned();
            let short = |name: String| match name.starts_with("libslat_preload-") {
                true => "ours".to_owned(),
                false => name,
            };
            entries.map(name).map(short).collect::<Vec<_>>().join(" ")
        });
        names.collect::<Vec<_>>()
    };
    assert_eq!(
        run("libm.so.6"),
        ["libasan.so.8 ours libm.so.6", "ours libm.so.6"]
    );
    let named = scratch.0.join("libasan.so.8");
    let named = run(&format!("libm.so.6:{}", named.display()));
    assert_eq!(named, ["libasan.so.8 ours libm.so.6"; 2]);
}

#[test]
fn a_program_that_becomes_another_user_keeps_the_library() {
    let scratch = Scratch::new("setpriv");
    // No other user can enter this directory.
    let private = scratch.0.join("private");
    fs::create_dir(&private).unwrap();
    fs::set_permissions(&private, fs::Permissions::from_mode(0o700)).unwrap();
    let becoming = "setpriv --reuid 65534 --regid 65534 --clear-groups";
    if !Command::new("sh")
        .args(["-c", &format!("{becoming} true")])
        .status()
        .unwrap()
        .success()
    {
        eprintln!("skipped: only root can become another user");
        return;
    }
    let slat = env!("CARGO_BIN_EXE_slat");
    let output = Command::new("sh")
        .args([
            "-c",
            &format!("umask 077; exec {slat} run -- {becoming} cat /proc/self/maps"),
        ])
        .env("HOME", &private)
        .env("XDG_CACHE_HOME", &private)
        .env("XDG_RUNTIME_DIR", &private)
        .env_remove("LD_PRELOAD")
        .output()
        .unwrap();
    assert_eq!(text(&output.stderr), "");
    assert!(text(&output.stdout).contains("libslat_preload-"));
}

#[test]
fn the_user_is_told_of_a_program_that_drops_the_library() {
    let scratch = Scratch::new("sudo");
    let sudo = scratch.file("sudo", 0o755, b"#!/bin/sh\nexec env -u LD_PRELOAD \"$@\"\n");
    let output = scratch.slat(&["run", "--", sudo.to_str().unwrap(), "echo", "ran"]);
    assert_eq!(text(&output.stdout), "ran\n");
    let told = text(&output.stderr);
    assert!(
        told.starts_with("slat: sudo ") && told.lines().count() == 1,
        "{told}"
    );
}

#[test]
fn a_home_that_cannot_be_written_is_no_obstacle() {
    let scratch = Scratch::new("home");
    let output = scratch
        .command(&["run", "--", "cat", "/proc/self/maps"])
        .env("XDG_CACHE_HOME", "/proc/nonexistent")
        .env("XDG_RUNTIME_DIR", "/proc/nonexistent")
        .env("TMPDIR", scratch.0.join("a directory with spaces"))
        .output()
        .unwrap();
    assert!(text(&output.stdout).contains("libslat_preload-"));
}

#[test]
fn the_command_itself_interposes_nothing() {
    let file = fs::read(env!("CARGO_BIN_EXE_slat")).unwrap();
    let file = object::File::parse(&*file).unwrap();
    for symbol in file.symbols().chain(file.dynamic_symbols()) {
        if let Ok(name) = symbol.name()
            && ["ioctl", "mmap", "mmap64", "open", "close", "madvise"].contains(&name)
        {
            assert!(!symbol.is_definition(), "slat defines {name}");
        }
    }
}

#[test]
fn without_a_program_the_built_in_one_runs_and_is_accounted_for() {
    let scratch = Scratch::new("builtin");
    let output = scratch.slat(&["run"]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let account = text(&output.stdout);
    let own = match IS_X86 {
        true => ["2 vCPUs", "functions"],
        false => ["2 threads", "No guest ran"],
    };
    for word in own.into_iter().chain(["device register", "memslot"]) {
        assert!(account.contains(word), "no '{word}' in:\n{account}");
    }
    assert!(account.lines().count() <= 30, "{account}");
}

#[test]
fn info_tells_what_is_there() {
    let scratch = Scratch::new("info");
    let output = scratch.slat(&["info"]);
    assert!(output.status.success());
    let format = slat_kvm::policy::FORMATS[0];
    for word in [format, "tdp", "/dev/kvm", "userfaultfd"] {
        assert!(text(&output.stdout).contains(word), "no '{word}'");
    }
}

#[test]
fn a_misspelled_option_is_no_program() {
    let scratch = Scratch::new("misspelled");
    let output = scratch.slat(&["run", "--staats", "--", "true"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(
        text(&output.stderr).contains("'--stats'"),
        "{}",
        text(&output.stderr)
    );
}

#[test]
fn what_is_no_process_and_no_command_is_refused_with_what_is() {
    let scratch = Scratch::new("no-process");
    for (arguments, told) in [
        (["stat", "abc"], "the number of a process"),
        (["map", "0"], "the number of a process"),
        (["trace", "file"], "slat trace report"),
    ] {
        let output = scratch.slat(&arguments);
        let error = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{error}");
        assert!(error.contains(told), "{error}");
    }
}

#[test]
fn bench_refuses_a_policy_that_the_experiment_sets() {
    let scratch = Scratch::new("policies");
    for (arguments, reason) in [
        (["split", "--set", "prefetch=off"], "split"),
        (["all", "--set", "huge_pages=off"], "split"),
        (["faults", "--set", "userfault=on"], "faults"),
        (["faults", "--materials", "."], "vmm"),
    ] {
        let output = scratch.slat(&[&["bench"], &arguments[..]].concat());
        assert_eq!(output.status.code(), Some(2));
        let message = text(&output.stderr);
        assert!(
            message.contains(reason) && message.lines().count() == 1,
            "{message}"
        );
    }
}

#[test]
fn completions_and_manual_pages_know_the_options_and_the_exit_statuses() {
    let scratch = Scratch::new("documents");
    let printed = |arguments: &[&str]| {
        let output = scratch.slat(arguments);
        assert!(output.status.success(), "{}", text(&output.stderr));
        text(&output.stdout)
    };
    let format = slat_kvm::policy::FORMATS[0];
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let script = printed(&["completions", shell]);
        assert!(script.contains("stats"), "{shell}");
        // The scripts for the other shells do not complete the values of options.
        if ["bash", "zsh", "fish"].contains(&shell) {
            assert!(script.contains(format), "{shell}");
        }
    }
    assert!(printed(&["man"]).contains("slat\\-bench(1)"));
    let page = printed(&["man", "run"]);
    for word in [
        ".TH slat-run 1",
        "stats",
        ".SH \"EXIT STATUS\"",
        "126",
        "127",
        "ASAN_OPTIONS",
    ] {
        assert!(page.contains(word), "no '{word}' in:\n{page}");
    }
    assert_eq!(scratch.slat(&["man", "walk"]).status.code(), Some(2));
}

#[test]
fn bench_explains_itself_without_measuring() {
    let scratch = Scratch::new("explain");
    let output = scratch.slat(&["bench", "split", "--explain"]);
    assert!(output.status.success());
    assert!(text(&output.stdout).contains("skip-last-level"));
    let all = scratch.slat(&["bench", "--explain"]);
    for experiment in slat_bench::EXPERIMENTS {
        assert!(text(&all.stdout).contains(experiment.explain));
    }
}

#[test]
fn bench_for_another_architecture_has_its_tables_and_its_guests() {
    if !IS_X86 {
        return;
    }
    let scratch = Scratch::new("other-architecture");
    let arm64 = |name| scratch.slat(&["bench", name, "--arch", "arm64", "--explain"]);
    assert!(text(&arm64("cpu").stdout).contains("LDADDAL"));
    assert!(text(&arm64("split").stdout).contains("skip-last-level"));
    let refused = arm64("exit");
    assert_eq!(refused.status.code(), Some(2));
    assert!(text(&refused.stderr).contains("not for exit"));
}

#[test]
fn bench_names_what_needs_a_guest_that_is_missing() {
    let scratch = Scratch::new("missing-guests");
    let all = text(&scratch.slat(&["bench", "--explain"]).stdout);
    for name in slat_bench::missing() {
        let output = scratch.slat(&["bench", name]);
        assert_eq!(output.status.code(), Some(1));
        assert!(text(&output.stderr).contains("no programs for guests of this architecture yet"));
        assert!(all.lines().last().unwrap().contains(name), "{all}");
    }
}
