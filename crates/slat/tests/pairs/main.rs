//! Two mechanisms at once; and that each pair of them has a test: [`pairs.txt`](pairs.txt) says which.

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
