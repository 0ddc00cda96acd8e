//! The task-state segment in memory, in its two formats (SDM volume 3, "Task-State Segment (TSS)" and "16-Bit
//! Task-State Segment (TSS)").

/// The format of a TSS.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Format {
    /// The 16-bit format, without CR3, FS, GS and debug trap flag.
    Bits16,
    /// The 32-bit format.
    Bits32,
}

/// The offset of CR3 in a 32-bit TSS. The next constant is the offset of the debug trap flag.
const CR3: usize = 0x1c;
const TRAP: usize = 0x64;
/// The number of saved registers: EIP, EFLAGS, eight general registers and six selectors.
const WORDS: usize = 16;

impl Format {
    /// Returns the format and the busy bit that the type in a TSS descriptor means.
    pub(crate) fn of_kind(kind: u8) -> Option<(Self, bool)> {
        match kind {
            1 => Some((Format::Bits16, false)),
            3 => Some((Format::Bits16, true)),
            9 => Some((Format::Bits32, false)),
            11 => Some((Format::Bits32, true)),
            _ => None,
        }
    }

    /// Returns the size in bytes of the part that the processor defines. A smaller TSS is invalid.
    pub(crate) fn bytes(self) -> usize {
        match self {
            Format::Bits16 => 44,
            Format::Bits32 => 104,
        }
    }

    /// Returns the size of each saved register in bytes.
    pub(crate) fn word(self) -> usize {
        match self {
            Format::Bits16 => 2,
            Format::Bits32 => 4,
        }
    }

    /// Returns the number of selectors in the TSS: ES, CS, SS and DS; in the 32-bit format also FS and GS.
    fn selectors(self) -> usize {
        match self {
            Format::Bits16 => 4,
            Format::Bits32 => 6,
        }
    }

    /// Returns the offset of the registers that are saved when the CPU leaves the task. EIP is the first of them.
    pub(crate) fn registers(self) -> usize {
        match self {
            Format::Bits16 => 0x0e,
            Format::Bits32 => 0x20,
        }
    }

    /// Returns the size in bytes of the registers that are saved when the CPU leaves the task.
    pub(crate) fn register_bytes(self) -> usize {
        (10 + self.selectors()) * self.word()
    }
}

/// The registers that a task switch saves in the TSS of the old task.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Registers {
    pub(crate) eip: u32,
    pub(crate) eflags: u32,
    /// EAX, ECX, EDX, EBX, ESP, EBP, ESI and EDI.
    pub(crate) general: [u32; 8],
    /// ES, CS, SS, DS, FS and GS.
    pub(crate) selectors: [u16; 6],
}

impl Registers {
    /// Encodes the registers as a TSS stores them at [`Format::registers`]. Only the first [`Format::register_bytes`]
    /// of the result are used.
    pub(crate) fn encode(&self, format: Format) -> [u8; 4 * WORDS] {
        let words = [self.eip, self.eflags].into_iter().chain(self.general);
        let words = words.chain(self.selectors.map(u32::from));
        let size = format.word();
        let mut bytes = [0; 4 * WORDS];
        for (place, word) in bytes.chunks_exact_mut(size).zip(words) {
            place.copy_from_slice(&word.to_le_bytes()[..size]);
        }
        bytes
    }
}

/// The registers that a task switch loads from the TSS of the new task.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Image {
    /// CR3; `None` in a 16-bit TSS.
    pub(crate) cr3: Option<u32>,
    pub(crate) registers: Registers,
    pub(crate) ldt: u16,
    /// Whether the debug trap flag is set: entering the task causes a debug trap.
    pub(crate) trap: bool,
}

impl Image {
    /// Decodes an image from the first [`Format::bytes`] of `tss`. What a 16-bit TSS does not have becomes zero: the
    /// upper halves of the registers, FS and GS.
    pub(crate) fn decode(tss: &[u8], format: Format) -> Self {
        let field = |at: usize, size: usize| {
            let mut bytes = [0; 4];
            bytes[..size].copy_from_slice(&tss[at..at + size]);
            u32::from_le_bytes(bytes)
        };
        let word = |n: usize| field(format.registers() + n * format.word(), format.word());
        let mut selectors = [0; 6];
        for (n, selector) in selectors[..format.selectors()].iter_mut().enumerate() {
            *selector = word(10 + n) as u16;
        }
        let wide = format == Format::Bits32;
        Self {
            cr3: wide.then(|| field(CR3, 4)),
            registers: Registers {
                eip: word(0),
                eflags: word(1),
                general: std::array::from_fn(|n| word(2 + n)),
                selectors,
            },
            ldt: word(10 + format.selectors()) as u16,
            trap: wide && field(TRAP, 2) & 1 != 0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_saved_is_loaded_again() {
        let registers = Registers {
            eip: 0x1234_5678,
            eflags: 0x0002_4202,
            general: std::array::from_fn(|n| 0x0101_0101 * (n as u32 + 1)),
            selectors: [0x10, 0x08, 0x18, 0x20, 0x28, 0x30],
        };
        let half = |v: u32| v & 0xffff;
        let narrow = Registers {
            eip: half(registers.eip),
            eflags: half(registers.eflags),
            general: registers.general.map(half),
            selectors: [0x10, 0x08, 0x18, 0x20, 0, 0],
        };
        for (format, expected) in [(Format::Bits32, registers), (Format::Bits16, narrow)] {
            let mut tss = vec![0; format.bytes()];
            let (at, len) = (format.registers(), format.register_bytes());
            tss[at..at + len].copy_from_slice(&registers.encode(format)[..len]);
            tss[at + len] = 0x48;
            let image = Image::decode(&tss, format);
            assert_eq!(image.registers, expected);
            assert_eq!((image.ldt, image.trap), (0x48, false));
        }
    }

    #[test]
    fn a_32_bit_tss_has_cr3_and_a_trap_flag() {
        let mut tss = [0; 104];
        tss[0x1c..0x20].copy_from_slice(&0x0012_3000u32.to_le_bytes());
        tss[0x64] = 1;
        let image = Image::decode(&tss, Format::Bits32);
        assert_eq!((image.cr3, image.trap), (Some(0x0012_3000), true));
        let image = Image::decode(&tss, Format::Bits16);
        assert_eq!((image.cr3, image.trap), (None, false));
    }
}
