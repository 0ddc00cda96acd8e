//! Two mechanisms at once.

#[path = "../common/access.rs"]
mod access;
mod clones;
#[path = "../common/guest.rs"]
mod guest;
mod nested;
mod private;
mod slots;
mod world;
