//! GDB's command `monitor`: requests for which GDB has no command of its own.

use gdbstub::outputln;
use gdbstub::target::ext::monitor_cmd::{ConsoleOutput, MonitorCmd};

use super::process::Space;
use super::target::Vm;
use crate::arch::gdb::describe;

const HELP: &str = "\
info            the VM and its vCPUs
phys on|off     addresses of all of gdb's commands are guest-physical, or linear again
xp ADDRESS [N]  show N bytes (64 if not given) of guest-physical memory";

/// The maximum number of bytes that `xp` shows.
const MOST_SHOWN: usize = 64 << 10;

/// Parses a number: decimal, or hexadecimal after `0x`.
fn number(text: &str) -> Option<u64> {
    match text.strip_prefix("0x") {
        Some(digits) => u64::from_str_radix(digits, 16).ok(),
        None => text.parse().ok(),
    }
}

impl Vm {
    /// Prints a description of the VM.
    fn info(&mut self, out: &mut ConsoleOutput<'_>) -> Result<(), String> {
        outputln!(out, "VM {} of process {}", self.number, self.pid);
        for vcpu in self.process.vcpus()? {
            if let Some(registers) = self.registers(vcpu)? {
                outputln!(
                    out,
                    "vCPU {vcpu}: {}",
                    describe(|name| registers.value(name))
                );
            }
        }
        Ok(())
    }

    /// Prints guest-physical memory.
    fn show(&mut self, at: u64, len: usize, out: &mut ConsoleOutput<'_>) -> Result<(), String> {
        let mut bytes = vec![0; len];
        let read = self
            .process
            .read(self.first, Space::Physical, at, &mut bytes)?;
        for (line, bytes) in bytes[..read].chunks(16).enumerate() {
            let digits: String = bytes.iter().map(|byte| format!(" {byte:02x}")).collect();
            outputln!(out, "{:#x}:{digits}", at + 16 * line as u64);
        }
        if read < len {
            outputln!(out, "{:#x} is no memory", at + read as u64);
        }
        Ok(())
    }
}

impl MonitorCmd for Vm {
    fn handle_monitor_cmd(
        &mut self,
        command: &[u8],
        mut out: ConsoleOutput<'_>,
    ) -> Result<(), String> {
        let command = String::from_utf8_lossy(command);
        let words: Vec<_> = command.split_whitespace().collect();
        let out = &mut out;
        match words[..] {
            ["info"] => return self.info(out),
            ["phys", "on"] => self.physical = true,
            ["phys", "off"] => self.physical = false,
            ["xp", at, ref rest @ ..] if rest.len() < 2 => {
                let len = rest.first().map_or(Some(64), |len| number(len));
                if let (Some(at), Some(len)) = (number(at), len) {
                    return self.show(at, (len as usize).min(MOST_SHOWN), out);
                }
                outputln!(out, "{HELP}");
            }
            _ => outputln!(out, "{HELP}"),
        }
        Ok(())
    }
}
