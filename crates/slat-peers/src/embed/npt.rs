//! The flush functions that the adapter needs. They do nothing.

/// The module in which the adapter expects the processor's flush functions.
pub mod arch {
    use page_table_multiarch::PagingMetaData;

    use super::super::GuestPhysAddr;

    /// The tables' metadata for page_table_multiarch. Its `flush_tlb` does nothing, like all flushes in this program.
    pub struct ExtendedPageTableMetadata;

    impl PagingMetaData for ExtendedPageTableMetadata {
        const LEVELS: usize = 4;
        const PA_MAX_BITS: usize = 52;
        const VA_MAX_BITS: usize = 48;
        type VirtAddr = GuestPhysAddr;

        fn flush_tlb(_: Option<GuestPhysAddr>) {}
    }
}
