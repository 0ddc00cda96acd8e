//! The role of a shadow page: how the entries of the guest table that it shadows are interpreted.

use crate::addr::{Gfn, Level};
use crate::format::Format;
use crate::frame::ENTRIES;
use crate::guest_walk::{GuestPaging, Mode, PageRights, UsedEntry, used_entry};
use crate::trace::PageRole;

/// The kind of guest table that a shadow page shadows.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Tables {
    /// No guest table: the page is *direct*, which means that it maps consecutive guest frames.
    None,
    /// A guest table of this paging mode. For 4-level paging, too, this is [`Mode::Level5`], because the entries have
    /// the same meaning.
    Of(Mode),
}

/// The role of a shadow page (KVM: `kvm_mmu_page_role`). There is at most one shadow page for a frame and a role.
///
/// A role contains exactly the state on which the meaning of an entry depends. CR0.WP, SMEP, SMAP and protection keys
/// are checked when a shadow leaf is used ([`PageRights::allow`]), so the same page serves all their settings.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Role {
    /// The level of the page's table.
    pub(crate) level: Level,
    pub(crate) tables: Tables,
    /// The rights that the guest's entries above the table grant together. On another path to the same table they may
    /// grant more: that is another role.
    pub(crate) rights: PageRights,
    /// Which part of the guest's table the page shadows. With 32-bit paging, two shadow tables of 512 entries shadow a
    /// page table of 1024 entries, and four shadow tables of 1 GiB each shadow the page directory, which translates 4
    /// GiB.
    pub(crate) quadrant: u8,
    /// EFER.NXE. If it is clear, the no-execute bit is reserved, and an entry with this bit maps nothing.
    pub(crate) no_execute: bool,
    /// The guest's MAXPHYADDR: higher address bits are reserved, and an entry with such a bit maps nothing.
    pub(crate) physical_bits: u32,
    /// [`GuestPaging::reserves_table_global`]: if it is set, the global bit is reserved in entries above the last
    /// level, and an entry with this bit maps nothing.
    pub(crate) reserves_table_global: bool,
}

/// What an entry of a guest table means for the corresponding entry of its shadow page.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Meaning {
    /// The guest's entry refers to a table. The shadow entry refers to the shadow page of this frame and role.
    Table(Gfn, Role),
    /// The guest's entry maps guest memory from this frame on, with these rights. If its dirty flag is clear, the
    /// rights do not include writing, so that the first write faults and sets the flag.
    Memory(Gfn, PageRights),
}

impl Role {
    /// Returns the role in KVM's encoding.
    pub(crate) fn word(self) -> PageRole {
        let short = matches!(self.tables, Tables::Of(Mode::Bits32 { .. }));
        let PageRights {
            write,
            user,
            execute,
            ..
        } = self.rights;
        let bits = [
            (u32::from(self.level.0), 0),
            (short.into(), 4),
            (self.quadrant.into(), 5),
            (self.is_direct().into(), 7),
            (execute.into(), 8),
            (write.into(), 9),
            (user.into(), 10),
        ];
        PageRole(bits.iter().fold(0, |word, (bits, at)| word | bits << at))
    }

    /// Returns the role of direct pages of `level` that restrict no right.
    pub(crate) const fn direct(level: Level) -> Self {
        Role {
            level,
            tables: Tables::None,
            rights: PageRights::ALL,
            quadrant: 0,
            no_execute: false,
            physical_bits: 0,
            reserves_table_global: false,
        }
    }

    /// Returns the frame and the role of the shadow page at which walks to `gva` begin in the state `paging`. `None`:
    /// with PAE paging, these walks fault at a page-directory-pointer entry, or the caller has not read these entries
    /// from memory ([`GuestPaging::pdptes`]).
    pub(crate) fn root(paging: &GuestPaging, gva: u64) -> Option<(Gfn, Role)> {
        let mode = match paging.mode {
            Mode::Level4 => Mode::Level5,
            mode => mode,
        };
        let role = Role {
            level: Level(paging.levels() as u8),
            tables: Tables::Of(mode),
            rights: PageRights::ALL,
            quadrant: match mode {
                Mode::Bits32 { .. } => (gva >> 30 & 3) as u8,
                _ => 0,
            },
            no_execute: paging.no_execute,
            physical_bits: paging.physical_bits,
            reserves_table_global: paging.reserves_table_global,
        };
        Some((paging.root_table(gva)?.gfn(), role))
    }

    /// Returns the number of the root that translates `gva`. With 32-bit and PAE paging there are four roots, selected
    /// by bits 31:30 of the address; otherwise there is one.
    pub(crate) fn root_number(paging: &GuestPaging, gva: u64) -> usize {
        match paging.mode {
            Mode::Bits32 { .. } | Mode::Pae => (gva >> 30 & 3) as usize,
            Mode::Level4 | Mode::Level5 => 0,
        }
    }

    pub(crate) fn is_direct(&self) -> bool {
        self.tables == Tables::None
    }

    /// Returns a paging state for interpreting the guest's entries as this role requires.
    fn paging(&self, mode: Mode) -> GuestPaging {
        GuestPaging {
            cr3: 0,
            mode,
            user: false,
            write_protect: true,
            no_execute: self.no_execute,
            smep: false,
            smap: false,
            pkru: 0,
            pdptes: None,
            physical_bits: self.physical_bits,
            reserves_table_global: self.reserves_table_global,
        }
    }

    /// Returns the size of an entry of the guest's table in bytes.
    pub(crate) fn entry_size(&self) -> u64 {
        match self.tables {
            Tables::Of(Mode::Bits32 { .. }) => 4,
            _ => 8,
        }
    }

    /// Returns how many entries of the shadow page correspond to one entry of the guest's table: 2 for the directory of
    /// 32-bit paging, whose entries cover 4 MiB; otherwise 1.
    fn entries_per_guest_entry(&self) -> usize {
        match self.entry_size() {
            4 if self.level > Level::PAGE => 2,
            _ => 1,
        }
    }

    /// Returns the index, in the guest's table, of the guest's entry that corresponds to entry `index` of the shadow
    /// page.
    pub(crate) fn guest_index(&self, index: usize) -> usize {
        (usize::from(self.quadrant) * ENTRIES + index) / self.entries_per_guest_entry()
    }

    /// Returns the indexes of the shadow page's entries that correspond to entry `guest_index` of the guest's table.
    /// The range is empty if the guest's entry belongs to another quadrant.
    pub(crate) fn indexes_of(&self, guest_index: usize) -> core::ops::Range<usize> {
        let per = self.entries_per_guest_entry();
        match (guest_index * per).checked_sub(usize::from(self.quadrant) * ENTRIES) {
            Some(first) if first < ENTRIES => first..first + per,
            _ => 0..0,
        }
    }

    /// Returns the meaning of the guest's entry `entry` for entry `index` of the shadow page. `None`: the guest's entry
    /// maps nothing, or its accessed flag is clear. Always `None` for a direct page, which shadows no table of the
    /// guest.
    pub(crate) fn meaning(&self, index: usize, entry: u64) -> Option<Meaning> {
        let Tables::Of(mode) = self.tables else {
            return None;
        };
        let paging = self.paging(mode);
        let part = index % self.entries_per_guest_entry();
        Some(match used_entry(&paging, self.level.0.into(), entry)? {
            UsedEntry::Table(table) => Meaning::Table(
                table.gfn(),
                Role {
                    level: self.level.below(),
                    rights: self.rights.below(&paging, entry),
                    quadrant: part as u8,
                    ..*self
                },
            ),
            UsedEntry::Page { gpa, dirty, .. } => {
                let rights = self.rights.of_page(&paging, entry);
                Meaning::Memory(
                    gpa.gfn().add(part as u64 * self.level.pages()),
                    PageRights {
                        write: rights.write && dirty,
                        ..rights
                    },
                )
            }
        })
    }

    /// Returns the role of the direct page, of the next lower level, that maps the pieces of a guest page with
    /// `rights`.
    pub(crate) fn pieces(&self, rights: PageRights) -> Role {
        Role {
            rights,
            ..Role::direct(self.level.below())
        }
    }
}

/// What a shadow page stores about a leaf or an MMIO entry: the guest frame, and the rights that the guest's tables
/// grant.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Note(u64);

impl Note {
    /// The value for an entry that was made without the guest's tables.
    pub(crate) const NONE: Note = Note(0);

    const RIGHTS: u32 = 3;
    const RIGHTS_AND_KEY: u32 = 7;

    pub(crate) fn new(gfn: Gfn, rights: PageRights) -> Self {
        debug_assert!(gfn.0 <= u64::MAX >> Self::RIGHTS_AND_KEY && rights.key < 16);
        let bits = u64::from(rights.write)
            | u64::from(rights.user) << 1
            | u64::from(rights.execute) << 2
            | u64::from(rights.key) << Self::RIGHTS;
        Note(gfn.0 << Self::RIGHTS_AND_KEY | bits)
    }

    pub(crate) fn gfn(self) -> Gfn {
        Gfn(self.0 >> Self::RIGHTS_AND_KEY)
    }

    pub(crate) fn rights(self) -> PageRights {
        PageRights {
            write: self.0 & 1 != 0,
            user: self.0 & 2 != 0,
            execute: self.0 & 4 != 0,
            key: (self.0 >> Self::RIGHTS & 15) as u8,
        }
    }

    /// Returns whether a leaf may combine the rights of both notes: they have the same frame, privilege and key.
    pub(crate) fn is_like(self, other: Note) -> bool {
        const GAINED: u64 = 1 | 4;
        (self.0 ^ other.0) & !GAINED == 0
    }

    /// Returns the note of a leaf that has the rights of both notes together. The notes must be alike
    /// ([`Self::is_like`]).
    pub(crate) fn with(self, other: Note) -> Note {
        Note(self.0 | other.0)
    }

    /// Returns whether the guest still grants what a leaf with this note maps, if its tables now map `gfn` with
    /// `rights`.
    pub(crate) fn is_granted(self, gfn: Gfn, rights: PageRights) -> bool {
        let was = self.rights();
        self.gfn() == gfn
            && was.user == rights.user
            && was.key == rights.key
            && (rights.write || !was.write)
            && (rights.execute || !was.execute)
    }
}

/// Returns the note that an MMIO entry of format `F` contains: like [`Note`], but without a key. `None`: the note does
/// not fit, because the key is not 0, or because the frame number has too many bits.
pub(crate) fn mmio_note<F: Format>(gfn: Gfn, rights: PageRights) -> Option<u64> {
    let frame_bits = F::MMIO_NOTE_BITS.checked_sub(Note::RIGHTS)?;
    let fits = rights.key == 0 && gfn.0 >> frame_bits == 0;
    fits.then(|| gfn.0 << Note::RIGHTS | Note::new(Gfn(0), rights).0)
}

/// Returns the frame and rights from which [`mmio_note`] was made.
pub(crate) fn of_mmio_note(note: u64) -> (Gfn, PageRights) {
    let rights = Note(note & ((1 << Note::RIGHTS) - 1)).rights();
    (Gfn(note >> Note::RIGHTS), rights)
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::format::{Entry, X86, all_gfns, tests::assert_refuses};

    const LONG: Role = Role {
        tables: Tables::Of(Mode::Level5),
        no_execute: true,
        physical_bits: 48,
        reserves_table_global: false,
        ..Role::direct(Level::MEGA)
    };
    const SHORT: Role = Role {
        tables: Tables::Of(Mode::Bits32 { pse: true }),
        quadrant: 3,
        ..LONG
    };

    #[test]
    fn an_entry_of_a_32_bit_directory_stands_for_two() {
        assert_eq!(SHORT.guest_index(7), 3 * 256 + 3);
        assert_eq!(SHORT.indexes_of(3 * 256 + 3), 6..8);
        assert!(SHORT.indexes_of(3).is_empty() && SHORT.indexes_of(1024).is_empty());
        // The guest's entry is present, writable, user, accessed and dirty, and maps 4 MiB at 0x40_0000.
        let huge = SHORT.meaning(7, 0x40_00e7);
        let rights = PageRights {
            execute: true,
            ..PageRights::ALL
        };
        assert_eq!(huge, Some(Meaning::Memory(Gfn(0x600), rights)));
        let Some(Meaning::Table(gfn, role)) = SHORT.meaning(7, 0x1_2027) else {
            panic!("it refers to a table");
        };
        assert_eq!(
            (gfn, role.level, role.quadrant),
            (Gfn(0x12), Level::PAGE, 1)
        );
        assert_eq!(role.indexes_of(512), 0..1);
        assert!(role.indexes_of(511).is_empty());
    }

    #[test]
    fn a_page_that_was_not_written_to_grants_no_writing() {
        const NO_EXECUTE: u64 = 1 << 63;
        for (entry, write, execute) in [(0xa7, false, true), (0xe7 | NO_EXECUTE, true, false)] {
            let rights = PageRights {
                write,
                execute,
                ..PageRights::ALL
            };
            let meaning = LONG.meaning(5, 0x20_0000 | entry);
            assert_eq!(meaning, Some(Meaning::Memory(Gfn(0x200), rights)));
        }
        // These entries mean nothing for a shadow page: one is not accessed, one is not present, and one has a reserved
        // bit set.
        for entry in [0x87, 0x20, 0x20_0000 | 1 << 13 | 0xe7] {
            assert_eq!(LONG.meaning(5, entry), None, "{entry:#x}");
        }
    }

    #[test]
    fn a_note_holds_what_it_was_made_of() {
        assert_refuses(|| Note::new(Gfn(1 << 57), PageRights::ALL));
        assert_refuses(|| {
            let rights = PageRights {
                key: 16,
                ..PageRights::ALL
            };
            Note::new(Gfn(0), rights)
        });
        // Test a large frame number: one of the last that tables of five levels translate. (Those in a guest's tables
        // have at most 40 bits.)
        let gfn = Gfn(all_gfns::<X86<5>>().end.0 - 3);
        for bits in 0..128u8 {
            let rights = PageRights {
                write: bits & 1 != 0,
                user: bits & 2 != 0,
                execute: bits & 4 != 0,
                key: bits >> 3,
            };
            let note = Note::new(gfn, rights);
            assert_eq!((note.gfn(), note.rights()), (gfn, rights));
            assert!(note.is_granted(gfn, rights) && !note.is_granted(Gfn(7), rights));
            let last = Gfn((1 << 40) - 1);
            let note = mmio_note::<X86<5>>(last, rights);
            assert_eq!(note.is_some(), rights.key == 0);
            if let Some(note) = note {
                assert_eq!(of_mmio_note(note), (last, rights));
                let entry = X86::<5>::decode(X86::<5>::mmio(7, note), Level::PAGE);
                assert_eq!(
                    entry,
                    Entry::Mmio {
                        generation: 7,
                        note
                    }
                );
            }
            assert_eq!(mmio_note::<X86<5>>(last.add(1), rights), None);
        }
    }
}
