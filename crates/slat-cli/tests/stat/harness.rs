//! Starts clients under `slat run`, and the commands that watch them.

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

/// A directory for one test, in which processes publish their sockets. Dropping this removes it.
pub struct Scratch(pub PathBuf);

impl Scratch {
    pub fn new(name: &str) -> Self {
        let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("stat-{name}"));
        let _ = fs::remove_dir_all(&path);
        fs::create_dir_all(&path).unwrap();
        Scratch(path)
    }

    pub fn slat(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_slat"));
        command
            .args(arguments)
            .env("XDG_CACHE_HOME", self.0.join("cache"))
            .env("XDG_RUNTIME_DIR", &self.0)
            .env("JITDUMPDIR", &self.0)
            .env_remove("LD_PRELOAD");
        command
    }

    /// Starts the client called `name` by `slat run`, and waits until it is ready.
    pub fn start(&self, options: &[&str], name: &str) -> Client {
        let program = std::env::current_exe().unwrap();
        let name = format!("client::{name}");
        let mut command = self.slat(&["run"]);
        let mut process = command
            .args(options)
            .arg("--")
            .arg(program)
            .args([
                "--exact",
                &name,
                "--ignored",
                "--nocapture",
                "--test-threads=1",
            ])
            .env("SLAT_TEST_VMS", vms().to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let output = BufReader::new(process.stdout.take().unwrap());
        let mut client = Client { process, output };
        client.said("ready");
        client
    }

    pub fn stat(&self, arguments: &[&str]) -> Output {
        self.slat(&[&["stat"], arguments].concat())
            .output()
            .unwrap()
    }

    /// Returns all counters of `pid`, or of all processes.
    pub fn json(&self, pid: Option<u32>) -> Vec<Value> {
        let pid = pid.map(|pid| pid.to_string());
        let mut arguments = vec!["--once", "--json"];
        arguments.extend(pid.as_deref());
        let output = self.stat(&arguments);
        assert!(output.status.success(), "{}", text(&output.stderr));
        let json: Value = serde_json::from_slice(&output.stdout).unwrap();
        json["processes"].as_array().unwrap().clone()
    }

    pub fn sockets(&self) -> usize {
        fs::read_dir(self.0.join("slat-stat")).map_or(0, |entries| entries.count())
    }

    /// Waits until a process has published its counters, which a thread of that process does.
    pub fn published(&self, pid: u32) -> Value {
        poll(20, || {
            let mut all = self.json(None).into_iter();
            let found = all.find(|process| process["pid"] == pid);
            found.ok_or(format!("{pid} is not seen"))
        })
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// A running client. Dropping this kills it.
pub struct Client {
    pub process: Child,
    output: BufReader<ChildStdout>,
}

impl Client {
    pub fn pid(&self) -> u32 {
        self.process.id()
    }

    /// Reads the client's output up to a line that ends with `word`. Returns everything that was read.
    pub fn said(&mut self, word: &str) -> String {
        let mut all = String::new();
        loop {
            let mut line = String::new();
            if self.output.read_line(&mut line).unwrap() == 0 {
                let mut errors = String::new();
                let _ = self
                    .process
                    .stderr
                    .take()
                    .unwrap()
                    .read_to_string(&mut errors);
                panic!("the client has ended: {all}{errors}");
            }
            all += &line;
            if line.trim_end().ends_with(word) {
                return all;
            }
        }
    }

    /// Tells the client to continue.
    pub fn proceed(&mut self) {
        let input = self.process.stdin.as_mut().unwrap();
        input.write_all(b"\n").unwrap();
    }

    pub fn kill(&mut self) {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Calls `ask` repeatedly, until it returns a result. After `seconds`, panics with the text that it returned last.
pub fn poll<T>(seconds: u64, mut ask: impl FnMut() -> Result<T, String>) -> T {
    let begin = Instant::now();
    loop {
        match ask() {
            Ok(answer) => return answer,
            Err(why) => assert!(begin.elapsed() < Duration::from_secs(seconds), "{why}"),
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Returns the error `why` unless `done`.
pub fn unless(done: bool, why: &str) -> Result<(), String> {
    if done { Ok(()) } else { Err(why.to_owned()) }
}

pub fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

/// Returns the number of VMs in a test with many VMs. The variable SLAT_TEST_VMS changes it.
pub fn vms() -> usize {
    let wanted = std::env::var("SLAT_TEST_VMS");
    wanted.map_or(1000, |wanted| wanted.parse().unwrap())
}

pub fn is_root() -> bool {
    // SAFETY: the call has no arguments.
    unsafe { libc::geteuid() == 0 }
}

/// The number of a user who has no VM.
pub const ANOTHER: &str = "54321";

/// Runs `slat` as another user. Returns `None` if this process is not root.
pub fn as_another(scratch: &Scratch, arguments: &[&str]) -> Option<Output> {
    if !is_root() {
        eprintln!("skipped: only root can be another user");
        return None;
    }
    // Make a copy that every user can execute, because others may have no access to the build directory.
    let name = scratch.0.file_name().unwrap().to_str().unwrap();
    let directory = PathBuf::from(format!("/tmp/slat-{name}-{}", std::process::id()));
    fs::create_dir_all(&directory).unwrap();
    fs::set_permissions(&directory, fs::Permissions::from_mode(0o755)).unwrap();
    let program = directory.join("slat");
    if !program.exists() {
        // Another process makes the copy. Otherwise a child of another test might have the copy open for writing, and
        // it could not be executed.
        let mut copy = Command::new("cp");
        let copied = copy.arg(env!("CARGO_BIN_EXE_slat")).arg(&program).status();
        assert!(copied.unwrap().success());
    }
    let output = Command::new("setpriv")
        .args(["--reuid", ANOTHER, "--regid", ANOTHER, "--clear-groups"])
        .arg(&program)
        .args(arguments)
        .env("XDG_RUNTIME_DIR", &scratch.0)
        .output();
    let _ = fs::remove_dir_all(&directory);
    Some(output.unwrap())
}
