//! slat's processor over a piece of this process's memory, without the engine and without KVM's API.

use std::ptr::{self, NonNull};
use std::sync::Arc;
use std::time::Duration;

use slat_a64::{Compile, Compiler, Cpu, Hypervisor, Leave, Order, Page, Right, State};
use slat_guard::Gone;

use super::programs::{End, IMAGE, Program, RAM, RAM_BYTES, image};
use crate::Failure;
use crate::rounds::thread_time;

/// Returns the processor time of a program's run, and its results. Without a compiler the program is interpreted.
pub fn run(
    program: &Program,
    turns: u64,
    compiler: Option<&Arc<Compiler>>,
) -> Result<(Duration, [u64; 2]), Failure> {
    slat_guard::install()?;
    let mut board = Board::new(&image(program, turns, End::Hvc))?;
    let mut cpu = Cpu::new(State::reset());
    if let Some(compiler) = compiler {
        cpu.set_compiler(compiler.clone(), Compile::Hot);
        // SAFETY: the pages are those of the board's mapping, which holds no Rust object and outlives the processor's
        // run. The handlers are installed.
        unsafe { cpu.access_directly() };
    }
    cpu.state.pc = IMAGE;
    let began = thread_time();
    let end = cpu.run(&mut board, u64::MAX);
    let time = thread_time() - began;
    match end {
        Leave::Hvc(0) => Ok((time, [cpu.state.x[2], cpu.state.x[3]])),
        end => Err(format!("the guest left at {:#x}: {end:?}", cpu.state.pc).into()),
    }
}

/// Memory, and nothing else. Addresses of the machine are those of the host.
struct Board {
    memory: NonNull<u8>,
}

/// There is nothing at an address, or the host's page is gone.
#[derive(Clone, Copy, Debug)]
struct Absent;

impl From<Gone> for Absent {
    fn from(Gone: Gone) -> Self {
        Absent
    }
}

impl Board {
    fn new(image: &[u8]) -> Result<Self, Failure> {
        // SAFETY: a new mapping at an address of the host's choice.
        let memory = unsafe {
            libc::mmap(
                ptr::null_mut(),
                RAM_BYTES,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
                -1,
                0,
            )
        };
        if memory == libc::MAP_FAILED {
            return Err(std::io::Error::last_os_error().into());
        }
        let memory = NonNull::new(memory.cast::<u8>()).ok_or("memory at address 0")?;
        // QEMU asks for huge pages, too. That there are none is no error.
        // SAFETY: the whole mapping, which is this board's.
        unsafe { libc::madvise(memory.as_ptr().cast(), RAM_BYTES, libc::MADV_HUGEPAGE) };
        let at = (IMAGE - RAM) as usize;
        assert!(at + image.len() <= RAM_BYTES);
        // SAFETY: the image fits into the new mapping at this offset.
        unsafe { ptr::copy_nonoverlapping(image.as_ptr(), memory.add(at).as_ptr(), image.len()) };
        Ok(Board { memory })
    }
}

impl Drop for Board {
    fn drop(&mut self) {
        // SAFETY: the mapping is this board's, and the processor that had its pages has ended.
        unsafe { libc::munmap(self.memory.as_ptr().cast(), RAM_BYTES) };
    }
}

impl Hypervisor for Board {
    type Fault = Absent;

    fn page(&mut self, ipa: u64, _: Right) -> Result<Page, Absent> {
        let offset = ipa.checked_sub(RAM).filter(|at| *at < RAM_BYTES as u64);
        Ok(Page {
            base: self.memory.as_ptr() as u64 + (offset.ok_or(Absent)? & !0xfff),
            write: true,
            execute: true,
        })
    }

    fn load(&mut self, at: u64, size: u8, _: Order) -> Result<u64, Absent> {
        // SAFETY: the address is in a page of the board, which only guarded accesses reach while the guest runs.
        Ok(unsafe { slat_guard::load_sized(at as *const u8, size) }?)
    }

    fn store(&mut self, at: u64, size: u8, value: u64, _: Order) -> Result<(), Absent> {
        // SAFETY: as in `load`.
        Ok(unsafe { slat_guard::store_sized(at as *mut u8, size, value) }?)
    }

    fn compare_exchange(
        &mut self,
        at: u64,
        size: u8,
        values: [u128; 2],
        _: Order,
    ) -> Result<u128, Absent> {
        // SAFETY: as in `load`.
        Ok(unsafe { slat_guard::compare_exchange_sized(at as *mut u8, size, values) }?)
    }
}
