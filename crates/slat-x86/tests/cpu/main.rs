//! Tests of the CPU by guests and clients, with a module for each subject. All modules are one program, because linking
//! a program for each module would take longer than running the tests.

#[path = "../common/mod.rs"]
mod common;

mod alignment;
mod avx;
mod behaviour;
mod coherence;
mod completion;
mod debug;
mod devices;
mod events;
mod features;
mod fetch;
mod floating;
mod invalidations;
mod legacy;
mod moved;
mod operands;
mod other_pages;
mod probe;
mod shared_code;
mod smm;
mod strings;
mod svm;
mod tlb_model;
mod tracked;
