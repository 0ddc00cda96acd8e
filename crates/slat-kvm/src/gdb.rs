//! A register of the CPU, as GDB describes registers, and the block of all registers' values. The list of registers
//! belongs to the architecture.

/// A register of the CPU, in GDB's terms.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Register {
    /// The register's name.
    pub name: &'static str,
    /// The number of bytes of the register.
    pub bytes: usize,
    /// GDB's name of the register's type.
    pub kind: &'static str,
    /// GDB's name of the group to which the register belongs.
    pub feature: &'static str,
}

impl Register {
    /// Returns a register with these properties.
    pub(crate) const fn new(
        name: &'static str,
        bytes: usize,
        kind: &'static str,
        feature: &'static str,
    ) -> Self {
        Register {
            name,
            bytes,
            kind,
            feature,
        }
    }

    /// Returns `value`, the bytes of a value of this register, as a number. `None`: the number of bytes is wrong.
    pub(crate) fn parse(&self, value: &[u8]) -> Option<u128> {
        let mut bytes = [0; 16];
        bytes[..self.bytes].copy_from_slice(value.get(..self.bytes)?);
        (value.len() == self.bytes).then(|| u128::from_le_bytes(bytes))
    }
}

/// Returns the number of bytes of the values of `registers`, one after another.
pub(crate) const fn block_bytes(registers: &[Register]) -> usize {
    let (mut at, mut bytes) = (0, 0);
    while at < registers.len() {
        bytes += registers[at].bytes;
        at += 1;
    }
    bytes
}

/// Writes the values of `registers` to `block`, one after another. `value` returns the value of a register by its
/// number.
pub(crate) fn fill_block(registers: &[Register], value: impl Fn(usize) -> u128, block: &mut [u8]) {
    let mut rest = block;
    for (number, Register { bytes, .. }) in registers.iter().enumerate() {
        let (part, after) = rest.split_at_mut(*bytes);
        part.copy_from_slice(&value(number).to_le_bytes()[..*bytes]);
        rest = after;
    }
}
