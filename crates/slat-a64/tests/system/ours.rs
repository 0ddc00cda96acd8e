//! The processor executes an image, on a machine with memory and a UART.

use crate::compiled::compile;
use crate::host::Memory;
use crate::image::{BASE, Image, RAM, RAM_BYTES, UART};
use slat_a64::{Cpu, Hypervisor, Leave, Order, Page, Right, State, Stop};

struct Board(Memory);

/// The reason why there is no memory at an address.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Absent {
    Uart,
    Nothing,
}

/// Returns the result of an access to memory, which is there.
fn present<R, E>(result: Result<R, E>) -> Result<R, Absent> {
    result.map_err(|_| Absent::Nothing)
}

impl Hypervisor for Board {
    type Fault = Absent;

    fn page(&mut self, ipa: u64, right: Right) -> Result<Page, Absent> {
        match ipa >> 12 == UART >> 12 {
            true => Err(Absent::Uart),
            false => present(self.0.page(ipa, right)),
        }
    }
    fn load(&mut self, at: u64, size: u8, order: Order) -> Result<u64, Absent> {
        present(self.0.load(at, size, order))
    }
    fn store(&mut self, at: u64, size: u8, value: u64, order: Order) -> Result<(), Absent> {
        present(self.0.store(at, size, value, order))
    }
    fn load_wide(&mut self, at: u64) -> Result<u128, Absent> {
        present(self.0.load_wide(at))
    }
    fn store_wide(&mut self, at: u64, value: u128) -> Result<(), Absent> {
        present(self.0.store_wide(at, value))
    }
    fn compare_exchange(
        &mut self,
        at: u64,
        size: u8,
        values: [u128; 2],
        order: Order,
    ) -> Result<u128, Absent> {
        present(self.0.compare_exchange(at, size, values, order))
    }
}

/// More exits than an image makes.
const MOST_LEAVES: u32 = 10_000_000;

/// Lets compiled code access the memory itself.
fn access_directly(cpu: &mut Cpu) {
    #[cfg(feature = "jit")]
    // SAFETY: the pages are mappings of `Memory`, which only guarded accesses and raw pointers reach. `Memory::new`
    // has installed the handlers.
    unsafe {
        cpu.access_directly()
    };
    #[cfg(not(feature = "jit"))]
    let _ = cpu;
}

/// Executes an image until it switches its machine off. Returns the text that it has written to the UART.
pub fn execute(image: &Image) -> Vec<u8> {
    let mut memory = Memory::new();
    memory.add(RAM, RAM_BYTES as usize / 4096, [true; 2]);
    for (n, bytes) in image.0.chunks(8).enumerate() {
        let mut word = [0; 8];
        word[..bytes.len()].copy_from_slice(bytes);
        memory.put(BASE + 8 * n as u64, u64::from_le_bytes(word));
    }
    let mut board = Board(memory);
    let mut cpu = Cpu::new(State::reset());
    compile(&mut cpu);
    access_directly(&mut cpu);
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
