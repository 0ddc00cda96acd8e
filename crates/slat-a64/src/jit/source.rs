//! The guest code of a region: the instructions of one page that execution can reach from the region's first
//! instruction, including called functions and the code to which they return.

use super::context::Context;
use super::uses::{Flow, uses};
use crate::decode::decode;
use std::collections::BTreeMap;
use std::vec::Vec;

const PAGE: u64 = 4096;
/// The greatest number of instructions in a region. Also the greatest number of addresses at which its blocks begin.
const INSTRUCTIONS: usize = 256;
const BLOCKS: usize = 32;

/// The guest code from which a region is compiled, and the processor state on which the region depends.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Source {
    pub(super) pc: u64,
    pub(super) context: Context,
    /// The instructions in ascending order: offsets in the page of `pc`, and words.
    pub(super) words: Vec<(u16, u32)>,
}

impl Source {
    /// Collects the code that execution can reach from `pc`. `fetch` returns the word at an offset in the page. Returns
    /// `None` if the word at `pc` cannot be fetched.
    pub(super) fn collect(
        pc: u64,
        context: Context,
        mut fetch: impl FnMut(u64) -> Option<u32>,
    ) -> Option<Self> {
        let mut words = BTreeMap::new();
        let mut begins = [pc].to_vec();
        let mut next = 0;
        while let Some(begin) = begins.get(next) {
            let mut at = *begin;
            next += 1;
            while at / PAGE == pc / PAGE
                && words.len() < INSTRUCTIONS
                && !words.contains_key(&((at % PAGE) as u16))
            {
                let Some(word) = fetch(at % PAGE) else { break };
                words.insert((at % PAGE) as u16, word);
                let (uses, flow) = uses(decode(word).as_ref(), at, context);
                let following = at.wrapping_add(4);
                let target = match flow {
                    Flow::Jump(target) | Flow::JumpIf(target) => Some(target),
                    Flow::Following | Flow::Indirect | Flow::Interpret => None,
                };
                for target in [target, uses.returns_to(flow, at)].into_iter().flatten() {
                    let is_new = target / PAGE == pc / PAGE && !begins.contains(&target);
                    if is_new && begins.len() < BLOCKS {
                        begins.push(target);
                    }
                }
                if !matches!(flow, Flow::Following | Flow::JumpIf(_)) {
                    break;
                }
                at = following;
            }
        }
        let words: Vec<_> = words.into_iter().collect();
        (!words.is_empty()).then_some(Self { pc, context, words })
    }

    /// Returns the address of the instruction at an offset in the page.
    pub(super) fn address(&self, offset: u16) -> u64 {
        self.pc & !(PAGE - 1) | u64::from(offset)
    }
}
