//! Moves that compute a value: SETcc CMOVcc, BSWAP MOVBE, and the conversions of RAX. They do not change the flags.

use super::{Compute, Flags, FlagsOf, Operation, operations};

operations! {
    // `holds` says whether the instruction's condition holds. CMOVcc reads its source even if the condition does not
    // hold.
    Setcc |c, a, _b, holds| (c.widened(holds, a), Flags::InCpu)
    Cmov |c, a, b, holds| (c.select(holds, b, a), Flags::InCpu)

    // The manual leaves the result of a 16-bit BSWAP undefined. As on processors, it is zero.
    Bswap |c, a, _b, _holds| match c.bits(a) {
        16 => (c.number(0, a), Flags::InCpu),
        _ => (c.swap_bytes(a), Flags::InCpu),
    }
    Movbe |c, a, _b, _holds| (c.swap_bytes(a), Flags::InCpu)

    // `Extend` is CBW, CWDE or CDQE, and `Spread` is CWD, CDQ or CQO, depending on the size of the result.
    Extend |c, a, _b, _holds| (c.extend_half(a), Flags::InCpu)
    Spread |c, a, _b, _holds| {
        let last = c.number(i64::from(c.bits(a)) - 1, a);
        (c.sar(a, last), Flags::InCpu)
    }
}
