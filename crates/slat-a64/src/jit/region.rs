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
    /// The functions to which the code has pointers.
    pub(super) _functions: Vec<Kept>,
}

impl Region {
    /// If a host address is in this region, returns the checkpoint of the guarded access there.
    pub(super) fn point_at(&self, address: u64) -> Option<Point> {
        let offset = self.chunk.offset_of(address as usize)?;
        let number = self.guarded.find(offset)?;
        self.points.get(number as usize).copied()
    }
}
