//! A software x86-64 CPU
