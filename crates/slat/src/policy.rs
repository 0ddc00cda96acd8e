//! Policies: which mechanisms a VM uses. They carry the names of KVM's module parameters.

use core::sync::atomic::{AtomicBool, Ordering::*};

/// The switches of one VM. All may be changed while it runs.
#[derive(Debug)]
pub struct Policy {
    /// Cache the absence of a memslot in the tables, so that repeated MMIO needs no slot look-up
    /// (KVM's `mmio_caching`). Default on.
    mmio_caching: AtomicBool,
    /// Map at 2 MiB and 1 GiB where slot and host allow. Default on.
    huge_pages: AtomicBool,
    /// Split huge leaves when a slot begins to log dirty pages, not at the first write to each
    /// (KVM's `eager_page_split`). Default on.
    eager_page_split: AtomicBool,
}

impl Default for Policy {
    fn default() -> Self {
        Policy {
            mmio_caching: AtomicBool::new(true),
            huge_pages: AtomicBool::new(true),
            eager_page_split: AtomicBool::new(true),
        }
    }
}

/// Name, current value and setter of one switch.
type Switch = (&'static str, fn(&Policy) -> &AtomicBool);

const SWITCHES: &[Switch] = &[
    ("mmio_caching", |p| &p.mmio_caching),
    ("huge_pages", |p| &p.huge_pages),
    ("eager_page_split", |p| &p.eager_page_split),
];

impl Policy {
    /// Whether absence of a memslot is cached.
    pub fn mmio_caching(&self) -> bool {
        self.mmio_caching.load(Relaxed)
    }

    /// Whether leaves may be larger than 4 KiB.
    pub fn huge_pages(&self) -> bool {
        self.huge_pages.load(Relaxed)
    }

    /// Whether the begin of dirty logging splits huge leaves.
    pub fn eager_page_split(&self) -> bool {
        self.eager_page_split.load(Relaxed)
    }

    /// The names and values of all policies.
    pub fn iter(&self) -> impl Iterator<Item = (&'static str, bool)> + '_ {
        SWITCHES
            .iter()
            .map(|(name, get)| (*name, get(self).load(Relaxed)))
    }

    /// Sets the policy `name`; `false` if there is none of that name.
    pub fn set(&self, name: &str, value: bool) -> bool {
        match SWITCHES.iter().find(|(known, _)| *known == name) {
            Some((_, get)) => {
                get(self).store(value, Relaxed);
                true
            }
            None => false,
        }
    }
}
