//! Methods that the tests' platforms pass on unchanged to the `SimPlatform` in their field `machine`.

/// The methods of `slat::Platform` that access the frame of a table.
macro_rules! passes_contents {
    () => {
        fn entries(&self, frame: slat::Pfn) -> std::ptr::NonNull<slat::Entries> {
            self.machine.entries(frame)
        }
        fn meta(&self, frame: slat::Pfn) -> std::ptr::NonNull<slat::TableMeta> {
            self.machine.meta(frame)
        }
    };
}

/// All methods of `slat::Platform` for tables.
#[allow(unused_macros, reason = "not every file of tests needs it")]
macro_rules! passes_tables {
    () => {
        fn alloc_table(&self, vm: slat::VmId) -> Option<slat::Pfn> {
            self.machine.alloc_table(vm)
        }
        fn alloc_root(&self, vm: slat::VmId, tables: usize) -> Option<slat::Pfn> {
            self.machine.alloc_root(vm, tables)
        }
        unsafe fn free_table(&self, vm: slat::VmId, frame: slat::Pfn) {
            // SAFETY: `frame` is from `machine` for `vm` and is freed once, as `free_table` asks of its caller.
            unsafe { self.machine.free_table(vm, frame) };
        }
        passes_contents!();
    };
}
