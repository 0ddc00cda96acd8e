//! The controllers' identification registers. Their values are KVM's.

/// The product in identification registers, 'K', and the implementer, Arm.
pub(crate) const PRODUCT: u32 = 0x4b;
pub(crate) const PRODUCT_SHIFT: u32 = 24;
pub(crate) const IMPLEMENTER: u32 = 0x43b;
/// The newest revision of GICD_IIDR, and the oldest one that a VMM can choose.
pub(crate) const REVISION: u8 = 3;
pub(crate) const OLDEST_REVISION: u8 = 2;
/// The number of bits of a priority, and the value of ICC_CTLR_EL1.IDbits, which means INTIDs of 16 bits.
pub(crate) const PRIORITY_BITS: u8 = 5;
pub(crate) const ID_BITS: u8 = 0;
