//! Guest memory as the controllers see it: tables of LPIs, and tables and commands of an ITS.

/// The error of an access to an address where the guest has no memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fault;

/// The guest's memory.
pub trait Memory {
    /// Reads `bytes.len()` bytes from the guest-physical address `gpa`.
    ///
    /// # Errors
    /// A part of the range is not memory.
    fn read(&self, gpa: u64, bytes: &mut [u8]) -> Result<(), Fault>;

    /// Writes `bytes` to the guest-physical address `gpa`.
    ///
    /// # Errors
    /// A part of the range is not writable memory.
    fn write(&self, gpa: u64, bytes: &[u8]) -> Result<(), Fault>;

    /// Whether the guest has memory at the guest-physical address `gpa`.
    fn has(&self, gpa: u64) -> bool;
}

/// Reads a little-endian word of a table.
pub(crate) fn read_u64(memory: &impl Memory, gpa: u64) -> Result<u64, Fault> {
    let mut bytes = [0; 8];
    memory.read(gpa, &mut bytes)?;
    Ok(u64::from_le_bytes(bytes))
}

/// Writes a little-endian word of a table.
pub(crate) fn write_u64(memory: &impl Memory, gpa: u64, value: u64) -> Result<(), Fault> {
    memory.write(gpa, &value.to_le_bytes())
}

/// A memory without any accessible address, for a GIC whose guest has no LPIs.
#[derive(Clone, Copy, Debug)]
pub struct NoMemory;

impl Memory for NoMemory {
    fn read(&self, _: u64, _: &mut [u8]) -> Result<(), Fault> {
        Err(Fault)
    }

    fn write(&self, _: u64, _: &[u8]) -> Result<(), Fault> {
        Err(Fault)
    }

    fn has(&self, _: u64) -> bool {
        false
    }
}
