//! Random numbers that are useful to test a CPU: edge values of integers, and unusual floating-point values.

/// SplitMix64: small, and returns the same numbers in every run.
pub struct Rng(pub u64);

impl Rng {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
    pub fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }
    pub fn one_in(&mut self, n: usize) -> bool {
        self.below(n) == 0
    }
    pub fn pick<T: Copy>(&mut self, of: &[T]) -> T {
        of[self.below(of.len())]
    }
    /// Returns an integer. Edge values are as likely as all others together.
    pub fn integer(&mut self) -> u64 {
        let edge = self.pick(&[
            0,
            1,
            2,
            0x7f,
            0x80,
            0xff,
            0x7fff,
            0x8000,
            0xffff,
            0x7fff_ffff,
            0x8000_0000,
            0xffff_ffff,
            0x7fff_ffff_ffff_ffff,
            0x8000_0000_0000_0000,
            u64::MAX,
            u64::MAX - 1,
        ]);
        match self.below(4) {
            0 => edge,
            1 => edge ^ (1 << self.below(64)),
            2 => self.next() >> self.below(64),
            _ => self.next(),
        }
    }
    pub fn f32(&mut self) -> u32 {
        let sign = (self.next() as u32) & 0x8000_0000;
        sign | match self.below(12) {
            0 => 0,
            1 => 0x7f80_0000,
            2 => 0x7fc0_0000 | (self.next() as u32 & 0x3f_ffff),
            3 => 0x7f80_0001 | (self.next() as u32 & 0x3f_ffff),
            4 => self.next() as u32 & 0x7f_ffff,
            5 => (self.below(0x1000) as f32).to_bits(),
            6 => 1.0f32.to_bits(),
            7 => (0x4b00_0000 + self.below(0x600_0000) as u32) | self.below(0x1000) as u32,
            8 => 0x0080_0000 | (self.next() as u32 & 0xff),
            9 => 0x7f7f_ff00 | (self.next() as u32 & 0xff),
            10 => (self.below(0x2000) as f32 / 2.0).to_bits(),
            _ => self.next() as u32 & 0x7fff_ffff,
        }
    }
    pub fn f64(&mut self) -> u64 {
        let sign = self.next() & (1 << 63);
        sign | match self.below(12) {
            0 => 0,
            1 => 0x7ff0 << 48,
            2 => (0x7ff8 << 48) | (self.next() >> 14),
            3 => (0x7ff0 << 48) | 1 | (self.next() >> 14),
            4 => self.next() >> 12,
            5 => (self.below(0x10000) as f64).to_bits(),
            6 => 1.0f64.to_bits(),
            7 => (0x41c0_0000 + self.below(0x300_0000) as u64) << 32 | (self.next() >> 32),
            8 => (0x0010 << 48) | (self.next() & 0xff),
            9 => f64::from(f32::from_bits(self.f32() & 0x7fff_ffff)).to_bits() & !(1 << 63),
            10 => (self.below(0x20000) as f64 / 2.0).to_bits(),
            _ => self.next() >> 1,
        }
    }
    pub fn xmm(&mut self) -> u128 {
        match self.below(4) {
            0 => (0..4).fold(0, |v, n| v | (u128::from(self.f32()) << (32 * n))),
            1 => u128::from(self.f64()) | (u128::from(self.f64()) << 64),
            2 => u128::from(self.integer()) | (u128::from(self.integer()) << 64),
            _ => u128::from(self.next()) | (u128::from(self.next()) << 64),
        }
    }
    /// Returns 80 bits, including unnormal and pseudo-denormal patterns.
    pub fn x87(&mut self) -> u128 {
        let exponent = match self.below(8) {
            0 => 0,
            1 => 0x7fff,
            2 => self.below(0x8000) as u128,
            3 => 0x3fff + 60 + self.below(8) as u128,
            4 => 1 + self.below(3) as u128,
            _ => 0x3fff - 8 + self.below(40) as u128,
        };
        let integer_bit = u128::from(exponent != 0) ^ u128::from(self.one_in(16));
        let fraction = match self.below(4) {
            0 => 0,
            1 => 1 << 62,
            2 => (self.next() >> 56) << 55,
            _ => self.next() >> 1,
        };
        (self.next() as u128 & 1) << 79 | exponent << 64 | integer_bit << 63 | u128::from(fraction)
    }
}
