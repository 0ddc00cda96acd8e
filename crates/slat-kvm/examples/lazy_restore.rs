//! A VMM that restores a guest from a snapshot twice: after it has read all of the guest's memory, and lazily, as the
//! guest uses it. Run it: `SLAT_SET=userfault=on cargo run --release -p slat-kvm --example lazy_restore`.
//!
//! The lazy restore needs no userfaultfd, which most containers forbid. Its memslot has the flag `KVM_MEM_USERFAULT`,
//! and a bitmap of the pages that are not there yet: an access to such a page ends KVM_RUN. Once the guest has said
//! something, a thread reads the rest of the snapshot while the guest runs, and takes the flag away: from then on the
//! memory may be mapped by huge pages.
//!
//! The guest, its memory and the snapshot are in `snapshot`.
//!
//! On other machines than x86-64 the example says that it needs one.

#[cfg_attr(target_arch = "x86_64", path = "lazy_restore/machine.rs")]
#[cfg_attr(not(target_arch = "x86_64"), path = "elsewhere/machine.rs")]
mod machine;

fn main() -> std::process::ExitCode {
    machine::main()
}
