//! Pools of records that are allocated in advance and have numbers. Taking and releasing a record needs no allocation.
//! So both can be done under the lock of the MMU, and in code that must not fail.

use alloc::boxed::Box;
use alloc::vec::Vec;
use core::cell::RefCell;

use super::list::END;
use crate::heap::OutOfMemory;

/// The records of one kind, numbered from 1. Records are freed only together with the pool.
pub(super) struct Pool<T> {
    records: Vec<Box<T>>,
    /// The numbers of the records that are not in use. It has capacity for all records.
    spare: RefCell<Vec<u32>>,
}

/// More records for a [`Pool`], allocated while its lock is not held.
pub(super) struct More<T> {
    records: Vec<Box<T>>,
    /// Larger lists for the pool, if its present lists have no capacity left.
    lists: Option<(Vec<Box<T>>, Vec<u32>)>,
}

impl<T> Pool<T> {
    /// The largest number that a record may have. Types that pack such a number, like
    /// [`EntryId`](super::page::EntryId), rely on this limit.
    pub(super) const MOST: usize = 1 << 22;

    pub(super) const fn new() -> Self {
        Pool {
            records: Vec::new(),
            spare: RefCell::new(Vec::new()),
        }
    }

    /// Returns the record with the number `number`.
    #[inline]
    pub(super) fn get(&self, number: u32) -> &T {
        debug_assert_ne!(number, END);
        &self.records[number as usize - 1]
    }

    /// Returns the number of records that are not in use.
    #[inline]
    pub(super) fn spare(&self) -> usize {
        self.spare.borrow().len()
    }

    /// Takes a record into use and returns its number. `None`: no record is left.
    pub(super) fn take(&self) -> Option<u32> {
        self.spare.borrow_mut().pop()
    }

    /// Returns a record to the pool.
    pub(super) fn give_back(&self, number: u32) {
        self.spare.borrow_mut().push(number);
    }

    /// Returns the number of records for which the pool's lists have capacity.
    fn capacity(&self) -> usize {
        (self.records.capacity()).min(self.spare.borrow().capacity())
    }

    /// Makes a request for `records` more records, for [`More::allocate`].
    ///
    /// # Errors
    /// [`OutOfMemory`] if the pool would have more than [`Self::MOST`] records.
    pub(super) fn ask(&self, records: usize) -> Result<Ask, OutOfMemory> {
        let all = self.records.len() + records;
        if all > Self::MOST {
            return Err(OutOfMemory);
        }
        Ok(Ask {
            records,
            capacity: match all > self.capacity() {
                true => Some((2 * self.records.len()).max(all)),
                false => None,
            },
        })
    }

    /// Adds the records that [`More::allocate`] has allocated. Returns what is not used: the old lists, or records that
    /// do not fit because another thread has added records meanwhile. The caller must drop the result after releasing
    /// the lock.
    pub(super) fn add(&mut self, mut more: More<T>) -> More<T> {
        if let Some((records, spare)) = &mut more.lists
            && records.capacity().min(spare.capacity()) > self.capacity()
        {
            records.append(&mut self.records);
            spare.append(self.spare.get_mut());
            core::mem::swap(records, &mut self.records);
            core::mem::swap(spare, self.spare.get_mut());
        }
        let capacity = self.capacity().min(Self::MOST);
        while self.records.len() < capacity
            && let Some(record) = more.records.pop()
        {
            self.records.push(record);
            self.spare.get_mut().push(self.records.len() as u32);
        }
        more
    }
}

/// A request: the number of records, and, if the pool needs larger lists, their capacity.
pub(super) struct Ask {
    records: usize,
    capacity: Option<usize>,
}

impl<T> More<T> {
    /// Allocates the records of a request.
    ///
    /// # Errors
    /// [`OutOfMemory`].
    pub(super) fn allocate(
        ask: Ask,
        new: impl Fn() -> Result<Box<T>, OutOfMemory>,
    ) -> Result<Self, OutOfMemory> {
        fn space<U>(items: usize) -> Result<Vec<U>, OutOfMemory> {
            let mut list = Vec::new();
            list.try_reserve_exact(items).map_err(|_| OutOfMemory)?;
            Ok(list)
        }
        let mut records = space(ask.records)?;
        for _ in 0..ask.records {
            records.push(new()?);
        }
        let lists = match ask.capacity {
            Some(capacity) => Some((space(capacity)?, space(capacity)?)),
            None => None,
        };
        Ok(More { records, lists })
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::heap::boxed;

    #[test]
    fn records_stay_where_they_are_while_the_pool_grows() {
        let mut pool = Pool::<u64>::new();
        let mut places = std::vec::Vec::new();
        for round in 1..=20 {
            let more = More::allocate(pool.ask(3).unwrap(), || boxed(round)).unwrap();
            let _ = pool.add(more);
            while let Some(number) = pool.take() {
                places.push((number, core::ptr::from_ref(pool.get(number))));
            }
        }
        assert_eq!(places.len(), 60);
        assert!(
            places
                .iter()
                .all(|(number, at)| core::ptr::eq(pool.get(*number), *at))
        );
        pool.give_back(7);
        assert_eq!((pool.spare(), pool.take(), pool.take()), (1, Some(7), None));
    }

    #[test]
    fn two_threads_that_allocated_at_once_lose_nothing_of_the_pool() {
        let mut pool = Pool::<u64>::new();
        let (first, second) = (pool.ask(3).unwrap(), pool.ask(1).unwrap());
        let first = More::allocate(first, || boxed(1)).unwrap();
        let second = More::allocate(second, || boxed(2)).unwrap();
        let _ = pool.add(first);
        let _ = pool.add(second);
        assert!(pool.spare() >= 3);
        assert!((1..=3).all(|number| *pool.get(number) == 1));
    }
}
