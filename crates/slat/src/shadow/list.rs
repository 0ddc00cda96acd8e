//! Doubly linked lists of objects that have numbers. The lists contain numbers instead of pointers, and need no
//! allocation: the user of a list provides the [`Link`] of each number.

use core::cell::Cell;
use core::iter;

/// The end of a list. No object has this number.
pub(super) const END: u32 = 0;

/// The neighbours of one object in its list.
#[derive(Default)]
pub(super) struct Link {
    next: Cell<u32>,
    before: Cell<u32>,
}

impl Link {
    pub(super) const fn new() -> Self {
        Link {
            next: Cell::new(END),
            before: Cell::new(END),
        }
    }

    /// Returns the number before this one in the list, or [`END`].
    pub(super) fn before(&self) -> u32 {
        self.before.get()
    }
}

/// A linked list of numbers. Contains the first number, or [`END`] if the list is empty.
pub(super) struct List(Cell<u32>);

impl List {
    pub(super) const fn new() -> Self {
        List(Cell::new(END))
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.get() == END
    }

    /// Adds `number`, which must be on no list, at the beginning. `link` returns the link of a number.
    pub(super) fn push<'l>(&self, number: u32, link: impl Fn(u32) -> &'l Link) {
        let first = self.0.replace(number);
        let new = link(number);
        new.next.set(first);
        new.before.set(END);
        if first != END {
            link(first).before.set(number);
        }
    }

    /// Removes `number`, which must be on this list.
    pub(super) fn remove<'l>(&self, number: u32, link: impl Fn(u32) -> &'l Link) {
        let Link { next, before } = link(number);
        let (next, before) = (next.get(), before.get());
        match before {
            END => {
                debug_assert_eq!(self.0.get(), number, "it is on another list");
                self.0.set(next);
            }
            before => link(before).next.set(next),
        }
        if next != END {
            link(next).before.set(before);
        }
    }

    /// Iterates over the list. During the iteration, the caller may remove the number that the iterator returned last.
    pub(super) fn iter<'l>(&self, link: impl Fn(u32) -> &'l Link) -> impl Iterator<Item = u32> {
        let mut next = self.0.get();
        iter::from_fn(move || {
            let number = next;
            next = match number {
                END => return None,
                number => link(number).next.get(),
            };
            Some(number)
        })
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use std::vec::Vec;

    #[test]
    fn a_list_keeps_its_order_whatever_is_removed() {
        let links: [Link; 6] = Default::default();
        let link = |number: u32| &links[number as usize];
        let all = |list: &List| list.iter(link).collect::<Vec<_>>();
        let list = List::new();
        (1..=5).for_each(|number| list.push(number, link));
        assert_eq!(all(&list), [5, 4, 3, 2, 1]);
        for (removed, left) in [
            (3, vec![5, 4, 2, 1]),
            (5, vec![4, 2, 1]),
            (1, vec![4, 2]),
            (4, vec![2]),
        ] {
            list.remove(removed, link);
            assert_eq!(all(&list), left);
        }
        list.iter(link).for_each(|number| list.remove(number, link));
        assert!(list.is_empty());
    }

    use std::vec;
}
