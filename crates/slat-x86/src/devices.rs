//! Accesses to devices that are in progress, and their data. See module `mmio`.

use crate::heap::Zeroed;
#[cfg(feature = "jit")]
use crate::machine::Access;

/// The greatest number of bytes that one exit for a port access transfers. (One exit transfers many units of a repeated
/// string instruction.)
pub const PORT_BYTES: usize = 4096;
/// The greatest number of MMIO accesses that one instruction makes, rounded up. XSAVE makes 72.
pub(crate) const MOST_FRAGMENTS: usize = 96;

#[derive(Clone, Copy, Debug)]
pub(crate) struct Fragment {
    /// The linear address of a read. 0 for a write, which does not need the address.
    pub(crate) lin: u64,
    pub(crate) gpa: u64,
    pub(crate) len: u8,
    pub(crate) data: [u8; 8],
}

/// The MMIO reads or writes of one instruction, in order.
pub(crate) struct Fragments {
    all: [Fragment; MOST_FRAGMENTS],
    /// The number of fragments that are completed.
    first: usize,
    /// The number of all fragments, completed or not.
    pub(crate) end: usize,
}

// SAFETY: the type consists of integers, for which zeroes are a valid value.
unsafe impl Zeroed for Fragments {}

impl Fragments {
    pub(crate) fn waiting(&self) -> &[Fragment] {
        &self.all[self.first..self.end]
    }

    /// Appends a fragment. Returns `false` if there are too many.
    pub(crate) fn push(&mut self, fragment: Fragment) -> bool {
        let free = self.all.get_mut(self.end);
        let pushed = free.map(|free| *free = fragment).is_some();
        self.end += usize::from(pushed);
        pushed
    }

    /// Returns the next fragment that is not completed, and counts it as completed.
    pub(crate) fn pop(&mut self) -> Option<Fragment> {
        let next = *self.waiting().first()?;
        self.first += 1;
        if self.first == self.end {
            self.clear();
        }
        Some(next)
    }

    pub(crate) fn clear(&mut self) {
        (self.first, self.end) = (0, 0);
    }
}

/// The data that a string input (INS) has read.
pub(crate) struct Input {
    pub(crate) bytes: [u8; PORT_BYTES],
    /// The number of bytes that the CPU has already stored in guest memory.
    pub(crate) stored: usize,
    pub(crate) len: usize,
}

// SAFETY: the type consists of integers, for which zeroes are a valid value.
unsafe impl Zeroed for Input {}

impl Input {
    pub(crate) fn set(&mut self, data: &[u8]) {
        self.len = data.len().min(PORT_BYTES);
        self.stored = 0;
        self.bytes[..self.len].copy_from_slice(&data[..self.len]);
    }

    /// Returns the bytes that the CPU has not stored yet, in the order in which they were read.
    pub(crate) fn left(&self) -> &[u8] {
        &self.bytes[self.stored..self.len]
    }
}

/// The data that a port output writes.
pub(crate) struct Output {
    pub(crate) bytes: [u8; PORT_BYTES],
    pub(crate) len: usize,
}

// SAFETY: the type consists of integers, for which zeroes are a valid value.
unsafe impl Zeroed for Output {}

impl Output {
    /// Makes the output `len` bytes long, and returns them to be filled.
    pub(crate) fn start(&mut self, len: usize) -> &mut [u8] {
        self.len = len;
        &mut self.bytes[..len]
    }
}

/// State of the accesses to devices that are in progress. Their data is in [`crate::fixed::Fixed`].
#[derive(Default)]
pub(crate) struct Devices {
    /// The number of reads that the current execution of the instruction has completed with data from the VMM.
    pub(crate) taken: usize,
    /// The read whose data the last run ended to ask for.
    pub(crate) asked: Option<Fragment>,
    pub(crate) port: Option<Port>,
    /// The instruction that ended the last run and needs a result from the caller.
    pub(crate) question: Option<Question>,
    /// A device access that compiled code has attempted. The interpreter executes the instruction again, and takes the
    /// guest-physical address from here, so that the machine translates it only once. Valid only for the next
    /// instruction, because a memslot may be added later.
    #[cfg(feature = "jit")]
    pub(crate) met: Option<Met>,
}

/// A device access that compiled code has attempted.
#[cfg(feature = "jit")]
#[derive(Clone, Copy)]
pub(crate) struct Met {
    pub(crate) lin: u64,
    pub(crate) access: Access,
    pub(crate) gpa: u64,
}

/// An instruction that waits for a result from the caller.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Question {
    /// RIP of this instruction, and of the next one.
    pub(crate) rip: u64,
    pub(crate) next: u64,
    pub(crate) kind: QuestionKind,
    /// The DR6 bits of the debug traps to take after the instruction.
    pub(crate) traps: u64,
}

/// The kind of the instruction, which says where its result goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum QuestionKind {
    /// A hypercall: RAX receives the result.
    Hypercall,
    /// RDMSR: EDX:EAX receives the result.
    Rdmsr,
    /// WRMSR: there is no register for a result; the result only finishes the instruction.
    Wrmsr,
}

/// A port access that is not finished yet.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Port {
    /// RIP of this instruction, and of the next one.
    pub(crate) rip: u64,
    pub(crate) next: u64,
    pub(crate) size: u8,
    /// The number of units that the exit transfers.
    pub(crate) count: u32,
    pub(crate) kind: PortKind,
    /// The DR6 bits of the debug traps to take after the access.
    pub(crate) traps: u64,
    /// Whether the caller has provided the data of a string input. The CPU stores the data when it runs again.
    pub(crate) answered: bool,
}

/// The instruction that makes a port access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PortKind {
    In,
    Out,
    /// INS or OUTS: the address size in bytes, and whether the instruction has a REP prefix.
    Ins {
        address_size: u8,
        rep: bool,
    },
    Outs {
        address_size: u8,
        rep: bool,
    },
}
