//! Translation and what an embedder sees: random tables against a plain model of the architecture, and cases by its
//! sections.
//!
//! `SLAT_TEST_COMPILED=1` runs them on compiled code.
//! `SLAT_STAGE1_ROUNDS=10000000 SLAT_STAGE1_SEED=7` executes more random cases than `cargo test`, and others.

#[allow(dead_code)]
#[path = "../common/compiled.rs"]
mod compiled;
mod debugger;
mod directed;
mod embedding;
mod guest;
mod machine;
mod model;
mod numbers;
mod random;
