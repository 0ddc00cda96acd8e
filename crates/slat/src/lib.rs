//! KVM's guest memory system as a portable no_std library
