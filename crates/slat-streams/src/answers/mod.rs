//! Lists of KVM's results: the state of new objects, and the values that each request which sets state refuses.
//!
//! Both lists follow the kernel's rules (arch/x86/kvm of Linux 7.3), in our own words. slat must return the listed
//! results. If the host's /dev/kvm can be opened, its results are compared with the lists, too. If the host returns
//! another result, that result must be added to the list, with the reason ([`edges::Differs`]).
//!
//! | file | idea |
//! |---|---|
//! | [`api`] | one interface to slat's objects and the kernel's |
//! | [`edges`] | the values at each edge of a rule |
//! | [`rules`] | the rules of requests that set state |
//! | [`fresh`] | the state of new objects |

pub mod api;
pub mod edges;
pub mod fresh;
pub mod rules;
