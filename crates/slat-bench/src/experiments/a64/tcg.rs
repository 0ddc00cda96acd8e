//! The programs on QEMU's own software CPU.

use std::io::{Read, Write};
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use super::programs::{End, IMAGE, Program, RAM_BYTES, image};
use crate::Failure;
use crate::memory_file::MemoryFile;

pub const NAME: &str = "tcg";
pub const PROGRAM: &str = "qemu-system-aarch64";

/// A time-out that is longer than any program takes, even on a loaded machine.
const PATIENCE: Duration = Duration::from_secs(600);

/// Returns the processor time of a program's run, with QEMU's start, and the results of the program.
pub fn run(program: &Program, turns: u64) -> Result<(Duration, [u64; 2]), Failure> {
    let mut file = MemoryFile::new()?;
    file.0.write_all(&image(program, turns, End::Off))?;
    let memory = RAM_BYTES >> 20;
    let machine = format!(
        "-accel tcg -cpu max -M virt -m {memory}M -nodefaults -no-user-config -display none -monitor none -serial stdio"
    );
    let mut qemu = Command::new(PROGRAM)
        .args(machine.split(' '))
        .args([
            "-device",
            &format!(
                "loader,file={},addr={IMAGE:#x},force-raw=on,cpu-num=0",
                file.path()
            ),
        ])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()?;
    // What the program and QEMU write fits into the pipes.
    let time = match time_of(qemu.id() as i32)? {
        Some(time) => time,
        None => {
            qemu.kill()?;
            qemu.wait()?;
            return Err(format!("{PROGRAM} does not end within {PATIENCE:?}").into());
        }
    };
    let (mut written, mut complaints) = (Vec::new(), String::new());
    if let Some(output) = &mut qemu.stdout {
        output.read_to_end(&mut written)?;
    }
    if let Some(errors) = &mut qemu.stderr {
        errors.read_to_string(&mut complaints)?;
    }
    let Ok(bytes) = <[u8; 16]>::try_from(written.as_slice()) else {
        return Err(format!("the program under {PROGRAM} wrote {written:x?}: {complaints}").into());
    };
    let both = u128::from_le_bytes(bytes);
    Ok((time, [both as u64, (both >> 64) as u64]))
}

/// Waits until a child ends, and returns its processor time. `None`: it does not end.
fn time_of(child: i32) -> Result<Option<Duration>, Failure> {
    let began = Instant::now();
    while began.elapsed() < PATIENCE {
        // SAFETY: zeros are a value of the struct.
        let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
        // SAFETY: the kernel writes the local struct. The child is ours, and nobody else waits for it.
        match unsafe { libc::wait4(child, std::ptr::null_mut(), libc::WNOHANG, &mut usage) } {
            0 => thread::sleep(Duration::from_millis(2)),
            ended if ended == child => {
                let times = [usage.ru_utime, usage.ru_stime]
                    .map(|time| Duration::new(time.tv_sec as u64, time.tv_usec as u32 * 1000));
                return Ok(Some(times[0] + times[1]));
            }
            _ => return Err(std::io::Error::last_os_error().into()),
        }
    }
    Ok(None)
}
