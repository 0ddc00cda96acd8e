//! A plain model of stage 1, from the tables and rules of DDI 0487, D8, written without a look at the processor.

/// The registers of the regime.
#[derive(Clone, Copy, Debug)]
pub struct Registers {
    pub tcr: u64,
    pub ttbr: [u64; 2],
    pub mair: u64,
    pub wxn: bool,
}

/// An access: its privilege, and the right that it needs.
#[derive(Clone, Copy, Debug)]
pub struct Query {
    pub privileged: bool,
    pub pan: bool,
    /// 'r', 'w', 'x', or '-' for no right.
    pub right: char,
    /// Whether hardware may update flags.
    pub updates: bool,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Outcome {
    Address {
        pa: u64,
        attribute: u8,
        shareability: u8,
    },
    Fault(u8),
    /// There is no memory at the address of a descriptor.
    Hole {
        ipa: u64,
        level: u8,
    },
}

/// The virtual address bits that index a table: from, to. D8.2.6 to D8.2.8.
const INDEX_4K: [Option<(u32, u32)>; 4] = [
    Some((47, 39)),
    Some((38, 30)),
    Some((29, 21)),
    Some((20, 12)),
];
const INDEX_16K: [Option<(u32, u32)>; 4] = [
    Some((47, 47)),
    Some((46, 36)),
    Some((35, 25)),
    Some((24, 14)),
];
const INDEX_64K: [Option<(u32, u32)>; 4] = [None, Some((47, 42)), Some((41, 29)), Some((28, 16))];

fn bits(value: u64, high: u32, low: u32) -> u64 {
    (value >> low) & ((1u64 << (high - low + 1)) - 1)
}

/// Translates. Reads descriptors, and reports the descriptors that hardware writes.
pub fn translate(
    registers: &Registers,
    va: u64,
    query: Query,
    read: &mut dyn FnMut(u64) -> Option<u64>,
    written: &mut Vec<(u64, u64)>,
) -> Outcome {
    let tcr = registers.tcr;
    let upper = bits(va, 55, 55) == 1;
    // TxSZ, EPD, TG, TBI, HPD of the half.
    let (txsz, epd, tbi, hpd) = if upper {
        (
            bits(tcr, 21, 16),
            bits(tcr, 23, 23),
            bits(tcr, 38, 38),
            bits(tcr, 42, 42),
        )
    } else {
        (
            bits(tcr, 5, 0),
            bits(tcr, 7, 7),
            bits(tcr, 37, 37),
            bits(tcr, 41, 41),
        )
    };
    let kib = if upper {
        match bits(tcr, 31, 30) {
            1 => 16,
            3 => 64,
            _ => 4,
        }
    } else {
        match bits(tcr, 15, 14) {
            1 => 64,
            2 => 16,
            _ => 4,
        }
    };
    let (index, page_shift) = match kib {
        4 => (INDEX_4K, 12),
        16 => (INDEX_16K, 14),
        _ => (INDEX_64K, 16),
    };
    if epd == 1 || !(16..=39).contains(&txsz) {
        return Outcome::Fault(0b000100);
    }
    let width = 64 - txsz as u32;
    // All bits above the input, up to the tag or the top, are those of the half.
    let highest = if tbi == 1 { 55 } else { 63 };
    for bit in width..=highest {
        if (bits(va, bit, bit) == 1) != upper {
            return Outcome::Fault(0b000100);
        }
    }
    let pa_width = [32, 36, 40, 42, 44, 48, 48, 48][bits(tcr, 34, 32) as usize];
    let fits = |address: u64| address < 1 << pa_width;

    // The first level has the highest input bit.
    let first = (0..4)
        .find(|level| index[*level].is_some_and(|(high, low)| width > low && width <= high + 1));
    let mut level = first.unwrap();
    let (_, low) = index[level].unwrap();
    let entries = 1u64 << (width - low);
    let base = bits(registers.ttbr[usize::from(upper)], 47, 0);
    let mut table = base / (8 * entries) * (8 * entries);
    if !fits(table) {
        return Outcome::Fault(0b000000);
    }
    let (mut ap_no_el0, mut ap_read_only, mut uxn_above, mut pxn_above) =
        (false, false, false, false);
    let mut high = width - 1;
    loop {
        let (_, low) = index[level].unwrap();
        let at = table + 8 * bits(va, high, low);
        let Some(descriptor) = read(at) else {
            return Outcome::Hole {
                ipa: at,
                level: level as u8,
            };
        };
        let is = |bit: u32| bits(descriptor, bit, bit) == 1;
        let code = level as u8;
        let block_is_possible = matches!((kib, level), (4, 1) | (_, 2));
        let leaf = match bits(descriptor, 1, 0) {
            3 => level == 3,
            1 if block_is_possible => true,
            _ => return Outcome::Fault(0b000100 | code),
        };
        if !leaf {
            table = bits(descriptor, 47, page_shift) << page_shift;
            if !fits(table) {
                return Outcome::Fault(code);
            }
            if hpd == 0 {
                ap_no_el0 |= is(61);
                ap_read_only |= is(62);
                uxn_above |= is(60);
                pxn_above |= is(59);
            }
            level += 1;
            high = low - 1;
            continue;
        }
        let output = bits(descriptor, 47, low) << low;
        if !fits(output) {
            return Outcome::Fault(code);
        }
        let hardware_flag = bits(tcr, 39, 39) == 1;
        let hardware_dirty = hardware_flag && bits(tcr, 40, 40) == 1 && is(51);
        if !is(10) && !hardware_flag {
            return Outcome::Fault(0b001000 | code);
        }
        // Table D8-60 and the text after it: the four values of AP[2:1].
        let ap2 = is(7) && !hardware_dirty || ap_read_only;
        let ap1 = is(6) && !ap_no_el0;
        let (mut privileged_read, mut privileged_write, user_read, user_write) = match (ap2, ap1) {
            (false, false) => (true, true, false, false),
            (false, true) => (true, true, true, true),
            (true, false) => (true, false, false, false),
            (true, true) => (true, false, true, false),
        };
        let privileged_never =
            is(53) || pxn_above || user_write || (registers.wxn && privileged_write);
        let user_never = is(54) || uxn_above || (registers.wxn && user_write);
        if query.pan && user_read {
            (privileged_read, privileged_write) = (false, false);
        }
        let allowed = match (query.right, query.privileged) {
            ('r', true) => privileged_read,
            ('w', true) => privileged_write,
            ('x', true) => !privileged_never,
            ('r', false) => user_read,
            ('w', false) => user_write,
            ('x', false) => !user_never,
            _ => true,
        };
        if !allowed {
            return Outcome::Fault(0b001100 | code);
        }
        if query.updates {
            let mut new = descriptor | 1 << 10;
            if query.right == 'w' && hardware_dirty {
                new &= !(1 << 7);
            }
            if new != descriptor {
                written.push((at, new));
            }
        }
        let attribute = (registers.mair >> (8 * bits(descriptor, 4, 2))) as u8;
        let is_uncached = attribute < 0x10 || attribute == 0x44;
        return Outcome::Address {
            pa: output | bits(va, low - 1, 0),
            attribute,
            shareability: if is_uncached {
                2
            } else {
                bits(descriptor, 9, 8) as u8
            },
        };
    }
}
