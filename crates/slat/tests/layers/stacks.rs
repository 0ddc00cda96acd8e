//! Stacks alone, without VMs: which layer a page comes from, and when its frame is freed.

use std::sync::Arc;

use slat::layers::Stack;
use slat::{Granule, HostPage, Level, Pfn, ResolveError};
use slat_model::{FailingHeap, Rng};

use crate::HUGE;
use crate::machine::{MEMORY, Memory};

const PAGES: u64 = 4 * HUGE;

/// Makes a stack with a base of all pages but those of the last stretch.
fn based(memory: &Arc<Memory>) -> (Stack<Memory>, Pfn) {
    let end = MEMORY.add_pages(PAGES);
    let mut stack = Stack::new(memory.clone(), Granule::Kib4, MEMORY..end);
    let base = memory.block(3 * HUGE, HUGE);
    stack.put(MEMORY, base, 3 * HUGE).unwrap();
    (stack, base)
}

fn find(stack: &Stack<Memory>, page: u64) -> Option<HostPage> {
    stack.find(MEMORY.add_pages(page))
}

/// Gives the stack an own copy of `page`, if it has none.
fn make_own(stack: &mut Stack<Memory>, page: u64) -> Result<(), ResolveError> {
    if find(stack, page).is_none_or(|found| !found.writable) {
        let copy = stack.copy(MEMORY.add_pages(page))?;
        assert_eq!(copy.is_replacement(), find(stack, page).is_some());
        stack.insert(copy);
    }
    Ok(())
}

/// Gives the stack an own copy of `page`, and writes `word` to it.
fn write(stack: &mut Stack<Memory>, memory: &Memory, page: u64, word: u64) {
    make_own(stack, page).unwrap();
    let own = find(stack, page).unwrap();
    assert!(own.writable);
    memory.set_word(own.pfn, word);
}

fn read(stack: &Stack<Memory>, memory: &Memory, page: u64) -> Option<u64> {
    find(stack, page).map(|page| memory.word(page.pfn))
}

#[test]
fn a_page_comes_from_the_highest_layer_that_has_it() {
    let memory = Arc::<Memory>::default();
    let (mut stack, base) = based(&memory);
    let huge = HostPage::new(base.add(7), Level::MEGA);
    assert_eq!(find(&stack, 7), Some(huge));
    let bases = stack.share().unwrap();
    assert_eq!(find(&stack, 7), Some(huge.with_writable(false)));
    write(&mut stack, &memory, 7, 1);
    write(&mut stack, &memory, 8, 1);
    let first = stack.share().unwrap();
    write(&mut stack, &memory, 8, 2);
    write(&mut stack, &memory, 3 * HUGE, 2);
    let second = stack.share().unwrap();
    write(&mut stack, &memory, 8, 3);
    let words = |stack| [6, 7, 8, 3 * HUGE, HUGE].map(|page| read(stack, &memory, page));
    assert_eq!(words(&bases), [Some(0), Some(0), Some(0), None, Some(0)]);
    assert_eq!(words(&first), [Some(0), Some(1), Some(1), None, Some(0)]);
    assert_eq!(
        words(&second),
        [Some(0), Some(1), Some(2), Some(2), Some(0)]
    );
    assert_eq!(words(&stack), [Some(0), Some(1), Some(3), Some(2), Some(0)]);
    assert_eq!(
        [&bases, &first, &second, &stack].map(Stack::layers),
        [1, 2, 3, 3]
    );
    assert_eq!(
        [&bases, &first, &second, &stack].map(Stack::own_pages),
        [0, 0, 0, 1]
    );
    // Neighbours of a page of a delta are found in the base, as small pages; other stretches stay huge.
    let small = HostPage::new(base.add(6), Level::PAGE).with_writable(false);
    assert_eq!(find(&first, 6), Some(small));
    assert_eq!(find(&first, HUGE).unwrap().level, Level::MEGA);
    assert_eq!(find(&bases, 6).unwrap().level, Level::MEGA);
    assert_eq!(
        stack.copy(MEMORY.add_pages(PAGES)).err(),
        Some(ResolveError::BadAddress)
    );
}

#[test]
fn runs_are_consecutive_and_leave_holes_out() {
    let memory = Arc::<Memory>::default();
    let (mut stack, base) = based(&memory);
    let _saved = stack.share().unwrap();
    write(&mut stack, &memory, 4, 1);
    let run = |from: u64, to: u64| {
        let run = stack.resident(MEMORY.add_pages(from)..MEMORY.add_pages(to));
        run.map(|run| ((run.backing.0 - MEMORY.0) >> 12, run.pages, run.first.pfn))
    };
    assert_eq!(run(0, 100), Some((0, 4, base)));
    assert_eq!(run(4, 100).map(|(at, pages, _)| (at, pages)), Some((4, 1)));
    assert_eq!(run(5, 100), Some((5, 95, base.add(5))));
    assert_eq!(run(HUGE, PAGES), Some((HUGE, 2 * HUGE, base.add(HUGE))));
    assert_eq!(run(3 * HUGE, PAGES), None);
}

#[test]
fn a_layer_is_freed_with_its_last_stack_and_not_before() {
    let memory = Arc::<Memory>::default();
    let (mut stack, _) = based(&memory);
    let base = memory.live();
    let saved = stack.share().unwrap();
    write(&mut stack, &memory, 1, 1);
    let mut clone = stack.share().unwrap();
    write(&mut clone, &memory, 2, 2);
    assert_eq!(memory.live(), base + 2);
    drop(stack);
    assert_eq!(memory.live(), base + 2, "the clone has the layer");
    drop(clone);
    assert_eq!(memory.live(), base);
    drop(saved);
    assert_eq!(memory.live(), 0);
}

/// A VM that is saved again and again, each time without the earlier one, has no more layers than at first. What its
/// own pages hide is freed.
#[test]
fn layers_that_only_one_stack_has_are_joined() {
    let memory = Arc::<Memory>::default();
    let (mut stack, _) = based(&memory);
    let base = memory.live();
    let _base = stack.share().unwrap();
    for n in 0..2 * HUGE {
        write(&mut stack, &memory, n % 3, n);
        write(&mut stack, &memory, n, n);
        let saved = stack.share().unwrap();
        assert_eq!((saved.layers(), saved.own_pages()), (2, 0));
        assert_eq!(
            memory.live(),
            base + (n as usize + 1).max(n.min(2) as usize + 1)
        );
        assert_eq!(read(&saved, &memory, n), Some(n));
    }
}

/// A chain of layers is dropped without a call for each layer.
#[test]
fn a_long_chain_of_layers_is_dropped() {
    let memory = Arc::<Memory>::default();
    let mut stack = Stack::new(
        memory.clone(),
        Granule::Kib4,
        MEMORY..MEMORY.add_pages(HUGE),
    );
    let mut saved = Vec::new();
    for n in 0..50_000 {
        write(&mut stack, &memory, n % HUGE, n);
        saved.push(stack.share().unwrap());
    }
    assert_eq!(stack.layers(), 50_000);
    saved.truncate(1);
    drop(stack);
    assert_eq!(memory.live(), 1);
    drop(saved);
    assert_eq!(memory.live(), 0);
}

/// Compares stacks with plain maps while each allocation in turn fails.
#[test]
fn random_stacks_are_plain_maps_and_survive_every_lack_of_memory() {
    for n in 0..400 {
        let mut rng = Rng::new(n.into());
        let memory = Arc::<Memory>::default();
        let (first, _) = based(&memory);
        let mut known = vec![0; 3 * HUGE as usize];
        known.resize(PAGES as usize, u64::MAX);
        let mut stacks = vec![(first, known)];
        let mut failed = false;
        for step in 1..300 {
            let at = rng.below(stacks.len() as u64) as usize;
            let alive = stacks.len();
            let (stack, known) = &mut stacks[at];
            let page = rng.below(3) * (HUGE - 2) + rng.below(5) * 100;
            let fails = if failed { u32::MAX } else { n % 20 };
            match rng.below(8) {
                0 if alive < 6 => {
                    let (child, has) = FailingHeap::failing(fails, n % 2 == 0, || stack.share());
                    failed |= has;
                    assert!(child.is_ok() || has);
                    let known = known.clone();
                    stacks.extend(child.ok().map(|child| (child, known)));
                }
                1 if alive > 1 => drop(stacks.swap_remove(at)),
                2..5 => {
                    let make = || make_own(stack, page);
                    let (made, has) = FailingHeap::failing(fails, n % 2 == 0, make);
                    failed |= has;
                    assert!(made.is_ok() || has);
                    if let Some(own) = find(stack, page).filter(|page| page.writable) {
                        memory.set_word(own.pfn, step);
                        known[page as usize] = step;
                    }
                }
                _ => {
                    let word = read(stack, &memory, page);
                    assert_eq!(
                        word.unwrap_or(u64::MAX),
                        known[page as usize],
                        "page {page}"
                    );
                }
            }
        }
        for (stack, known) in &stacks {
            for (page, word) in known.iter().enumerate() {
                assert_eq!(read(stack, &memory, page as u64).unwrap_or(u64::MAX), *word);
            }
        }
        drop(stacks);
        assert_eq!(memory.live(), 0);
    }
}

/// A copy that was made before the stack was shared may be of a page that has changed since: it is dropped.
#[test]
fn a_copy_from_before_a_share_is_dropped() {
    let memory = Arc::<Memory>::default();
    let (mut stack, _) = based(&memory);
    let _base = stack.share().unwrap();
    let old = stack.copy(MEMORY).unwrap();
    let late = stack.copy(MEMORY).unwrap();
    write(&mut stack, &memory, 0, 1);
    stack.insert(late);
    assert_eq!(read(&stack, &memory, 0), Some(1), "another vCPU was first");
    let _saved = stack.share().unwrap();
    stack.insert(old);
    assert_eq!((read(&stack, &memory, 0), stack.own_pages()), (Some(1), 0));
    assert_eq!(memory.live(), 3 * HUGE as usize + 1);
}
