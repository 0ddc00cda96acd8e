//! Interrupts: who may send them, and how they reach vCPUs. The controllers themselves are `slat-irqchip`'s.
//!
//! | file | idea |
//! |---|---|
//! | `vcpus` | the vCPUs of a VM, and messages from one to others |

pub(crate) mod vcpus;
