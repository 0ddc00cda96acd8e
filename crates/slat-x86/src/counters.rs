//! Counters of a CPU's own work.

/// Defines the counters, in the order in which they are shown.
macro_rules! counters {
    ($($(#[doc = $doc:literal])+ $name:ident,)+) => {
        /// Counts of a CPU's work since it was made, for statistics and measurements. Only the PAUSE filter depends on
        /// a counter: it takes the number of instructions for a number of cycles.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub struct Counters {
            $($(#[doc = $doc])+ pub $name: u64,)+
        }

        impl Counters {
            /// The names, in the order of [`to_array`](Self::to_array).
            pub const NAMES: [&'static str; Self::COUNT] = [$(stringify!($name)),+];
            /// The number of counters.
            pub const COUNT: usize = [$(stringify!($name)),+].len();

            /// Returns the values.
            pub fn to_array(&self) -> [u64; Self::COUNT] {
                [$(self.$name),+]
            }
        }
    };
}

counters! {
    /// Instructions executed; a repeated string instruction is one.
    instructions,
    /// Instructions executed in compiled code: a part of `instructions`.
    instructions_compiled,
    /// Regions of compiled code that the CPU has received.
    regions,
    /// A part of `regions`: regions that were compiled for another CPU, for another address, or earlier.
    regions_shared,
    /// Basic blocks executed by the interpreter, and regions of compiled code entered.
    blocks,
    /// A part of `blocks`: blocks that the first table lacked, after a flush, a store to code, or a serialising event,
    /// or because they run rarely.
    blocks_looked_up,
    /// Blocks decoded: a part of `blocks_looked_up`.
    blocks_decoded,
    /// Regions of compiled code entered directly from other regions.
    regions_chained,
    /// Pages whose decoded code was compared with memory.
    pages_compared,
    /// Stores to pages that hold decoded code.
    code_stores,
    /// Data accesses that missed in the first level of the software TLB.
    tlb_misses,
    /// Translations, of data and of code, found in the second level of the software TLB. All other translations are
    /// made by the machine.
    stlb_hits,
    /// Loads of CR3, each of which drops at most the translations of the new PCID, and never global ones.
    flushes_cr3,
    /// Flushes of the translations of a PCID or of all PCIDs, but not of global ones: INVPCID.
    flushes_pcid,
    /// Flushes of the whole TLB by a change of CR0, CR4, EFER or of the registers as a whole, or by INVPCID.
    flushes_other,
    /// Flushes of one page, small or large: INVLPG, INVPCID, and host memory that was found inaccessible.
    flushes_page,
    /// Flushes of the whole TLB because the host's memory, memslots or dirty logs changed.
    flushes_host,
}
