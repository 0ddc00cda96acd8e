//! Which elements of a result can underflow.

/// Which elements of an instruction's result can be denormal because of an underflow.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Lanes {
    None,
    Half,
    Single,
    Double,
    ScalarSingle,
    ScalarDouble,
}

/// Whether `value` is denormal. `exponent` and `fraction` are the numbers of bits of these fields.
fn is_denormal(value: u64, exponent: u32, fraction: u32) -> bool {
    let of = |bits: u32| (1 << bits) - 1;
    value >> fraction & of(exponent) == 0 && value & of(fraction) != 0
}

impl Lanes {
    /// Whether one of these elements of a result is denormal.
    pub(super) fn has_denormal(self, result: &[u128]) -> bool {
        let (bits, exponent, fraction) = match self {
            Lanes::None => return false,
            Lanes::Half => (16, 5, 10),
            Lanes::Single | Lanes::ScalarSingle => (32, 8, 23),
            Lanes::Double | Lanes::ScalarDouble => (64, 11, 52),
        };
        let elements = match self {
            Lanes::ScalarSingle | Lanes::ScalarDouble => 1,
            _ => 128 / bits,
        };
        (result.iter())
            .take(if elements == 1 { 1 } else { result.len() })
            .any(|half| {
                (0..elements).any(|n| is_denormal((half >> (n * bits)) as u64, exponent, fraction))
            })
    }
}
