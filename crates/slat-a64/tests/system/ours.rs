//! The processor executes an image, on a machine with memory and a UART.

use crate::image::{BASE, Image, RAM, RAM_BYTES, UART};
use slat_a64::{Cpu, Hypervisor, Leave, Order, Page, Right, State, Stop};

struct Board {
    ram: Vec<u8>,
}

/// Why there is no memory at an address.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Absent {
    Uart,
    Nothing,
}

impl Board {
    fn at(&mut self, at: u64, bytes: usize) -> &mut [u8] {
        let at = (at - RAM) as usize;
        &mut self.ram[at..at + bytes]
    }
}

impl Hypervisor for Board {
    type Fault = Absent;

    fn page(&mut self, ipa: u64, _: Right) -> Result<Page, Absent> {
        match ipa {
            ipa if ipa >> 12 == UART >> 12 => Err(Absent::Uart),
            ipa if (RAM..RAM + RAM_BYTES).contains(&ipa) => Ok(Page {
                base: ipa & !0xfff,
                write: true,
                execute: true,
            }),
            _ => Err(Absent::Nothing),
        }
    }
    fn load(&mut self, at: u64, size: u8, _: Order) -> Result<u64, Absent> {
        let mut value = [0; 8];
        let bytes = 1 << size;
        value[..bytes].copy_from_slice(self.at(at, bytes));
        Ok(u64::from_le_bytes(value))
    }
    fn store(&mut self, at: u64, size: u8, value: u64, _: Order) -> Result<(), Absent> {
        let bytes = 1 << size;
        self.at(at, bytes)
            .copy_from_slice(&value.to_le_bytes()[..bytes]);
        Ok(())
    }
    fn load_wide(&mut self, at: u64) -> Result<u128, Absent> {
        Ok(u128::from_le_bytes(self.at(at, 16).try_into().unwrap()))
    }
    fn store_wide(&mut self, at: u64, value: u128) -> Result<(), Absent> {
        self.at(at, 16).copy_from_slice(&value.to_le_bytes());
        Ok(())
    }
    fn compare_exchange(
        &mut self,
        at: u64,
        size: u8,
        [expected, new]: [u128; 2],
        _: Order,
    ) -> Result<u128, Absent> {
        let bytes = 1 << size;
        let mut found = [0; 16];
        found[..bytes].copy_from_slice(self.at(at, bytes));
        let found = u128::from_le_bytes(found);
        if found == expected {
            self.at(at, bytes)
                .copy_from_slice(&new.to_le_bytes()[..bytes]);
        }
        Ok(found)
    }
}

/// More exits than an image makes.
const MOST_LEAVES: u32 = 10_000_000;

/// Executes an image until it switches its machine off. Returns what it has written to the UART.
pub fn execute(image: &Image) -> Vec<u8> {
    let mut board = Board {
        ram: vec![0; RAM_BYTES as usize],
    };
    board.at(BASE, image.0.len()).copy_from_slice(&image.0);
    let mut cpu = Cpu::new(State::reset());
    cpu.state.pc = BASE;
    let mut output = vec![];
    for _ in 0..MOST_LEAVES {
        match cpu.run(&mut board, 20_000_000) {
            Leave::Stage2 { fault, syndrome } if fault.reason == Absent::Uart && !fault.is_walk => {
                let syndrome = syndrome.unwrap();
                assert!(syndrome.is_store && fault.ipa == UART, "{fault:?}");
                output.push(syndrome.stored(&cpu.state) as u8);
                syndrome.complete(&mut cpu.state, 0);
            }
            Leave::Stage2 { fault, .. } => match fault.is_fetch {
                true => cpu.state.take_fetch_abort(fault.external()),
                false => cpu.state.take_stop(Stop::Memory(fault.external())),
            },
            Leave::Hvc(0) if cpu.state.x[0] == 0x8400_0008 => return output,
            Leave::Invalidated(_) | Leave::Hint(_) => {}
            leave => panic!("{leave:?} at {:#x}", cpu.state.pc),
        }
    }
    panic!("endless at {:#x}", cpu.state.pc);
}
