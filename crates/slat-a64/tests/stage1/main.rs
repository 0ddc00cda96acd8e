//! Tests translation, and its exits to an embedder: random tables are compared with a plain model of the architecture,
//! random changes of tables with what a TLB may keep, and cases follow the architecture's sections.
//!
//! `SLAT_TEST_COMPILED=1` runs them on compiled code. `SLAT_STAGE1_ROUNDS=10000000 SLAT_STAGE1_SEED=7` executes more
//! random cases than `cargo test`, from another seed.

mod caching;
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
