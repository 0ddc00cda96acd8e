//! KVM's answers, as lists: the state of new objects, and what each SET request refuses.
//!
//! Both lists are made of the kernel's rules (arch/x86/kvm of Linux 7.3), in our own words. slat has to answer as they
//! say. Where the host's /dev/kvm opens, it is asked, too: what it answers otherwise belongs into the list, with the
//! reason ([`edges::Differs`]).
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
