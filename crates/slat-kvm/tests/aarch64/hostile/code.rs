//! Makes random instructions, among which those of EL1 and of memory are frequent.

use slat_model::Rng;

/// Encodings: the bits that a kind of instruction has, and the bits that are chosen at random.
const KINDS: [(u32, u32); 18] = [
    // System registers and instructions, barriers, hints. More often: MSR and MRS of the registers of EL1.
    (0xd500_0000, 0x003f_ffff),
    (0xd510_0000, 0x002f_ffff),
    (0xd518_0000, 0x0020_ffff),
    // TLBI, IC, DC, AT.
    (0xd508_7000, 0x0000_8fff),
    // SVC, HVC, SMC and others; HVC with immediate 0; ERET; branches to registers.
    (0xd400_0001, 0x001f_ffff),
    (0xd400_0002, 0),
    (0xd69f_03e0, 0),
    (0xd61f_0000, 0x0060_03e0),
    // Branches nearby: conditional, CBZ and CBNZ, TBZ and TBNZ, B and BL.
    (0x5400_0000, 0x0000_07ef),
    (0x3400_0000, 0x8100_07ff),
    (0x3600_0000, 0x81f8_07ff),
    (0x1400_0000, 0x8000_003f),
    // Loads and stores of all kinds; exclusive and ordered ones; atomic ones.
    (0x0800_0000, 0xf5ff_ffff),
    (0x0800_0000, 0xc0ff_ffff),
    (0x3820_0000, 0xc7df_ffff),
    // Loads and stores without an offset.
    (0x3900_0000, 0xc4c0_03ff),
    (0x3900_0000, 0xc4c0_03ff),
    // ADD and SUB of an immediate.
    (0x1100_0000, 0xe03f_ffff),
];

/// Accesses to the address in X3: STR, LDR, STRB, STP, LDADD, CAS, STXR, STLR, DC ZVA, STR of a vector.
const ACCESSES: [u32; 10] = [
    0xf900_0064,
    0xf940_0064,
    0x3900_0064,
    0xa900_1464,
    0xf824_0065,
    0xc8a4_7c65,
    0xc805_7c64,
    0xc89f_fc64,
    0xd50b_7423,
    0x3d80_0064,
];

/// Appends `words` instructions.
pub fn code(rng: &mut Rng, bytes: &mut Vec<u8>, words: usize) {
    let end = bytes.len() + 4 * words;
    while bytes.len() < end {
        bytes.extend(instruction(rng).to_le_bytes());
        if rng.one_in(6) {
            // ADR X3, to 16 bytes at most 64 KiB from here; and accesses to them.
            let distance = rng.below(0x2000) as u32 * 4;
            let offset = (bytes.len() as u32 / 4).wrapping_neg() & 3;
            let sign = if rng.one_in(2) { 0x7_8000 } else { 0 };
            bytes.extend((0x1000_0003 | (sign | distance | offset) << 5).to_le_bytes());
            (0..1 + rng.below(3)).for_each(|_| bytes.extend(rng.pick(&ACCESSES).to_le_bytes()));
        }
    }
    bytes.truncate(end);
}

/// Returns an instruction.
fn instruction(rng: &mut Rng) -> u32 {
    let random = rng.word() as u32;
    // DC ZVA, WFI, MOVZ with a function of PSCI.
    match rng.below(32) {
        0 => return rng.pick(&[0xd50b_7420, 0xd503_207f, 0xd503_205f, 0xd503_3fdf]),
        1 => return 0x52b0_8000 | random & 0x1f,
        2 | 3 => return random,
        _ => {}
    }
    let (bits, chosen) = rng.pick(&KINDS);
    bits | random & chosen
}

/// Appends exception vectors. Most of them return to EL1, behind the instruction that has failed. That instruction may
/// have been anywhere, so the return is to its place in the 256 KiB that contain the vectors.
pub fn vectors(rng: &mut Rng, bytes: &mut Vec<u8>) {
    const GOES_ON: [u32; 9] = [
        0xd538_403d, // MRS X29, ELR_EL1
        0x9100_13bd, // ADD X29, X29, #4
        0xd342_47bd, // UBFX X29, X29, #2, #16
        0x1000_001e, // ADR X30, #0
        0xb37e_3fbe, // BFI X30, X29, #2, #16
        0xd518_403e, // MSR ELR_EL1, X30
        0xd280_78bd, // MOVZ X29, #0x3c5
        0xd518_401d, // MSR SPSR_EL1, X29
        0xd69f_03e0, // ERET
    ];
    for _ in 0..16 {
        let goes_on = !rng.one_in(8);
        for n in 0..32 {
            let word = match GOES_ON.get(n) {
                Some(word) if goes_on => *word,
                _ => instruction(rng),
            };
            bytes.extend(word.to_le_bytes());
        }
    }
}
