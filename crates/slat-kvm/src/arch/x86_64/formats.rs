//! The formats of second-level tables. Guests of x86 run with the tables of every architecture, because a software CPU
//! walks the tables through the engine.

/// Passes two things to the macro `$formats`: the function that returns the default format for an MMU, and the list of
/// formats. A format has a name, log2 of the size of its pages in bytes, and a type.
macro_rules! table_formats {
    ($formats:ident) => {
        $formats! {
            of(mmu) {
                match mmu {
                    MmuKind::Shadow => TableFormat::X86,
                    _ => TableFormat::Ept,
                }
            }
            /// Intel EPT.
            Ept = "ept" [12]: slat::Ept,
            /// Intel EPT of five levels.
            Ept5 = "ept5" [12]: slat::format::Ept5,
            /// AMD nested page tables.
            Npt = "npt" [12]: slat::format::Npt,
            /// AMD nested page tables of five levels.
            Npt5 = "npt5" [12]: slat::format::Npt5,
            /// AArch64 stage 2, 48 bits.
            Aarch64 = "aarch64" [12]: slat::format::Stage2<48>,
            /// AArch64 stage 2 with FEAT_LPA2, 52 bits.
            Aarch64Lpa2 = "aarch64-lpa2" [12]: slat::format::Stage2<52>,
            /// RISC-V G-stage, Sv48x4.
            Riscv = "riscv" [12]: slat::format::Sv48x4,
            /// RISC-V G-stage, Sv57x4.
            Riscv57 = "riscv57" [12]: slat::format::Sv57x4,
            /// x86's own tables, of five levels. The shadow MMU has only this format.
            X86 = "x86" [12]: slat::format::X86<5>,
        }
    };
}
pub(crate) use table_formats;
