//! The caches of a [`CachingMmu`](super::CachingMmu): a TLB and paging-structure caches. They keep each entry until it
//! is flushed.

use std::collections::HashMap;

use slat::guest_walk::{GuestPage, GuestPaging};
use slat::{Access, Hpa};

/// The CPU state on which a translation's rights depend, except the parts whose change flushes the TLB. A cached
/// translation is used only if the current context equals the context in which it was cached.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Context {
    user: bool,
    write_protect: bool,
    smap: bool,
    pkru: u32,
}

impl Context {
    fn of(paging: &GuestPaging) -> Context {
        Context {
            user: paging.user,
            write_protect: paging.write_protect,
            smap: paging.smap,
            pkru: paging.pkru,
        }
    }
}

/// A TLB entry.
#[derive(Clone, Copy, Debug)]
pub(super) struct Translation {
    pub page: GuestPage,
    /// The R/W flag of the leaf.
    pub writable: bool,
    /// The host page of the translation at its first use.
    pub host: Option<Hpa>,
}

impl Translation {
    /// Whether the rights allow `access`, and no accessed or dirty flag has to be set for it.
    pub fn allows(&self, access: Access) -> bool {
        match access {
            Access::Read => self.page.read,
            Access::Write => self.page.write,
            Access::Execute => self.page.execute,
        }
    }
}

/// The values of the entries on a walk's path, by level; the last value is that of level 1. Only the entries above some
/// level may be known.
pub(super) type Values = [u64; 5];

/// The PCID to which a translation belongs. `None`: the translation is global, so it belongs to all PCIDs.
type Owner = Option<u16>;

/// The caches of a vCPU.
#[derive(Default)]
pub(super) struct Caches {
    /// The translations, by owner, page number and context.
    translations: HashMap<(Owner, u64, Context), Translation>,
    /// The entries that reference tables, by PCID, level, and the address bits that select the entry.
    structures: HashMap<(u16, u32, u64), Values>,
}

impl Caches {
    /// Returns the translation for an address.
    pub fn find(&mut self, pcid: u16, gva: u64, paging: &GuestPaging) -> Option<&mut Translation> {
        let context = Context::of(paging);
        let owner = [Some(pcid), None]
            .into_iter()
            .find(|owner| (self.translations).contains_key(&(*owner, gva >> 12, context)))?;
        self.translations.get_mut(&(owner, gva >> 12, context))
    }

    pub fn insert(&mut self, owner: Owner, gva: u64, paging: &GuestPaging, new: Translation) {
        let key = (owner, gva >> 12, Context::of(paging));
        self.translations.insert(key, new);
    }

    /// Returns the lowest level at which the caches have an entry for `gva` that references a table. Also returns the
    /// values of the entries down to that level. `shifts[0]` is the lowest address bit of the index at level 1, and so
    /// on for higher levels.
    pub fn structures(&self, pcid: u16, gva: u64, shifts: &[u32]) -> Option<(u32, Values)> {
        let levels = 2..=shifts.len() as u32;
        levels.into_iter().find_map(|level| {
            let key = (pcid, level, gva >> shifts[level as usize - 1]);
            Some((level, *self.structures.get(&key)?))
        })
    }

    pub fn insert_structure(&mut self, pcid: u16, level: u32, gva: u64, shift: u32, new: Values) {
        self.structures.insert((pcid, level, gva >> shift), new);
    }

    /// Drops all cached entries.
    pub fn flush(&mut self) {
        self.translations.clear();
        self.structures.clear();
    }

    /// Drops all translations that are not global.
    pub fn flush_contexts(&mut self) {
        self.translations.retain(|(owner, _, _), _| owner.is_none());
        self.structures.clear();
    }

    /// Drops the translations of a PCID that are not global.
    pub fn flush_context(&mut self, pcid: u16) {
        self.translations
            .retain(|(owner, _, _), _| *owner != Some(pcid));
        self.flush_structures(pcid);
    }

    /// Drops the translations of a PCID for the page of `gva`. If `globals`, also drops global translations of that
    /// page.
    pub fn flush_page(&mut self, pcid: u16, gva: u64, globals: bool) {
        self.translations.retain(|(owner, page, _), translation| {
            let meant = match owner {
                Some(owner) => *owner == pcid,
                None => globals,
            };
            !meant || (page ^ gva >> 12) >> (translation.page.bits - 12) != 0
        });
    }

    /// Drops all of a PCID's entries that reference tables.
    pub fn flush_structures(&mut self, pcid: u16) {
        self.structures.retain(|(owner, _, _), _| *owner != pcid);
    }

    /// Drops the cached entries that reference tables and are on the path of a walk for `gva`. `shifts` has the same
    /// meaning as in [`Self::structures`].
    pub fn flush_structures_of(&mut self, pcid: u16, gva: u64, shifts: &[u32]) {
        self.structures.retain(|(owner, level, prefix), _| {
            let shift = shifts.get(*level as usize - 1).copied().unwrap_or(0);
            *owner != pcid || *prefix != gva >> shift
        });
    }
}
