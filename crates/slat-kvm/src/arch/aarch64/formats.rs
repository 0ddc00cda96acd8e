//! The formats of second-level tables: those of AArch64's stage 2.

/// Passes two things to the macro `$formats`: the function that returns the default format for an MMU, and the list of
/// formats. A format has a name, log2 of the size of its pages in bytes, and a type.
macro_rules! table_formats {
    ($formats:ident) => {
        $formats! {
            of(_mmu) {
                // The tables' pages have to be as large as the host's.
                match slat_process::page_size() {
                    0x4000 => TableFormat::Aarch64Kib16,
                    0x1_0000 => TableFormat::Aarch64Kib64,
                    _ => TableFormat::Aarch64,
                }
            }
            /// AArch64 stage 2, 48 bits.
            Aarch64 = "aarch64" [12]: slat::format::Stage2<48>,
            /// AArch64 stage 2 with FEAT_LPA2, 52 bits.
            Aarch64Lpa2 = "aarch64-lpa2" [12]: slat::format::Stage2<52>,
            /// AArch64 stage 2, 48 bits, for hosts with pages of 16 KiB.
            Aarch64Kib16 = "aarch64-16k" [14]: slat::format::Stage2Kib16<48>,
            /// AArch64 stage 2, 48 bits, for hosts with pages of 64 KiB.
            Aarch64Kib64 = "aarch64-64k" [16]: slat::format::Stage2Kib64<48>,
        }
    };
}
pub(crate) use table_formats;
