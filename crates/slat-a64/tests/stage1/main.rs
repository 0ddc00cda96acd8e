//! Stage 1: random tables against a plain model of the architecture, and cases by its sections.

mod machine;
mod model;
mod numbers;
mod random;
