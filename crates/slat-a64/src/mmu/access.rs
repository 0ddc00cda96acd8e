//! Loads, stores and fetches by virtual addresses.
//!
//! If the TLB has the page, the access itself may still fail. The machine below may have waited during that access, and
//! the memory that backs any page may have changed meanwhile. So the processor drops all pages, and asks the machine
//! for the page of the access again.

use super::{Mmu, PAGE, Place, Request, accessor, misaligned};
use crate::abort::{Fault, Right};
use crate::bits::ones;
use crate::debug::Watched;
use crate::hypervisor::Hypervisor;
use crate::insn::{AtomicOp, Order};
use crate::memory::{Maintenance, Memory};
use crate::registers::{SCTLR, SCTLR_A};
use crate::stage1::Accessor;
use crate::state::State;
use crate::tier::Access;

/// An access, split at the page boundary: the part in the page of its first byte, and the part in the next page.
struct Places {
    first: Place,
    /// The number of the access's bytes that are in the first of its two pages.
    bytes: u64,
    second: Option<Place>,
}

impl<H: Hypervisor> Mmu<'_, H> {
    /// Translates each page of an access. Makes the checks that prevent an entry in the TLB: alignment, watchpoints,
    /// probes.
    #[cold]
    fn places(
        &mut self,
        state: &State,
        address: u64,
        bytes: u64,
        right: Right,
        access: Access,
    ) -> Result<Places, Fault<H::Fault>> {
        let is_write = right == Right::Write;
        let element = access.element.map_or(bytes, |size| 1 << size);
        let is_misaligned = address & (element - 1) != 0;
        if is_misaligned && state.system.get(SCTLR) & SCTLR_A != 0 {
            return Err(misaligned(address, is_write));
        }
        let request = Request::access(state, right, access);
        let first = self.place(state, address, &request)?;
        // Device memory refuses misaligned accesses and DC ZVA, which is the request with a `reported` address.
        let is_refused =
            |place: &Place| place.is_device && (is_misaligned || request.reported.is_some());
        let reported = request.reported.unwrap_or(address);
        if is_refused(&first) {
            return Err(misaligned(reported, is_write));
        }
        let in_first = PAGE - address % PAGE;
        let second = match in_first < bytes {
            true => Some(self.place(state, address.wrapping_add(in_first), &request)?),
            false => None,
        };
        if second.as_ref().is_some_and(is_refused) {
            return Err(misaligned(reported, is_write));
        }
        let watched = Watched {
            address,
            bytes,
            right,
            is_atomic: request.is_atomic,
            for_el0: request.want.accessor == Accessor::El0,
        };
        if let Some(abort) = state.watchpoint(&watched) {
            return Err(Fault::Stage1(abort));
        }
        let reads = !is_write || request.is_atomic;
        self.caches.probes.note(address, bytes, reads, is_write);
        Ok(Places {
            first,
            bytes: in_first.min(bytes),
            second,
        })
    }

    /// Accesses `bytes` bytes of a page that the TLB has. `None`: the TLB does not have the page, or the access has
    /// failed, and all pages were dropped.
    #[inline(always)]
    fn known<R>(
        &mut self,
        state: &State,
        access: Access,
        right: Right,
        address: u64,
        bytes: u64,
        make: impl FnOnce(&mut H, u64) -> Result<R, H::Fault>,
    ) -> Option<R> {
        let accessor = accessor(state, access.kind);
        let at = self.caches.tlb.find(accessor, right, address, bytes)?;
        match make(self.below, at) {
            Ok(result) => Some(result),
            Err(_) => {
                self.caches.flush();
                None
            }
        }
    }

    /// Loads at most 16 bytes whose page is not in the TLB.
    #[cold]
    fn load_slowly(
        &mut self,
        state: &State,
        address: u64,
        bytes: u64,
        access: Access,
    ) -> Result<u128, Fault<H::Fault>> {
        let places = self.places(state, address, bytes, Right::Read, access)?;
        let request = Request::access(state, Right::Read, access);
        let at = places.first.at;
        let Some(second) = places.second else {
            let loaded = match bytes {
                16 => self.below.load_wide(at),
                _ => {
                    let size = bytes.ilog2() as u8;
                    self.below.load(at, size, access.order).map(u128::from)
                }
            };
            return loaded
                .map_err(|reason| Self::refused(address, places.first.ipa, &request, reason));
        };
        let mut value = 0;
        for n in 0..bytes {
            let (at, ipa) = places.byte(&second, n);
            let byte = self.below.load(at, 0, access.order);
            let byte = byte
                .map_err(|reason| Self::refused(address.wrapping_add(n), ipa, &request, reason))?;
            value |= u128::from(byte) << (8 * n);
        }
        Ok(value)
    }

    /// Stores at most 16 bytes whose page is not in the TLB.
    #[cold]
    fn store_slowly(
        &mut self,
        state: &State,
        address: u64,
        bytes: u64,
        value: u128,
        access: Access,
    ) -> Result<(), Fault<H::Fault>> {
        let places = self.places(state, address, bytes, Right::Write, access)?;
        let request = Request::access(state, Right::Write, access);
        let at = places.first.at;
        let Some(second) = places.second else {
            let stored = match bytes {
                16 => self.below.store_wide(at, value),
                _ => {
                    let size = bytes.ilog2() as u8;
                    self.below.store(at, size, value as u64, access.order)
                }
            };
            return stored
                .map_err(|reason| Self::refused(address, places.first.ipa, &request, reason));
        };
        for n in 0..bytes {
            let (at, ipa) = places.byte(&second, n);
            let byte = (value >> (8 * n)) as u64 & 0xff;
            let stored = self.below.store(at, 0, byte, access.order);
            stored
                .map_err(|reason| Self::refused(address.wrapping_add(n), ipa, &request, reason))?;
        }
        Ok(())
    }

    /// Makes an access that reads and writes `1 << size` aligned bytes: calls `make` with the address in the machine's
    /// memory.
    #[inline(always)]
    fn exchange<R>(
        &mut self,
        state: &State,
        address: u64,
        size: u8,
        access: Access,
        make: impl Fn(&mut H, u64) -> Result<R, H::Fault>,
    ) -> Result<R, Fault<H::Fault>> {
        let known = self.known(state, access, Right::Write, address, 1 << size, &make);
        if let Some(result) = known {
            return Ok(result);
        }
        let place = self
            .places(state, address, 1 << size, Right::Write, access)?
            .first;
        let request = Request::access(state, Right::Write, access);
        make(self.below, place.at)
            .map_err(|reason| Self::refused(address, place.ipa, &request, reason))
    }
}

impl Places {
    /// Returns, for byte `n` of the access, its address in the machine's memory and its intermediate physical address.
    fn byte(&self, second: &Place, n: u64) -> (u64, u64) {
        match n < self.bytes {
            true => (self.first.at + n, self.first.ipa + n),
            false => (second.at + n - self.bytes, second.ipa + n - self.bytes),
        }
    }
}

impl<H: Hypervisor> Memory for Mmu<'_, H> {
    type Fault = Fault<H::Fault>;

    fn fetch(&mut self, state: &State, address: u64) -> Result<u32, Self::Fault> {
        let request = Request::access(state, Right::Execute, Access::default());
        let place = self.place(state, address, &request)?;
        let word = self.below.load(place.at, 2, Order::default());
        word.map(|word| word as u32)
            .map_err(|reason| Self::refused(address, place.ipa, &request, reason))
    }

    #[inline(always)]
    fn load(
        &mut self,
        state: &State,
        address: u64,
        size: u8,
        access: Access,
    ) -> Result<u64, Self::Fault> {
        let known = self.known(
            state,
            access,
            Right::Read,
            address,
            1 << size,
            |below, at| below.load(at, size, access.order),
        );
        if let Some(value) = known {
            return Ok(value);
        }
        let value = self.load_slowly(state, address, 1 << size, access)?;
        Ok(value as u64)
    }

    #[inline(always)]
    fn store(
        &mut self,
        state: &State,
        address: u64,
        size: u8,
        value: u64,
        access: Access,
    ) -> Result<(), Self::Fault> {
        let known = self.known(
            state,
            access,
            Right::Write,
            address,
            1 << size,
            |below, at| below.store(at, size, value, access.order),
        );
        if let Some(()) = known {
            return Ok(());
        }
        let value = value & ones(8 << size);
        self.store_slowly(state, address, 1 << size, value.into(), access)
    }

    fn load_wide(
        &mut self,
        state: &State,
        address: u64,
        access: Access,
    ) -> Result<u128, Self::Fault> {
        let known = self.known(state, access, Right::Read, address, 16, |below, at| {
            below.load_wide(at)
        });
        if let Some(value) = known {
            return Ok(value);
        }
        self.load_slowly(state, address, 16, access)
    }

    fn store_wide(
        &mut self,
        state: &State,
        address: u64,
        value: u128,
        access: Access,
    ) -> Result<(), Self::Fault> {
        let known = self.known(state, access, Right::Write, address, 16, |below, at| {
            below.store_wide(at, value)
        });
        if let Some(()) = known {
            return Ok(());
        }
        self.store_slowly(state, address, 16, value, access)
    }

    fn prepare_stores(
        &mut self,
        state: &State,
        address: u64,
        bytes: u32,
        access: Access,
    ) -> Result<(), Self::Fault> {
        let accessor = accessor(state, access.kind);
        let found = self
            .caches
            .tlb
            .find(accessor, Right::Write, address, bytes.into());
        if found.is_some() && !self.checks_each_access(state) {
            return Ok(());
        }
        let places = self.places(state, address, bytes.into(), Right::Write, access);
        places.map(|_| ())
    }

    fn compare_exchange(
        &mut self,
        state: &State,
        address: u64,
        size: u8,
        values: [u128; 2],
        access: Access,
    ) -> Result<u128, Self::Fault> {
        self.exchange(state, address, size, access, |below, at| {
            below.compare_exchange(at, size, values, access.order)
        })
    }

    fn atomic(
        &mut self,
        state: &State,
        op: AtomicOp,
        address: u64,
        size: u8,
        operand: u64,
        access: Access,
    ) -> Result<u64, Self::Fault> {
        self.exchange(state, address, size, access, |below, at| {
            below.atomic(op, at, size, operand, access.order)
        })
    }

    fn maintain(
        &mut self,
        state: &State,
        maintenance: Maintenance,
        address: u64,
    ) -> Result<(), Self::Fault> {
        self.maintain_caches(state, maintenance, address)
    }
}
