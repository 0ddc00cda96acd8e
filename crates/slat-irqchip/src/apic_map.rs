//! Finds the local APICs to which a message is addressed, without asking each APIC.
//!
//! [`ApicMap`] is a snapshot of the APICs' [`Address`]es. The code that shares it builds a new one when an address has
//! changed: at most a few times while a guest boots. A look-up by id is a binary search. A logical id of x2APIC mode
//! names at most 16 physical ids (SDM volume 3, 12.12.10.2). Logical ids of xAPIC mode are compared one by one; there
//! are at most 255 of them.

use crate::message::{BROADCAST, DeliveryMode, Destination, Message};
use alloc::collections::TryReserveError;
use alloc::vec::Vec;

/// The ids of one local APIC, by which messages find it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Address {
    /// The physical id.
    pub id: u32,
    /// The logical id.
    pub logical: Logical,
    /// Whether software has enabled the APIC, so that it takes interrupts.
    pub enabled: bool,
}

/// The logical id of a local APIC (SDM volume 3, 12.6.2.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Logical {
    /// The APIC has no logical id.
    None,
    /// Flat model: the ID has a bit for each of eight APICs.
    Flat(u8),
    /// Cluster model: the upper four bits are the number of a cluster, and each of the cluster's four APICs has one of
    /// the lower four bits.
    Cluster(u8),
    /// x2APIC mode: the logical id is computed from the physical id.
    X2apic,
}

impl Logical {
    /// Whether the 8-bit logical destination `id` names this APIC.
    fn matches(self, id: u32) -> bool {
        match self {
            Logical::Flat(own) => u32::from(own) & id != 0,
            Logical::Cluster(own) => {
                u32::from(own) >> 4 == id >> 4 && u32::from(own) & id & 15 != 0
            }
            Logical::None | Logical::X2apic => false,
        }
    }
}

/// One APIC in the map.
#[derive(Clone, Copy, Debug)]
struct Entry {
    id: u32,
    logical: Logical,
    enabled: bool,
    /// The number by which the caller knows the APIC.
    index: usize,
}

/// The addresses of all enabled local APICs of a machine.
#[derive(Debug, Default)]
pub struct ApicMap {
    /// The APICs, sorted by physical id. Several APICs may have given themselves the same id.
    by_id: Vec<Entry>,
    /// Whether some APIC is in xAPIC mode.
    has_xapic: bool,
}

impl ApicMap {
    /// Allocates memory for `apics` APICs, so that [`rebuild`](Self::rebuild) allocates nothing.
    ///
    /// # Errors
    /// There is no memory. The map does not change.
    pub fn reserve(&mut self, apics: usize) -> Result<(), TryReserveError> {
        self.by_id
            .try_reserve(apics.saturating_sub(self.by_id.len()))
    }

    /// Replaces all addresses of the map. `addresses` yields each address with the number by which the caller knows the
    /// APIC.
    pub fn rebuild(&mut self, addresses: impl Iterator<Item = (usize, Address)>) {
        self.by_id.clear();
        self.has_xapic = false;
        for (index, address) in addresses {
            let Address {
                id,
                logical,
                enabled,
            } = address;
            self.has_xapic |= logical != Logical::X2apic;
            self.by_id.push(Entry {
                id,
                logical,
                enabled,
                index,
            });
        }
        self.by_id
            .sort_unstable_by_key(|entry| (entry.id, entry.index));
    }

    fn with_id(&self, id: u32) -> &[Entry] {
        let begin = self.by_id.partition_point(|entry| entry.id < id);
        let len = self.by_id[begin..].partition_point(|entry| entry.id == id);
        &self.by_id[begin..begin + len]
    }

    /// Calls `visit` with each APIC in xAPIC mode whose logical id the closure `is_meant` accepts.
    fn visit_xapic(&self, visit: &mut impl FnMut(&Entry), is_meant: impl Fn(Logical) -> bool) {
        if self.has_xapic {
            (self.by_id.iter())
                .filter(|entry| entry.logical != Logical::X2apic && is_meant(entry.logical))
                .for_each(visit);
        }
    }

    /// Calls `visit` with each APIC that `destination` names. `sender` is the APIC that sent the message, if an APIC
    /// did.
    pub fn visit(
        &self,
        destination: Destination,
        sender: Option<usize>,
        mut visit: impl FnMut(usize),
    ) {
        self.visit_entries(destination, sender, |entry| visit(entry.index));
    }

    fn visit_entries(
        &self,
        destination: Destination,
        sender: Option<usize>,
        mut visit: impl FnMut(&Entry),
    ) {
        match destination {
            Destination::Sender => (self.by_id.iter())
                .filter(|entry| Some(entry.index) == sender)
                .for_each(visit),
            Destination::All => self.by_id.iter().for_each(visit),
            Destination::Others => (self.by_id.iter())
                .filter(|entry| Some(entry.index) != sender)
                .for_each(visit),
            Destination::Physical(id) => {
                // For an APIC in xAPIC mode, the destination 0xff is a broadcast, even if the sender uses 32-bit ids.
                if id == BROADCAST {
                    self.visit_xapic(&mut visit, |_| true);
                }
                (self.with_id(id).iter())
                    .filter(|entry| id != BROADCAST || entry.logical == Logical::X2apic)
                    .for_each(visit);
            }
            Destination::Logical(id) => {
                for bit in (0..16).filter(|bit| id >> bit & 1 != 0) {
                    (self.with_id((id >> 16) << 4 | bit).iter())
                        .filter(|entry| entry.logical == Logical::X2apic)
                        .for_each(&mut visit);
                }
                if id <= BROADCAST {
                    self.visit_xapic(&mut visit, |logical| id == BROADCAST || logical.matches(id));
                }
            }
        }
    }

    /// Calls `deliver` with each APIC to which `message` goes. A lowest-priority message goes to one of the APICs that
    /// accept interrupts. As in KVM, the vector determines this APIC, so that an interrupt stays on one CPU.
    pub fn route(&self, message: &Message, sender: Option<usize>, mut deliver: impl FnMut(usize)) {
        let destination = message.destination;
        if message.mode != DeliveryMode::LowestPriority {
            return self.visit(destination, sender, deliver);
        }
        let mut count = 0;
        self.visit_entries(destination, sender, |entry| {
            count += usize::from(entry.enabled);
        });
        let mut left = match count {
            0 => return,
            count => usize::from(message.vector) % count,
        };
        self.visit_entries(destination, sender, |entry| {
            if !entry.enabled {
                return;
            }
            if left == 0 {
                deliver(entry.index);
            }
            left = left.wrapping_sub(1);
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::vec;

    fn map(addresses: &[(u32, Logical)]) -> ApicMap {
        map_without(&[], addresses)
    }

    /// Makes a map of APICs with these addresses. Software has enabled all of them except those at the indices
    /// `disabled`.
    fn map_without(disabled: &[usize], addresses: &[(u32, Logical)]) -> ApicMap {
        let mut map = ApicMap::default();
        map.reserve(addresses.len()).unwrap();
        map.rebuild(
            (addresses.iter().enumerate()).map(|(index, &(id, logical))| {
                let enabled = !disabled.contains(&index);
                let address = Address {
                    id,
                    logical,
                    enabled,
                };
                (index, address)
            }),
        );
        map
    }

    fn routed(
        map: &ApicMap,
        mode: DeliveryMode,
        vector: u8,
        destination: Destination,
    ) -> Vec<usize> {
        let message = Message {
            vector,
            mode,
            level: false,
            assert: true,
            destination,
        };
        let mut found = vec![];
        map.route(&message, Some(1), |index| found.push(index));
        found.sort_unstable();
        found
    }

    #[test]
    fn physical_ids_and_shorthands() {
        let map = map(&[
            (7, Logical::X2apic),
            (0, Logical::X2apic),
            (300, Logical::X2apic),
        ]);
        let fixed = |destination| routed(&map, DeliveryMode::Fixed, 0x30, destination);
        assert_eq!(fixed(Destination::Physical(300)), [2]);
        assert_eq!(fixed(Destination::Physical(1)), []);
        assert_eq!(fixed(Destination::All), [0, 1, 2]);
        assert_eq!(fixed(Destination::Others), [0, 2]);
        assert_eq!(fixed(Destination::Sender), [1]);
    }

    #[test]
    fn logical_ids_of_every_model() {
        let flat = map(&[
            (0, Logical::Flat(1)),
            (1, Logical::Flat(2)),
            (2, Logical::Flat(4)),
        ]);
        let cluster = map(&[
            (0, Logical::Cluster(0x11)),
            (1, Logical::Cluster(0x12)),
            (2, Logical::Cluster(0x21)),
        ]);
        let x2apic = map(&[
            (0, Logical::X2apic),
            (17, Logical::X2apic),
            (19, Logical::X2apic),
        ]);
        let fixed =
            |map: &ApicMap, id| routed(map, DeliveryMode::Fixed, 0x30, Destination::Logical(id));
        assert_eq!(fixed(&flat, 5), [0, 2]);
        assert_eq!(fixed(&cluster, 0x13), [0, 1]);
        assert_eq!(fixed(&cluster, 0x21), [2]);
        assert_eq!(fixed(&x2apic, 0x1_000a), [1, 2]);
        assert_eq!(fixed(&x2apic, 1), [0]);
        assert_eq!(fixed(&x2apic, 0x2_000a), []);
        assert_eq!(fixed(&cluster, BROADCAST), [0, 1, 2]);
        assert_eq!(fixed(&x2apic, BROADCAST), [0]);
    }

    #[test]
    fn the_vector_chooses_one_of_the_destinations() {
        let map = map(&[
            (0, Logical::Flat(1)),
            (1, Logical::Flat(2)),
            (2, Logical::None),
        ]);
        let lowest = |vector| {
            routed(
                &map,
                DeliveryMode::LowestPriority,
                vector,
                Destination::Logical(3),
            )
        };
        assert_eq!(lowest(0x30), [0]);
        assert_eq!(lowest(0x31), [1]);
        assert_eq!(
            routed(
                &map,
                DeliveryMode::LowestPriority,
                0x31,
                Destination::Logical(0x40)
            ),
            []
        );
    }

    #[test]
    fn the_lowest_priority_is_that_of_an_apic_that_takes_interrupts() {
        let flat = [
            (0, Logical::Flat(1)),
            (1, Logical::None),
            (2, Logical::Flat(4)),
        ];
        let x2apic = [0, 1, 2].map(|id| (id, Logical::X2apic));
        for (addresses, destination) in [
            (flat, Destination::All),
            (x2apic, Destination::All),
            (x2apic, Destination::Logical(7)),
        ] {
            let map = map_without(&[1], &addresses);
            for vector in 0x30..0x38 {
                let found = routed(&map, DeliveryMode::LowestPriority, vector, destination);
                assert_eq!(found, [if vector & 1 == 0 { 0 } else { 2 }]);
            }
            // An INIT reaches all APICs.
            assert_eq!(routed(&map, DeliveryMode::Init, 0, destination), [0, 1, 2]);
        }
        let none = map_without(&[0, 1, 2], &x2apic);
        let found = routed(&none, DeliveryMode::LowestPriority, 0x30, Destination::All);
        assert_eq!(found, []);
    }
}
