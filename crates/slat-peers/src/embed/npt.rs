//! The flushes of the adapter.

/// Of the processor.
pub mod arch {
    use page_table_multiarch::PagingMetaData;

    use super::super::GuestPhysAddr;

    /// Flushes nothing, as everybody here.
    pub struct ExtendedPageTableMetadata;

    impl PagingMetaData for ExtendedPageTableMetadata {
        const LEVELS: usize = 4;
        const PA_MAX_BITS: usize = 52;
        const VA_MAX_BITS: usize = 48;
        type VirtAddr = GuestPhysAddr;

        fn flush_tlb(_: Option<GuestPhysAddr>) {}
    }
}
