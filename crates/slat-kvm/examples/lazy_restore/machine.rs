//! The example, whose guest is x86's.

#[path = "snapshot.rs"]
mod snapshot;

use kvm_bindings::kvm_userspace_memory_region2;
use slat_kvm::{Kvm, VcpuExit, VcpuFd, VmFd};
use snapshot::{Memory, Registers};
use std::error::Error;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::process::ExitCode;
use std::sync::atomic::{AtomicU64, Ordering::*};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

type Result<T> = std::result::Result<T, Box<dyn Error + Send + Sync>>;

const MEMORY: usize = 256 << 20;

const KVM_CAP_USERFAULT: u64 = 0x736c_0001;
const KVM_MEM_USERFAULT: u32 = 1 << 3;
const KVM_MEMORY_EXIT_FLAG_USERFAULT: u64 = 1 << 4;

/// Bytes that are read at once: the 64 pages of a word of the bitmap.
const BATCH: usize = 64 * 4096;

/// Makes `memory` the VM's slot 0. Pages are absent if `bitmap` says so.
fn set_slot(vm: &VmFd, memory: &Memory, bitmap: Option<&[AtomicU64]>) -> Result<()> {
    let mut region = kvm_userspace_memory_region2 {
        memory_size: memory.len as u64,
        userspace_addr: memory.start as u64,
        ..Default::default()
    };
    if let Some(bitmap) = bitmap {
        region.flags = KVM_MEM_USERFAULT;
        // `userfault_bitmap`
        region.pad2[0] = bitmap.as_ptr() as u64;
    }
    // SAFETY: the memory and the bitmap outlive the VM. Bytes are accessed while no guest runs, or
    // while they are absent.
    Ok(unsafe { vm.set_user_memory_region2(region) }?)
}

/// Memory that is read from a snapshot, as it is needed.
struct Late<'a> {
    memory: &'a Memory,
    file: &'a File,
    /// A bit for each page that is absent.
    bitmap: Vec<AtomicU64>,
    /// Bytes that were read. Its lock is held while a batch is read, so that no batch is read again after the
    /// guest has changed it.
    read: Mutex<usize>,
}

impl<'a> Late<'a> {
    fn new(memory: &'a Memory, file: &'a File) -> Self {
        Late {
            memory,
            file,
            bitmap: (0..memory.len / BATCH)
                .map(|_| AtomicU64::new(!0))
                .collect(),
            read: Mutex::default(),
        }
    }

    /// Reads a batch, then tells that its pages are there.
    fn bring(&self, batch: usize) -> io::Result<()> {
        let mut read = self.read.lock().unwrap_or_else(PoisonError::into_inner);
        if self.bitmap[batch].load(Relaxed) != 0 {
            let at = batch * BATCH;
            // SAFETY: no guest accesses pages that are absent, and only we read into them: we have the lock.
            let bytes = unsafe { self.memory.bytes(at, BATCH) };
            self.file.read_exact_at(bytes, at as u64)?;
            *read += BATCH;
            self.bitmap[batch].store(0, Release);
        }
        Ok(())
    }

    fn bring_all(&self) -> io::Result<()> {
        (0..self.bitmap.len()).try_for_each(|batch| self.bring(batch))
    }

    fn bytes_read(&self) -> usize {
        *self.read.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Runs the guest until it writes to `port`, and brings what it waits for. Returns the word, and the number of
/// exits for absent pages.
fn run(vcpu: &mut VcpuFd, late: &Late, port: u16) -> Result<(u32, usize)> {
    let mut exits = 0;
    loop {
        match vcpu.run()? {
            VcpuExit::MemoryFault { flags, gpa, .. }
                if flags & KVM_MEMORY_EXIT_FLAG_USERFAULT != 0 =>
            {
                exits += 1;
                late.bring(gpa as usize / BATCH)?;
            }
            VcpuExit::IoOut(to, data) if to == port => {
                return Ok((u32::from_le_bytes(data.try_into()?), exits));
            }
            exit => return Err(format!("unexpected exit: {exit:?}").into()),
        }
    }
}

/// The output of a restored guest, and the time at which it was printed.
#[derive(Debug)]
struct Restored {
    /// From the beginning of the restore to the first output.
    first: Duration,
    /// Bytes of memory read until then.
    read: usize,
    /// Exits for absent pages until then, and in all.
    exits: [usize; 2],
    /// The first output, and the checksum of all memory.
    said: [u32; 2],
    whole: Duration,
}

/// Restores the guest, and runs it to its end.
fn restore(file: &File, size: usize, lazily: bool) -> Result<Restored> {
    let begin = Instant::now();
    let memory = Memory::new(size)?;
    let late = Late::new(&memory, file);
    let vm = Kvm::new()?.create_vm()?;
    if !lazily {
        late.bring_all()?;
    }
    set_slot(&vm, &memory, lazily.then_some(&late.bitmap))?;
    let mut registers = Registers::default();
    file.read_exact_at(registers.bytes(), size as u64)?;
    let mut vcpu = vm.create_vcpu(0)?;
    vcpu.set_sregs(&registers.sregs)?;
    vcpu.set_regs(&registers.regs)?;

    let (output, exits) = run(&mut vcpu, &late, 0x10)?;
    let (first, read) = (begin.elapsed(), late.bytes_read());
    let (sum, more) = std::thread::scope(|threads| {
        let rest = threads.spawn(|| -> Result<()> {
            late.bring_all()?;
            set_slot(&vm, &memory, None)
        });
        let result = run(&mut vcpu, &late, 0x11);
        rest.join()
            .map_err(|_| "the thread that reads the rest panicked")??;
        result
    })?;
    Ok(Restored {
        first,
        read,
        exits: [exits, exits + more],
        said: [output, sum],
        whole: begin.elapsed(),
    })
}

/// Takes a snapshot of a guest with `size` bytes of memory, and restores it eagerly, then lazily.
fn compare(size: usize) -> Result<[Restored; 2]> {
    let vm = Kvm::new()?.create_vm()?;
    if vm.check_extension_raw(KVM_CAP_USERFAULT) == 0 {
        return Err(
            "no KVM_MEM_USERFAULT here, as the policy `userfault` is off. Type\n\
             SLAT_SET=userfault=on cargo run --release -p slat-kvm --example lazy_restore"
                .into(),
        );
    }
    let file = snapshot::take(size)?;
    Ok([restore(&file, size, false)?, restore(&file, size, true)?])
}

pub fn main() -> ExitCode {
    let [eager, lazy] = match compare(MEMORY) {
        Ok(both) => both,
        Err(error) => {
            eprintln!("lazy_restore: {error}");
            return ExitCode::FAILURE;
        }
    };
    for (how, restored) in [("all at once", &eager), ("lazily", &lazy)] {
        println!(
            "{how:11}: first output after {:3} ms, {:3} of {} MiB read, {:2} exits; result {:08x} after {:3} ms, {:2} exits",
            restored.first.as_millis(),
            restored.read >> 20,
            MEMORY >> 20,
            restored.exits[0],
            restored.said[1],
            restored.whole.as_millis(),
            restored.exits[1],
        );
    }
    if eager.said != lazy.said {
        eprintln!("lazy_restore: the guests' outputs differ");
        return ExitCode::FAILURE;
    }
    ExitCode::SUCCESS
}

#[test]
fn a_lazy_restore_reads_what_the_guest_uses() {
    // SAFETY: the only test, and no thread reads the environment yet.
    unsafe { std::env::set_var("SLAT_SET", "userfault=on") };
    let size = 32 << 20;
    let [eager, lazy] = compare(size).unwrap();
    assert_eq!(eager.said, lazy.said);
    assert_eq!((eager.read, eager.exits), (size, [0, 0]));
    // The code, and 256 KiB of each 8 MiB.
    assert_eq!((lazy.read, lazy.exits[0]), (5 * BATCH, 5));
}
