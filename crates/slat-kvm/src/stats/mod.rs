//! Statistics in KVM's format: `KVM_GET_STATS_FD`, a file that describes itself.
//!
//! The descriptor is a memfd in KVM's layout: header, name, descriptors, values. Before each read by the client, the
//! preload library calls [`StatsObject::refresh`], which updates the values through slat's own mapping. Then the host
//! carries out the read, at the client's offset.

mod list;

use crate::errno::{Result, fail, no_memory};
use crate::heap;
use crate::run_page::{Shared, memfd, seal};
use crate::vcpu::VcpuObject;
use crate::vm::VmObject;
use kvm_bindings::*;
use list::Entry;
use slat::Shared as Owner;
use std::fmt;
use std::io::Write as _;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// The number of bytes for a name, including its NUL.
const NAME_SIZE: usize = 48;
/// The number of bytes of a descriptor: `kvm_stats_desc` ends with a flexible array for the name.
const DESCRIPTOR: usize = size_of::<kvm_stats_desc>() + NAME_SIZE;
const HEADER: usize = size_of::<kvm_stats_header>();

/// The VM or vCPU that statistics describe.
#[derive(Debug)]
enum Of {
    Vm(Arc<VmObject>),
    Vcpu(Owner<VcpuObject>),
}

/// The statistics of a VM or a vCPU, as a file. Keeps the VM or vCPU alive.
#[derive(Debug)]
pub struct StatsObject {
    of: Of,
    entries: Vec<Entry>,
    /// The bytes of the file: header, descriptors, and values.
    file: Shared,
    /// The offset of the values in `file`.
    data: usize,
}

impl VmObject {
    /// Carries out `KVM_GET_STATS_FD` of a VM.
    ///
    /// # Errors
    /// `EIO` in a forked child, `ENOMEM`, the host's error for making the file.
    pub fn stats(self: &Arc<Self>) -> Result<(Owner<StatsObject>, OwnedFd)> {
        let _call = self.begin()?;
        let entries = list::of_vm()?;
        let process = std::process::id();
        StatsObject::new(Of::Vm(self.clone()), format_args!("kvm-{process}"), entries)
    }
}

impl VcpuObject {
    /// Carries out `KVM_GET_STATS_FD` of a vCPU.
    ///
    /// # Errors
    /// `EIO` in a forked child, `ENOMEM`, the host's error for making the file.
    pub fn stats(vcpu: &Owner<Self>) -> Result<(Owner<StatsObject>, OwnedFd)> {
        let _call = vcpu.vm.begin()?;
        let entries = list::of_vcpu()?;
        let (process, id) = (std::process::id(), vcpu.common().id);
        StatsObject::new(
            Of::Vcpu(vcpu.clone()),
            format_args!("kvm-{process}/vcpu-{id}"),
            entries,
        )
    }
}

impl StatsObject {
    fn new(
        of: Of,
        name: fmt::Arguments<'_>,
        entries: Vec<Entry>,
    ) -> Result<(Owner<Self>, OwnedFd)> {
        let data = HEADER + NAME_SIZE + entries.len() * DESCRIPTOR;
        let values: usize = entries.iter().map(Entry::len).sum();
        let size = data + values * size_of::<u64>();
        let fd = memfd(c"kvm-stats", size, true)?;
        let file = Shared::map(&fd, 0, size)?;
        // From now on the client cannot write through the descriptor. slat's own mapping stays writable.
        seal(&fd, libc::F_SEAL_FUTURE_WRITE | libc::F_SEAL_SEAL)?;
        let mut bytes = heap::with_room(data)?;
        let header = [
            0,
            NAME_SIZE,
            entries.len(),
            HEADER,
            HEADER + NAME_SIZE,
            data,
        ];
        bytes.extend(header.iter().flat_map(|word| (*word as u32).to_le_bytes()));
        push_name(&mut bytes, name);
        let mut offset = 0;
        for entry in &entries {
            entry.describe(&mut bytes, offset as u32);
            push_name(&mut bytes, format_args!("{}", entry.name));
            offset += entry.len() * size_of::<u64>();
        }
        assert_eq!(bytes.len(), data, "the layout is what the header says");
        // SAFETY: the mapping is new, and at least `bytes.len()` long.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), file.start(), bytes.len()) };
        let stats = Owner::try_new(StatsObject {
            of,
            entries,
            file,
            data,
        })
        .map_err(no_memory)?;
        stats.refresh();
        Ok((stats, fd))
    }

    /// Whether this is a forked child, in which the VM's locks may be held forever.
    pub fn is_foreign(&self) -> bool {
        match &self.of {
            Of::Vm(vm) => vm.is_foreign(),
            Of::Vcpu(vcpu) => vcpu.is_foreign(),
        }
    }

    /// Returns the id of the vCPU that the statistics describe. `None`: the statistics describe a VM.
    pub fn vcpu_id(&self) -> Option<u32> {
        match &self.of {
            Of::Vm(_) => None,
            Of::Vcpu(vcpu) => Some(vcpu.id()),
        }
    }

    /// Returns names and current values.
    ///
    /// # Errors
    /// `EIO` in a forked child.
    pub fn values(&self) -> Result<Vec<(&'static str, Vec<u64>)>> {
        if self.is_foreign() {
            return fail(libc::EIO);
        }
        let mut named: Vec<_> = (self.entries.iter())
            .map(|entry| (entry.name, Vec::with_capacity(entry.len())))
            .collect();
        self.sample(|index, value| named[index].1.push(value));
        Ok(named)
    }

    /// Updates the values in the file. Takes no lock: a vCPU may run meanwhile.
    pub fn refresh(&self) {
        if self.is_foreign() {
            return;
        }
        let mut at = self.data;
        self.sample(|_, value| {
            // SAFETY: the value is within the mapping, which holds all values. The value is aligned, because the sizes
            // of header, name and descriptors are multiples of eight bytes. Other threads load and store the value
            // atomically.
            let place = unsafe { AtomicU64::from_ptr(self.file.start().add(at).cast()) };
            place.store(value, Ordering::Relaxed);
            at += size_of::<u64>();
        });
    }

    /// Calls `give` with each value and the index of the value's entry, in the order of the entries.
    fn sample(&self, mut give: impl FnMut(usize, u64)) {
        let (engine, exits) = match &self.of {
            Of::Vm(vm) => (vm.engine.stats(), None),
            Of::Vcpu(vcpu) => (vcpu.common().counted.get(), Some(&vcpu.common().exits)),
        };
        for (index, entry) in self.entries.iter().enumerate() {
            entry.values(&engine, exits, |value| give(index, value));
        }
    }
}

/// Appends a name, cut to `NAME_SIZE - 1` bytes, and zeroes up to `NAME_SIZE`. Allocates nothing, because `bytes`
/// already has the memory.
fn push_name(bytes: &mut Vec<u8>, name: fmt::Arguments<'_>) {
    let start = bytes.len();
    bytes.resize(start + NAME_SIZE, 0);
    let mut room = &mut bytes[start..start + NAME_SIZE - 1];
    // A name that does not fit is cut off, so an error is ignored.
    let _ = room.write_fmt(name);
}

const _: () = assert!((HEADER + NAME_SIZE).is_multiple_of(8) && DESCRIPTOR.is_multiple_of(8));
