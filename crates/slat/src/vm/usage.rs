//! Reports how much memory the tables of a VM use, and how much guest memory they map.

use super::Vm;
use crate::addr::{Granule, Level};
use crate::format::Format;
use crate::platform::Platform;

/// The result of [`Vm::memory_usage`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct MemoryUsage {
    /// Bytes of the frames that the platform has given to the VM for tables: frames in use, frames that will be freed
    /// after a flush, and frames that vCPUs have allocated for their next faults. Linux counts these as `SecPageTables`
    /// (Documentation/filesystems/proc.rst).
    pub table_bytes: u64,
    /// The largest value that [`Self::table_bytes`] has had.
    pub peak_table_bytes: u64,
    /// The number of leaves of level 1. Each maps one page: with tables of 4 KiB, 4 KiB.
    pub pages_4k: u64,
    /// The number of leaves of level 2. Each maps, with tables of 4 KiB, 2 MiB.
    pub pages_2m: u64,
    /// The number of leaves of level 3. Each maps, with tables of 4 KiB, 1 GiB.
    pub pages_1g: u64,
    /// The granule of the tables.
    pub granule: Granule,
}

impl MemoryUsage {
    /// Returns how many bytes of guest memory are mapped. If several leaves map a page, it is counted for each:
    /// memslots may share their backing, and with the shadow MMU several guest-virtual addresses may be mapped to a
    /// page.
    pub fn mapped_bytes(&self) -> u64 {
        let pages = |leaves: u64, level| leaves * self.granule.pages(level);
        let pages = pages(self.pages_4k, Level::PAGE)
            + pages(self.pages_2m, Level::MEGA)
            + pages(self.pages_1g, Level::GIGA);
        pages * self.granule.bytes()
    }
}

impl<P: Platform, F: Format> Vm<P, F> {
    /// Returns how much memory the VM's tables use, in all address spaces, and how much memory they map.
    ///
    /// Any thread may call it. The result is exact if no other thread changes the tables: no vCPU faults, and no
    /// operation on the VM runs. Otherwise the numbers are from slightly different times, and leaves that an operation
    /// has zapped are counted until its flush. The peak is always exact.
    ///
    /// Tables are counted when a frame is allocated or freed, and leaves by the gauges of [`Stats`](crate::Stats), so
    /// faults do no extra work. The call itself adds up the counters of all vCPUs.
    ///
    /// ```
    /// # use slat_model::{HostMemory, SimPlatform};
    /// # let (platform, backing) = (SimPlatform::new(512), HostMemory::hva(0));
    /// # use slat::{Access, Config, Ept, Gpa, Region, Vm};
    /// # let vm = Vm::<_, Ept>::new(platform, Config::default())?;
    /// assert_eq!(vm.memory_usage().table_bytes, 4096);
    /// vm.set_memory_region(0, &Region::new(0, Gpa(0), 0x20_0000, backing))?;
    /// vm.create_vcpu()?.hardware_fault(Gpa(0x3000), Access::Write)?;
    ///
    /// // The root, and the three tables between the root and a leaf of 4 KiB.
    /// let usage = vm.memory_usage();
    /// assert_eq!(usage.table_bytes, 4 * 4096);
    /// assert_eq!(usage.mapped_bytes(), 4096 * usage.pages_4k);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn memory_usage(&self) -> MemoryUsage {
        let (now, peak) = self.frames.count();
        let stats = self.stats();
        MemoryUsage {
            table_bytes: now * F::GRANULE.bytes(),
            peak_table_bytes: peak * F::GRANULE.bytes(),
            pages_4k: stats.pages_4k,
            pages_2m: stats.pages_2m,
            pages_1g: stats.pages_1g,
            granule: F::GRANULE,
        }
    }
}
