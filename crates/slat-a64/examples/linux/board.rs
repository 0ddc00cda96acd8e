//! The board: memory, a GICv3 with one CPU interface, the timers, and a UART.

use crate::uart::Uart;
use slat_a64::{Hypervisor, Order, Page, Pending, Right, State, SystemName};
use slat_gic::gic::{Gic, Model, VcpuName};
use slat_gic::icc::Icc;
use slat_gic::memory::NoMemory;
use slat_gic::registers::Frame;
use std::cell::Cell;

/// Memory: its address and size.
pub const RAM: u64 = 0x4000_0000;
pub const RAM_BYTES: u64 = 256 << 20;
/// Devices: addresses and sizes; the INTID of the UART.
pub const DISTRIBUTOR: (u64, u64) = (0x0800_0000, 0x1_0000);
pub const REDISTRIBUTOR: (u64, u64) = (0x080a_0000, 0x2_0000);
pub const UART: (u64, u64, u32) = (0x0900_0000, 0x1000, 33);

/// In a second of the guest: the ticks of the counter, and the instructions that the processor executes.
pub const FREQUENCY: u64 = 50_000_000;
const INSTRUCTIONS: u64 = 100_000_000;

const INTERRUPTS: u32 = 64;
/// The PPIs of the physical and the virtual timer.
const PPIS: [u32; 2] = [30, 27];
/// CNTx_CTL: the timer is enabled; its output is masked; the condition is met.
const ENABLE: u64 = 1 << 0;
const MASK: u64 = 1 << 1;
const STATUS: u64 = 1 << 2;

/// There is no memory at the address.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Absent;

/// The registers of a timer: control (CNTx_CTL) and compare value (CNTx_CVAL).
#[derive(Clone, Copy, Default)]
struct Timer {
    control: u64,
    compare: u64,
}

pub struct Board {
    /// The first byte of memory, which lives as long as the process. The guest's compiled code accesses it, too.
    ram: *mut u8,
    gic: Gic,
    uart: Uart,
    /// The physical and the virtual timer.
    timers: [Timer; 2],
    ticks: u64,
    /// The ticks by which the clock went on while the guest waited.
    waited: u64,
    /// The GIC's signals have changed.
    attention: Cell<bool>,
}

impl Board {
    pub fn new() -> Self {
        let name = VcpuName { id: 0, affinity: 0 };
        let mut gic = Gic::new(Model::V3, INTERRUPTS, &[name]).expect("a GIC");
        gic.set_last(0, true);
        Self {
            ram: Box::leak(vec![0; RAM_BYTES as usize].into_boxed_slice()).as_mut_ptr(),
            gic,
            uart: Uart::default(),
            timers: [Timer::default(); 2],
            ticks: 0,
            waited: 0,
            attention: Cell::new(false),
        }
    }

    /// Copies bytes to memory.
    pub fn fill(&mut self, address: u64, bytes: &[u8]) {
        let at = address - RAM;
        let memory = self.bytes(self.ram as u64 + at, bytes.len());
        memory.copy_from_slice(bytes);
    }

    /// Sets the clock, and returns the interrupts that are pending.
    pub fn attend(&mut self, instructions: u64) -> Pending {
        self.ticks = instructions * FREQUENCY / INSTRUCTIONS + self.waited;
        self.drive();
        self.attention.set(false);
        let signals = self.gic.signals(0);
        Pending {
            irq: signals.irq,
            fiq: signals.fiq,
            serror: None,
        }
    }

    /// Waits for an interrupt, or for the next deadline of a timer.
    pub fn wait(&mut self) {
        if self.gic.signals(0).irq {
            return;
        }
        let due = |timer: &&Timer| timer.control & (ENABLE | MASK) == ENABLE;
        let deadline = self
            .timers
            .iter()
            .filter(due)
            .map(|timer| timer.compare)
            .min();
        let ticks = deadline.map_or(FREQUENCY, |deadline| deadline.saturating_sub(self.ticks));
        self.uart
            .wait(ticks.min(FREQUENCY) * (1_000_000_000 / FREQUENCY));
        self.waited += ticks;
    }

    /// Gives the GIC the levels of the devices' outputs.
    fn drive(&mut self) {
        for (timer, ppi) in self.timers.into_iter().zip(PPIS) {
            let is_high = self.is_met(timer) && timer.control & MASK == 0;
            self.gic.set_ppi(0, ppi, is_high).expect("a PPI");
        }
        self.gic.set_spi(UART.2, self.uart.line()).expect("an SPI");
        self.follow_gic();
    }

    fn follow_gic(&mut self) {
        let attention = &self.attention;
        self.gic.take_changed(|_| attention.set(true));
    }

    fn is_met(&self, timer: Timer) -> bool {
        timer.control & ENABLE != 0 && self.ticks >= timer.compare
    }

    /// Carries out an access to a device. Returns what a load has loaded. `None`: there is no device.
    pub fn access(&mut self, ipa: u64, bytes: usize, stored: Option<u64>) -> Option<u64> {
        let offset =
            |(base, size): (u64, u64)| ipa.checked_sub(base).filter(|offset| *offset < size);
        let frames = [
            (DISTRIBUTOR, Frame::Distributor),
            (REDISTRIBUTOR, Frame::Redistributor(0)),
        ];
        let found = frames
            .into_iter()
            .find_map(|(range, frame)| Some((frame, offset(range)?)));
        let mut data = [0; 8];
        match (found, stored) {
            (Some((frame, offset)), Some(value)) => {
                let value = value.to_le_bytes();
                self.gic.write(0, frame, offset, &value[..bytes], &NoMemory);
            }
            (Some((frame, offset)), None) => self.gic.read(0, frame, offset, &mut data[..bytes]),
            (None, stored) => {
                let offset = offset((UART.0, UART.1))?;
                match stored {
                    Some(value) => self.uart.write(offset, value),
                    None => data = self.uart.read(offset).to_le_bytes(),
                }
                self.drive();
            }
        }
        self.follow_gic();
        Some(u64::from_le_bytes(data))
    }

    /// Returns bytes of memory at an address of the host.
    #[inline]
    fn bytes(&mut self, at: u64, bytes: usize) -> &mut [u8] {
        let offset = at as usize - self.ram as usize;
        assert!(offset + bytes <= RAM_BYTES as usize);
        // SAFETY: the bytes are in the memory, which the board alone has. Compiled code does not run meanwhile.
        unsafe { std::slice::from_raw_parts_mut(self.ram.add(offset), bytes) }
    }

    fn get(&mut self, at: u64, size: u8) -> u128 {
        let mut value = [0; 16];
        let bytes = 1 << size;
        value[..bytes].copy_from_slice(self.bytes(at, bytes));
        u128::from_le_bytes(value)
    }

    fn put(&mut self, at: u64, size: u8, value: u128) {
        let bytes = 1 << size;
        self.bytes(at, bytes)
            .copy_from_slice(&value.to_le_bytes()[..bytes]);
    }
}

/// Addresses of the machine are those of the host.
impl Hypervisor for Board {
    type Fault = Absent;

    fn page(&mut self, ipa: u64, _: Right) -> Result<Page, Absent> {
        let offset = ipa.checked_sub(RAM).filter(|offset| *offset < RAM_BYTES);
        Ok(Page {
            base: self.ram as u64 + (offset.ok_or(Absent)? & !0xfff),
            write: true,
            execute: true,
        })
    }
    #[inline]
    fn load(&mut self, at: u64, size: u8, _: Order) -> Result<u64, Absent> {
        let mut value = [0; 8];
        match size {
            0 => value[0] = self.bytes(at, 1)[0],
            1 => value[..2].copy_from_slice(self.bytes(at, 2)),
            2 => value[..4].copy_from_slice(self.bytes(at, 4)),
            _ => value.copy_from_slice(self.bytes(at, 8)),
        }
        Ok(u64::from_le_bytes(value))
    }
    #[inline]
    fn store(&mut self, at: u64, size: u8, value: u64, _: Order) -> Result<(), Absent> {
        let bytes = value.to_le_bytes();
        match size {
            0 => self.bytes(at, 1)[0] = bytes[0],
            1 => self.bytes(at, 2).copy_from_slice(&bytes[..2]),
            2 => self.bytes(at, 4).copy_from_slice(&bytes[..4]),
            _ => self.bytes(at, 8).copy_from_slice(&bytes),
        }
        Ok(())
    }
    fn load_wide(&mut self, at: u64) -> Result<u128, Absent> {
        Ok(self.get(at, 4))
    }
    fn store_wide(&mut self, at: u64, value: u128) -> Result<(), Absent> {
        self.put(at, 4, value);
        Ok(())
    }
    fn compare_exchange(
        &mut self,
        at: u64,
        size: u8,
        [expected, new]: [u128; 2],
        _: Order,
    ) -> Result<u128, Absent> {
        let found = self.get(at, size);
        if found == expected {
            self.put(at, size, new);
        }
        Ok(found)
    }

    fn read_system(&mut self, _: &State, name: SystemName) -> Option<u64> {
        if let Some(register) = Icc::from_encoding(name.0) {
            let value = self.gic.read_icc(0, register).ok();
            self.follow_gic();
            return value;
        }
        Some(match name.parts() {
            // MPIDR_EL1; CCSIDR_EL1, CLIDR_EL1, CSSELR_EL1: there are no caches to manage.
            [3, 0, 0, 0, 5] => 1 << 31,
            [3, 1 | 2, 0, 0, _] => 0,
            [3, 3, 14, 0, 0] => FREQUENCY,
            [3, 3, 14, 0, 1 | 2] => self.ticks,
            [3, 3, 14, which @ (2 | 3), field] => {
                let timer = self.timers[usize::from(which - 2)];
                match field {
                    0 => u64::from(timer.compare.wrapping_sub(self.ticks) as u32),
                    1 if self.is_met(timer) => timer.control | STATUS,
                    1 => timer.control,
                    _ => timer.compare,
                }
            }
            _ => return None,
        })
    }

    fn write_system(&mut self, _: &State, name: SystemName, value: u64) -> Option<()> {
        if let Some(register) = Icc::from_encoding(name.0) {
            let done = self.gic.write_icc(0, register, value).ok();
            self.follow_gic();
            return done;
        }
        match name.parts() {
            [3, 2, 0, 0, 0] => {}
            [3, 3, 14, which @ (2 | 3), field] => {
                let ticks = self.ticks;
                let timer = &mut self.timers[usize::from(which - 2)];
                match field {
                    0 => timer.compare = ticks.wrapping_add(value as i32 as u64),
                    1 => timer.control = value & (ENABLE | MASK),
                    _ => timer.compare = value,
                }
                self.drive();
            }
            _ => return None,
        }
        Some(())
    }

    #[inline]
    fn attention(&self) -> bool {
        self.attention.get()
    }
}
