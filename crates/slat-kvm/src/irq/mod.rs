//! Interrupt controllers. There is a local APIC per vCPU; IOAPIC and 8259 do not exist, their ioctls are unknown.

pub mod lapic;
