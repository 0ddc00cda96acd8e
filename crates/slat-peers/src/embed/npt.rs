//! The flushes of the adapter.

/// The module in which the adapter expects the processor's flushes.
pub mod arch {
    use page_table_multiarch::PagingMetaData;

    use super::super::GuestPhysAddr;

    /// The metadata of the tables. Like all flushes of this program, `flush_tlb` does nothing.
    pub struct ExtendedPageTableMetadata;

    impl PagingMetaData for ExtendedPageTableMetadata {
        const LEVELS: usize = 4;
        const PA_MAX_BITS: usize = 52;
        const VA_MAX_BITS: usize = 48;
        type VirtAddr = GuestPhysAddr;

        fn flush_tlb(_: Option<GuestPhysAddr>) {}
    }
}
