//! A PL011 (DDI 0183): the console.

use std::io::Write;

/// Registers.
const DATA: u64 = 0;
const FLAGS: u64 = 0x18;
const MASK: u64 = 0x38;
const RAW: u64 = 0x3c;
const MASKED: u64 = 0x40;
const IDENTIFICATION: u64 = 0xfe0;

/// FLAGS: the receiver is empty; the transmitter is empty.
const RECEIVER_EMPTY: u64 = 1 << 4;
const TRANSMITTER_EMPTY: u64 = 1 << 7;
/// Interrupts: the receiver has something; the transmitter has space, as always.
const RECEIVED: u64 = 1 << 4 | 1 << 6;
const TRANSMITTED: u64 = 1 << 5;

/// The registers that identify the device.
const IDENTITY: [u64; 8] = [0x11, 0x10, 0x14, 0, 0x0d, 0xf0, 0x05, 0xb1];

#[derive(Default)]
pub struct Uart {
    mask: u64,
    received: Vec<u8>,
}

impl Uart {
    fn raw(&self) -> u64 {
        let received = if self.received.is_empty() {
            0
        } else {
            RECEIVED
        };
        TRANSMITTED | received
    }

    /// Whether the interrupt is asserted.
    pub fn line(&self) -> bool {
        self.raw() & self.mask != 0
    }

    pub fn read(&mut self, offset: u64) -> u64 {
        match offset {
            DATA if self.received.is_empty() => 0,
            DATA => self.received.remove(0).into(),
            FLAGS if self.received.is_empty() => TRANSMITTER_EMPTY | RECEIVER_EMPTY,
            FLAGS => TRANSMITTER_EMPTY,
            MASK => self.mask,
            RAW => self.raw(),
            MASKED => self.raw() & self.mask,
            IDENTIFICATION.. => IDENTITY
                .get((offset - IDENTIFICATION) as usize / 4)
                .copied()
                .unwrap_or(0),
            _ => 0,
        }
    }

    pub fn write(&mut self, offset: u64, value: u64) {
        match offset {
            DATA => {
                let mut out = std::io::stdout();
                // Without a reader the guest goes on.
                let _ignored = out.write_all(&[value as u8]).and_then(|()| out.flush());
            }
            MASK => self.mask = value,
            _ => {}
        }
    }

    /// Waits at most `nanoseconds` for input on standard input.
    pub fn wait(&mut self, nanoseconds: u64) {
        let mut input = libc::pollfd {
            fd: libc::STDIN_FILENO,
            events: libc::POLLIN,
            revents: 0,
        };
        let milliseconds = i32::try_from(nanoseconds / 1_000_000).unwrap_or(i32::MAX);
        let mut bytes = [0u8; 64];
        // SAFETY: both calls write what they are given, which lives until they return.
        let read = unsafe {
            match libc::poll(&mut input, 1, milliseconds) {
                1 => libc::read(libc::STDIN_FILENO, bytes.as_mut_ptr().cast(), bytes.len()),
                _ => 0,
            }
        };
        self.received
            .extend_from_slice(&bytes[..read.max(0) as usize]);
    }
}
