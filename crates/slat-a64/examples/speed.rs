//! Measures the interpreter: the CPU time in nanoseconds per instruction of a simple loop, and of a decoded block.
//!
//! `cargo run --release -p slat-a64 --example speed`

use slat_a64::{Access, Block, Machine, Memory, State, run};

/// A page of memory, and a few words of code.
struct Page {
    code: Vec<u32>,
    bytes: [u8; 4096],
}

impl Memory for Page {
    type Fault = ();

    fn fetch(&mut self, _: &State, address: u64) -> Result<u32, ()> {
        self.code.get(address as usize / 4).copied().ok_or(())
    }
    fn load(&mut self, _: &State, address: u64, size: u8, _: Access) -> Result<u64, ()> {
        let bytes = self
            .bytes
            .get(address as usize..)
            .ok_or(())?
            .first_chunk::<8>()
            .ok_or(())?;
        Ok(u64::from_le_bytes(*bytes) & u64::MAX >> (64 - (8 << size)))
    }
    fn store(
        &mut self,
        _: &State,
        address: u64,
        size: u8,
        value: u64,
        _: Access,
    ) -> Result<(), ()> {
        let length = 1 << size;
        let bytes = self
            .bytes
            .get_mut(address as usize..address as usize + length)
            .ok_or(())?;
        bytes.copy_from_slice(&value.to_le_bytes()[..length]);
        Ok(())
    }
    fn load_wide(&mut self, _: &State, _: u64, _: Access) -> Result<u128, ()> {
        Err(())
    }
    fn store_wide(&mut self, _: &State, _: u64, _: u128, _: Access) -> Result<(), ()> {
        Err(())
    }
    fn prepare_stores(&mut self, _: &State, _: u64, _: u32, _: Access) -> Result<(), ()> {
        Err(())
    }
    fn compare_exchange(
        &mut self,
        _: &State,
        _: u64,
        _: u8,
        _: [u128; 2],
        _: Access,
    ) -> Result<u128, ()> {
        Err(())
    }
}

impl Machine for Page {}

/// Returns the nanoseconds for which this thread has had a CPU.
fn cpu_time() -> f64 {
    let mut time = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: the kernel writes the struct.
    unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut time) };
    time.tv_sec as f64 * 1e9 + time.tv_nsec as f64
}

fn main() {
    const TURNS: u64 = 5_000_000;
    let loops: [(&str, &[u32]); 3] = [
        // ADD X2, X2, X1; SUBS X1, X1, #1; B.NE.
        ("registers", &[0x8b01_0042, 0xf100_0421, 0x54ff_ffc1]),
        // LDR X3, [X4]; ADD X3, X3, X1; STR X3, [X4]; EOR X2, X2, X3, LSL #3; SUBS X1, X1, #1; B.NE.
        (
            "memory",
            &[
                0xf940_0083,
                0x8b01_0063,
                0xf900_0083,
                0xca03_0c42,
                0xf100_0421,
                0x54ff_ff61,
            ],
        ),
        // FADD D0, D0, D1; FMUL D2, D0, D1; SUBS X1, X1, #1; B.NE.
        (
            "doubles",
            &[0x1e61_2800, 0x1e61_0802, 0xf100_0421, 0x54ff_ffa1],
        ),
    ];
    for (name, code) in loops {
        let mut page = Page {
            code: code.to_vec(),
            bytes: [0; 4096],
        };
        let mut state = State::default();
        state.x[1] = TURNS;
        state.v[1] = 1.5f64.to_bits().into();
        let block = Block::decode(&state, &mut page, 0).unwrap();
        let start = cpu_time();
        let exit = run::run_block(&mut state, &mut page, &block, TURNS);
        let time = cpu_time() - start;
        assert!(exit.is_none() && state.x[1] == 0);
        println!(
            "{name}: {:.2} ns an instruction",
            time / (TURNS as f64 * code.len() as f64)
        );
    }
}
