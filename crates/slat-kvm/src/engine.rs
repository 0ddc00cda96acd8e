//! The engine with the table format that was chosen when the process began. This is the only module that names the type
//! of the engine's platform. The architecture lists the formats. The same guest runs with any format; only the entries
//! of the tables differ.

use crate::arch::table_formats;
use crate::errno::{self, Error, fail, no_memory};
use crate::messages;
use slat::format::Entry;
use slat::guest_walk::GuestPaging;
use slat::{
    Access, Attention, AttributesError, Config, CreateVmError, DirtyLogError, DirtyRange,
    DirtyRing, Gfn, Gpa, HostWords, Hva, Level, Mapping, MemoryAttributes, MemoryUsage, MmuKind,
    OutOfMemory, Policy, Region, RegionError, Stats, Stop, Translation, VcpuStats, VirtualPage,
    VirtualStop,
};
use slat_host::userfault::Userfaults;
use slat_host::{HostPlatform, page_size};
use std::fmt::{self, Debug, Formatter};
use std::ops::Range;
use std::sync::Arc;

macro_rules! formats {
    (of($mmu:ident) $default:block $($(#[$doc:meta])* $variant:ident = $name:literal [$shift:literal]: $format:ty,)*) => {
        /// A format of second-level tables.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum TableFormat {
            $($(#[$doc])* $variant,)*
        }

        impl TableFormat {
            /// The names that `slat run --format` accepts.
            pub const NAMES: &[&str] = &[$($name,)*];

            /// Returns the default format of a VM whose tables `mmu` makes.
            pub fn of($mmu: MmuKind) -> Self $default

            /// Returns the name of this format for `slat run --format`.
            pub fn name(self) -> &'static str {
                match self {
                    $(TableFormat::$variant => $name,)*
                }
            }

            /// Whether a VM with tables of this format can have this MMU.
            pub fn has(self, mmu: MmuKind) -> bool {
                match self {
                    $(TableFormat::$variant => mmu.serves::<$format>(),)*
                }
            }

            /// Whether a VM with tables of this format and this MMU can shadow nested tables.
            pub fn nests(self, mmu: MmuKind) -> bool {
                match self {
                    $(TableFormat::$variant => mmu.nests::<$format>(),)*
                }
            }

            /// Whether entries that refer to tables have a bit that allows writes, so that one entry can write-protect
            /// all pages that the table below it maps.
            pub fn protects_from_above(self) -> bool {
                match self {
                    $(TableFormat::$variant => <$format as slat::Format>::TABLE_WRITE != 0,)*
                }
            }

            /// Returns the format called `name`. `None`: there is no such format.
            pub fn by_name(name: &str) -> Option<Self> {
                match name {
                    $($name => Some(TableFormat::$variant),)*
                    _ => None,
                }
            }
        }

        /// The engine's VM.
        pub enum EngineVm {
            $($(#[$doc])* $variant(Arc<slat::Vm<HostPlatform<$shift>, $format>>),)*
        }

        /// The engine's vCPU.
        pub enum EngineVcpu {
            $($(#[$doc])* $variant(slat::Vcpu<HostPlatform<$shift>, $format>),)*
        }

        /// The engine's reader of dirty logs.
        pub enum EngineLogReader {
            $($(#[$doc])* $variant(slat::LogReader<HostPlatform<$shift>, $format>),)*
        }

        /// An invalidation in progress. Dropping this value ends the invalidation.
        #[must_use]
        pub enum EngineInvalidation<'a> {
            $($(#[$doc])* $variant(slat::Invalidation<'a, HostPlatform<$shift>, $format>),)*
        }

        impl EngineVm {
            /// Creates a VM without memory.
            ///
            /// # Errors
            /// `EINVAL` for an MMU that has no tables of the format, and for a format whose pages are not as large as
            /// those of this process. `ENOMEM`, or the host's error for setting up the platform.
            pub fn new(format: TableFormat, config: Config) -> errno::Result<Arc<Self>> {
                Ok(Arc::new(match format {
                    $(TableFormat::$variant => {
                        check_pages(format, 1 << $shift)?;
                        let platform = HostPlatform::with_pages().map_err(no_platform)?;
                        let vm = slat::Vm::new(platform, config).map_err(not_created)?;
                        EngineVm::$variant(vm)
                    })*
                }))
            }

            /// Returns the table of the slots' bitmaps of absent pages.
            pub(crate) fn userfaults(&self) -> &Userfaults {
                match self {
                    $(EngineVm::$variant(vm) => &vm.platform().userfaults,)*
                }
            }

            /// Calls [`HostPlatform::set_contiguous`].
            pub fn set_contiguous(&self, on: bool) {
                match self {
                    $(EngineVm::$variant(vm) => vm.platform().set_contiguous(on),)*
                }
            }

            /// Calls [`slat_host::frames::warm`].
            pub fn warm_frames(&self, frames: usize) {
                match self {
                    $(EngineVm::$variant(vm) => slat_host::frames::warm(&**vm.platform(), frames),)*
                }
            }

            /// Creates a vCPU of this VM.
            ///
            /// # Errors
            /// [`OutOfMemory`].
            pub fn create_vcpu(&self) -> Result<EngineVcpu, OutOfMemory> {
                Ok(match self {
                    $(EngineVm::$variant(vm) => EngineVcpu::$variant(vm.create_vcpu()?),)*
                })
            }

            /// Makes a reader of this VM's dirty logs.
            ///
            /// # Errors
            /// [`OutOfMemory`].
            pub(crate) fn log_reader(&self) -> Result<EngineLogReader, OutOfMemory> {
                Ok(match self {
                    $(EngineVm::$variant(vm) => EngineLogReader::$variant(vm.log_reader()?),)*
                })
            }

            /// Returns the format of the VM's tables.
            pub fn format(&self) -> TableFormat {
                match self {
                    $(EngineVm::$variant(_) => TableFormat::$variant,)*
                }
            }

            /// Calls [`slat::Vm::invalidate`].
            pub fn invalidate(&self, range: Range<Hva>) -> EngineInvalidation<'_> {
                match self {
                    $(EngineVm::$variant(vm) => EngineInvalidation::$variant(vm.invalidate(range)),)*
                }
            }
        }

        /// Evaluates an expression with the object of the VM's format.
        macro_rules! each {
            ($of:ident, $on:expr, $inner:ident => $then:expr) => {
                match $on {
                    $($of::$variant($inner) => $then,)*
                }
            };
        }
    };
}

table_formats! { formats }

/// Checks that the pages of a format, of `bytes` bytes, are as large as those of this process. KVM's API counts in the
/// host's pages.
fn check_pages(format: TableFormat, bytes: usize) -> errno::Result<()> {
    if bytes == page_size() {
        return Ok(());
    }
    messages::explain(&format_args!(
        "tables of format {} have pages of {bytes} bytes, and this process has pages of {}",
        format.name(),
        page_size()
    ));
    fail(libc::EINVAL)
}

/// Converts the host's error for setting up a VM's platform to an error of the API.
fn no_platform(error: std::io::Error) -> Error {
    Error::new(error.raw_os_error().unwrap_or(libc::EIO))
}

/// Converts the engine's error for creating a VM to an error of the API.
fn not_created(error: CreateVmError) -> Error {
    match error {
        CreateVmError::NoSuchMmu { .. } => Error::new(libc::EINVAL),
        _ => no_memory(error),
    }
}

impl EngineLogReader {
    /// Begins an epoch and leaves it open. Returns the epoch's number.
    pub(crate) fn begin(&mut self) -> u64 {
        each!(EngineLogReader, self, reader => {
            let epoch = reader.begin();
            let number = epoch.number();
            epoch.leave_open();
            number
        })
    }

    /// Ends the open epoch by a commit or an abort. Returns `false` if there is none.
    pub(crate) fn end(&mut self, commits: bool) -> bool {
        each!(EngineLogReader, self, reader => match reader.open_epoch() {
            Some(epoch) if commits => epoch.commit(),
            Some(epoch) => epoch.abort(),
            None => return false,
        });
        true
    }

    /// Calls `visit` for the dirty pages of the open epoch, beginning with a frame of an address space, until `visit`
    /// returns `false` or an error, which is returned. `None`: there is no open epoch.
    pub(crate) fn each_range(
        &mut self,
        (space, gfn): (usize, Gfn),
        min_gap: u64,
        max_pages: u64,
        visit: &mut dyn FnMut(DirtyRange) -> errno::Result<bool>,
    ) -> Option<errno::Result<()>> {
        each!(EngineLogReader, self, reader => {
            let epoch = reader.open_epoch()?;
            let mut ranges = epoch.dirty_ranges_from(space, gfn, min_gap, max_pages);
            let visited = loop {
                match ranges.next().map(&mut *visit) {
                    Some(Ok(true)) => {}
                    Some(Err(error)) => break Err(error),
                    Some(Ok(false)) | None => break Ok(()),
                }
            };
            drop(ranges);
            epoch.leave_open();
            Some(visited)
        })
    }
}

impl Debug for EngineLogReader {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        f.debug_struct("EngineLogReader").finish_non_exhaustive()
    }
}

impl EngineVcpu {
    /// Calls [`slat::Vcpu::translate_virtual`].
    ///
    /// # Errors
    /// The errors of [`slat::Vcpu::translate_virtual`].
    #[inline]
    pub fn translate_virtual<W: HostWords>(
        &mut self,
        gva: u64,
        access: Access,
        paging: &GuestPaging,
        words: &mut W,
    ) -> Result<VirtualPage, VirtualStop<W::Error>> {
        each!(EngineVcpu, self, inner => inner.translate_virtual(gva, access, paging, words))
    }

    /// Calls [`slat::Vcpu::invlpg`].
    pub fn invlpg<W: HostWords>(&mut self, gva: u64, paging: &GuestPaging, words: &mut W) -> bool {
        each!(EngineVcpu, self, inner => inner.invlpg(gva, paging, words))
    }

    /// Calls [`slat::Vcpu::flush_guest`].
    pub fn flush_guest<W: HostWords>(&mut self, words: &mut W) {
        each!(EngineVcpu, self, inner => inner.flush_guest(words))
    }
}

impl Default for TableFormat {
    fn default() -> Self {
        TableFormat::of(MmuKind::default())
    }
}

/// Defines methods that pass their arguments to the object of the VM's format. The methods of a `mut` list take
/// `&mut self`.
macro_rules! delegate {
    ($of:ident { $($(#[$doc:meta])* fn $name:ident($($arg:ident: $ty:ty),*) $(-> $out:ty)?;)* }) => {
        impl $of {
            $($(#[$doc])* #[inline] pub fn $name(&self $(, $arg: $ty)*) $(-> $out)? {
                each!($of, self, inner => inner.$name($($arg),*))
            })*
        }
    };
    (mut $of:ident { $($(#[$doc:meta])* fn $name:ident($($arg:ident: $ty:ty),*) $(-> $out:ty)?;)* }) => {
        impl $of {
            $($(#[$doc])* #[inline] pub fn $name(&mut self $(, $arg: $ty)*) $(-> $out)? {
                each!($of, self, inner => inner.$name($($arg),*))
            })*
        }
    };
}

delegate! {
    EngineVm {
        /// Calls [`slat::Vm::policy`].
        fn policy() -> Policy;
        /// Calls [`slat::Vm::set_policy`].
        fn set_policy(setting: slat::Setting) -> ();
        /// Calls [`slat::Vm::stats`].
        fn stats() -> Stats;
        /// Calls [`slat::Vm::memory_usage`].
        fn memory_usage() -> MemoryUsage;
        /// Calls [`slat::Vm::visit_attention`].
        fn visit_attention(visit: &mut dyn FnMut(&Attention)) -> ();
        /// Calls [`slat::Vm::guest_memory_changed`].
        fn guest_memory_changed() -> ();
        /// Calls [`slat::Vm::shadows_nested`].
        fn shadows_nested() -> bool;
        /// Calls [`slat::Vm::mmu`].
        fn mmu() -> MmuKind;
        /// Calls [`slat::Vm::synchronize`].
        fn synchronize() -> ();
        /// Calls [`slat::Vm::synchronize_those`].
        fn synchronize_those(wanted: &dyn Fn(&Attention) -> bool) -> ();
        /// Calls [`slat::Vm::age`].
        fn age(range: Range<Hva>, clear: bool) -> u64;
        /// Calls [`slat::Vm::visit_leaves`].
        fn visit_leaves(space: usize, range: Range<Gfn>, visit: &mut dyn FnMut(Gfn, Level, Entry)) -> ();
        /// Calls [`slat::Vm::memslot_from`].
        fn memslot_from(space: usize, gfn: Gfn) -> Option<Region>;
        /// Calls [`slat::Vm::private_around`].
        fn private_around(gfn: Gfn) -> (bool, Range<Gfn>);
        /// Calls [`slat::Vm::audit`].
        fn audit() -> Result<(), slat::AuditError>;
        /// Calls [`slat::Vm::set_memory_region`].
        fn set_memory_region(space: usize, region: &Region) -> Result<(), RegionError>;
        /// Calls [`slat::Vm::remove_memory_region`].
        fn remove_memory_region(space: usize, slot: u32) -> Result<(), RegionError>;
        /// Calls [`slat::Vm::check_memory_region`].
        fn check_memory_region(space: usize, region: &Region) -> Result<(), RegionError>;
        /// Calls [`slat::Vm::set_memory_attributes`].
        fn set_memory_attributes(gfns: Range<Gfn>, attributes: MemoryAttributes) -> Result<(), AttributesError>;
        /// Calls [`slat::Vm::dirty_log_words`].
        fn dirty_log_words(space: usize, slot: u32) -> Result<usize, DirtyLogError>;
        /// Calls [`slat::Vm::get_dirty_log`].
        fn get_dirty_log(space: usize, slot: u32, bitmap: &mut [u64]) -> Result<(), DirtyLogError>;
        /// Calls [`slat::Vm::clear_dirty_log`].
        fn clear_dirty_log(space: usize, slot: u32, first: u64, pages: u64, bitmap: &[u64]) -> Result<(), DirtyLogError>;
        /// Calls [`slat::Vm::mark_dirty`].
        fn mark_dirty(space: usize, gfns: Range<Gfn>) -> Result<(), DirtyLogError>;
        /// Calls [`slat::Vm::is_marked_dirty`].
        fn is_marked_dirty(space: usize, gfn: Gfn) -> bool;
        /// Calls [`slat::Vm::set_manual_dirty_log`].
        fn set_manual_dirty_log(manual: bool, initially_set: bool);
        /// Calls [`slat::Vm::use_dirty_rings`].
        fn use_dirty_rings();
        /// Calls [`slat::Vm::reset_dirty_rings`].
        fn reset_dirty_rings() -> u64;
        /// Calls [`slat::Vm::set_mmu_pages`].
        fn set_mmu_pages(pages: u64) -> ();
        /// Calls [`slat::Vm::recover_nx_huge_pages`].
        fn recover_nx_huge_pages() -> u64;
    }
}

delegate! {
    EngineVcpu {
        /// Calls [`slat::Vcpu::attention`].
        fn attention() -> &Attention;
        /// Calls [`slat::Vcpu::stats`].
        fn stats() -> Stats;
        /// Calls [`slat::Vcpu::lookup`].
        fn lookup(gfn: Gfn) -> Option<Mapping>;
        /// Calls [`slat::Vcpu::count_guest_pte_read`].
        fn count_guest_pte_read();
        /// Calls [`slat::Vcpu::watch_stats`].
        fn watch_stats() -> VcpuStats;
    }
}

delegate! {
    mut EngineVcpu {
        /// Calls [`slat::Vcpu::enter_unguarded`].
        fn enter_unguarded(token: usize);
        /// Calls [`slat::Vcpu::leave`].
        fn leave();
        /// Calls [`slat::Vcpu::quiesce`].
        fn quiesce();
        /// Calls [`slat::Vcpu::use_space`].
        fn use_space(space: usize);
        /// Calls [`slat::Vcpu::translate`].
        fn translate(gpa: Gpa, access: Access) -> Result<Translation, Stop>;
        /// Calls [`slat::Vcpu::stored`].
        fn stored(gpa: Gpa, bytes: u64) -> bool;
        /// Calls [`slat::Vcpu::prefault`].
        fn prefault(range: Range<Gpa>) -> Result<u64, Stop>;
        /// Calls [`slat::Vcpu::set_dirty_ring`].
        fn set_dirty_ring(ring: Arc<DirtyRing>) -> Result<(), OutOfMemory>;
    }
}
