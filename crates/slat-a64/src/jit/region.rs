//! The compiled code of a region.

use super::source::Source;
use super::translator::{Kept, Point};
use slat_jit::{Chunk, Guarded};
use std::vec::Vec;

pub(super) struct Region {
    pub(super) chunk: Chunk,
    pub(super) source: Source,
    pub(super) guarded: Guarded,
    pub(super) points: Vec<Point>,
    /// The functions to which the code has pointers: kept so that they live as long as the code.
    pub(super) _functions: Vec<Kept>,
}

impl Region {
    /// If a host address is that of a guarded access of this region, returns the last [checkpoint](super::plan) before
    /// the access.
    pub(super) fn point_at(&self, address: u64) -> Option<Point> {
        let offset = self.chunk.offset_of(address as usize)?;
        let number = self.guarded.find(offset)?;
        self.points.get(number as usize).copied()
    }
}
