//! The CRCs of FEAT_CRC32 (C6.2, CRC32B and CRC32CB).

/// The polynomials in reflected form: bit 0 is the coefficient of the highest power.
const POLYNOMIALS: [u32; 2] = [0xedb8_8320, 0x82f6_3b78];

const TABLES: [[u32; 256]; 2] = [table(POLYNOMIALS[0]), table(POLYNOMIALS[1])];

const fn table(polynomial: u32) -> [u32; 256] {
    let mut table = [0; 256];
    let mut n = 0;
    while n < 256 {
        let (mut crc, mut bit) = (n as u32, 0);
        while bit < 8 {
            crc = crc >> 1 ^ if crc & 1 != 0 { polynomial } else { 0 };
            bit += 1;
        }
        table[n] = crc;
        n += 1;
    }
    table
}

/// Returns the CRC of the low `bits` bits of `value`, continued from `crc`.
pub(crate) fn crc(crc: u32, value: u64, bits: u32, castagnoli: bool) -> u32 {
    let table = &TABLES[usize::from(castagnoli)];
    let bytes = &value.to_le_bytes()[..bits as usize / 8];
    bytes.iter().fold(crc, |crc, byte| {
        crc >> 8 ^ table[usize::from(crc as u8 ^ byte)]
    })
}
