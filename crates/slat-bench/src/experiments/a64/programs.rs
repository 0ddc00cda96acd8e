//! The programs: loops for 64-bit Arm, and the image that a board starts.

/// The first address of memory; the UART of QEMU's board.
pub const RAM: u64 = 0x4000_0000;
pub const RAM_BYTES: usize = 32 << 20;
const UART: u64 = 0x0900_0000;
/// The address of the image, at which the processor starts at EL1.
pub const IMAGE: u64 = RAM + (1 << 20);
/// The translation tables, in the image. The data follow the image.
const TABLES: u64 = IMAGE + PAGE;
const DATA: u64 = RAM + (2 << 20);
const PAGE: u64 = 4096;
/// The number of pages of data, which is also the number of pages to which `misses` writes.
const PAGES: u64 = 2048;

/// A program: a loop, of which X1 counts the turns from their number down to 1. X4 is the address of data, X5 an
/// address 64 bytes after it, X6 is 3, X7 is 1, D1 is 1.0. All others are 0. The program leaves results in X2 and X3.
pub struct Program {
    pub name: &'static str,
    words: &'static [u32],
    /// The number of instructions of a turn, on average over two.
    pub instructions: f64,
    /// Of how many turns of the fastest loops this one makes one.
    pub slowness: u64,
    /// Returns the results of a number of turns.
    pub results: fn(u64) -> [u64; 2],
}

pub const PROGRAMS: [Program; 10] = [
    Program {
        name: "alu",
        // ADD X2, X2, X1; EOR X3, X3, X2, LSL #3; SUBS X1, X1, #1; B.NE.
        words: &[0x8b01_0042, 0xca02_0c63, 0xf100_0421, 0x54ff_ffa1],
        instructions: 4.0,
        slowness: 1,
        results: |turns| {
            (1..=turns).rev().fold([0; 2], |[sum, mixed]: [u64; 2], n| {
                let sum = sum.wrapping_add(n);
                [sum, mixed ^ sum << 3]
            })
        },
    },
    Program {
        name: "ldst",
        // LDR X3, [X4]; ADD X3, X3, X1; STR X3, [X4]; EOR X2, X2, X3, LSL #3; SUBS X1, X1, #1; B.NE.
        words: &[
            0xf940_0083,
            0x8b01_0063,
            0xf900_0083,
            0xca03_0c42,
            0xf100_0421,
            0x54ff_ff61,
        ],
        instructions: 6.0,
        slowness: 2,
        results: |turns| {
            (1..=turns).rev().fold([0; 2], |[mixed, sum]: [u64; 2], n| {
                let sum = sum.wrapping_add(n);
                [mixed ^ sum << 3, sum]
            })
        },
    },
    Program {
        name: "copies",
        // STP X1, X4, [X4]; loop: LDP X2, X3, [X4]; STP X2, X3, [X5]; LDR Q0, [X4]; STR Q0, [X5, #16];
        // SUBS X1, X1, #1; B.NE loop; LDP X2, X3, [X5, #16].
        words: &[
            0xa900_1081,
            0xa940_0c82,
            0xa900_0ca2,
            0x3dc0_0080,
            0x3d80_04a0,
            0xf100_0421,
            0x54ff_ff61,
            0xa941_0ca2,
        ],
        instructions: 6.0,
        slowness: 2,
        results: |turns| [turns, DATA],
    },
    Program {
        name: "call",
        // BL function; SUBS X1, X1, #1; B.NE; B on; function: ADD X2, X2, #1; RET; on:
        words: &[
            0x9400_0004,
            0xf100_0421,
            0x54ff_ffc1,
            0x1400_0003,
            0x9100_0442,
            0xd65f_03c0,
        ],
        instructions: 5.0,
        slowness: 2,
        results: |turns| [turns, 0],
    },
    Program {
        name: "branch",
        // TST X1, #1; B.EQ even; ADD X2, X2, X1; B next; even: SUB X3, X3, X1; next: SUBS X1, X1, #1; B.NE.
        words: &[
            0xf240_003f,
            0x5400_0060,
            0x8b01_0042,
            0x1400_0002,
            0xcb01_0063,
            0xf100_0421,
            0x54ff_ff41,
        ],
        instructions: 5.5,
        slowness: 2,
        results: |turns| {
            let [odd, even] = [turns.div_ceil(2), turns / 2];
            [odd * odd, (even * (even + 1)).wrapping_neg()]
        },
    },
    Program {
        name: "div",
        // UDIV X8, X1, X6; ADD X2, X2, X8; SUBS X1, X1, #1; B.NE.
        words: &[0x9ac6_0828, 0x8b08_0042, 0xf100_0421, 0x54ff_ffa1],
        instructions: 4.0,
        slowness: 2,
        results: |turns| [(1..=turns).map(|n| n / 3).sum(), 0],
    },
    Program {
        name: "float",
        // FADD D0, D0, D1; FMUL D2, D0, D1; SUBS X1, X1, #1; B.NE; FMOV X2, D0; FMOV X3, D2.
        words: &[
            0x1e61_2800,
            0x1e61_0802,
            0xf100_0421,
            0x54ff_ffa1,
            0x9e66_0002,
            0x9e66_0043,
        ],
        instructions: 4.0,
        slowness: 16,
        results: |turns| [(turns as f64).to_bits(); 2],
    },
    Program {
        name: "simd",
        // ADD V0.4S, V0.4S, V1.4S; EOR V1.16B, V1.16B, V0.16B; SUBS X1, X1, #1; B.NE; FMOV X2, D0; FMOV X3, D1.
        words: &[
            0x4ea1_8400,
            0x6e20_1c21,
            0xf100_0421,
            0x54ff_ffa1,
            0x9e66_0002,
            0x9e66_0023,
        ],
        instructions: 4.0,
        slowness: 2,
        results: |turns| {
            let one = 1f64.to_bits();
            let (mut a, mut b) = ([0; 2], [one as u32, (one >> 32) as u32]);
            for _ in 0..turns {
                for (a, b) in a.iter_mut().zip(&mut b) {
                    *a = u32::wrapping_add(*a, *b);
                    *b ^= *a;
                }
            }
            [a, b].map(|words| u64::from(words[1]) << 32 | u64::from(words[0]))
        },
    },
    Program {
        name: "atomic",
        // LDADDAL X7, X3, [X4]; SUBS X1, X1, #1; B.NE; LDR X2, [X4].
        words: &[0xf8e7_0083, 0xf100_0421, 0x54ff_ffc1, 0xf940_0082],
        instructions: 3.0,
        slowness: 8,
        results: |turns| [turns, turns - 1],
    },
    Program {
        name: "miss",
        // ADD X10, X4, #2048 * 4096; begin: MOV X11, X4; loop: LDR X3, [X11]; ADD X3, X3, #1; STR X3, [X11];
        // ADD X2, X2, X3; ADD X11, X11, #4096; CMP X11, X10; CSEL X11, X4, X11, EQ; SUBS X1, X1, #1; B.NE loop.
        words: &[
            0x9160_008a,
            0xaa04_03eb,
            0xf940_0163,
            0x9100_0463,
            0xf900_0163,
            0x8b03_0042,
            0x9140_056b,
            0xeb0a_017f,
            0x9a8b_008b,
            0xf100_0421,
            0x54ff_ff01,
        ],
        instructions: 9.0,
        slowness: 8,
        results: |turns| {
            let round = |n: u64| n / PAGES + 1;
            [(0..turns).map(round).sum(), round(turns - 1)]
        },
    },
];

/// How a program ends.
#[derive(Clone, Copy)]
pub enum End {
    /// By HVC, with the results in X2 and X3.
    Hvc,
    /// By PSCI's SYSTEM_OFF, after X2 and X3 were written to QEMU's UART.
    Off,
}

/// Returns the image of a program, at [`IMAGE`]: its code, and tables that map the data by pages.
pub fn image(program: &Program, turns: u64, end: End) -> Vec<u8> {
    let mut words = Vec::new();
    // MAIR_EL1: normal memory, devices. TCR_EL1: 39 bits of addresses, TTBR0_EL1 alone. CPACR_EL1: no traps of FP.
    // SCTLR_EL1: translation and caches.
    let settings = [
        (0xd518_a209, 0xff),
        (0xd518_2049, 25 | 1 << 23),
        (0xd518_2009, TABLES),
        (0xd518_1049, 3 << 20),
        (0xd518_1009, 1 | 1 << 2 | 1 << 12),
    ];
    const ISB: u32 = 0xd503_3fdf;
    for (msr_from_x9, value) in settings {
        words.extend(set(9, value));
        words.extend([msr_from_x9, ISB]);
    }
    for (register, value) in [(1, turns), (4, DATA), (5, DATA + 64), (6, 3), (7, 1)] {
        words.extend(set(register, value));
    }
    for register in [2, 3] {
        words.extend(set(register, 0));
    }
    // FMOV D1, #1.0; MOVI D0, #0.
    words.extend([0x1e6e_1001, 0x2f00_e400]);
    words.extend(program.words);
    if matches!(end, End::Off) {
        words.extend(set(9, UART));
        // Each byte of a register: STRB, LSR.
        for pair in [[0x3900_0122, 0xd348_fc42], [0x3900_0123, 0xd348_fc63]] {
            words.extend(pair.repeat(8));
        }
        words.extend(set(0, 0x8400_0008));
    }
    // HVC #0.
    words.push(0xd400_0002);
    let mut image: Vec<u8> = words.into_iter().flat_map(u32::to_le_bytes).collect();
    assert!(image.len() as u64 <= TABLES - IMAGE);
    image.resize((TABLES - IMAGE) as usize, 0);
    image.extend(tables().into_iter().flatten().flat_map(u64::to_le_bytes));
    image
}

/// Returns MOVZ and MOVK that set a register.
fn set(register: u32, value: u64) -> [u32; 4] {
    [0, 1, 2, 3].map(|n| {
        let instruction = if n == 0 { 0xd280_0000 } else { 0xf280_0000 };
        let part = (value >> (16 * n)) as u32 & 0xffff;
        instruction | n << 21 | part << 5 | register
    })
}

/// Returns the tables: GiB, of which the first has the devices; 2 MiB of memory, of which the first is a block; pages.
fn tables() -> Vec<[u64; 512]> {
    /// A block; a table or a page. Both have the access flag. Normal memory is shareable, attribute 1 is that of devices.
    const BLOCK: u64 = 1;
    const TABLE: u64 = 3;
    const MEMORY: u64 = 1 << 10 | 3 << 8;
    const DEVICES: u64 = 1 << 10 | 1 << 2;
    let count = PAGES as usize / 512;
    let mut tables = vec![[0; 512]; 2 + count];
    tables[0][0] = DEVICES | BLOCK;
    tables[0][1] = (TABLES + PAGE) | TABLE;
    tables[1][0] = RAM | MEMORY | BLOCK;
    for n in 0..count {
        tables[1][1 + n] = (TABLES + (2 + n as u64) * PAGE) | TABLE;
        for (k, entry) in (0..).zip(&mut tables[2 + n]) {
            *entry = (DATA + (n as u64 * 512 + k) * PAGE) | MEMORY | TABLE;
        }
    }
    tables
}
