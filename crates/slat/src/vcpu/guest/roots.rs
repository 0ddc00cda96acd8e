//! The roots at which walks of guest-virtual addresses begin, with the shadow MMU.

use crate::format::Format;
use crate::guest_walk::{GuestPaging, Mode};
use crate::mmu::Mmu;
use crate::platform::Platform;
use crate::shadow::ShadowMmu;
use crate::shadow::trail::Role;
use crate::table::Root;
use crate::vcpu::Vcpu;

/// The shadow roots for the guest address space (CR3 and paging mode) that the vCPU used last.
#[derive(Default)]
pub(in crate::vcpu) struct Roots {
    /// The guest's paging state to which the roots belong.
    of: Option<RootsOf>,
    /// The roots, indexed by [`Role::root_number`].
    roots: [Option<Root>; 4],
    /// The value of [`ShadowMmu::roots_zapped`](crate::shadow::ShadowMmu) when the roots were found.
    zapped: u64,
}

#[derive(Clone, Copy, PartialEq, Eq)]
struct RootsOf {
    cr3: u64,
    mode: Mode,
    pdptes: Option<[u64; 4]>,
    no_execute: bool,
    physical_bits: u32,
    reserves_table_global: bool,
}

impl RootsOf {
    fn new(paging: &GuestPaging) -> Self {
        RootsOf {
            cr3: paging.cr3,
            mode: paging.mode,
            pdptes: paging.pdptes.filter(|_| paging.mode == Mode::Pae),
            no_execute: paging.no_execute,
            physical_bits: paging.physical_bits,
            reserves_table_global: paging.reserves_table_global,
        }
    }
}

impl Roots {
    /// Returns the root with the number `number`, if it was found before.
    pub(in crate::vcpu) fn get(&self, number: usize) -> Option<Root> {
        self.roots[number]
    }

    /// Returns whether these roots are still in `tables`: no root was zapped since they were found. If `true`, walks
    /// may begin with these roots until the vCPU leaves its reader section.
    pub(in crate::vcpu) fn are_in<P: Platform, F: Format>(&self, tables: &Mmu<P, F>) -> bool {
        tables.shadow().map(ShadowMmu::roots_zapped) == Some(self.zapped)
    }

    /// Sets `root`, which a fault has reached, as the root of walks with number `number`. [`Vcpu::guest_root`] does not
    /// return a root that must be compared with the guest's table after a flush. Without `begin_with`, a hardware CPU
    /// would not get such a root: it would ask for its root and fault, again and again, until the guest flushes.
    pub(in crate::vcpu) fn begin_with(&mut self, number: usize, root: Root) {
        self.roots[number] = Some(root);
    }
}

impl<P: Platform, F: Format> Vcpu<P, F> {
    /// Returns the root for walks to `gva` in the state `paging`. If the vCPU does not know this root yet, takes the
    /// MMU's lock to look for it. `None`: the guest's table has no shadow page, or has one that must be compared with
    /// the table first ([`ShadowMmu::root_of`]), or cannot be the root ([`Role::root`]).
    pub(in crate::vcpu) fn guest_root(&mut self, gva: u64, paging: &GuestPaging) -> Option<Root> {
        let mmu = self.tables().shadow();
        let zapped = mmu
            .expect("a VM that shadows tables of the guest's")
            .roots_zapped();
        let of = Some(RootsOf::new(paging));
        if self.roots.of != of || self.roots.zapped != zapped {
            self.presence.tables.clear();
            self.roots = Roots {
                of,
                zapped,
                roots: [None; 4],
            };
        }
        let number = Role::root_number(paging, gva);
        if self.roots.roots[number].is_none() {
            let (gfn, role) = Role::root(paging, gva)?;
            self.roots.roots[number] = self.tables().shadow()?.root_of(gfn, role);
        }
        self.roots.roots[number]
    }
}
