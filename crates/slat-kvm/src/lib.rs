//! The KVM API in userspace, in the shape of kvm-ioctls
