//! Arm's table of encodings.

use std::sync::LazyLock;

/// One encoding of A64.
pub struct Encoding {
    pub class: &'static str,
    pub name: &'static str,
    pub mask: u32,
    pub value: u32,
    /// Bits of the mask that should have the given value. Other values of these bits are CONSTRAINED UNPREDICTABLE.
    pub should: u32,
}

impl Encoding {
    /// Whether all words of this encoding, and not all words of `other`, match both.
    pub fn is_inside(&self, other: &Encoding) -> bool {
        let matches_other = (self.value ^ other.value) & other.mask == 0;
        matches_other && self.mask & other.mask == other.mask && self.mask != other.mask
    }
}

/// All encodings except those of SVE and SME.
pub static ENCODINGS: LazyLock<Vec<Encoding>> = LazyLock::new(|| {
    let text = include_str!("encodings.txt");
    let rows = text.lines().filter(|line| !line.starts_with('#'));
    rows.map(|row| {
        let mut columns = row.split(' ');
        let [class, name] = [columns.next().unwrap(), columns.next().unwrap()];
        let [mask, value, should] =
            [(); 3].map(|()| u32::from_str_radix(columns.next().unwrap(), 16).unwrap());
        Encoding {
            class,
            name,
            mask,
            value,
            should,
        }
    })
    .collect()
});

/// Whether a word matches an encoding, even if bits differ from the value that they should have.
pub fn is_allocated(word: u32) -> bool {
    ENCODINGS
        .iter()
        .any(|e| (word ^ e.value) & e.mask & !e.should == 0)
}
