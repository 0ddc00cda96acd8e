//! The KVM API for unmodified programs: the preload library
