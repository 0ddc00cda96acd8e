//! Extracts fields of instruction words, and truncates or sign-extends numbers.

/// Returns bits `high` to `low` of `word`.
#[inline(always)]
pub(crate) const fn field(word: u32, high: u32, low: u32) -> u32 {
    word >> low & (u32::MAX >> (31 - (high - low)))
}

/// Whether bit `n` of `word` is set.
#[inline(always)]
pub(crate) const fn flag(word: u32, n: u32) -> bool {
    word >> n & 1 != 0
}

/// Returns the register number whose lowest bit is bit `low` of `word`.
#[inline(always)]
pub(crate) const fn register(word: u32, low: u32) -> u8 {
    (word >> low & 31) as u8
}

/// Sign-extends the field in bits `high` to `low` of `word`.
#[inline(always)]
pub(crate) const fn signed_field(word: u32, high: u32, low: u32) -> i32 {
    (word << (31 - high)) as i32 >> (31 - (high - low))
}

/// Returns the low `bits` bits of `value`.
#[inline(always)]
pub(crate) const fn zero_extend(value: u64, bits: u32) -> u64 {
    value & (u64::MAX >> (64 - bits))
}

/// Sign-extends the low `bits` bits of `value`.
#[inline(always)]
pub(crate) const fn sign_extend(value: u64, bits: u32) -> u64 {
    ((value << (64 - bits)) as i64 >> (64 - bits)) as u64
}

/// Returns a mask of the low `bits` bits, at most 64.
pub(crate) const fn ones(bits: u32) -> u64 {
    match bits {
        0 => 0,
        _ => u64::MAX >> (64 - bits),
    }
}
