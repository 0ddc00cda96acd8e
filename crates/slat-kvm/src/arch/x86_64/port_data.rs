//! The port-data page: the page after `kvm_run`. It holds the data of port accesses, for the client and from the
//! client.

use crate::run_page::RunPage;
use slat_host::page_size;

/// The offset of the port-data page among the pages that a vCPU shares with the client.
pub(crate) const PIO_OFFSET: usize = page_size();

impl RunPage {
    /// Returns the address of the port-data page.
    fn port_data(&self) -> *mut u8 {
        self.ptr().cast::<u8>().wrapping_add(PIO_OFFSET)
    }

    /// Copies from the port-data page. `data` has at most one page.
    pub(crate) fn read_pio(&self, data: &mut [u8]) {
        assert!(data.len() <= page_size());
        // SAFETY: the bytes are within the mapping. The client may change them during the copy, but every value of a
        // byte is valid.
        unsafe { std::ptr::copy_nonoverlapping(self.port_data(), data.as_mut_ptr(), data.len()) }
    }

    /// Copies to the port-data page. `data` has at most one page.
    pub(crate) fn write_pio(&self, data: &[u8]) {
        assert!(data.len() <= page_size());
        // SAFETY: the bytes are within the mapping, and the client expects any value there.
        unsafe { std::ptr::copy_nonoverlapping(data.as_ptr(), self.port_data(), data.len()) }
    }

    /// Returns the first `len` bytes of the port-data page, which the client may change.
    pub(crate) fn port_data_mut(&mut self, len: usize) -> &mut [u8] {
        assert!(len <= page_size());
        // SAFETY: the page is part of the mapping, which lives as long as the borrow of `self`.
        unsafe { std::slice::from_raw_parts_mut(self.port_data(), len) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvm_bindings::kvm_run;

    #[test]
    fn the_descriptor_maps_to_the_same_page() {
        let (ours, fd) = RunPage::create(3, 0).unwrap();
        let theirs = RunPage::map(&fd).unwrap();
        ours.write_pio(&[1, 2, 3]);
        let mut data = [0; 3];
        theirs.read_pio(&mut data);
        assert_eq!(data, [1, 2, 3]);
    }

    #[test]
    fn the_page_follows_the_run_struct() {
        assert!(size_of::<kvm_run>() <= PIO_OFFSET);
    }
}
