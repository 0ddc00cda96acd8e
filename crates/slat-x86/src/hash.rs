//! Hashes block keys. The hash multiplies each word by a constant and folds the product. It begins with a seed that the
//! guest does not know, so a guest cannot choose addresses that make looking up its code slow.

use std::hash::{BuildHasher, Hasher, RandomState};

/// Makes hashers of type [`Fold`] with one seed.
pub(crate) struct Seeded(u64);

impl Seeded {
    pub(crate) fn new() -> Self {
        Seeded(RandomState::new().build_hasher().finish())
    }
}

impl BuildHasher for Seeded {
    type Hasher = Fold;

    fn build_hasher(&self) -> Fold {
        Fold(self.0)
    }
}

pub(crate) struct Fold(u64);

impl Hasher for Fold {
    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.write_u64((*byte).into());
        }
    }

    fn write_u8(&mut self, value: u8) {
        self.write_u64(value.into());
    }

    fn write_u64(&mut self, value: u64) {
        const ODD: u64 = 0x9e37_79b9_7f4a_7c15;
        let product = u128::from(self.0 ^ value) * u128::from(ODD);
        self.0 = (product >> 64) as u64 ^ product as u64;
    }

    fn finish(&self) -> u64 {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn neighbours_are_told_apart_in_the_bits_that_a_map_uses() {
        let seeded = Seeded::new();
        let hashes: Vec<u64> = (0..4096u64)
            .map(|n| seeded.hash_one((n << 12, n << 12, 2u8)))
            .collect();
        let low: HashSet<u64> = hashes.iter().map(|hash| hash & 0xffff).collect();
        let high: HashSet<u64> = hashes.iter().map(|hash| hash >> 57).collect();
        // Of 4096 random values below 65536, about 3969 are expected to be different.
        assert!(
            low.len() > 3800 && high.len() == 128,
            "{} {}",
            low.len(),
            high.len()
        );
        assert_ne!(
            hashes[1],
            Seeded::new().hash_one((1u64 << 12, 1u64 << 12, 2u8))
        );
    }
}
