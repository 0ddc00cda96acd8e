//! KVM's results, as lists: the state of new objects, and the values that each SET request refuses.
//!
//! Both lists follow the kernel's rules (arch/x86/kvm of Linux 7.3), in our own words. slat must return the listed
//! results. If the host's /dev/kvm opens, its results are compared, too. A different result of the host belongs into
//! the list, with the reason ([`edges::Differs`]).
//!
//! | file | idea |
//! |---|---|
//! | [`api`] | one interface to slat's objects and the kernel's |
//! | [`edges`] | the values at each edge of a rule |
//! | [`rules`] | the rules of SET requests |
//! | [`fresh`] | the state of new objects |

pub mod api;
pub mod edges;
pub mod fresh;
pub mod rules;
