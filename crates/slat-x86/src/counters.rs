//! Counters of a CPU's own work.

/// Defines the counters, in the order in which they are printed.
macro_rules! counters {
    ($($(#[doc = $doc:literal])+ $name:ident,)+) => {
        /// Counts of a CPU's work since it was made, for statistics and measurements. Only one counter affects the
        /// guest: the PAUSE filter counts instructions as cycles.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub struct Counters {
            $($(#[doc = $doc])+ pub $name: u64,)+
        }

        impl Counters {
            /// The names of the counters, in the order of [`to_array`](Self::to_array).
            pub const NAMES: [&'static str; Self::COUNT] = [$(stringify!($name)),+];
            /// The number of counters.
            pub const COUNT: usize = [$(stringify!($name)),+].len();

            /// Returns the values of all counters.
            pub fn to_array(&self) -> [u64; Self::COUNT] {
                [$(self.$name),+]
            }
        }
    };
}

counters! {
    /// Executed instructions. A repeated string instruction counts as one.
    instructions,
    /// Instructions executed in compiled code: a part of `instructions`.
    instructions_compiled,
    /// Regions of compiled code that the CPU has received.
    regions,
    /// Regions that were compiled earlier, or for another CPU or another address: a part of `regions`.
    regions_shared,
    /// Basic blocks executed by the interpreter, and regions of compiled code entered.
    blocks,
    /// Blocks that were not found in the front table, because of a flush, a store to code or a serialising event, or
    /// because the block runs rarely. `blocks` counts them, too.
    blocks_looked_up,
    /// Blocks decoded: a part of `blocks_looked_up`.
    blocks_decoded,
    /// Regions of compiled code entered directly from other regions.
    regions_chained,
    /// Pages whose decoded code was compared with memory.
    pages_compared,
    /// Stores to pages that hold decoded code.
    code_stores,
    /// Data accesses that missed the first level of the software TLB.
    tlb_misses,
    /// Translations of data and code found in the second level of the software TLB. The machine makes all other
    /// translations.
    stlb_hits,
    /// Loads of CR3. A load drops at most the translations of the new PCID, and never global translations.
    flushes_cr3,
    /// Flushes by INVPCID of the translations of one PCID or of all PCIDs, except global translations.
    flushes_pcid,
    /// Flushes of the whole TLB, by INVPCID or because CR0, CR4, EFER or all registers were changed.
    flushes_other,
    /// Flushes of one page, small or large: by INVLPG or INVPCID, or because host memory was inaccessible.
    flushes_page,
    /// Flushes of the whole TLB because the host's memory, memslots or dirty logs changed.
    flushes_host,
}
