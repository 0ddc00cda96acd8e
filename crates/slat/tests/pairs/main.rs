//! Tests pairs of mechanisms. [`pairs.txt`](pairs.txt) names the test of each pair, and a test checks that none is
//! missing.

#[path = "../common/access.rs"]
mod access;
mod clones;
#[path = "../common/guest.rs"]
mod guest;
mod nested;
mod private;
mod slots;
mod table;
mod world;
