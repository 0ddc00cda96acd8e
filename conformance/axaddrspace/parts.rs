/// Tests that the crate does not have: parts of areas, and areas that cannot exist.
#[cfg(test)]
mod parts {
    use super::*;
    use crate::test_utils::{DEALLOC_COUNT, MockHal, mock_hal_test};
    use core::sync::atomic::Ordering::SeqCst;

    const FLAGS: MappingFlags = MappingFlags::READ.union(MappingFlags::WRITE);
    const PAGE: usize = 0x1000;
    const BASE: GuestPhysAddr = GuestPhysAddr::from_usize(0x10000);

    fn with_space(test: impl FnOnce(AddrSpace<MockHal>)) {
        mock_hal_test(|| test(AddrSpace::new_empty(4, BASE, 0x4000_0000).unwrap()));
    }

    // The crate's test memory has 16 frames, and gives each of them only once.

    #[test]
    fn both_sides_of_a_hole_stay_mapped() {
        with_space(|mut space| {
            space.map_alloc(BASE, 3 * PAGE, FLAGS, true).unwrap();
            let before = [0, 2].map(|page| space.translate(BASE + page * PAGE));
            space.unmap(BASE + PAGE, PAGE).unwrap();
            assert_eq!(
                [0, 2].map(|page| space.translate(BASE + page * PAGE)),
                before
            );
            assert_eq!(space.translate(BASE + PAGE), None);
        });
    }

    #[test]
    fn a_hole_in_two_areas_leaves_their_other_ends() {
        with_space(|mut space| {
            space.map_alloc(BASE, 2 * PAGE, FLAGS, true).unwrap();
            space
                .map_alloc(BASE + 2 * PAGE, 2 * PAGE, FLAGS, true)
                .unwrap();
            let before = [0, 3].map(|page| space.translate(BASE + page * PAGE));
            space.unmap(BASE + PAGE, 2 * PAGE).unwrap();
            assert_eq!(
                [0, 3].map(|page| space.translate(BASE + page * PAGE)),
                before
            );
            assert_eq!(
                [1, 2].map(|page| space.translate(BASE + page * PAGE)),
                [None; 2]
            );
        });
    }

    #[test]
    fn a_fault_has_the_rights_of_its_area() {
        with_space(|mut space| {
            space.map_alloc(BASE, PAGE, FLAGS, false).unwrap();
            assert!(!space.handle_page_fault(BASE, MappingFlags::EXECUTE));
            assert!(!space.handle_page_fault(BASE + PAGE, MappingFlags::READ));
            assert!(space.handle_page_fault(BASE, MappingFlags::WRITE));
        });
    }

    #[test]
    fn a_hole_in_large_linear_memory_leaves_the_rest_mapped() {
        with_space(|mut space| {
            let start = GuestPhysAddr::from_usize(0x20_0000);
            space
                .map_linear(start, PhysAddr::from_usize(0x4000_0000), 0x80_0000, FLAGS)
                .unwrap();
            space.unmap(start + 0x20_0000, 0x20_0000).unwrap();
            assert_eq!(space.translate(start + 0x20_0000), None);
            let last = PhysAddr::from_usize(0x4040_0123);
            assert_eq!(space.translate(start + 0x40_0123), Some(last));
        });
    }

    #[test]
    fn an_area_that_cannot_be_leaves_nothing() {
        with_space(|mut space| {
            space.map_alloc(BASE, 2 * PAGE, FLAGS, true).unwrap();
            let before = DEALLOC_COUNT.load(SeqCst);
            let over = space.map_alloc(BASE + PAGE, PAGE, FLAGS, true);
            assert_eq!(over.unwrap_err(), AxError::AlreadyExists.into());
            let too_large = space.map_alloc(BASE + 2 * PAGE, 16 * PAGE, FLAGS, true);
            assert_eq!(too_large.unwrap_err(), AxError::NoMemory.into());
            assert_eq!(space.translate(BASE + 2 * PAGE), None);
            assert!(space.translate(BASE).is_some());
            assert!(
                DEALLOC_COUNT.load(SeqCst) > before,
                "the pages that there were"
            );
        });
    }
}
