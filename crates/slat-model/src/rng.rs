//! The source of a generator's decisions. The source is either a small pseudo-random generator (SplitMix64), so that a
//! failing run can be repeated from its seed, or the bytes of a fuzzer. A decision uses as few bytes as possible, so
//! that a changed byte changes only one decision.

/// Pseudo-random numbers from a seed, or numbers from a fuzzer.
#[derive(Clone, Debug)]
pub struct Rng(Source);

#[derive(Clone, Debug)]
enum Source {
    Seed(u64),
    /// The bytes in reverse order, so that a `pop` returns the next byte.
    Bytes(Vec<u8>),
}

impl Rng {
    /// Makes a pseudo-random generator. Equal seeds give equal sequences.
    pub fn new(seed: u64) -> Self {
        Rng(Source::Seed(seed))
    }

    /// Makes a generator that reads its numbers from `bytes`. After the last byte, all numbers are 0.
    pub fn from_bytes(bytes: &[u8]) -> Self {
        Rng(Source::Bytes(bytes.iter().rev().copied().collect()))
    }

    /// Whether the fuzzer's bytes have run out.
    pub fn is_exhausted(&self) -> bool {
        matches!(&self.0, Source::Bytes(bytes) if bytes.is_empty())
    }

    /// Returns the next number, of 64 random bits.
    pub fn word(&mut self) -> u64 {
        self.number(u64::MAX)
    }

    /// Returns a number that has enough bits to reach `max`. The number may exceed `max`.
    fn number(&mut self, max: u64) -> u64 {
        match &mut self.0 {
            Source::Seed(state) => {
                *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
                let mut z = *state;
                z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
                z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
                z ^ (z >> 31)
            }
            Source::Bytes(bytes) => {
                let needed = (64 - max.leading_zeros()).div_ceil(8);
                (0..needed).fold(0, |number, _| {
                    number << 8 | u64::from(bytes.pop().unwrap_or(0))
                })
            }
        }
    }

    /// Returns a number below `end`, which is not 0.
    pub fn below(&mut self, end: u64) -> u64 {
        // The remainders are not quite uniform, which does not matter for such small numbers.
        self.number(end - 1) % end
    }

    /// Returns true with a probability of 1 in `n`.
    pub fn one_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }

    /// Returns one of `choices`, which must not be empty.
    pub fn pick<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[self.below(choices.len() as u64) as usize]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_used_up_as_decisions_need_them() {
        let mut rng = Rng::from_bytes(&[7, 1, 2, 9]);
        assert_eq!(rng.below(1), 0);
        assert_eq!(rng.below(256), 7);
        assert_eq!(rng.below(1000), 0x102);
        assert!(!rng.is_exhausted());
        assert_eq!(rng.below(4), 1);
        assert!(rng.is_exhausted());
        assert_eq!(rng.below(1000), 0);
    }
}
