//! The client's devices.

use slat_kvm::VcpuExit;

/// One access: to a device, or by a hypercall.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Access {
    pub write: bool,
    /// The guest-physical address, the port, or the number of the hypercall.
    pub at: u64,
    pub len: usize,
    pub value: u64,
}

impl Access {
    pub fn read(at: u64, value: u64, len: usize) -> Self {
        Access {
            write: false,
            at,
            len,
            value,
        }
    }
}

/// The offset in the devices' pages from which on the devices store what is written, like memory. Below this offset,
/// each read returns another value.
const REMEMBERS: u64 = 0x8000;

/// The devices, which record each access.
#[derive(Default)]
pub struct Device {
    pub accesses: Vec<Access>,
    written: std::collections::HashMap<u64, u8>,
}

impl Device {
    /// Returns the byte that a read at `at` returns.
    fn byte(&self, at: u64, number: usize) -> u8 {
        let new = (at * 31 + number as u64 * 7 + self.accesses.len() as u64 * 13) as u8;
        match at >= super::programs::DEVICE + REMEMBERS {
            true => self.written.get(&at).copied().unwrap_or(at as u8),
            false => new,
        }
    }

    fn note(&mut self, write: bool, at: u64, data: &[u8]) {
        // Records only a checksum of a long transfer.
        let value = match data.len() {
            ..=8 => data
                .iter()
                .rev()
                .fold(0, |value, byte| value << 8 | u64::from(*byte)),
            _ => data
                .iter()
                .fold(0, |sum: u64, byte| sum.wrapping_mul(31) + u64::from(*byte)),
        };
        self.accesses.push(Access {
            write,
            at,
            len: data.len(),
            value,
        });
    }

    fn fill(&mut self, at: u64, data: &mut [u8]) {
        for (number, byte) in data.iter_mut().enumerate() {
            *byte = self.byte(at + number as u64, number);
        }
        self.note(false, at, data);
    }

    /// Handles an exit. Returns `false` when the guest has ended.
    pub fn serve(&mut self, exit: VcpuExit<'_>) -> bool {
        match exit {
            VcpuExit::IoIn(port, data) => self.fill(port.into(), data),
            VcpuExit::IoOut(port, data) => self.note(true, port.into(), data),
            VcpuExit::MmioRead(at, data) => self.fill(at, data),
            VcpuExit::MmioWrite(at, data) => {
                for (number, byte) in data.iter().enumerate() {
                    self.written.insert(at + number as u64, *byte);
                }
                self.note(true, at, data);
            }
            VcpuExit::Hypercall(call) => {
                *call.ret = 77 + self.accesses.len() as u64;
                self.note(false, call.nr, &call.args[0].to_le_bytes());
            }
            VcpuExit::X86Rdmsr(msr) => {
                *msr.data = 0x1122_3344_5566 + self.accesses.len() as u64;
                // An MSR with an odd index does not exist.
                *msr.error = u8::from(msr.index & 1 != 0);
                self.note(false, msr.index.into(), &[]);
            }
            VcpuExit::X86Wrmsr(msr) => {
                *msr.error = u8::from(msr.index & 1 != 0);
                self.note(true, msr.index.into(), &msr.data.to_le_bytes());
            }
            // slat cannot emulate some instructions on devices: they end the program by an internal error.
            VcpuExit::Hlt | VcpuExit::InternalError => return false,
            other => panic!("{other:?}"),
        }
        true
    }
}
