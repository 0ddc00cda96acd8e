//! Clones of a running guest, as a sandbox makes one for each request: a guest gets ready once, and each request
//! continues it in a VM of its own. Run it: `cargo run -p slat-kvm --example clones -- 1000`.
//!
//! How it is cloned is in `guest`: memory by MAP_PRIVATE, the rest by KVM's calls.
//!
//! On other machines than x86-64 the example says that it needs one.

#[cfg_attr(target_arch = "x86_64", path = "clones/machine.rs")]
#[cfg_attr(not(target_arch = "x86_64"), path = "elsewhere/machine.rs")]
mod machine;

fn main() -> std::process::ExitCode {
    machine::main()
}
