//! Tests accesses in code that is made at run time. Here, a function in assembly replaces such code.

#[cfg(target_arch = "aarch64")]
mod aarch64;
#[cfg(target_arch = "x86_64")]
mod x86_64;

#[cfg(target_arch = "aarch64")]
use aarch64::{ACCESS, BYTES, access, exit};
#[cfg(target_arch = "x86_64")]
use x86_64::{ACCESS, BYTES, access, exit};

use slat_guard::{install, set_generated};

/// A bit for each byte of code.
static TABLE: [u8; BYTES.div_ceil(8)] = {
    let mut table = [0; BYTES.div_ceil(8)];
    table[ACCESS / 8] = 1 << (ACCESS % 8);
    table
};

#[test]
fn code_goes_on_at_its_exit_with_the_address_of_the_access_that_failed() {
    install().unwrap();
    let code = access as *const () as usize;
    let exit = exit as *const () as usize;
    // SAFETY: the table stays. The exit returns for the access, and nothing else is registered.
    unsafe { set_generated(code..code + BYTES, TABLE.as_ptr() as usize, exit) };
    let value = 5;
    // SAFETY: the code reads a word, or continues at the exit.
    unsafe {
        assert_eq!(access(&raw const value), 0);
        assert_eq!(access(std::ptr::without_provenance(64)), code + ACCESS);
    }
}
