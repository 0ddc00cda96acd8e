//! A CPU with AMD's SVM, which runs a guest through nested tables, or through shadow tables.
#![no_std]

extern crate alloc;

mod svm;
mod vmcb;

pub use svm::Svm;
